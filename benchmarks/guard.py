"""Hold core time, in ratios to peers, against the figures of guard.json: `python -m benchmarks.guard [--update]`.

A figure is the least core time of bytecheckpoint divided by the least core time of a peer. One run measures both in turn.
A figure fails if it is more than 25 % above its reference in each of three runs. `make bench-guard` runs this program.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import Options
from benchmarks.measure import Result
from benchmarks.world import run_world

__all__ = ["REFERENCES", "Comparison", "compare", "main", "measure_until_clear", "ratios"]

REFERENCES = Path(__file__).with_name("guard.json")
_WORLDS = (1, 2)
_TRIES = 3
_TOLERANCE = 1.25
_OURS = "bytecheckpoint"

#: Ratio of core times by name of the figure.
Ratios = Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """One figure beside its reference.

    Attributes:
        name: name of the measurement, with the number of ranks.
        reference: ratio in guard.json; None if the file lacks the figure.
        measured: ratio of each run, in the order of the runs; None where a run lacks the figure.
    """

    name: str
    reference: float | None
    measured: tuple[float | None, ...]

    @property
    def verdict(self) -> str:
        """The result: "ok", "slower", "missing" (in the last run) or "new" (no reference)."""
        found = [ratio for ratio in self.measured if ratio is not None]
        if not found:
            return "missing"
        if self.reference is None:
            return "new"
        return "ok" if min(found) <= self.reference * _TOLERANCE else "slower"


def ratios(results: Sequence[Result]) -> dict[str, float]:
    """Return the least core time of bytecheckpoint over that of the peer, by figure.

    Figures whose measurement failed are left out.
    """
    found: dict[str, dict[str, float]] = {}
    for result in results:
        if result.core and not result.error:
            name = f"{result.case}, {result.world} rank{'s' if result.world > 1 else ''}"
            found.setdefault(name, {})["ours" if result.arm == _OURS else "peer"] = min(result.core)
    return {name: arms["ours"] / arms["peer"] for name, arms in found.items() if arms.keys() == {"ours", "peer"}}


def compare(references: Ratios, runs: Sequence[Ratios]) -> list[Comparison]:
    """Compare every figure of `references` and of `runs`."""
    names = dict.fromkeys([*references, *(name for run in runs for name in run)])
    return [Comparison(name, references.get(name), tuple(run.get(name) for run in runs)) for name in names]


def measure_until_clear(measure: Callable[[], Ratios], references: Ratios, tries: int = _TRIES) -> list[Comparison]:
    """Measure until every figure has been good in one of the runs, at most `tries` times."""
    runs: list[Ratios] = []
    while True:
        runs.append(measure())
        comparisons = compare(references, runs)
        if len(runs) == tries or not any(c.verdict in ("slower", "missing") for c in comparisons):
            return comparisons


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and return 1 if a figure is slower or missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the measured ratios into guard.json")
    parser.add_argument("--tensors", type=int, default=10_000, metavar="N", help="number of small tensors")
    parser.add_argument("--size", type=int, default=64, metavar="MIB", help="size of the large state")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="repetitions of each measurement")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-guard-", dir="/dev/shm") as folder:
        options = Options(
            nbytes=given.size << 20,
            tensors=given.tensors,
            rounds=given.rounds,
            seconds=0.0,
            planning_rows=0,
            places={"tmpfs": folder},
            only=("guard",),
        )
        references: dict[str, float] = {} if given.update else json.loads(REFERENCES.read_text())
        comparisons = measure_until_clear(lambda: _measure(options), references)
    print(table(comparisons))
    if given.update:
        REFERENCES.write_text(json.dumps({c.name: round(c.measured[-1] or 0, 3) for c in comparisons}, indent=1) + "\n")
        return 0
    return int(any(c.verdict in ("slower", "missing") for c in comparisons))


def _measure(options: Options) -> dict[str, float]:
    results: list[Result] = []
    for size in _WORLDS:
        found, _ = run_world(size, options, timeout=300)
        results += found
    return ratios(results)


def table(comparisons: Sequence[Comparison]) -> str:
    """Return one line per figure: reference, ratio of each run, verdict."""
    lines = [f"{'core time / peer':36} {'reference':>9}  measured"]
    for c in comparisons:
        reference = "-" if c.reference is None else f"{c.reference:.2f}"
        measured = "  ".join("   -" if ratio is None else f"{ratio:4.2f}" for ratio in c.measured)
        lines.append(f"{c.name:36} {reference:>9}  {measured}  {c.verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
