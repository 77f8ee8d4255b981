"""The token loader: rows, mixture, shuffling, and going on exactly at any number of ranks and workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointTimeoutError,
    IncompatibleCheckpointError,
    PeerLostError,
    UsageError,
)
from tests.dataloader.token_loaders import Numbers, loader, tokens_of

# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_hold_all_tokens_in_order() -> None:
    one = loader(sources=Numbers(shuffle=False), streams=1, global_batch=2, document_end=999)
    batches = [next(one) for _ in range(30)]
    tokens = torch.cat([batch["tokens"].flatten() for batch in batches]).tolist()
    wanted = [t for i in range(100) for t in [i % 50] * (i % 50 * 7 % 9 + 1) + [999]]
    assert tokens == wanted[: len(tokens)]
    for batch in batches:
        assert batch["tokens"].dtype == torch.int64 and batch["tokens"].shape == (2, 8)
        for row, documents, positions in zip(batch["tokens"], batch["documents"], batch["positions"], strict=True):
            pieces = [row[documents == d].tolist() for d in range(int(documents[-1]) + 1)]
            assert all(len({*piece} - {999}) <= 1 for piece in pieces)
            assert [p for piece in pieces for p in range(len(piece))] == positions.tolist()
    assert torch.cat([batch["rows"] for batch in batches]).tolist() == list(range(60))


def test_every_document_comes_once_in_an_epoch() -> None:
    fed = [t for batch in loader(epochs=2, context_length=1, shuffle_buffer=5) for row in tokens_of(batch) for t in row]
    for index in range(50):
        # The end of some streams is dropped with the rows that fill no batch.
        assert fed.count(index) <= 2 * (index * 7 % 9 + 1)
    assert len(fed) > 0.8 * 2 * sum(i * 7 % 9 + 1 for i in range(50))


def test_ratios_hold_for_tokens() -> None:
    sources = {Numbers("short", 1000): 3.0, Numbers("long", 70, first=5000): 1.0}
    one = loader(sources=sources, context_length=64)
    tokens = torch.cat([next(one)["tokens"] for _ in range(50)])
    assert abs(float((tokens >= 5000).double().mean()) - 0.25) < 0.02
    first = next(loader(sources=sources, context_length=64))["tokens"]
    assert 0 < int((first >= 5000).sum()) < first.numel() / 2  # mixed from the beginning


def test_seeds_and_shuffle_buffers_change_the_order() -> None:
    orders = [
        tokens_of(next(loader(**options))) for options in ({}, {}, {"seed": 1}, {"shuffle_buffer": 7}, {"seed": -5})
    ]
    assert orders[0] == orders[1]
    assert len({str(order) for order in orders}) == 4


def reference(count: int, **options: Any) -> list[list[list[int]]]:
    one = loader(**options)
    return [tokens_of(next(one)) for _ in range(count)]


# --- faults -----------------------------------------------------------------------------------------------------------


class Bad(Numbers):
    def __init__(self, deed: Callable[[], Any]) -> None:
        super().__init__()
        self.deed = deed

    def __getitem__(self, index: int) -> Any:
        self.deed()
        return super().__getitem__(index)


class Flaky(Numbers):
    """Fails at some of the reads."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads in (5, 40, 90):
            raise OSError("try again")
        return super().__getitem__(index)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    time.sleep(600)


def fail() -> None:
    raise ValueError("no such shard")


def cut() -> None:
    raise EOFError("cut short")


def test_a_worker_that_dies_is_named() -> None:
    with loader(sources=Bad(die), workers=2) as one, pytest.raises(PeerLostError) as caught:
        next(one)
    assert "worker 0 of 2, which feeds streams 0 to 2, died with exit code -9" in str(caught.value)


def test_a_worker_that_has_died_fails_the_save_of_every_rank(tmp_path: Path) -> None:
    def save(collective: Collective) -> str:
        with loader(collective.rank, 3, workers=2) as own:
            next(own)
            if collective.rank == 1:
                os.kill(own._makers[1][0]._process.pid, signal.SIGKILL)
                own._makers[1][0]._process.join(30)
            with pytest.raises(PeerLostError) as caught:
                bytecheckpoint.save(tmp_path / "c", {"dataloader": own})
            return str(caught.value)

    found = ThreadWorld(3).run(save, timeout=100)
    assert all(
        "data loader worker 1 of 2, which feeds stream 3, died with exit code -9" in message for message in found
    )
    assert found[0].startswith("rank 1, ")


@pytest.mark.parametrize(("deed", "message"), [(fail, "ValueError: no such shard"), (cut, "EOFError: cut short")])
def test_the_error_of_a_worker_arrives(deed: Callable[[], Any], message: str) -> None:
    with loader(sources=Bad(deed), workers=1) as one, pytest.raises(CheckpointError, match=message):
        next(one)


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(UsageError, match="cannot be sent to a forkserver worker"):
        next(loader(tokenizer=lambda text: [1], workers=1))


def test_a_hung_worker_is_a_timeout() -> None:
    sources = Bad(sleep)
    with (
        loader(sources=sources, workers=1, timeout=0.5) as one,
        pytest.raises(CheckpointTimeoutError, match="worker 0 of 1"),
    ):
        next(one)


