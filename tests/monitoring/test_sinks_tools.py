"""Sinks for tools that plot numbers over steps, and today's ClickHouse: tests read what the tools have stored."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bytecheckpoint.monitoring.analysis.summary import summarize
from bytecheckpoint.monitoring.simulation import SimulatedRun
from bytecheckpoint.monitoring.sinks import Sink, make_sink
from bytecheckpoint.monitoring.sinks.clickhouse import create_statement, insert_statement, tab_separated
from bytecheckpoint.monitoring.table import SCHEMA, OperationRecord
from tests.support.metrics import tables
from tests.support.processes import run_program, wait_until

pytestmark = pytest.mark.skipif(
    not os.environ.get("BYTECHECKPOINT_REQUIRE_METRICS"), reason="NOT TESTED HERE: needs `make test-metrics-sinks`"
)

RECORDS = list(SimulatedRun({"dp": 4}, saves=3).records())
STEPS = [100, 200, 300]


def deliver(address: str, records: list[OperationRecord] = RECORDS) -> None:
    sink: Sink = make_sink(address)
    for record in records:
        sink.deliver(record, summarize(record))
    sink.close()


def test_tensorboard_shows_scalars_over_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    deliver(f"tensorboard://{tmp_path}/logs")
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    seconds = events.Scalars("bytecheckpoint/save/seconds")
    assert [event.step for event in seconds] == STEPS
    assert [event.wall_time for event in seconds] == [record.began for record in RECORDS[1:]]
    assert seconds[0].value > events.Scalars("bytecheckpoint/save/phase/write/longest")[0].value > 1


def wandb_records(path: Path) -> list[Any]:
    """Return what an offline run has stored so far: a log of LevelDB's format, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, records, parts = path.read_bytes(), 7, [], b""
    assert data.startswith(b":W&B")
    while at + 7 < len(data):
        if (1 << 15) - at % (1 << 15) < 7:  # the rest of a block has no room for a header
            at += (1 << 15) - at % (1 << 15)
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            break  # it is being written
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return records


def wandb_history(folder: Path, project: str) -> list[dict[str, Any]]:
    """Return the rows of the only run of a project, which is over."""

    def finished_run() -> list[Any]:
        runs = [wandb_records(path) for path in folder.glob("wandb/offline-run-*/*.wandb")]
        runs = [run for run in runs if any(record.run.project == project for record in run)]
        return runs[0] if len(runs) == 1 and any(record.HasField("exit") for record in runs[0]) else []

    # A file is complete only some time after `finish` has returned.
    assert wait_until(lambda: bool(finished_run()), 60)
    rows = [record.history.item for record in finished_run() if record.history.item]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


@pytest.fixture(scope="module")
def wandb_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of all runs of this process, as W&B reads its variables once."""
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(folder))
        patch.setenv("WANDB_MODE", "offline")
        yield folder


def test_wandb_gets_an_offline_run_of_its_own(wandb_folder: Path) -> None:
    import wandb

    deliver("wandb://project")
    rows = wandb_history(wandb_folder, "project")
    saves = [row for row in rows if "bytecheckpoint/save/seconds" in row]
    assert [row["bytecheckpoint/step"] for row in saves] == STEPS and wandb.run is None


def test_wandb_takes_the_run_of_the_training_and_leaves_its_steps_alone(wandb_folder: Path) -> None:
    import wandb

    sink = make_sink("wandb://")
    run = wandb.init(project="training", settings=wandb.Settings(silent=True, console="off"))
    for step, record in enumerate(RECORDS):
        run.log({"loss": 1.0 / (step + 1)}, step=10 * step)
        sink.deliver(record, summarize(record))
    run.log({"loss": 0.0}, step=40)
    sink.close()
    run.finish()
    rows = wandb_history(wandb_folder, "training")
    assert [row["_step"] for row in rows if "loss" in row] == [0, 10, 20, 30, 40]
    assert [row["bytecheckpoint/step"] for row in rows if "bytecheckpoint/save/seconds" in row] == STEPS


@pytest.fixture
def tracking(tmp_path: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")


def mlflow_steps(tracking: Any, run: Any) -> list[int]:
    return [m.step for m in tracking.get_metric_history(run.info.run_id, "bytecheckpoint/save/seconds")]


def test_mlflow_gets_a_run_of_its_own(tmp_path: Path, tracking: Any) -> None:
    deliver(f"mlflow://{tmp_path}/mlflow.db")
    (run,) = tracking.search_runs([tracking.get_experiment_by_name("bytecheckpoint").experiment_id])
    assert mlflow_steps(tracking, run) == STEPS and run.info.status == "FINISHED"


def test_mlflow_takes_the_run_of_the_training(tmp_path: Path, tracking: Any) -> None:
    """The sink works on another thread than the one that started the run."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with mlflow.start_run() as run:
        mlflow.log_metric("loss", 1.0, step=1)
        thread = threading.Thread(target=deliver, args=(f"mlflow://{tmp_path}/other.db",))
        thread.start()
        thread.join()
    assert mlflow_steps(tracking, run) == STEPS and not (tmp_path / "other.db").exists()


