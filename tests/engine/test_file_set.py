"""The open files of a checkpoint, used by several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.storage import FileReader, resolve

KINDS = [f"kind{i}" for i in range(6)]


def test_files_are_opened_at_the_same_time_and_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a remote storage an open is a request: six in turn would take six times as long."""
    bytecheckpoint.save(tmp_path / "s", {kind: {"t": torch.arange(100)} for kind in KINDS})
    storage = resolve(tmp_path / "s")
    catalog, _ = read_catalog(storage)
    together = threading.Barrier(len(KINDS), timeout=20)
    opened: list[str] = []
    original = type(storage).open

    def slow(self: object, name: str) -> FileReader:
        opened.append(name)
        together.wait()
        return original(storage, name)

    monkeypatch.setattr(type(storage), "open", slow)
    with FileSet(storage, catalog) as files, ThreadPoolExecutor(3 * len(KINDS)) as pool:
        read = [pool.submit(files.read, file, 0, 800) for file in range(len(KINDS)) for _ in range(3)]
        assert {r.result(30) for r in read} == {torch.arange(100).numpy().tobytes()}
    assert sorted(opened) == sorted(f.name for f in catalog.files)


def test_a_file_that_cannot_be_opened_fails_all_who_wait_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytecheckpoint.save(tmp_path / "s", {"model": {"t": torch.arange(100)}})
    storage = resolve(tmp_path / "s")
    catalog, _ = read_catalog(storage)
    entered, leave = threading.Event(), threading.Event()

    def missing(self: object, name: str) -> FileReader:
        entered.set()
        assert leave.wait(20)
        raise FileNotFoundError(name)

    with FileSet(storage, catalog) as files, ThreadPoolExecutor(3) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(type(storage), "open", missing)
            reads = [pool.submit(files.read, 0, 0, 8) for _ in range(3)]
            assert entered.wait(20)
            leave.set()
            for read in reads:
                with pytest.raises(CorruptCheckpointError, match="missing"):
                    read.result(30)
        assert files.read(0, 0, 8) == bytes(8)
