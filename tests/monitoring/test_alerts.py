"""Alerts: the right rank and phase within one save, and none without a reason."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import UsageError
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.monitoring import delivery
from bytecheckpoint.monitoring.alerts import Alert, Evaluation, load_rules
from bytecheckpoint.monitoring.alerts.evaluation import AlertWatcher
from bytecheckpoint.monitoring.analysis.summary import summarize
from bytecheckpoint.monitoring.progress import OperationProgress, RankColumns
from bytecheckpoint.monitoring.reading import RunMetrics, read_run
from bytecheckpoint.monitoring.report.report import Reporter
from bytecheckpoint.monitoring.simulation import Fault, SimulatedRun
from bytecheckpoint.storage.posix.storage import PosixStorage
from tests.support.faulty_storage import Faults
from tests.support.metrics import collecting, wait_for_operations
from tests.support.metrics_runs import alerts_of, simulated
from tests.support.processes import wait_until
from tests.support.ranks import load_all, save_all, succeeded
from tests.support.receivers import Received, receiver
from tests.support.settings import using
from tests.support.variants import quick
from tests.support.worlds import Worlds


def facts(alerts: list[Alert]) -> list[tuple[str, int | None, str]]:
    """Return what an alert is about."""
    return [(alert.rule, alert.rank, alert.phase) for alert in alerts]


# --- simulated runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault("slow", [5], "write", 5, first=7), [("straggler", 5, "write")]),
        (Fault("slow", [3], "capture", 200, first=7), [("straggler", 3, "capture")]),
        (Fault("slow", range(8), "write", 4, first=7), [("bandwidth", None, "write")]),
        (Fault("retry", range(8), "finish", 1, first=7), [("retries", 0, "")]),
        (Fault("missing", [2, 6], first=7), [("missing", 2, "")]),
        (Fault("fail", [6], "write", first=7), [("failed", 6, "write")]),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_each_fault_within_one_save(fault: Fault, expected: list[Any]) -> None:
    summaries = simulated(fault)
    alerts = alerts_of(summaries)
    assert facts(alerts) == expected, "and it is not repeated at every save"
    assert alerts[0].step == 800 and alerts[0].path == "simulated://run/step_800"


def test_none_in_200_healthy_saves_of_512_ranks() -> None:
    summaries = simulated(mesh={"pp": 4, "dp": 16, "tp": 8}, saves=200, noise=0.15, chunks=0)
    assert [alert.text for alert in alerts_of(summaries)] == []


@pytest.mark.parametrize(
    "error", ["CheckpointNotFoundError: no catalog", "KeyboardInterrupt:", "StorageError: refused"]
)
def test_what_a_program_expects_is_no_failure(error: str) -> None:
    """Many programs try to load at a first start, and continue without a checkpoint."""
    failed = simulated(Fault("fail", [6], "write", first=7))[-1]
    failed = replace(failed, failures=tuple(replace(failure, error=error) for failure in failed.failures))
    assert [alert.rule for alert in alerts_of([failed])] == ["failed"] * error.startswith("StorageError")


def test_an_overdue_checkpoint() -> None:
    evaluation = Evaluation(load_rules())
    assert evaluation.next_time is None
    for summary in simulated():
        assert not evaluation.after(summary)
    assert evaluation.next_time == pytest.approx(summary.began + 3 * 900 + summary.seconds)
    assert not evaluation.at(evaluation.next_time - 1)
    (alert,) = evaluation.at(evaluation.next_time + 1)
    assert alert.rule == "overdue" and "45 min" in alert.text
    assert not evaluation.at(evaluation.next_time + 2)


def test_a_step_that_stays_in_memory() -> None:
    def running(seconds: float, *, ended: bool = False) -> OperationProgress:
        path, ranks = "tier+s3://b/run/step_1", RankColumns(rank=[], host=[], phase=[], seconds=[], done=[], planned=[])
        return OperationProgress("x-save-1", "save", path, 1, 2, 0.0, seconds, ended, ranks)

    evaluation = Evaluation(load_rules())
    assert not evaluation.while_running(running(1000)) and not evaluation.while_running(running(2000, ended=True))
    (alert,) = evaluation.while_running(running(2000))
    assert facts([alert]) == [("unflushed", None, "flush")] and alert.step == 1
    assert not evaluation.while_running(running(2001))


# --- rules --------------------------------------------------------------------------------------------------------


def test_rules_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(
        '[[rule]]\nkind = "threshold"\nname = "training waits"\nmetric = "phase.stage"\nabove = 0.01\nrepeat = 0\n'
        'operations = "save"\nseverity = "info"\n'
    )
    evaluation = Evaluation(load_rules(str(path)))
    alerts = [alert for summary in simulated() for alert in evaluation.after(summary)]
    assert {alert.rule for alert in alerts} == {"training waits"} and len(alerts) == 10
    assert alerts[0].limit == 0.01 and alerts[0].value is not None and alerts[0].value > 0.05
    assert "phase.stage is 0." in alerts[0].text


def test_a_storage_that_cannot_be_asked_for_its_room_costs_no_other_alert(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Alert] = []
    watcher = AlertWatcher(told.append)
    for summary in simulated(Fault("missing", [3]), saves=1, loads=0):  # of a scheme that no storage has
        watcher.ended(summary)
    watcher.finish(10)
    assert [alert.rule for alert in told] == ["missing"] and "monitoring failed" not in caplog.text


def test_rules_of_one_name_are_two_rules(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    limits = "metric = 'seconds'\nabove = 0", "metric = 'nbytes'\nabove = 1"
    path.write_text("".join(f"[[rule]]\nkind = 'threshold'\n{limit}\n" for limit in limits))
    records = list(SimulatedRun({"dp": 2}, saves=1, loads=0).records())
    alerts = Reporter(load_rules(str(path))).report(RunMetrics.of(records)).alerts
    assert [alert.text.split(" is ")[0] for alert in alerts] == [
        "save of step 100: seconds",
        "save of step 100: nbytes",
    ]


def test_a_clock_that_is_set_back_silences_no_rule() -> None:
    rule = load_rules()[0]
    evaluation = Evaluation([rule])
    (summary,) = simulated(Fault("slow", [3]), saves=1, loads=0)
    assert len(evaluation.after(summary)) == 1 and not evaluation.after(summary)
    assert len(evaluation.after(replace(summary, began=summary.began - 86400))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "rule = 3",
        '[[rule]]\nkind = "no such"',
        '[[rule]]\nkind = "straggler"\nratioo = 3',
        '[[rule]]\nkind = "threshold"\nmetric = "speed"\nabove = 1',
        '[[rule]]\nkind = "threshold"\nmetric = "seconds"',
        "[[rule]]\nkind = 'threshold'\nmetric = 'total.write.times'\nabove = 1",
        "[[rule]]\nkind = 'threshold'\nmetric = 'seconds'\nabove = nan",
        "[[rule]]\nkind = 'overdue'\nfactor = inf",
        "[[rule]]\nkind = 'failed'\nname = 'fällt aus'",
        "not toml",
    ],
)
def test_wrong_rules_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text, "latin-1")
    with pytest.raises(UsageError, match=r"rules\.toml"):
        load_rules(str(path))


def test_wrong_rules_fail_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with collecting():
        bytecheckpoint.configure(alerts=str(tmp_path / "none.toml"))
        succeeded(save_all(ThreadWorld(1), tmp_path / "step_1", 1))
        assert wait_until(lambda: "the built-in rules hold" in caplog.text, 30)


# --- real saves ---------------------------------------------------------------------------------------------------


def alerts_in(received: Received) -> list[dict[str, Any]]:
    """Return the alerts that a webhook has received."""
    return [json.loads(body) for _, _, body in received.requests]


def test_a_slow_rank_and_then_a_slow_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults().install(monkeypatch)
    world = ThreadWorld(4)
    (tmp_path / "rules.toml").write_text('[[rule]]\nkind = "straggler"\n[[rule]]\nkind = "bandwidth"\nnbytes = 0')
    with (
        receiver(204) as received,
        collecting(f"files,webhook+http://127.0.0.1:{received.port}/token"),
        using(alerts=str(tmp_path / "rules.toml")),
    ):
        for step in range(6):
            succeeded(save_all(world, tmp_path / f"step_{step}", step))
        faults.add("write", delay=3.0, rank=2, times=1)
        succeeded(save_all(world, tmp_path / "step_6", 6))
        assert wait_until(lambda: bool(received.requests), 30)
        (alert,) = alerts_in(received)
        assert (alert["rule"], alert["rank"], alert["phase"], alert["step"]) == ("straggler", 2, "write", 6)
        for rank in range(4):
            faults.add("write", delay=3.0, rank=rank)
        succeeded(save_all(world, tmp_path / "step_7", 7))
        wait_for_operations(tmp_path, 8)
        delivery.finish()
    slow_rank, slow_store = [record.message for record in caplog.records if record.message.startswith("alert")]
    assert "alert straggler: save of step 6: rank 2 on" in slow_rank and "for write" in slow_rank
    assert "alert bandwidth: save of step 7:" in slow_store
    assert [alert["rule"] for alert in alerts_in(received)] == ["straggler", "bandwidth"]


def test_damaged_bytes_and_a_full_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = ThreadWorld(2)
    caplog.set_level(logging.INFO)
    with collecting():
        succeeded(save_all(world, tmp_path / "step_1", 1))
        wait_for_operations(tmp_path, 1)
        delivery.finish()
        assert "alert" not in caplog.text
        monkeypatch.setattr(PosixStorage, "free_bytes", lambda _: 1000)
        succeeded(save_all(world, tmp_path / "step_2", 2))
        assert wait_until(lambda: "alert storage: save of step 2: the storage is nearly full" in caplog.text, 30)
        for file in (tmp_path / "step_1").glob("*/*.safetensors"):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        load_all(world, tmp_path / "step_1")
        assert wait_until(lambda: "alert verification: load of step 1: failed in fit on rank" in caplog.text, 30)
    assert "alert failed" not in caplog.text
    told = Reporter(load_rules()).report(read_run(str(tmp_path))).alerts
    assert [alert.rule for alert in told] == ["storage", "verification"], "of which the first cannot be told afterwards"
    assert told[1].operation in {one.id for one in read_run(str(tmp_path), newest=1).operations}
    assert [alert.rule for alert in read_run(str(tmp_path), newest=1).alerts] == ["verification"]


def test_verification_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    succeeded(save_all(ThreadWorld(1), tmp_path / "step_1", 1))
    file = next((tmp_path / "step_1").glob("*/rank*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with receiver(204) as received, using(metrics=f"webhook+http://127.0.0.1:{received.port}/token"):
        assert command(["verify", str(tmp_path / "step_1")]) == 1
    (alert,) = alerts_in(received)
    assert alert["rule"] == "verification" and alert["severity"] == "critical" and file.name in alert["text"]


def test_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(PosixStorage, "free_bytes", lambda _: 1)
    with collecting(), using(alerts="off"):
        succeeded(save_all(ThreadWorld(1), tmp_path / "step_1", 1))
        wait_for_operations(tmp_path, 1)
        delivery.finish()
    assert "alert" not in caplog.text


# --- processes ----------------------------------------------------------------------------------------------------


def alerts_of_many_saves(root: str, saves: int) -> list[str]:
    """Save some MB repeatedly; return the alerts that this rank has logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("bytecheckpoint")
    log.addHandler(handler)
    state = {f"layer{number}": torch.randn(1 << 18) for number in range(8)}  # two for each rank
    with using(metrics="files"):
        for number in range(saves):
            handle = bytecheckpoint.save(f"{root}/step_{number}", {"model": state}, async_checkpoint=bool(number % 2))
            handle.result(120)
        if torch.distributed.get_rank() == 0:
            wait_for_operations(root, saves)
            delivery.finish()
    log.removeHandler(handler)
    return [line for line in lines if line.startswith("alert")]


@pytest.mark.parametrize("saves", quick([40, 200], every=2))
def test_none_in_many_healthy_saves_of_four_processes(worlds: Worlds, tmp_path: Path, saves: int) -> None:
    assert worlds.run(4, alerts_of_many_saves, str(tmp_path), saves, timeout=540) == [[]] * 4
    run = read_run(str(tmp_path))
    assert len(run.records) == saves and not run.skipped
    assert all(0.7 < summarize(record).spared_share < 0.8 for record in run.records), "each layer is written once"
