"""Metrics from all ranks to the file beside the run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import duckdb
import msgspec
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import (
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    StorageFullError,
    StorageUnavailableError,
    UsageError,
)
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.monitoring import collector
from bytecheckpoint.monitoring.background import Background
from bytecheckpoint.monitoring.progress import make_progress
from bytecheckpoint.monitoring.reading import read_run
from bytecheckpoint.monitoring.record import error_text, make_record, path_without_secrets, without_secrets
from bytecheckpoint.monitoring.sinks import files
from bytecheckpoint.monitoring.sinks.files import METRICS_FOLDER
from bytecheckpoint.tiers.flush import job
from bytecheckpoint.tracing.operation import Operation, span
from bytecheckpoint.tuning import tuned
from tests.support.coded import states
from tests.support.faulty_storage import Faults
from tests.support.memory import hot_tier
from tests.support.metrics import collecting, tables, wait_for_operations
from tests.support.processes import run_program, wait_until
from tests.support.ranks import load_all, outcomes, save_all, succeeded


def query(root: Path, sql: str) -> list[tuple[Any, ...]]:
    """Ask the metrics of a run, without this package."""
    source = f"read_parquet('{root}/.bytecheckpoint-metrics/*.parquet')"
    return duckdb.sql(sql.format(metrics=source)).fetchall()


def test_progress_of_a_save_that_hangs_keeps_it_not_alive(tmp_path: Path) -> None:
    """Rank 0 writes a file each time, and the others would take that for work of the save."""
    world = ThreadWorld(3)

    def one(collective: Collective) -> None:
        if collective.rank != 2:
            bytecheckpoint.save(tmp_path / "step_1", states(collective.rank, 3, 1), timeout=1.0)

    with collecting(), tuned(progress_interval=0.2, metrics_wait=0.5):
        for error in outcomes(world, one, timeout=30)[:2]:
            assert isinstance(error, CheckpointTimeoutError) and "from rank 2 within 1 s" in str(error)
        wait_for_operations(tmp_path, 1)  # else they come in the middle of the next test


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_every_rank_reports_phases_and_chunks(tmp_path: Path, writer: str) -> None:
    world = ThreadWorld(3)
    # Loads have metrics only beside those of saves, and a rank may report its part of the load before that of the save.
    (tmp_path / METRICS_FOLDER).mkdir()
    with collecting():
        bytecheckpoint.configure(writer=writer, mesh="pp=3")
        succeeded(save_all(world, tmp_path / "step_00000007", 7, async_checkpoint=True))
        load_all(world, tmp_path / "step_00000007")
        wait_for_operations(tmp_path, 2)
    ranks = query(
        tmp_path, "select kind, rank, step, pp, name, nbytes > 0 from {metrics} where level = 'rank' order by all"
    )
    assert ranks == [(kind, rank, 7, rank, "done", True) for kind in ("load", "save") for rank in range(3)]
    phases = query(
        tmp_path,
        "select rank, list(name order by begin)[-3:] from {metrics} where level = 'phase' and kind = 'save'"
        " group by rank order by rank",
    )
    assert phases == [(rank, ["write", "finish", "commit"]) for rank in range(3)]
    # Spans lie inside of their rank's operation, and those of chunks add up to what the rank wrote. They may begin before
    # rank 0's: if a rank hears of the commit later than rank 0, its clock seems to differ, and the table takes that out.
    spans = query(
        tmp_path,
        "with ranks as (select * from {metrics} where level = 'rank') select count(*) > 0, min(s.begin - r.begin) > -1e-4,"
        " max(s.begin + s.seconds - r.begin - r.seconds) < 1e-4"
        " from {metrics} s join ranks r using (kind, rank) where s.level = 'span'",
    )
    assert spans == [(True, True, True)]
    written = query(
        tmp_path,
        "select sum(nbytes) filter (level = 'rank') - sum(nbytes) filter (level = 'total' and name in ('write', 'finish'))"
        " from {metrics} where kind = 'save'",
    )
    assert written == [(0,)]


def test_a_failure_says_which_rank_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults().install(monkeypatch)
    faults.add("write", StorageFullError("no space at s3://key:secret@bucket/x?X-Amz-Signature=own-signature"), rank=1)
    with collecting():
        save_all(ThreadWorld(2), tmp_path / "run" / "step_00000001", 1)
        (table,) = wait_for_operations(tmp_path / "run", 1)
    rows = [row for row in table.to_pylist() if row["level"] == "rank"]
    assert [(row["rank"], row["name"]) for row in rows] == [(0, "failed"), (1, "failed")]
    assert rows[1]["phase"] == "write" and "no space" in rows[1]["subject"] and "rank 1" in rows[0]["subject"]
    assert not any(secret in str(table.to_pylist()) for secret in ("secret", "own-signature"))


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("kind", [StorageFullError, ValueError])
def test_a_failure_is_that_of_the_rank_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], culprit: int
) -> None:
    error = kind("rank 7: no space left")
    Faults().install(monkeypatch).add("write", error, rank=culprit)
    with collecting():
        save_all(ThreadWorld(3), tmp_path / "run" / "step_00000001", 1)
        wait_for_operations(tmp_path / "run", 1)
    (operation,) = read_run(str(tmp_path / "run")).operations
    first = operation.first_failure
    assert (first.rank, first.stage) == (culprit, "write"), operation.failures
    assert first.error.endswith(str(error)) and f"rank {culprit}" not in first.error


def test_a_load_that_fails_before_its_first_phase(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first job of a new run finds no checkpoint, which nobody has to look at."""
    caplog.set_level(logging.INFO)
    with collecting():
        save_all(ThreadWorld(1), tmp_path / "step_1", 1)
        wait_for_operations(tmp_path, 1)
        with pytest.raises(CheckpointNotFoundError):
            bytecheckpoint.load(tmp_path / "step_2", {"model": {"w": torch.ones(1)}})
        wait_for_operations(tmp_path, 2)
        bytecheckpoint.save(tmp_path / "step_3", {"model": {"w": torch.ones(1)}})
        wait_for_operations(tmp_path, 3)
    _, load, _ = read_run(str(tmp_path)).operations
    assert load.failed and load.phases == () and "CheckpointNotFoundError" in load.first_failure.error
    assert "alert failed" not in caplog.text
    assert command(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0


def test_metrics_that_cannot_be_joined_cost_no_other_operation_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with collecting():
        with monkeypatch.context() as patch:
            patch.setattr(collector, "summarize", Mock(side_effect=ValueError("odd")))
            bytecheckpoint.save(tmp_path / "step_1", {"model": {"w": torch.ones(1)}})
            assert wait_until(lambda: "the metrics of a save are lost" in caplog.text, 30)
        bytecheckpoint.save(tmp_path / "step_2", {"model": {"w": torch.ones(1)}})
        wait_for_operations(tmp_path, 1)


def test_what_follows_the_commit_of_a_tier_are_phases_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, run = ThreadWorld(2), tmp_path / "run"
    with hot_tier(monkeypatch), collecting():
        reports = save_all(world, f"tier+file://{run}/step_1", 1)
        monkeypatch.setattr(job, "commit", Mock(side_effect=StorageFullError("no space")))
        save_all(world, f"tier+file://{run}/step_2", 2)
        wait_for_operations(run, 2)
    done, failed = (record.table.to_pylist() for record in read_run(str(run)).records)
    for rank, report in enumerate(reports):
        phases = {row["name"]: row["seconds"] for row in done if (row["rank"], row["level"]) == (rank, "phase")}
        assert [*phases][-3:] == ["commit", "replicate", "flush"]
        assert phases == pytest.approx(report.phases, rel=1e-4, abs=1e-5)
        assert sum(phases.values()) == pytest.approx(report.total_seconds, abs=0.05)
    copied = [row["nbytes"] for row in done if row["name"] == "transfer" and row["level"] == "span"]
    assert sum(copied) == sum(file.stat().st_size for file in (run / "step_1").glob("*/*.safetensors"))
    assert {(row["name"], row["phase"]) for row in failed if row["level"] == "rank"} == {("failed", "flush")}


def test_a_rank_that_reports_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = ThreadWorld(3)
    monkeypatch.setattr(world.rank(2), "send", _without_metrics(world.rank(2).send))
    with collecting(), tuned(metrics_wait=0.2):
        succeeded(save_all(world, tmp_path / "step_1", 1))
        (table,) = wait_for_operations(tmp_path, 1)
    assert [row["rank"] for row in table.to_pylist() if row["name"] == "missing"] == [2]


def test_a_rank_that_goes_on_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 reports later than rank 0 waits for ranks that are gone, and says meanwhile how far it is."""
    world = ThreadWorld(2)
    send = world.rank(1).send

    def slowly(to: int, tag: str, payload: bytes) -> None:
        if tag != "metrics":
            return send(to, tag, payload)
        operation = Operation("save", str(tmp_path / "step_1"))
        operation.number = 1
        for part in range(6):
            operation.count("write", nbytes=part + 1)
            send(to, "metrics/progress", msgspec.msgpack.encode(make_progress(operation, 1, "host")))
            time.sleep(0.2)
        send(to, tag, payload)

    monkeypatch.setattr(world.rank(1), "send", slowly)
    with collecting(), tuned(metrics_wait=0.5):
        succeeded(save_all(world, tmp_path / "step_1", 1))
        (table,) = wait_for_operations(tmp_path, 1)
    assert [(row["rank"], row["name"]) for row in table.to_pylist() if row["level"] == "rank"] == [
        (0, "done"),
        (1, "done"),
    ]


def _without_metrics(send: Callable[[int, str, bytes], None]) -> Callable[[int, str, bytes], None]:
    return lambda to, tag, payload: None if tag.startswith("metrics") else send(to, tag, payload)


def test_off_writes_nothing(tmp_path: Path) -> None:
    with collecting("off"):
        succeeded(save_all(ThreadWorld(2), tmp_path / "step_1", 1))
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_load_leaves_nothing_where_no_save_has(tmp_path: Path) -> None:
    world = ThreadWorld(1)
    succeeded(save_all(world, tmp_path / "step_1", 1))
    with collecting():
        load_all(world, tmp_path / "step_1")
        assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
        succeeded(save_all(world, tmp_path / "step_2", 2))
        load_all(world, tmp_path / "step_1")
        wait_for_operations(tmp_path, 2)


def test_many_small_files_become_one(tmp_path: Path) -> None:
    world = ThreadWorld(1)
    with tuned(files_joined=4), collecting():
        for step in range(1, 7):
            succeeded(save_all(world, tmp_path / f"step_{step:08d}", step))
            wait_for_operations(tmp_path, step)
    assert [name.startswith("joined-") for name in sorted(tables(tmp_path))] == [False, False, True]
    assert query(tmp_path, "select count(distinct operation) from {metrics}") == [(6,)]


def test_the_files_are_written_without_pandas(tmp_path: Path) -> None:
    """Importing it takes a second of a training's processor."""
    program = """if True:
        import dataclasses, sys
        from bytecheckpoint.monitoring.analysis.summary import summarize
        from bytecheckpoint.monitoring.simulation import SimulatedRun
        from bytecheckpoint.monitoring.sinks.files import FilesSink
        sink = FilesSink("files")
        for record in SimulatedRun({"dp": 1}, saves=64).records():
            record = dataclasses.replace(record, path=f"{sys.argv[1]}/step_{record.step}")
            sink.deliver(record, summarize(record))
        assert "pandas" not in sys.modules
    """
    done = run_program(program, tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    assert any(name.startswith("joined-") for name in tables(tmp_path))


def test_a_storage_that_fails_costs_nothing_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise StorageUnavailableError("down")

    monkeypatch.setattr(files, "resolve", fail)
    world = ThreadWorld(1)
    with collecting():
        for step in range(3):
            succeeded(save_all(world, tmp_path / f"step_{step}", step))
    told = [record.message for record in caplog.records if "metrics do not reach files" in record.message]
    assert len(told) == 1 and "down" in told[0]


def test_live_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults().install(monkeypatch)
    faults.add("write", delay=0.3)
    seen: list[Any] = []
    publish = files.FilesSink.progress

    def note(sink: files.FilesSink, progress: Any) -> None:
        seen.append(progress)
        publish(sink, progress)

    monkeypatch.setattr(files.FilesSink, "progress", note)
    with collecting(), tuned(progress_interval=0.05):
        succeeded(save_all(ThreadWorld(2), tmp_path / "step_00000003", 3))
        wait_for_operations(tmp_path, 1)
        (live,) = (tmp_path / ".bytecheckpoint-metrics").glob("live-*.json")
        assert '"ended":true' in live.read_text()
    assert not live.exists(), "nothing runs any more"
    assert seen[-1].ended and not seen[0].ended
    whole = [progress for progress in seen if progress.ranks["rank"] == [0, 1]]
    assert whole and whole[-1].step == 3 and whole[-1].planned > 0


def test_the_longest_spans_stay_and_totals_count_all() -> None:
    with tuned(spans_per_rank=4):
        operation = Operation("save", "/x")
        for number in range(100):
            operation.add("write", time.perf_counter() - (60.0 if number % 25 == 0 else 0.0), number)
        assert operation.total("write")[::2] == (100, sum(range(100)))
        assert [part.nbytes for part in operation.longest_spans()] == [0, 25, 50, 75]


def test_a_function_is_measured_with_its_failures() -> None:
    @span("work")
    def work(fail: bool) -> None:
        if fail:
            raise ValueError("no")

    operation = Operation("load", "/x")
    with operation.running():
        work(fail=False)
        with pytest.raises(ValueError, match="no"):
            work(fail=True)
    work(fail=False)  # no operation runs
    assert [part.failed for part in operation.longest_spans()] == [False, True]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:secret@bucket/run", "s3://bucket/run"),
        ("hdfs://user:p@ss@host/run@2", "hdfs://host/run@2"),
        ("cannot read https://host/a?sig=abc&x=1: refused", "cannot read https://host/a refused"),
        ("exceeded with url: /a?sig=abc (refused)", "exceeded with url: /a (refused)"),
        ("401 for Authorization: Bearer abcdefgh123=", "401 for Authorization: Bearer ..."),
        ("/plain/path?with=query", "/plain/path?with=query"),
        ("s3://key:se/cret@bucket/run", "s3://bucket/run"),
        ("hdfs://host:8020/run@2", "hdfs://host:8020/run@2"),
        ("{'Authorization': 'Basic abcdefgh123='}", "{'Authorization': 'Basic ...'}"),
        ("GET /a?X-Amz-Date=1&X-Amz-Signature=ab/c&x=1", "GET /a?X-Amz-Date=1&X-Amz-Signature=...&x=1"),
        (
            "AWS_SECRET_ACCESS_KEY=abc AccountKey=a+b==;X-Api-Key: abc",
            "AWS_SECRET_ACCESS_KEY=... AccountKey=...;X-Api-Key: ...",
        ),
        ("model/cls_token: shape (1,) is not (2,)", "model/cls_token: shape (1,) is not (2,)"),
    ],
)
def test_secrets_are_left_out(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_names_that_are_not_utf_8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert error_text(OSError("no file a\udcff")) == "OSError: no file a\\udcff"
    with collecting():
        bytecheckpoint.save(f"{tmp_path}/a\udcff/step_1", {"model": {"w": torch.ones(1)}})
        bytecheckpoint.save(tmp_path / "step_2", {"model": {"w": torch.ones(1)}})
        wait_for_operations(tmp_path, 1)
    assert caplog.text.count("its path is not UTF-8") == 1 and "Traceback" not in caplog.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_operations_after_one_whose_path_is_not_utf_8(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ranks: int
) -> None:
    """Neither its end nor its progress reaches a sink, so the sinks of later operations do not fail."""
    with collecting(), tuned(progress_interval=0.001):
        world = ThreadWorld(ranks)
        for name in ("a\udcff/step_1", "step_2"):
            succeeded(save_all(world, f"{tmp_path}/{name}", 1, rows=20_000, async_checkpoint=True))
        wait_for_operations(tmp_path, 1)
    assert "do not reach" not in caplog.text and "are lost" in caplog.text


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("s3://key:se/cret@bucket/run", "s3://bucket/run"),
        ("s3://:secret@bucket/run?secret", "s3://bucket/run"),
        ("hdfs://user:p@ss@host:8020/run@2", "hdfs://host:8020/run@2"),
        ("fsspec+abfs://container@account.dfs.core.windows.net/run", "fsspec+abfs://container@account.dfs.core.windows.net/run"),
        ("hdfs://host:8020/run@2", "hdfs://host:8020/run@2"),
        ("/runs/token=64/step_1", "/runs/token=64/step_1"),
    ],
)  # fmt: skip
def test_a_path_without_secrets_still_leads_to_the_checkpoint(path: str, shown: str) -> None:
    assert path_without_secrets(path) == shown


