"""Every case of the benchmark runs on a tiny state and gives figures that can be true. Speed is not judged here."""

from __future__ import annotations

import errno
import json
import math
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench import Bench, Options
from benchmarks.cases import CASES
from benchmarks.cases.roundtrip import quickest
from benchmarks.measure import Arm, Result, World, measure
from benchmarks.peers import Peer, all_peers
from benchmarks.raw import Raw, Way
from benchmarks.report import chart, table
from tests.support.processes import ROOT, environment, python

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


@pytest.fixture(scope="module")
def peers() -> list[Peer]:
    # The process that torch_checkpointing starts imports torch again: seconds that a smoke test need not spend.
    return all_peers(("DCP", "safetensors"))


def _sane(results: list[Result]) -> None:
    assert results
    for result in results:
        assert not result.error, f"{result.case}, {result.arm}: {result.error}"
        assert all(math.isfinite(v) and v >= 0 for v in result.wall + result.core), result
        assert all(math.isfinite(v) for values in result.extra.values() for v in values), result


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("roundtrip", "tmpfs"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("roundtrip", "disk"), ("small", "tmpfs"), ("interference", "tmpfs"), ("planning", "tmpfs"))
        ),
    ],
)
def test_case_of_one_rank(name: str, place: str, peers: list[Peer], tmp_path: Path) -> None:
    bench = Bench(_options(tmp_path), World(), peers, place=place)
    CASES[name].run(bench)
    _sane(bench.results)
    if name == "planning":
        return
    for result in bench.results:
        assert result.wall or name == "interference"
        assert result.nbytes > 0
    arms = {result.arm for result in bench.results}
    assert any(arm.startswith("bytecheckpoint") for arm in arms)
    assert any(arm.startswith("DCP") for arm in arms)
    if name == "roundtrip":
        kept = {result.case for result in bench.results if result.arm == "DCP, kept stager"}
        assert kept == {"async save: blocking", "async save: end to end"}
        raw = [result for result in bench.results if result.arm.startswith("raw")]
        assert {result.case for result in raw} >= {"save", "load (page cache)"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_runs_the_cases_of_several_ranks(tmp_path: Path) -> None:
    command = python("-m", "benchmarks", "--short", "--size", 1, "--tensors", 40, "--rounds", 1)
    command += ["--worlds", "1", "2", "4", "--places", "tmpfs", "--only", "reshard", "cuts", "ddp", "slice"]
    command += ["--peers", "DCP", "--out", str(tmp_path)]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [Result(**r) for r in json.loads((tmp_path / "results.json").read_text())["results"]]
    _sane(results)
    assert {(r.case, r.world) for r in results} >= {
        ("cuts", 1),
        ("cuts, slow storage", 4),
        ("DDP load", 2),
        ("DDP load", 4),
        ("load at a layout", 2),
        ("load at a layout", 4),
    }
    share = next(r for r in results if r.case == "1/64 of a tensor" and r.arm == "bytecheckpoint")
    assert 1 / 64 <= share.extra["share"][0] <= 1


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


def test_the_two_quickest_raw_ways_are_measured(tmp_path: Path) -> None:
    def refused() -> None:
        raise OSError("no O_DIRECT here")

    seconds = {"slow": 0.02, "quick": 0.0, "medium": 0.01}
    arms = [Arm(name, partial(time.sleep, wait)) for name, wait in seconds.items()]
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


@pytest.mark.slow
def test_table_and_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    pytest.importorskip("matplotlib", reason="no chart without it")
    assert chart(results, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_many_ranks_on_one_machine() -> None:
    command = python("-m", "benchmarks.endpoints", "--ranks", 10, "--processes", 1, "--shapes", "tree")
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {"connect", "barrier", "sums", "save", "load"} <= {line[2] for line in lines if line[0] == "10"}


@pytest.mark.slow
def test_the_sockets_beside_others() -> None:
    command = python("-m", "benchmarks.wires", "--leaves", 2, "--mib", 1, "--wires", "sockets", "gloo")
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["sockets", "gloo"]
