"""Wrappers that count, repeat, delay and break calls."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import StorageError, StorageUnavailableError
from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.storage import NewFile, Storage, resolve
from bytecheckpoint.storage.testing import content, read_all, write_file
from bytecheckpoint.storage.testing.wrappers import (
    DelayedStorage,
    FaultRule,
    FaultyStorage,
    Meter,
    MeteredStorage,
    RetryingStorage,
)
from bytecheckpoint.storage.time_limits import TimeLimitedStorage
from bytecheckpoint.storage.uploading import UploadingStorage
from bytecheckpoint.storage.wrappers import Call, WrappedStorage, wrapped_like
from tests.storage.checks import check_save, within
from tests.support.coded import load_step, states
from tests.support.processes import wait_until
from tests.support.ranks import outcomes
from tests.support.variants import crossed

_T = TypeVar("_T")


@pytest.fixture
def local(tmp_path: Path) -> Storage:
    return resolve(tmp_path / "step")


def test_a_meter_counts_calls_bytes_and_seconds(local: Storage) -> None:
    storage = MeteredStorage(DelayedStorage(local, 0.01))
    data = content(10_000)
    write_file(storage, "model/file", data, piece=2000)
    read_all(storage, "model/file")
    meter = storage.meter
    assert meter.bytes("write") == meter.bytes("read_into") == 10_000
    assert (meter.calls("create"), meter.calls("write"), meter.calls("finish")) == (1, 6, 1)
    assert meter.seconds("write") >= 0.06
    with pytest.raises(FileNotFoundError):
        storage.read("absent")
    assert (meter.calls("read"), meter.failures("read"), meter.bytes("read")) == (1, 1, 0)
    assert meter.calls("publish") == 0 and meter.seconds("publish") == 0.0
    storage.publish("catalog", b"x" * 700)
    assert storage.read("catalog") == b"x" * 700
    reader = storage.open("catalog")
    assert reader.read_into(600, [memoryview(bytearray(500))]) == 100
    reader.close()
    assert (meter.bytes("publish"), meter.bytes("read"), meter.bytes("read_into")) == (700, 700, 10_100)


WRAPPERS: dict[str, Callable[[Storage, Sequence[FaultRule]], Storage]] = {
    "metered": lambda inner, faults: MeteredStorage(inner),
    "retrying": lambda inner, faults: RetryingStorage(inner, 20.0),
    "delayed": lambda inner, faults: DelayedStorage(inner, 0.0005, 1e9),
    "faulty": FaultyStorage,
}


@pytest.mark.parametrize(
    ("order", "scheme"), crossed(list(itertools.permutations(WRAPPERS)), ["", "fsspec+file://"], every=3)
)
def test_wrappers_go_in_any_order(tmp_path: Path, order: tuple[str, ...], scheme: str) -> None:
    """The retrying wrapper repeats the calls of a save and a load that fail inside of it."""
    bytecheckpoint.configure(writer="thread")
    down = StorageUnavailableError("down")
    faults = [
        FaultRule("write", down, partial=True, times=2),
        FaultRule("read_into", down, skip=1),
        FaultRule("open", down),
        FaultRule("list", down),
    ]
    storage = resolve(f"{scheme}{tmp_path}/{uuid.uuid4().hex}")
    for name in order:  # from the inside out
        storage = WRAPPERS[name](storage, faults)
    if order.index("retrying") < order.index("faulty"):
        with pytest.raises(StorageUnavailableError, match="down"):
            bytecheckpoint.save(storage, states(step=1))
        faults.clear()
    check_save(storage, 2, async_checkpoint=True)
    assert load_step(storage.url) == 2
    if order.index("retrying") > order.index("faulty"):
        assert [fault.hits for fault in faults] == [2, 1, 1, 1]


def test_what_can_be_repeated_is_tried_again(local: Storage) -> None:
    write_file(local, "model/file", content(100))
    down = StorageUnavailableError("down")
    operations = ("open", "read_into", "read", "list", "write", "stat")
    faults = [FaultRule(operation, down, times=2) for operation in operations]
    storage = RetryingStorage(FaultyStorage(local, faults), 20.0)
    write_file(storage, "model/other", content(100, 1))
    assert np.array_equal(read_all(storage, "model/file"), content(100))
    assert storage.read("model/other") == content(100, 1).tobytes()
    assert len(storage.list()) == 2
    assert storage.stat("model/file").size == 100
    assert [f.hits for f in faults] == [2] * 6


def test_the_last_error_names_the_attempts(local: Storage) -> None:
    storage = RetryingStorage(FaultyStorage(local, [FaultRule("read", StorageUnavailableError("down"), times=-1)]), 0.5)
    with pytest.raises(StorageUnavailableError, match=r"down \(\d+ attempts in \d\.\d s\)"):
        storage.read("metadata.parquet")


@pytest.mark.parametrize(
    ("operation", "error", "call"),
    [
        ("create", StorageUnavailableError("down"), lambda storage: write_file(storage, "model/file", content(10))),
        ("finish", StorageUnavailableError("down"), lambda storage: write_file(storage, "model/file", content(10))),
        ("publish", StorageUnavailableError("down"), lambda storage: storage.publish("catalog", b"x")),
        ("read", StorageError("forbidden"), lambda storage: storage.read("x")),
    ],
)
def test_what_may_have_happened_and_other_errors_are_not_repeated(
    local: Storage, operation: str, error: StorageError, call: Callable[[Storage], None]
) -> None:
    fault = FaultRule(operation, error, times=-1)
    with pytest.raises(type(error), match=str(error)):
        call(RetryingStorage(FaultyStorage(local, [fault]), 20.0))
    assert fault.hits == 1


def test_bandwidth(local: Storage) -> None:
    storage = DelayedStorage(local, 0.0, bandwidth=1e6)
    begun = time.monotonic()
    write_file(storage, "model/file", content(400_000), piece=400_000)
    assert time.monotonic() - begun >= 0.4


def test_a_torn_write_leaves_half(local: Storage) -> None:
    storage = FaultyStorage(local, [FaultRule("write", StorageError("torn"), partial=True)])
    writer = storage.create(NewFile("model/file", 100))
    with pytest.raises(StorageError, match="torn"):
        writer.write_at(0, [memoryview(content(100))])
    left = local.read("model/file").ljust(100, b"\0")[:100]
    assert left == content(50).tobytes() + bytes(50)
    writer.abort()
    assert local.list() == []


def test_an_answer_that_gets_lost(local: Storage) -> None:
    storage = FaultyStorage(local, [FaultRule("publish", StorageUnavailableError("reset"), lose=True)])
    with pytest.raises(StorageUnavailableError):
        storage.publish("catalog", b"x")
    assert local.read("catalog") == b"x"


def test_faults_choose_their_calls(local: Storage) -> None:
    gate = threading.Event()
    held = FaultRule("read", name="held", hold=gate)
    storage = FaultyStorage(local, [held, FaultRule("read", StorageError("third"), name="file", skip=2)])
    for name in ("file", "held"):
        local.publish(name, b"x")
    assert storage.read("file") == storage.read("file") == b"x"
    with pytest.raises(StorageError, match="third"):
        storage.read("file")
    assert storage.read("file") == b"x"
    threading.Timer(0.1, gate.set).start()
    assert storage.read("held") == b"x" and gate.is_set()


class _Crowded(WrappedStorage):
    """Counts the reads that are under way at the same time."""

    most = now = 0

    def __init__(self, inner: Storage, reads: int) -> None:
        super().__init__(inner)
        self.capabilities = replace(self.capabilities, parallel_reads=reads)
        self._lock = threading.Lock()

    def around(self, call: Call, do: Callable[[], _T]) -> _T:
        if call.operation != "read_into":
            return super().around(call, do)
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.05)
        try:
            return do()
        finally:
            with self._lock:
                self.now -= 1


@pytest.mark.parametrize(("read_threads", "expected"), [(0, 5), (3, 3)])
def test_as_many_reads_at_once_as_suit_the_storage(local: Storage, read_threads: int, expected: int) -> None:
    """... unless the settings say how many."""
    bytecheckpoint.configure(read_threads=read_threads, chunk_bytes=1 << 20)
    weights = {"w": torch.arange(4 << 20, dtype=torch.float32)}
    bytecheckpoint.save(local, {"model": weights})
    loaded = {"w": torch.zeros(4 << 20)}
    storage = _Crowded(local, 5)
    bytecheckpoint.load(storage, {"model": loaded})
    assert torch.equal(loaded["w"], weights["w"])
    assert storage.most == expected
    assert (
        resolve("mem://x").capabilities.parallel_reads
        < UploadingStorage.capabilities.parallel_reads
        == MeteredStorage(_Crowded(local, 8)).capabilities.parallel_reads
    )


@pytest.mark.parametrize(("reads", "expected"), [(2, range(3, 6)), (8, range(9, 17))])
def test_as_many_reads_at_once_when_ranks_share_them(local: Storage, reads: int, expected: range) -> None:
    """Two ranks read every byte once, between them."""
    bytecheckpoint.configure(chunk_bytes=1 << 20)
    weights = torch.arange(8 << 20, dtype=torch.float32)
    bytecheckpoint.save(local, {"model": {"w": weights}})
    storage = _Crowded(local, reads)
    meter = Meter()

    def load(collective: Collective) -> bool:
        loaded = {"w": torch.zeros(8 << 20)}
        bytecheckpoint.load(MeteredStorage(storage, meter), {"model": loaded}, overlap_loading=True)
        return torch.equal(loaded["w"], weights)

    assert outcomes(ThreadWorld(2), load) == [True, True]
    assert storage.most in expected
    assert weights.nbytes <= meter.bytes("read_into") < weights.nbytes + (1 << 20)


def test_calls_that_do_not_return_are_given_up(local: Storage) -> None:
    """... and others refused meanwhile, and made again when it has returned."""
    write_file(local, "model/file", content(1000))
    held = threading.Event()
    storage = TimeLimitedStorage(FaultyStorage(local, [FaultRule("read_into", hold=held)]))
    reader = storage.open("model/file")
    storage.timeout = 0.2
    with pytest.raises(StorageUnavailableError, match=r"cannot read .*/model/file: no answer within 0.2 s"):
        reader.read_into(0, [memoryview(bytearray(10))])
    storage.timeout = 60.0
    says = r"cannot look at .*/model/file: an earlier call has had no answer"
    with within(20):
        with pytest.raises(StorageUnavailableError, match=says):
            storage.stat("model/file")
        assert wrapped_like(storage, local).stat("model/file").size == 1000, "another storage does not hang with it"
        reader.close()
    held.set()
    wait_until(lambda: not storage._hanging, 30)
    assert np.array_equal(read_all(storage, "model/file"), content(1000))


@pytest.mark.parametrize(
    ("names", "place"), [(["model/my file"], "/step/model/my file"), (["model/a", "model/b"], "/step"), ([], "/step")]
)
def test_a_call_of_one_file_that_is_given_up_names_it(local: Storage, names: list[str], place: str) -> None:
    held = threading.Event()
    storage = TimeLimitedStorage(FaultyStorage(local, [FaultRule("delete", hold=held)]))
    storage.timeout = 0.05
    with pytest.raises(StorageUnavailableError, match=rf"cannot delete .*{place}: no answer within"):
        storage.delete(names)
    held.set()
    wait_until(lambda: not storage._hanging, 30)


def test_a_late_abort_leaves_what_another_attempt_has_written(local: Storage) -> None:
    first = local.create(NewFile("model/file", 10))
    local.delete(["model/file"])
    write_file(local, "model/file", content(20))
    first.abort()
    assert np.array_equal(read_all(local, "model/file"), content(20))
    again = local.create(NewFile("model/other", 10))
    again.abort()
    assert local.list() == [("model/file", 20)]
