"""A world of ranks that measure together, each a process: `python -m benchmarks.world RANK SIZE PORT OPTIONS RESULTS`."""

from __future__ import annotations

import datetime
import json
import logging
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path

from benchmarks.bench import Bench, Options
from benchmarks.measure import Result, World

__all__ = ["run_cases", "run_world"]


def run_world(size: int, options: Options, timeout: float) -> tuple[list[Result], int]:
    """Run the cases of `options` in a world of `size` processes; return the results, and 1 if a process failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent.parent), environment.get("PYTHONPATH", "")]
    ).rstrip(os.pathsep)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        command = [sys.executable, "-m", "benchmarks.world"]
        tail = [str(size), str(port), json.dumps(asdict(options)), str(out)]
        ranks = [subprocess.Popen([*command, str(rank), *tail], env=environment) for rank in range(size)]
        end = time.monotonic() + timeout
        status = 0
        while any(r.poll() is None for r in ranks):
            # When one rank dies, the others wait for it until their timeouts.
            if time.monotonic() > end or any(r.poll() for r in ranks):
                time.sleep(1)
                for rank in ranks:
                    rank.kill()
            time.sleep(0.05)
        for number, rank in enumerate(ranks):
            if rank.wait():
                print(f"  rank {number} of {size} ended with status {rank.returncode}", file=sys.stderr)
                status = 1
        found = json.loads(out.read_text()) if out.exists() else []
        return [Result(**r) for r in found], status


def run_cases(bench: Bench) -> None:
    """Run every case that is for worlds of this size, on each of its file systems."""
    from benchmarks.cases import CASES

    for name, case in CASES.items():
        chosen = name in bench.options.only if bench.options.only else not case.only_by_name
        if not chosen or bench.world.size not in case.worlds:
            continue
        for place in case.places:
            if place not in bench.options.places:
                continue
            bench.place = place
            case.run(bench)


def main() -> None:
    rank, size, port = map(int, sys.argv[1:4])
    raw = json.loads(sys.argv[4])
    options = Options(**raw)
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    import torch

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    torch.set_num_threads(1)
    if size > 1:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=300),
        )
    from benchmarks.peers import all_peers

    bench = Bench(options, World(rank, size), all_peers(options.peers))
    failed = False
    try:
        run_cases(bench)
    except Exception:  # noqa: BLE001  the results so far are still written
        traceback.print_exc()
        failed = True
    if rank == 0:
        Path(sys.argv[5]).write_text(json.dumps([r.to_json() for r in bench.results]))
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # without waiting for ranks that are in a collective call
    for peer in bench.peers:
        peer.close()
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
