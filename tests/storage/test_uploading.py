"""Storages that take whole files: bytes that stay in memory, bytes that are spooled, and failures that leave nothing."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CheckpointError, StorageFullError
from bytecheckpoint.collectives import current
from bytecheckpoint.engine.writing import FilesWriter, FileTask
from bytecheckpoint.storage import NewFile
from bytecheckpoint.storage.posix.storage import PosixStorage
from bytecheckpoint.storage.testing import content, write_file
from bytecheckpoint.storage.uploading import Pieces, UploadingStorage
from bytecheckpoint.tracing.operation import Operation, bind_operation
from bytecheckpoint.world import world_of
from tests.support.mounts import small_tmpfs
from tests.support.ranks import attempt


class Uploads(UploadingStorage, PosixStorage):
    """A storage that keeps uploads, and the addresses of their bytes."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), str(root))
        self.capabilities = UploadingStorage.capabilities
        self.files: dict[str, bytes] = {}
        self.pieces: list[tuple[int, int]] = []
        self.error: Exception | None = None
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def upload(self, name: str, size: int, pieces: Pieces) -> None:
        data = b""
        for piece in pieces():
            self.pieces.append((np.frombuffer(piece, np.uint8).ctypes.data if len(piece) else 0, len(piece)))
            data += piece
            self.begun.set()
            assert self.go_on.wait(20)
            if self.error is not None:
                raise self.error
        assert len(data) == size
        self.files[name] = data

    def delete(self, names: Any) -> None:
        for name in names:
            self.files.pop(name, None)

    def sync(self, names: Any) -> None:
        pass


@pytest.fixture
def storage(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path / "step")


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    folder = tmp_path / "spool"
    folder.mkdir()
    bytecheckpoint.configure(spool_dir=str(folder))
    return folder


def test_stable_buffers_are_sent_from_where_they_are(storage: Uploads, spool: Path) -> None:
    data = content(100_000)
    write_file(storage, "model/file", data, stable=True)
    assert storage.files["model/file"] == data.tobytes()
    low, high = data.ctypes.data, data.ctypes.data + len(data)
    assert all(low <= at < high for at, length in storage.pieces if length), "a byte was copied"


def open_files() -> list[str]:
    descriptors = Path("/proc/self/fd")
    return [os.readlink(fd) for fd in descriptors.iterdir() if os.path.lexists(fd)]


def test_other_buffers_pass_through_a_file_without_a_name(storage: Uploads, spool: Path) -> None:
    data = content((17 << 20) + 5)
    writer = storage.create(NewFile("model/file", len(data), stable=False))
    writer.write_at(4096, [memoryview(data)[4096:]])
    assert any(name.startswith(str(spool)) and name.endswith("(deleted)") for name in open_files())
    assert list(spool.iterdir()) == []
    writer.write_at(0, [memoryview(data)[:4096]])
    writer.finish(len(data))
    assert storage.files["model/file"] == data.tobytes()
    assert max(length for _, length in storage.pieces) <= 8 << 20, "memory stays bounded"
    assert not any(str(spool) in name for name in open_files())


@pytest.mark.parametrize("stable", [True, False])
def test_bytes_that_lack_are_noticed(storage: Uploads, stable: bool) -> None:
    writer = storage.create(NewFile("model/file", 100, stable=stable))
    writer.write_at(0, [memoryview(bytes(40))])
    writer.write_at(50, [memoryview(bytes(50))])
    with pytest.raises(AssertionError):
        writer.finish(100)
    writer.abort()
    assert storage.files == {}


def test_no_room_for_the_spool(storage: Uploads, spool: Path) -> None:
    full = pytest.raises(StorageFullError, match=rf"the spool of .*model/file in {spool} \(setting spool_dir\)")
    with small_tmpfs(spool, "1m", lazy=True), full:
        write_file(storage, "model/file", content(3 << 20), stable=False)


def test_no_folder_for_the_spool(storage: Uploads, tmp_path: Path) -> None:
    bytecheckpoint.configure(spool_dir=str(tmp_path / "absent"))
    with pytest.raises(bytecheckpoint.StorageError, match=r"setting spool_dir"):
        storage.create(NewFile("model/file", 10))


# --- as the engine uses it ------------------------------------------------------------------------------------------


