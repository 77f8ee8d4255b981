"""All benchmarks: `python -m benchmarks [--short] [--out DIR] [--only CASE ...]`.

Prints a table, and writes results.json and results.png into DIR (default benchmarks/out).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bench import Options
from benchmarks.measure import Result
from benchmarks.world import run_world

__all__ = ["main"]

_HERE = Path(__file__).parent


def main() -> int:
    """Run the worlds one after the other, then print and write the results."""
    arguments = _parse()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.report:
        saved = json.loads((out / "results.json").read_text())
        results = [Result(**r) for r in saved["results"]]
        return _report(results, saved["about"], out)
    begin = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.disk or out) as disk,
    ):
        folders = {"tmpfs": memory, "disk": disk}
        options = Options(
            nbytes=(arguments.size or (64 if arguments.short else 1024)) << 20,
            tensors=arguments.tensors or (5_000 if arguments.short else 50_000),
            rounds=arguments.rounds or (1 if arguments.short else 5),
            seconds=0.5 if arguments.short else 6.0,
            planning_rows=1_000_000 if arguments.short else 30_000_000,
            places={name: folders[name] for name in arguments.places},
            only=tuple(arguments.only),
            peers=tuple(arguments.peers),
        )
        results, status = [], 0
        for size in arguments.worlds:
            found, failed = run_world(size, options, arguments.timeout)
            results += found
            status |= failed
    about = _about(options) | {"seconds": round(time.perf_counter() - begin, 1), "command": " ".join(sys.argv[1:])}
    (out / "results.json").write_text(json.dumps({"about": about, "results": [r.to_json() for r in results]}, indent=1))
    return _report(results, about, out) | status


def _report(results: list[Result], about: dict[str, Any], out: Path) -> int:
    from benchmarks.report import chart, table

    table(results, about)
    if chart(results, out / "results.png"):
        print(f"\n{out / 'results.json'}, {out / 'results.png'}")
    else:
        print(f"\n{out / 'results.json'} (no chart: matplotlib is not installed)")
    return int(any(result.error for result in results if result.arm.startswith("bytecheckpoint")))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="small states, once each: shows that all of it runs")
    parser.add_argument("--out", type=Path, default=_HERE / "out", help="folder for the results")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="run these cases alone")
    parser.add_argument("--peers", nargs="+", default=[], metavar="PEER", help="beside bytecheckpoint; default all")
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4], metavar="N", help="numbers of ranks")
    parser.add_argument("--places", nargs="+", default=["tmpfs", "disk"], choices=["tmpfs", "disk"])
    parser.add_argument("--disk", type=Path, default=None, metavar="DIR", help="folder on a disk; default --out")
    parser.add_argument("--size", type=int, default=0, metavar="MIB", help="size of the large state")
    parser.add_argument("--tensors", type=int, default=0, metavar="N", help="number of small tensors")
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="repetitions of each arm")
    parser.add_argument("--timeout", type=float, default=3600, metavar="S", help="seconds for one world")
    parser.add_argument("--report", action="store_true", help="only print the results in --out")
    return parser.parse_args()


def _about(options: Options) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    from bytecheckpoint._distribution import DISTRIBUTION

    versions = {}
    for name in (DISTRIBUTION, "torch", "torch-checkpointing", "safetensors", "megatron-core", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    places = {}
    for name, folder in options.places.items():
        usage = shutil.disk_usage(folder if Path(folder).exists() else "/")
        places[name] = f"{usage.total >> 30} GiB"
    return {
        "versions": versions,
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "state_mib": options.nbytes >> 20,
        "small_tensors": options.tensors,
        "rounds": options.rounds,
    }


if __name__ == "__main__":
    sys.exit(main())
