"""What a storage takes and gives, measured beside a run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from bytecheckpoint.cli.main import run
from bytecheckpoint.errors import StorageError, StorageFullError, UsageError
from bytecheckpoint.monitoring.reading import read_run
from bytecheckpoint.monitoring.sinks.files import METRICS_FOLDER
from bytecheckpoint.storage.posix.storage import PosixStorage
from bytecheckpoint.tools import measure
from tests.support.mounts import small_tmpfs

MIB = 1 << 20


def test_the_bandwidths_stay_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["measure", str(tmp_path), "--size", "20MiB", "--threads", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (limit,) = read_run(str(tmp_path)).limits
    assert printed == {name: getattr(limit, name) for name in limit.__struct_fields__}
    assert limit.nbytes == 20 * MIB and limit.threads == 2 and 0 < limit.write < 1e12
    assert [name.split("-")[0] for name in os.listdir(tmp_path / METRICS_FOLDER)] == ["limits"]


def test_bytes_that_do_not_come_from_the_storage_are_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
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
        assert not list((tmp_path / "small").rglob("measure-*"))
    killed, running = (tmp_path / METRICS_FOLDER / f"measure-{name}" for name in ("killed", "running"))
    killed.parent.mkdir()
    killed.write_bytes(b"1")
    running.write_bytes(b"1")
    os.utime(killed, (time.time() - 90_000,) * 2)
    measure(str(tmp_path), MIB, 1)
    assert running.exists() and not killed.exists()


def test_a_file_that_is_cut_meanwhile_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(storage: PosixStorage, names: Iterable[str]) -> None:
        for name in names:
            os.truncate(os.path.join(storage.root, name), 5)

    monkeypatch.setattr(PosixStorage, "sync", cut)
    monkeypatch.setattr(PosixStorage, "is_cached", lambda *_: False)
    with pytest.raises(StorageError, match="was cut or removed while it was measured"):
        measure(str(tmp_path), MIB, 2)
    assert not list((tmp_path / METRICS_FOLDER).iterdir())


def test_too_few_bytes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1000 bytes are too few for 8 threads"):
        measure(str(tmp_path), 1000, 8)
    assert not list(tmp_path.iterdir())
