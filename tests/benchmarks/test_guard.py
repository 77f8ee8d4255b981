"""The guard of core time: which ratios fail, and when it measures again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import guard
from benchmarks.bench import Bench, Options
from benchmarks.cases import CASES
from benchmarks.guard import compare, measure_until_clear, ratios, table
from benchmarks.measure import Result, World


def _result(arm: str, *core: float, case: str = "save", world: int = 1, error: str = "") -> Result:
    return Result(case, "tmpfs", world, arm, 1, list(core), list(core), error=error)


def test_a_ratio_divides_the_least_of_ours_by_the_least_of_the_peer() -> None:
    results = [_result("bytecheckpoint", 4.0, 2.0, 3.0), _result("DCP", 9.0, 8.0)]
    results += [_result("bytecheckpoint", 1.0, world=2), _result("DCP", world=2, error="ValueError: no")]
    assert ratios(results) == {"save, 1 rank": 0.25}


@pytest.mark.parametrize(
    ("reference", "measured", "verdict"),
    [
        (1.0, (1.2,), "ok"),
        (1.0, (0.2,), "ok"),
        (1.0, (1.3,), "slower"),
        (1.0, (1.3, 1.9, 1.24), "ok"),
        (1.0, (None, 1.0), "ok"),
        (1.0, (None,), "missing"),
        (None, (3.0,), "new"),
    ],
)
def test_verdict(reference: float | None, measured: tuple[float | None, ...], verdict: str) -> None:
    references = {} if reference is None else {"save": reference}
    runs = [{} if ratio is None else {"save": ratio} for ratio in measured]
    (comparison,) = compare(references, runs) if runs != [{}] or references else ()
    assert comparison.verdict == verdict
    assert verdict in table([comparison]).splitlines()[1]


@pytest.mark.parametrize(
    ("runs", "measured", "good"),
    [
        ([{"a": 1.0, "b": 1.0}], 1, True),
        ([{"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 2.0}], 2, True),  # each was good once
        ([{"a": 2.0, "b": 1.0}] * 3, 3, False),
        ([{"b": 1.0}] * 3, 3, False),
    ],
)
def test_it_measures_again_until_each_figure_was_good_once(
    runs: list[dict[str, float]], measured: int, good: bool
) -> None:
    left = iter([*runs, {}, {}])
    comparisons = measure_until_clear(lambda: next(left), {"a": 1.0, "b": 1.0})
    assert len(comparisons[0].measured) == measured
    assert all(c.verdict == "ok" for c in comparisons) is good


def test_the_case_measures_every_figure_that_has_a_reference(tmp_path: Path) -> None:
    options = Options(
        nbytes=1 << 20, tensors=40, rounds=1, seconds=0.0, planning_rows=0, places={"tmpfs": str(tmp_path)}
    )
    bench = Bench(options, World(), [], place="tmpfs")
    CASES["guard"].run(bench)
    found = ratios(bench.results)
    assert all(math.isfinite(ratio) for ratio in found.values())
    references = json.loads(guard.REFERENCES.read_text())
    assert found.keys() == {name for name in references if name.endswith(" 1 rank")}
