"""Planning for thousands of ranks: runs the program `benchmarks.planning`, whose lines become results."""

from __future__ import annotations

import re
import subprocess
import sys

from benchmarks.bench import Bench
from benchmarks.measure import Result

__all__ = ["planning"]

_LINE = re.compile(r"^\s*(.*?)\s+([\d.]+) s\s+([\d.]+) s cpu\s+peak")


def planning(bench: Bench) -> None:
    command = [sys.executable, "-m", "benchmarks.planning", "--rows", str(bench.options.planning_rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    heading = ""
    for line in done.stdout.splitlines():
        if found := _LINE.match(line):
            arm = found[1] if not line.startswith("  ") else f"{heading}: {found[1]}"
            bench.add(Result("planning", "", 1, arm, 0, [float(found[2])], [float(found[3])]))
        elif not line.startswith(" "):
            heading = line
