"""Reader threads: results, failures, and storage that does not answer."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from bytecheckpoint.engine.reading import Readers, read_all
from bytecheckpoint.engine.scatter import BoxTarget, ScatterPlan
from bytecheckpoint.errors import CorruptCheckpointError, StorageUnavailableError
from bytecheckpoint.planning.read_plan import StoredRows, plan_reads
from bytecheckpoint.representation.boxes import BoxTable

CHUNK = 1 << 12
DATA = np.random.default_rng(3).integers(0, 255, 64 * CHUNK, dtype=np.uint8)


class Files:
    """Stands for a `FileSet` of one file."""

    url = "memory"
    in_memory = False

    def __init__(self, before: Callable[[int], object] = lambda start: None) -> None:
        self.before = before
        self.stopped: Future[None] = Future()

    def read_timeout(self) -> float:
        return 0.3

    def threads(self, wanted: int) -> int:
        return wanted or 2

    def fetch(self, file: int, start: int, stop: int, buffers: Sequence[memoryview]) -> None:
        self.before(start)
        for buffer in buffers:
            buffer[:] = memoryview(DATA[start : start + len(buffer)])  # type: ignore[assignment]
            start += len(buffer)


def load(files: Files, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Read columns of a 64-row matrix, so that every range passes through a scratch buffer."""
    zero = np.zeros(1, np.int64)
    box = BoxTable.build([0], [[0, 0]], [[64, CHUNK]])
    stored = StoredRows(box, zero, zero, np.array([1]), np.array([DATA.nbytes]), np.array([CHUNK]))
    wanted = BoxTable.build([0], [[0, 7]], [[64, 100]])
    target = torch.zeros(64, 100, dtype=dtype)
    plan = plan_reads(stored, wanted, np.array([True]), CHUNK)
    scatter_plan = ScatterPlan(plan, [BoxTarget(target, torch.uint8)])
    ranges = range(len(plan.file))
    assert len(ranges) > 1
    assert read_all(files, scatter_plan, ranges, threads=2, chunk_bytes=CHUNK) == plan.nbytes  # type: ignore[arg-type]
    return target


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_ranges_reach_their_destinations(dtype: torch.dtype) -> None:
    assert torch.equal(load(Files(), dtype), torch.from_numpy(DATA.reshape(64, CHUNK)[:, 7:107]).to(dtype))


def test_the_first_failure_ends_a_read() -> None:
    calls: list[int] = []

    def fail(start: int) -> None:
        calls.append(start)
        raise CorruptCheckpointError("damaged", file="x")

    with pytest.raises(CorruptCheckpointError, match="damaged"):
        load(Files(fail))
    assert len(calls) <= 2, "one per thread"


def test_a_read_without_an_answer_is_an_error_and_later_loads_wait_for_it() -> None:
    """Whenever the answer comes, it is written into memory that may belong to the next load."""
    answer = threading.Event()
    with pytest.raises(StorageUnavailableError, match="cannot read memory: no answer within"):
        load(Files(lambda start: answer.wait(30)))
    with pytest.raises(StorageUnavailableError, match="a read of an earlier load has had no answer yet"):
        load(Files())
    answer.set()
    with Readers(Files(), 1) as readers:  # type: ignore[arg-type]
        assert readers.result(readers.submit(lambda: 7)) == 7


def test_an_interrupted_load_waits_for_its_reads() -> None:
    """Ctrl-C during the wait is no time-out: after the block no thread writes to the caller's memory."""
    ended = threading.Event()

    def read() -> None:
        time.sleep(0.2)
        ended.set()

    def load_until_interrupted() -> None:
        with Readers(Files(), 1) as readers:  # type: ignore[arg-type]
            future = readers.submit(read)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            readers.result(future)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            load_until_interrupted()
        assert ended.is_set()
    finally:
        signal.signal(signal.SIGALRM, before)
