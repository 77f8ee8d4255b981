"""The first asynchronous saves of a process, which a warm measurement does not show."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench
from benchmarks.measure import Result

__all__ = ["first_calls", "run_alone"]

_CALLS = 10
_ARMS = (
    "memcpy",
    "bytecheckpoint",
    "bytecheckpoint prepared",
    "bytecheckpoint after a load",
    "DCP",
    "DCP, kept stager",
    "torch_checkpointing",
)


def run_alone(module: str, *arguments: object, timeout: float = 300) -> dict[str, Any]:
    """Run `python -m module arguments... FILE`, and return the JSON that it writes to FILE."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", module, *map(str, arguments), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode:
            raise RuntimeError(f"{module} {arguments}: {done.stderr.strip().splitlines()[-1:]}")
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


def first_calls(bench: Bench) -> None:
    """Measure the blocking seconds of the first, second and tenth call, each arm in a process of its own."""
    known = {p.name for p in bench.peers} | {"memcpy"}
    for arm in _ARMS:
        if re.split("[ ,]", arm)[0] not in known:
            continue
        results = [
            Result(f"async save: {which} call", bench.place, 1, arm, 0) for which in ("first", "second", "tenth")
        ]
        try:
            figures = run_alone(__name__, arm, bench.folder / "first", bench.options.nbytes)
            for result, index in zip(results, (0, 1, -1), strict=True):
                result.nbytes = figures["nbytes"]
                result.wall = [figures["blocking"][index]]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            for result in results:
                result.error = str(error)
        bench.clear("first")
        bench.add(*results)


def main(arm: str, path: str, nbytes: int) -> dict[str, Any]:
    # A training program has imported this anyway.
    import torch.distributed.tensor  # noqa: F401

    from benchmarks.peers import all_peers
    from benchmarks.state import dense, size_of

    state = dense(nbytes)
    blocking = []
    if arm == "memcpy":
        from benchmarks.raw import Raw

        raw = Raw(size_of(state))
        for _ in range(3):
            begin = time.perf_counter()
            raw.copy()
            blocking.append(time.perf_counter() - begin)
        return {"blocking": blocking, "nbytes": size_of(state)}
    ways = [way for peer in all_peers() for way in (*peer.async_ways(), peer)]
    peer = next(way for way in ways if arm.startswith(way.name))
    if arm.startswith("bytecheckpoint "):
        import bytecheckpoint

        if arm.endswith("prepared"):
            bytecheckpoint.prepare({"model": state}).result()
        else:
            bytecheckpoint.save(path, {"model": state})
            bytecheckpoint.load(path, {"model": state})
            time.sleep(1 + 2 * nbytes / 2**30)  # some training steps, during which the pool is touched
    for number in range(_CALLS):
        folder = Path(path) / str(number % 2)
        shutil.rmtree(folder, ignore_errors=True)  # not every peer replaces an existing checkpoint
        begin = time.perf_counter()
        wait = peer.save_async(folder, state)
        blocking.append(time.perf_counter() - begin)
        wait()
    peer.close()
    return {"blocking": blocking, "nbytes": size_of(state)}


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    Path(sys.argv[4]).write_text(json.dumps(report))
