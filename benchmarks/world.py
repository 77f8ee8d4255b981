"""One rank of a world: `python -m benchmarks.world RANK SIZE PORT OPTIONS RESULTS`, started by `python -m benchmarks`."""

from __future__ import annotations

import datetime
import json
import logging
import resource
import sys
import traceback
import warnings
from pathlib import Path

from benchmarks.bench import Bench, Options
from benchmarks.measure import World

__all__ = ["run_cases"]


def run_cases(bench: Bench) -> None:
    """Run every case that is for worlds of this size, on each of its file systems."""
    from benchmarks.cases import CASES

    for name, case in CASES.items():
        if (bench.options.only and name not in bench.options.only) or bench.world.size not in case.worlds:
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
        import os

        os._exit(1)  # without waiting for ranks that are in a collective call
    for peer in bench.peers:
        peer.close()
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
