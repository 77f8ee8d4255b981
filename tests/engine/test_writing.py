"""Writing storage files: contents, checksums, failures, and the buffers and threads beneath."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bytecheckpoint.concurrency import Workers
from bytecheckpoint.engine.buffers import block_sums, split_buffers
from bytecheckpoint.engine.writing import FilesWriter, FileTask
from bytecheckpoint.errors import StorageError
from bytecheckpoint.representation.checksums import block_sum
from bytecheckpoint.storage import resolve

BLOCK = 1 << 12
DATA = np.random.default_rng(5).bytes(5 * BLOCK + 123)


def cut(data: bytes, *ends: int) -> list[memoryview]:
    view = memoryview(data)
    return [view[a:b] for a, b in zip((0, *ends), (*ends, len(data)), strict=True)]


@pytest.mark.parametrize("ends", [(), (1,), (BLOCK, 2 * BLOCK), (0, 7, 7, BLOCK + 1, 4 * BLOCK)])
def test_sums_and_parts_do_not_depend_on_how_bytes_are_cut_into_buffers(ends: tuple[int, ...]) -> None:
    sums = [block_sum(memoryview(DATA)[at : at + BLOCK]) for at in range(0, len(DATA), BLOCK)]
    assert list(block_sums(cut(DATA, *ends), BLOCK)) == sums
    parts = [(at, b"".join(buffers)) for at, buffers in split_buffers(len(DATA), BLOCK, cut(DATA, *ends))]
    assert parts == [(at, DATA[at : at + BLOCK]) for at in range(0, len(DATA), BLOCK)]


def writer_of(path: Path, *names: str) -> FilesWriter:
    tasks = [FileTask(name, 4096, len(DATA), BLOCK) for name in names]
    writer = FilesWriter(resolve(path), tasks, direct=False, threads=2)
    writer.open()
    return writer


def test_files_hold_header_and_data_and_sums_are_returned(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, "model/a", "model/b")
    for file in range(2):
        for start in (2 * BLOCK, 0):  # chunks come in any order
            chunk = DATA[start : start + 2 * BLOCK] if start == 0 else DATA[start:]
            writer.submit(writer.write, file, start, cut(chunk, 10, BLOCK + 1))
    expected = list(block_sums([memoryview(DATA)], BLOCK))
    assert [sums.blocks.tolist() for sums in writer.sums()] == [expected, expected]
    headers = [bytes([65 + file]) * 4096 for file in range(2)]
    writer.finish(headers)
    for name, header in zip(("a", "b"), headers, strict=True):
        assert (tmp_path / "model" / name).read_bytes() == header + DATA
    writer.abort()
    assert (tmp_path / "model/a").exists(), "a catalog may name a finished file"


def test_a_failed_write_fails_the_save_and_abort_removes_its_files(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, "model/a")

    def fail() -> None:
        raise StorageError("the disk is on fire")

    writer.submit(fail)
    with pytest.raises(StorageError, match="on fire"):
        writer.sums()
    writer.abort()
    assert not (tmp_path / "model/a").exists()


def test_workers_that_are_cancelled_drop_what_has_not_begun() -> None:
    workers = Workers(1, "test")
    begun, go_on = threading.Event(), threading.Event()
    running = workers.submit(lambda: (begun.set(), go_on.wait(30)))
    waiting = workers.submit(time.sleep, 1000)
    assert begun.wait(30)
    assert not workers.shutdown(cancel=True, seconds=0.1)
    go_on.set()
    assert running.result(30) == (None, True)
    assert waiting.cancelled()
    assert workers.submit(lambda: 7).result(0) == 7, "without threads, functions run in the caller's"


def test_what_a_function_raises_is_its_future_s() -> None:
    workers = Workers(2, "test")
    assert [workers.submit(divmod, n, 3).result(30) for n in (7, 8)] == [(2, 1), (2, 2)]
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 1, 0).result(30)
    assert workers.shutdown()