def test_workers_end_with_their_loader() -> None:
    one = loader(workers=2)
    next(one)
    processes = [worker._process for worker, _ in one._makers]
    one.close()
    assert not any(process.is_alive() for process in processes)
    one = loader(workers=1)
    next(one)
    (process,) = [worker._process for worker, _ in one._makers]
    del one
    process.join(10)
    assert not process.is_alive()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_breaks_a_batch_off_lets_no_stream_drift(workers: int) -> None:
    """A source fails in the middle of a batch, and another part of the step after it was made."""
    calls, failures = iter(range(100)), {2, 3, 7}

    def agree(ended: bool) -> bool:
        if next(calls) in failures:
            raise KeyboardInterrupt
        return ended

    flaky = Flaky() if not workers else Numbers()
    wanted = reference(8, shuffle_buffer=4)
    found, failed = [], 0
    with loader(sources=flaky, workers=workers, agree=agree, shuffle_buffer=4) as one:
        while len(found) < 8:
            try:
                found.append(tokens_of(next(one)))
            except (KeyboardInterrupt, OSError):
                failed += 1
                assert one.stream_states().keys() == {*range(6)}
    assert found == wanted and failed >= 3


def test_an_ended_loader_stays_so() -> None:
    one = loader(epochs=1, workers=2)
    with one:
        count = len([*one])
        assert count and [*one] == [] and [*one] == [] and one.batches == count


def test_an_idle_worker_stays() -> None:
    with loader(workers=1) as one:
        found = [next(one)]
        time.sleep(2.5)
        assert tokens_of(found[0]) == tokens_of(next(loader())) and one.stream_states()
        next(one)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_end_with_a_killed_process(method: str) -> None:
    program = (
        "import time; from tests.dataloader.token_loaders import loader\n"
        f"if __name__ == '__main__':\n    one = loader(workers=2, start_method={method!r}); next(one)\n"
        "    print(*(worker._process.pid for worker, _ in one._makers), flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "the workers have outlived their loader"
        time.sleep(0.1)


# --- other data -------------------------------------------------------------------------------------------------------


def differences() -> Iterator[tuple[str, dict[str, Any], str]]:
    yield "tokenizer", {"tokenizer": lambda text: [len(text)]}, "tokenizer was None"
    yield (
        "context_length",
        {"context_length": 16},
        r"context_length was 8 and is 16 here \(allow=\(\"context_length\",\)",
    )
    yield "global_batch", {"global_batch": 12}, "global_batch was 6 and is 12"
    yield "streams", {"streams": 3}, "streams was 6 and is 3 here: set it as the run began"
    yield "seed", {"seed": 3}, "seed was 0 and is 3"
    yield "data", {"sources": Numbers(count=49)}, r"data of source numbers has changed \(count was 50 and is 49\)"
    yield "lost", {"sources": Numbers("other")}, "lacks the source numbers .*does not know the source other"
    yield "new", {"sources": [Numbers(), Numbers("other")]}, "does not know the source other .*ratios was"


@pytest.mark.parametrize(("options", "message"), [d[1:] for d in differences()], ids=[d[0] for d in differences()])
def test_other_data_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    shared = loader().shared_state()
    with pytest.raises(IncompatibleCheckpointError, match=message):
        loader(**options).choose_streams(shared, range(6))


def test_sound_changes_are_allowed(tmp_path: Path) -> None:
    one = loader()
    batches = [next(one) for _ in range(3)]
    bytecheckpoint.save(tmp_path / "c", {"dataloader": one})
    sources = {Numbers(): 1.0, Numbers("new", first=1000): 1.0}
    names = ("sources", "ratios", "global_batch", "context_length")
    other = loader(sources=sources, global_batch=12, context_length=16, allow=names)
    bytecheckpoint.load(tmp_path / "c", {"dataloader": other})
    after = [next(other) for _ in range(20)]
    assert after[0]["tokens"].shape == (12, 16)
    tokens = torch.cat([batch["tokens"].flatten() for batch in after])
    assert (tokens >= 1000).any()
    assert len(batches) == 3 and other.batches == 23


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": []}, "one or more Sources"),
        ({"sources": [Numbers(), Numbers()]}, "two sources have one name"),
        ({"sources": {Numbers(): -1.0}}, "ratios must be positive"),
        ({"streams": 4}, "equally many from 4 streams"),
        ({"rank": 6, "ranks": 7}, "7 ranks cannot share 6 streams"),
        ({"context_length": 0}, "context_length must be an int of at least 1"),
        ({"epochs": 1, "ranks": 2}, "pass agree="),
        ({"allow": ("seed",)}, "does not know seed"),
        ({"seed": 2**70}, "seed must be"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loader(**options)


def test_documents_that_are_no_tokens() -> None:
    class Text(Numbers):
        def __getitem__(self, index: int) -> Any:
            return "text"

    with pytest.raises(UsageError, match="pass tokenizer="):
        next(loader(sources=Text()))
    assert next(loader(sources=Text(), tokenizer=lambda text: {"input_ids": [*map(ord, text)]}))["tokens"].max() == ord(
        "x"
    )
    with pytest.raises(UsageError, match="fewer documents than there are streams"):
        next(loader(sources=Numbers(count=3)))
