"""What local storage does when a network file system's caches are out of date: tried here with calls that lie.

tests/storage/test_nas.py has two mounts of a real one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bytecheckpoint import StorageUnavailableError
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.testing import content, read_all, write_file
from bytecheckpoint.tuning import tuned
from tests.support.system_calls import Fail

SHORT_PAUSES = (0.0, 0.01, 0.01, 0.01)


def ends_with(name: str) -> Callable[..., bool]:
    return lambda path, *_: str(path).endswith(name)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT])
@tuned(stale_pauses=SHORT_PAUSES)
def test_a_name_that_the_cache_knows_wrongly_is_opened_again(tmp_path: Path, fail: Fail, code: int) -> None:
    storage = resolve(tmp_path)
    write_file(storage, "model/file", content(5000))
    rule = fail("open", code, ends_with("model/file"), times=3)
    assert np.array_equal(read_all(storage, "model/file"), content(5000))
    assert rule.hits == 3
    rule.times = 3
    assert storage.stat("model/file").size == 5000
    assert rule.hits == 6


@tuned(stale_pauses=SHORT_PAUSES)
def test_a_cache_that_never_learns_is_an_error(tmp_path: Path, fail: Fail) -> None:
    storage = resolve(tmp_path)
    write_file(storage, "model/file", content(50))
    fail("open", errno.ESTALE, ends_with("model/file"))
    with pytest.raises(StorageUnavailableError, match="Stale file handle"):
        storage.open("model/file")


@tuned(stale_pauses=(1000.0,))
def test_a_missing_file_is_reported_at_once(tmp_path: Path) -> None:
    storage = resolve(tmp_path / "step")
    for name in ("model/file", "other"):
        for call in (storage.open, storage.read, storage.stat):
            with pytest.raises(FileNotFoundError):
                call("metadata.parquet")
        write_file(storage, name, content(5))


@pytest.mark.parametrize("threads", [1, 4])
@tuned(stale_pauses=SHORT_PAUSES)
def test_an_open_file_that_becomes_stale_is_reopened(tmp_path: Path, fail: Fail, threads: int) -> None:
    storage = resolve(tmp_path)
    data = content(1 << 20)
    write_file(storage, "model/file", data)
    reader = storage.open("model/file")
    stale = reader._fd  # type: ignore[attr-defined]
    fail("preadv", errno.ESTALE, lambda fd, *_: fd == stale)
    out = np.zeros(len(data), np.uint8)
    step = len(data) // 16

    def one(start: int) -> int:
        return reader.read_into(start, [memoryview(out)[start : start + step]])

    with ThreadPoolExecutor(threads) as pool:
        assert sum(pool.map(one, range(0, len(data), step))) == len(data)
    assert np.array_equal(out, data)
    before = len(os.listdir("/proc/self/fd"))
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2, "both descriptors are closed"
