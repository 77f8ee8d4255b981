"""The parts of the benchmark: arms in turns, raw ways, the table. `make bench-short` runs every case, in CI."""

from __future__ import annotations

import errno
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench import Bench, Options
from benchmarks.cases.roundtrip import quickest
from benchmarks.measure import Arm, Result, World, measure
from benchmarks.raw import Raw, Way
from benchmarks.report import table

_ABOUT = {"versions": {}, "python": "3", "cpus": 1, "memory_gib": 1, "state_mib": 1, "load_average": 0.0}


def _options(folder: Path) -> Options:
    for name in ("tmpfs", "disk"):
        (folder / name).mkdir()
    return Options(
        nbytes=1 << 20,
        tensors=40,
        rounds=1,
        seconds=0.0,
        planning_rows=2000,
        places={"tmpfs": str(folder / "tmpfs"), "disk": str(folder / "disk")},
    )


def test_arms_take_turns_and_a_failing_one_is_dropped() -> None:
    order: list[str] = []

    def bad() -> None:
        order.append("bad")
        raise ValueError("no")

    def good() -> dict[str, float]:
        order.append("good")
        return {"blocking": 1.0}

    results = measure(World(), "case", "", 8, [Arm("good", good), Arm("bad", bad), Arm("also", good)], 2)
    assert order == ["good", "bad", "good", "good", "good", "good", "good"]
    assert [len(r.wall) for r in results] == [2, 0, 2]
    assert "no" in results[1].error
    assert results[0].extra == {"blocking": [1.0, 1.0]}


def test_the_two_quickest_raw_ways_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def refused() -> None:
        raise OSError("no O_DIRECT here")

    def take(seconds: float) -> None:
        clock[0] += seconds

    arms = [Arm(name, partial(take, wait)) for name, wait in {"slow": 2.0, "quick": 0.0, "medium": 1.0}.items()]
    bench = Bench(_options(tmp_path), World(), [])
    assert [arm.name for arm in quickest(bench, [Arm("refused", refused), *arms])] == ["quick", "medium"]
    assert not bench.results


@pytest.mark.parametrize("way", [Way(), Way(2, 4096), Way(2, 8192, files=2), Way(3, 0), Way(2, direct=True)], ids=str)
def test_every_raw_way_moves_all_bytes(way: Way, tmp_path: Path) -> None:
    raw = Raw(5 * 4096 + 1)
    raw.buffer[:] = np.arange(len(raw.buffer)) % 251
    try:
        raw.write(tmp_path / "raw", way)
    except OSError as error:
        if way.direct and error.errno == errno.EINVAL:
            pytest.skip("this file system has no O_DIRECT")
        raise
    written = b"".join(path.read_bytes() for path in sorted((tmp_path / "raw").iterdir()))
    assert written == raw.buffer.tobytes() and len(list((tmp_path / "raw").iterdir())) == way.files
    raw.copy(way)
    assert raw.copied.tobytes() == written
    if way.files == 1:
        raw.buffer[:] = 0
        raw.read(tmp_path / "raw", way)
        assert raw.buffer.tobytes() == written


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        Result("save", "tmpfs", 1, "raw pwrite", 2**30, [0.5], [0.5]),
        Result("save", "tmpfs", 1, "bytecheckpoint", 2**30, [1.0, 1.2, 1.1], [0.6, 0.6, 0.6]),
        Result("save", "tmpfs", 1, "DCP", 2**30, [2.2], [1.0]),
        Result("save", "tmpfs", 1, "broken", 2**30, error="ValueError: no"),
    ]
    table(results, _ABOUT)
    lines = {line.split("  ")[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert "2.20" in lines["bytecheckpoint"]  # of the raw limit
    assert "2.00" in lines["DCP"]  # of ours
    assert "ValueError: no" in lines["broken"]