def test_metrics_lie_beside_a_run_of_a_container_of_an_account() -> None:
    with collecting():
        bytecheckpoint.save("fsspec+memory://container@account/run/step_1", {"model": {"w": torch.ones(1)}})
        wait_for_operations("fsspec+memory://container@account/run", 1)


def test_an_error_is_one_line_of_limited_length_and_a_path_stays_a_path() -> None:
    operation = Operation("save", "s3://key:secret@bucket/token=64/step_1")
    record = make_record(operation, 0, "host", {}, ValueError("a\n  b " + "x" * 100_000), 10)
    assert record.path == "s3://bucket/token=64/step_1"
    assert record.error.startswith("ValueError: a b xxx") and len(record.error) < 4100


def test_background_work_ends_with_its_owner() -> None:
    background = Background("test-background")
    done: list[int] = []
    background.later(0.2, lambda: done.append(3))
    background.submit(lambda: done.append(1))
    assert background.flush(10) and done == [1] and background.waiting() == 1
    background.submit(lambda: 1 / 0)  # is logged, and the next job runs
    background.end()
    assert wait_until(lambda: not any(t.name == "test-background" for t in threading.enumerate()), 10) and done == [
        1,
        3,
    ]
    background.submit(lambda: done.append(4))
    assert background.flush(10) and done[-1] == 4


def test_an_operation_that_ends_before_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save is refused while the first is being written: both are told."""
    written = threading.Event()
    faults = Faults().install(monkeypatch)
    faults.add("write", hold=written)
    background: Any = {"async_checkpoint": True, "staging": "background"}

    def run(collective: Collective) -> None:
        handle = bytecheckpoint.save(tmp_path / "step_1", {"model": {"w": torch.ones(4)}}, **background)
        with pytest.raises(UsageError):
            bytecheckpoint.save(tmp_path / "step_2", {"model": object()}, **background)
        if collective.rank == 0:
            wait_for_operations(tmp_path, 1)
            written.set()
        handle.result(60)

    with collecting():
        ThreadWorld(2).run(run, timeout=90)
        found = wait_for_operations(tmp_path, 2)
    assert sorted(table["operation"][0].as_py().rpartition("-")[2] for table in found) == ["1", "2"]


def test_a_job_in_a_million_years_holds_up_no_other() -> None:
    background = Background("test")
    background.later(1e15, bool)
    done: list[bool] = []
    background.later(0.05, lambda: done.append(True))
    background.flush(10)
    deadline = time.monotonic() + 10
    while not done:
        assert time.monotonic() < deadline
        time.sleep(0.01)