def test_all_of_them_at_the_end_of_a_training(tmp_path: Path) -> None:
    program = """if True:
        import os, sys, torch, bytecheckpoint
        folder = sys.argv[1]
        os.environ["WANDB_DIR"] = os.environ["WANDB_CONFIG_DIR"] = os.environ["WANDB_DATA_DIR"] = folder
        import mlflow, wandb, torch.utils.tensorboard
        bytecheckpoint.configure(metrics=f"tensorboard://{folder}/tb,wandb://p,mlflow://{folder}/mlflow.db,files")
        state = {"model": {"w": torch.ones(9)}}
        bytecheckpoint.save(f"{folder}/run/step_1", state)
        from pathlib import Path
        from tests.support.processes import wait_until
        # A training takes longer than the start of W&B, which cannot start when the interpreter ends.
        assert wait_until(lambda: list(Path(folder).glob("wandb/offline-run-*/*.wandb")), 60)
        bytecheckpoint.save(f"{folder}/run/step_2", state, async_checkpoint=True)
    """
    done = run_program(program, tmp_path)
    assert done.returncode == 0 and "metrics do not reach" not in done.stderr, done.stderr
    assert len(tables(tmp_path / "run")) == 2
    assert len([row for row in wandb_history(tmp_path, "p") if "bytecheckpoint/save/seconds" in row]) == 2
    assert list((tmp_path / "tb").iterdir()) and (tmp_path / "mlflow.db").exists()


def test_todays_clickhouse_takes_the_same_statements(tmp_path: Path) -> None:
    from chdb import session

    engine = session.Session(str(tmp_path / "data"))
    engine.query("CREATE DATABASE run")
    engine.query(create_statement("run.ranks"))
    for record in RECORDS:
        (tmp_path / "rows").write_bytes(tab_separated(record.table))
        names = ", ".join(SCHEMA.names)
        assert insert_statement("run.ranks").endswith(") FORMAT TabSeparated")
        engine.query(
            f"INSERT INTO run.ranks ({names}) SELECT * FROM file('{tmp_path}/rows', 'TabSeparated',"
            f" '{create_statement('t').split('(', 1)[1].split(') ENGINE')[0]}')"
        )
    assert int(str(engine.query("SELECT count() FROM run.ranks"))) == sum(len(r.table) for r in RECORDS)
    nulls = engine.query("SELECT countIf(isNull(tp)) = count(), countIf(isNull(dp)), max(step) FROM run.ranks")
    assert str(nulls).strip() == "1,0,300"
    engine.query("INSERT INTO run.ranks (operation, step) FORMAT TabSeparated\nx\t\\N\n")
    assert str(engine.query("SELECT count() FROM run.ranks WHERE operation = 'x' AND isNull(step)")).strip() == "1"
    engine.close()
