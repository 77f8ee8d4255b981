"""Measure the cost of failing requests: `python -m benchmarks.failures [--percent 0 1 5 20] [--steps 10] [--mib 64]`.

Saves and loads on an S3 server of this machine, behind a proxy that lets some percent of all requests fail: refused, or cut
off before, while or after the server carries them out. Every load is compared with what was saved.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import bytecheckpoint
from tests.servers.fault_proxy import fail_at_rate, fault_proxy, repeated_by_client
from tests.servers.s3 import S3Server, versitygw

__all__ = ["main"]

_TENSORS = 16


def _measure(server: S3Server, percent: float, steps: int, nbytes: int) -> str:
    bucket = f"bucket-{percent:g}-percent".replace(".", "-")
    server.make_bucket(bucket)
    shape = (_TENSORS, max(nbytes // 4 // _TENSORS, 1))
    saves, loads, retries, waited = [], [], 0, 0.0
    with fault_proxy(server.endpoint) as proxy:
        os.environ.update(server.environment(proxy.endpoint))
        failed = fail_at_rate(proxy, percent / 100, seed=1)
        for step in range(steps):
            path = f"s3://{bucket}/run/{step}"
            states = {"model": {str(number): tensor for number, tensor in enumerate(torch.rand(shape).unbind())}}
            saved = bytecheckpoint.save(path, states).result()
            target = {"model": {name: torch.zeros_like(tensor) for name, tensor in states["model"].items()}}
            loaded = bytecheckpoint.load(path, target)
            assert all(torch.equal(target["model"][name], tensor) for name, tensor in states["model"].items())
            for report, seconds in ((saved, saves), (loaded, loads)):
                seconds.append(report.total_seconds)
                retries += report.retries
                waited += report.retry_seconds
        silent = sum(map(repeated_by_client, failed))
        middle = (
            f"{statistics.median(saves):.2f} / {max(saves):.2f} | {statistics.median(loads):.2f} / {max(loads):.2f}"
        )
        return (
            f"| {percent:g} % | {len(proxy.requests)} | {len(failed)} ({silent}) | {retries} | "
            f"{waited / steps:.2f} | {middle} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--percent", type=float, nargs="+", default=[0.0, 1.0, 5.0, 20.0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mib", type=int, default=64)
    options = parser.parse_args(arguments)
    print(f"{options.steps} steps of {options.mib} MiB; load average {os.getloadavg()[0]:.1f}; {time.ctime()}")
    print("| failing | requests | failed (in parts) | retries | waits per step, s | save s, median and max | load s |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        server = versitygw(Path(folder))
        try:
            for percent in options.percent:
                print(_measure(server, percent, options.steps, options.mib << 20), flush=True)
        finally:
            server.server.stop()


if __name__ == "__main__":
    main()
