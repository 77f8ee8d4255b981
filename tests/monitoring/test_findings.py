"""A run in words, its cost, and the report of the command line."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.monitoring.analysis.limits import Limits, StorageLimit
from bytecheckpoint.monitoring.analysis.run import summarize_run
from bytecheckpoint.monitoring.report.findings import _ERROR_ADVICE, findings
from bytecheckpoint.monitoring.simulation import Fault, SimulatedRun
from bytecheckpoint.monitoring.sinks.files import METRICS_FOLDER, encode_table
from tests.support.metrics_runs import simulated


def write_run(folder: Path, *faults: Fault) -> str:
    """Write the files of a simulated run; return its folder."""
    (folder / METRICS_FOLDER).mkdir()
    for number, record in enumerate(SimulatedRun({"dp": 4}, saves=8, faults=faults).records()):
        (folder / METRICS_FOLDER / f"{number:04d}-{record.id}.parquet").write_bytes(encode_table(record.table))
    return str(folder)


def test_nothing_is_wrong_with_a_healthy_run() -> None:
    assert findings(simulated(saves=30)) == []


@pytest.mark.parametrize(
    ("fault", "severity", "title", "rank"),
    [
        (Fault("slow", [5], "write", first=4), "warning", "rank 5 on host-0000 is slow in write", 5),
        (Fault("fail", [6], "write", first=9), "critical", "1 save failed by StorageFullError", 6),
        (Fault("missing", [2], first=9), "warning", "Ranks reported nothing", 2),
        (Fault("retry", [1], "finish", 1, first=9), "warning", "Requests are repeated", 1),
        (Fault("slow", range(8), "write", 3, first=9), "warning", "Saves are slow because of the storage", None),
        (Fault("slow", range(8), "write", 4, first=1), "warning", "Saves use", None),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_what_is_wrong(fault: Fault, severity: str, title: str, rank: int | None) -> None:
    found = findings(simulated(fault))
    (finding,) = found
    assert finding.title.startswith(title)
    assert finding.severity == severity and rank in (None, finding.rank) and finding.advice.endswith(".")


def slow(ranks: range, *phases: str, last: int | None = None) -> list[Fault]:
    return [Fault("slow", ranks, phase, 4 if phase == "write" else 100, first=10, last=last) for phase in phases]


@pytest.mark.parametrize(
    ("faults", "title"),
    [
        (slow(range(8, 16), "write", "finish", "stage"), "host-0001 is slow"),
        (slow(range(8, 11), "write"), "host-0001 is slow"),
        (slow(range(9, 10), "write", "stage"), "rank 9 on host-0001 is slow in write"),
        (slow(range(24), "write"), "Saves are slow because of the storage"),
        ([*slow(range(4), "write"), *slow(range(8, 12), "write"), *slow(range(16, 20), "write")],
         "host-0000, host-0001, host-0002 are slow"),
        (slow(range(32), "write", "finish"), "Saves are slow because of the storage"),
        ([*slow(range(32), "write"), Fault("retry", range(32), first=10)], "Saves are slow because of the storage"),
        ([Fault("slow", range(32), "capture", 400, first=10)], "Saves are slow in the training's processes"),
    ],
)  # fmt: skip
def test_one_cause_is_one_finding(faults: list[Fault], title: str) -> None:
    """All that follows from it is in the finding: other ranks and phases, the loss of bandwidth, slower saves."""
    (finding,) = findings(simulated(*faults, mesh={"dp": 32}, saves=40))
    assert finding.title == title and finding.episode is not None
    assert (finding.episode.step, finding.episode.ended) == (1100, None), "since when"
    assert finding.episode.operations == 30 and finding.episode.lost > 30


@pytest.mark.parametrize("seed", range(12))
def test_the_one_cause_of_a_run_by_chance(seed: int) -> None:
    chance = random.Random(seed)
    hosts, per = chance.choice([1, 3, 4, 8]), chance.choice([2, 4, 8])
    host = chance.randrange(hosts)
    rank = host * per + chance.randrange(per)
    of_machine = range(host * per, host * per + per)
    ranks, title = chance.choice(
        [
            (range(rank, rank + 1), f"rank {rank} on host-{host:04d} is slow in "),
            (of_machine if hosts > 1 else range(per), f"host-{host:04d} is slow" if hosts > 1 else "Saves are slow "),
            (range(hosts * per), "Saves are slow "),
        ]
    )
    phase, factor = chance.choice([("write", 5), ("finish", 90), ("stage", 120), ("capture", 500)])
    fault = Fault("slow", ranks, phase, factor, first=chance.randrange(4, 38))
    options = {"mesh": {"dp": hosts * per}, "ranks_per_host": per, "saves": 40, "noise": 0.1, "seed": seed}
    (found,) = findings(simulated(fault, **options))
    assert found.title.startswith(title) and found.phase == phase and found.ended is None
    assert found.episode is not None and found.episode.step == 100 * (fault.first + 1)


def test_what_the_training_waited_for_is_said() -> None:
    (write,) = findings(simulated(*slow(range(9, 10), "write"), mesh={"dp": 32}, saves=40))
    assert write.text.endswith("It has lasted since step 1100; the training did not wait for it.")
    (capture,) = findings(simulated(*slow(range(9, 10), "capture"), mesh={"dp": 32}, saves=40))
    assert capture.episode is not None and capture.episode.cost == pytest.approx(30 * 99 * 0.02, rel=0.3)
    assert "Since step 1100, the training has waited " in capture.text


def test_a_copy_in_the_background_costs_no_more_than_the_call() -> None:
    found = simulated(*slow(range(9, 10), "stage"), mesh={"dp": 32}, saves=40)
    (stage,) = findings([replace(one, blocking_seconds=0.005) for one in found])
    assert stage.episode is not None and stage.episode.lost > 100 and stage.episode.cost == pytest.approx(0.15)


def test_what_is_over_is_history() -> None:
    """A failure of long ago is no alarm any more, and a run in which saves fail again and again is not healthy."""
    faults = [Fault("fail", [3], first=2, last=3), *slow(range(8), "write", last=30)]
    found = findings(simulated(*faults, mesh={"dp": 8}, saves=500))
    assert [(one.severity, one.ended is not None) for one in found] == [("info", True)] * 2
    assert found[1].title == "2 saves failed by StorageFullError"
    twice = [Fault("slow", [3], factor=9, first=first, last=first + 9) for first in (20, 60)]
    assert [one.title for one in findings(simulated(*twice, saves=100))] == ["rank 3 on host-0000 is slow in write"] * 2
    again = [Fault("fail", [3], first=number, last=number) for number in range(0, 19, 3)]
    (failing,) = findings(simulated(*again, saves=20))
    assert failing.severity == "critical" and failing.title.startswith("7 saves")
    assert failing.advice.startswith("Free space")


def test_a_lost_rank_is_the_cause_of_a_failure() -> None:
    (found,) = findings(simulated(Fault("fail", [0], first=9), Fault("missing", [2], first=9)))
    assert found.rank == 2 and "rank 2 reported nothing" in found.text


def test_advice_names_errors_that_exist() -> None:
    assert all(issubclass(getattr(bytecheckpoint, name), bytecheckpoint.CheckpointError) for name in _ERROR_ADVICE)


@pytest.mark.parametrize("seed", range(3))
def test_healthy_saves_whose_times_vary_a_lot_have_no_findings(seed: int) -> None:
    assert findings(simulated(saves=300, loads=0, noise=0.3, seed=seed)) == []


def test_the_phase_that_costs_most_comes_first() -> None:
    found = findings(simulated(Fault("slow", [5], "capture", 100), Fault("slow", [2], "write", 4)))
    assert [finding.phase for finding in found if "is slow in" in finding.title] == ["write", "capture"]


def test_the_storages_own_limit() -> None:
    summaries = simulated(saves=2)
    assert not findings(summaries)
    found = findings(summaries, Limits(given=8e9))
    assert [finding.phase for finding in found] == ["write", "read"] and "7.5 GiB/s was given" in found[0].text


def test_what_was_measured_of_the_storage_counts_for_each_machine() -> None:
    summaries = simulated(saves=2)
    saved = summaries[-1].bandwidth
    hosts = summaries[-1].hosts

    def measured(host: str, time: float, share: float, read: float | None = None) -> StorageLimit:
        return StorageLimit(host=host, time=time, write=saved / share / hosts, read=read, nbytes=1 << 30, threads=8)

    assert not findings(summaries, Limits(measured=[measured("a", 1, 0.9)]))
    assert not findings(summaries, Limits(measured=[measured("a", 2, 0.9), measured("a", 1, 0.01)])), (
        "the newest counts"
    )
    limits = Limits(measured=[measured("a", 1, 0.2), measured("b", 1, 0.2)])
    (finding,) = findings(summaries, limits)  # of the median save; the sentence is about the last one
    assert finding.title.startswith("Saves use 2") and f"was measured for {hosts} mach" in finding.text
    (sentence,) = limits.words(summaries)
    assert sentence.startswith("the last save reached 20% ") and sentence.endswith(" on 1970-01-01")


def test_the_cost_of_a_run() -> None:
    summaries = simulated(saves=20)
    run = summarize_run(summaries)
    assert (run.saves, run.loads, run.failed, run.jobs, run.interval) == (20, 1, 0, 1, pytest.approx(900))
    assert 0.998 < run.effective < 1 and run.undone_seconds == 0
    shares = run.at(4 * 3600)
    assert shares is not None and shares.lost == pytest.approx((450 + run.write + run.restart) / 14400)
    assert shares.effective == pytest.approx(1 - shares.lost - shares.stalled)


def test_a_restart_costs_what_was_done_since_the_last_save() -> None:
    first, second = simulated(saves=3, loads=0), simulated(seed=1, began=1_790_000_000.0 + 3 * 900 + 600, loads=1)
    later = simulated(seed=1, began=1_790_000_000.0 + 3 * 900 + 86400, loads=1)
    run = summarize_run(first + later)
    assert run.undone_seconds == pytest.approx(900 + run.write)
    assert run.undone_seconds + run.between_seconds == pytest.approx(86400)
    run = summarize_run(first + second)
    assert run.jobs == 2 and run.undone_seconds == pytest.approx(600) and run.interval == pytest.approx(900)
    assert run.between_seconds == 0


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_run(tmp_path, Fault("slow", [2], "write", first=7))
    (tmp_path / METRICS_FOLDER / "foreign.parquet").write_bytes(b"nothing of ours")
    assert command(["report", root, "--mtbf", "4h"]) == 0
    shown = capsys.readouterr()
    assert "1 damaged or foreign file skipped" in shown.err
    for line in (
        "write of rank 2 on host-0000: ", "warning: rank 2 on host-0000 is slow in write", "alert", "warning   straggler",
        "with a failure every 4.0 h: ", "8 saves, 1 load and 0 that failed, by 1 job",
    ):  # fmt: skip
        assert line in shown.out, shown.out


def test_report_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_run(tmp_path, Fault("fail", [1], "write", first=7))
    assert command(["report", root, "--json", "--newest", "3", "--bandwidth", "1GB"]) == 1, "something is critical"
    document = json.loads(capsys.readouterr().out)
    assert [operation["step"] for operation in document["operations"]] == [600, 700, 800]
    assert document["operations"][2]["failures"][1] == {
        "rank": 1, "stage": "write", "error": "StorageFullError: rank 1, write: no space left on the storage",
    }  # fmt: skip
    assert [alert["rule"] for alert in document["alerts"]] == ["failed"]
    assert document["findings"][0]["severity"] == "critical" and document["run"]["saves"] == 2


def test_two_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", Fault("slow", range(4), "write", 2))
    assert command(["compare", first, second]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["save", "operations", "8", "8", "1.00"] in rows and ["kind", "number", "first", "second", "ratio"] in rows
    assert command(["compare", first, second, "--json"]) == 0
    numbers = {(row["kind"], row["name"]): row["ratio"] for row in json.loads(capsys.readouterr().out)["numbers"]}
    assert numbers["save", "phase.write"] == pytest.approx(2, rel=0.2) and numbers["load", "seconds"] == 1
    assert numbers["save", "bandwidth"] == pytest.approx(0.5, rel=0.2) and numbers["save", "failed"] is None
    assert command(["compare", first, str(tmp_path)]) == 2


def test_report_needs_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from bytecheckpoint.cli.main import run; sys.exit(run(sys.argv[1:]) or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, "report", write_run(tmp_path)], check=True, timeout=120)


def test_report_without_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["report", str(tmp_path)]) == 2
    assert "holds no metrics" in capsys.readouterr().err