@pytest.fixture
def files_writer(storage: Uploads) -> Iterator[Callable[..., tuple[FilesWriter, np.ndarray[Any, Any]]]]:
    made: list[FilesWriter] = []

    def make(stable: bool) -> tuple[FilesWriter, np.ndarray[Any, Any]]:
        data = content(40 << 20)
        tasks = [FileTask(f"model/{n}", 4096, len(data) // 2, 1 << 20) for n in range(2)]
        writer = FilesWriter(storage, tasks, direct=True, threads=2, stable=stable)
        writer.open()
        made.append(writer)
        for file in range(2):
            for start in range(0, len(data) // 2, 8 << 20):
                part = data[file * len(data) // 2 :][start : min(start + (8 << 20), len(data) // 2)]
                writer.submit(writer.write, file, start, [memoryview(part)], memoryview(part))
        return writer, data

    yield make
    for writer in made:
        writer.abort()


@pytest.mark.parametrize("stable", [True, False])
def test_the_header_comes_last_and_stands_first(files_writer: Any, storage: Uploads, stable: bool) -> None:
    writer, data = files_writer(stable)
    assert not writer.direct
    sums = writer.sums()
    assert [len(s.blocks) for s in sums] == [20, 20]
    assert storage.files == {}, "nothing can be sent before the header is known"
    writer.finish([b"A" * 4096, b"B" * 4096])
    half = len(data) // 2
    assert storage.files == {
        "model/0": b"A" * 4096 + data[:half].tobytes(),
        "model/1": b"B" * 4096 + data[half:].tobytes(),
    }


@pytest.mark.parametrize("stable", [True, False])
def test_an_upload_that_fails_takes_the_other_files_with_it(files_writer: Any, storage: Uploads, stable: bool) -> None:
    writer, _ = files_writer(stable)
    writer.sums()
    storage.error = OSError(errno.EPIPE, "the line is cut")
    with pytest.raises(OSError, match="the line is cut"):
        writer.finish([b"A" * 4096, b"B" * 4096])
    writer.abort()
    assert storage.files == {}


def test_abort_ends_an_upload_that_is_under_way(files_writer: Any, storage: Uploads) -> None:
    writer, _ = files_writer(True)
    writer.sums()
    storage.go_on.clear()
    with ThreadPoolExecutor(1) as pool:
        finished = pool.submit(attempt, writer.finish, [b"A" * 4096, b"B" * 4096])
        assert storage.begun.wait(20)
        threading.Timer(0.2, storage.go_on.set).start()
        writer.abort()
    assert isinstance(finished.result(), CheckpointError) and "was aborted" in str(finished.result())
    assert storage.files == {}


@pytest.mark.parametrize("stable", [True, False])
def test_bytes_count_as_written_when_they_are_on_their_way(files_writer: Any, storage: Uploads, stable: bool) -> None:
    """Hashing them, and putting them into a spool, moves nothing to the storage."""
    with Operation("save", storage.url).running() as operation, ThreadPoolExecutor(1) as pool:
        writer, data = files_writer(stable)
        writer.sums()
        assert (operation.total("write").nbytes, operation.total("hash").nbytes) == (0, len(data))
        storage.go_on.clear()
        result = pool.submit(bind_operation(writer.finish), [b"\1" * 4096, b"\2" * 4096])
        assert storage.begun.wait(10) and operation.total("write").nbytes < len(data) / 2
        storage.go_on.set()
        result.result()
        assert operation.total("write").nbytes == len(data) + 2 * 4096


@pytest.mark.parametrize(("scheme", "phases"), [("", {"write", "finish"}), ("fsspec+file://", {"write"})])
def test_a_save_goes_on_writing_until_whole_files_are_sent(tmp_path: Path, scheme: str, phases: set[str]) -> None:
    handle = bytecheckpoint.save(f"{scheme}{tmp_path}/run/step", {"model": {"w": torch.ones(3)}})
    assert handle.result().phases.keys() & {"write", "finish"} == phases


def test_a_synchronous_save_needs_no_spool_where_memory_has_room(tmp_path: Path) -> None:
    """... and keeps none of it."""
    state = {"w": torch.randn(40, 1 << 18), "small": torch.arange(1000), "view": torch.randn(300, 200).T}
    url = f"fsspec+file://{tmp_path}/run/step"
    pool = world_of(current()).resources.pools.shared.capacity
    bytecheckpoint.configure(spool_dir=str(tmp_path / "absent"), staging_bytes=100 << 20)
    bytecheckpoint.save(url, {"model": state})
    assert world_of(current()).resources.pools.shared.capacity == pool
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    bytecheckpoint.load(url, {"model": loaded})
    assert all(torch.equal(loaded[key], state[key]) for key in state)

    bytecheckpoint.configure(staging_bytes=20 << 20)
    world_of(current()).resources.pools.shared.release()
    with pytest.raises(bytecheckpoint.StorageError, match=r"the spool of .*setting spool_dir"):
        bytecheckpoint.save(url, {"model": state})
    bytecheckpoint.configure(spool_dir=str(tmp_path))
    state["w"].fill_(3.0)
    bytecheckpoint.save(url, {"model": state})
    bytecheckpoint.load(url, {"model": loaded})
    assert all(torch.equal(loaded[key], state[key]) for key in state)
