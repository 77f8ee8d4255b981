"""What a storage takes and gives, measured beside a run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from bytecheckpoint.cli.main import run
from bytecheckpoint.errors import StorageError, StorageFullError, UsageError
from bytecheckpoint.monitoring.reading import read_run
from bytecheckpoint.monitoring.sinks.files import METRICS_FOLDER
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.posix.storage import PosixStorage
from bytecheckpoint.tools import measure
from tests.support.mounts import small_tmpfs
from tests.support.processes import interrupted

MIB = 1 << 20


@pytest.fixture(autouse=True)
def metrics_of_a_run(tmp_path: Path) -> Path:
    (tmp_path / METRICS_FOLDER).mkdir()
    return tmp_path / METRICS_FOLDER


def test_the_bandwidths_stay_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["measure", str(tmp_path), "--size", "20MiB", "--threads", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (limit,) = read_run(str(tmp_path)).limits
    assert printed == {name: getattr(limit, name) for name in limit.__struct_fields__} | {"kept": True}
    assert limit.nbytes == 20 * MIB and limit.threads == 2 and 0 < limit.write < 1e12
    assert [name.split("-")[0] for name in os.listdir(tmp_path / METRICS_FOLDER)] == ["limits"]


def test_bytes_that_do_not_come_from_the_storage_are_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    resolve("mem://measured-here").publish("x", b"")
    assert measure("mem://measured-here", 8 * MIB, 2).read is None
    assert run(["measure", "mem://measured-here", "--size", "8MiB"]) == 0
    assert "read from this machine's memory, so not measured" in capsys.readouterr().out


def test_of_a_tier_the_durable_storage_is_measured(tmp_path: Path) -> None:
    measure(f"tier+{tmp_path.as_uri()}", MIB, 1)
    assert len(read_run(str(tmp_path)).limits) == 1


def test_nothing_stays_of_a_measurement_that_fails_or_was_killed(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", 8 * MIB):
        with pytest.raises(StorageFullError):
            measure(str(tmp_path / "small"), 64 * MIB, 2)
        assert not os.listdir(tmp_path / "small")
    killed, running = (tmp_path / f".bytecheckpoint-measure-{name}" for name in ("killed", "running"))
    for folder in (killed, running):
        folder.mkdir()
        (folder / "0").write_bytes(b"1")
    os.utime(killed / "0", (time.time() - 90_000,) * 2)
    measure(str(tmp_path), MIB, 1)
    assert running.exists() and not killed.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_stays_of_a_measurement_that_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    place = tmp_path / "a run\nof mine"
    place.mkdir()
    command = [sys.executable, "-m", "bytecheckpoint.cli.main", "measure", str(place), "--size", "2GiB"]
    code, err = interrupted(command, number, lambda: list(place.glob("*/0")))
    assert code == (130 if number == signal.SIGINT else 128 + number), err
    assert not list(place.iterdir()) and "Traceback" not in err


def test_a_folder_without_metrics_stays_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    assert run(["measure", str(tmp_path / "other"), "--size", "1MiB"]) == 0
    assert "kept nowhere" in capsys.readouterr().err and not list((tmp_path / "other").iterdir())


def test_a_folder_that_is_absent_or_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step" / "model").mkdir(parents=True)
    (tmp_path / "step" / "metadata.parquet").write_bytes(b"x")
    (tmp_path / "file").write_bytes(b"x")
    for name, message in {
        "absent": "does not exist",
        "file": "does not exist",
        "step": "/step is a checkpoint",
        "step/model": "/step is a checkpoint",
    }.items():
        with pytest.raises(UsageError, match=message):
            measure(str(tmp_path / name), MIB, 1)
    assert sorted(os.listdir(tmp_path)) == [METRICS_FOLDER, "file", "step"]
    assert sorted(os.listdir(tmp_path / "step")) == ["metadata.parquet", "model"]


def test_a_file_that_is_cut_meanwhile_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(storage: PosixStorage, names: Iterable[str]) -> None:
        for name in names:
            os.truncate(os.path.join(storage.root, name), 5)

    monkeypatch.setattr(PosixStorage, "sync", cut)
    monkeypatch.setattr(PosixStorage, "is_cached", lambda *_: False)
    with pytest.raises(StorageError, match="was cut or removed while it was measured"):
        measure(str(tmp_path), MIB, 2)
    assert os.listdir(tmp_path) == [METRICS_FOLDER] and not os.listdir(tmp_path / METRICS_FOLDER)


def test_too_few_bytes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1000 bytes are too few for 8 threads"):
        measure(str(tmp_path), 1000, 8)
    assert os.listdir(tmp_path) == [METRICS_FOLDER]
