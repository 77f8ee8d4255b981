"""The token loader: rows, mixture, shuffling, and going on exactly at any number of ranks and workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.dataloader.loader import TokenBufferLoader
from bytecheckpoint.dataloader.sources.iterable import IterableSource
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointTimeoutError,
    IncompatibleCheckpointError,
    PeerLostError,
    UsageError,
)
from tests.dataloader.token_loaders import Numbers, loader, tokens_of, workers_of
from tests.support.programs import forked
from tests.support.variants import quick

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
    assert all(fed.count(index) <= 2 * (index * 7 % 9 + 1) for index in range(50))
    assert 0 <= 2 * sum(i * 7 % 9 + 1 for i in range(50)) - len(fed) < 6  # rows that fill no batch


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


@pytest.mark.parametrize(
    ("deed", "error", "message"),
    [
        (die, PeerLostError, "worker 0 of 1, which feeds streams 0 to 5, died with exit code -9"),
        (sleep, CheckpointTimeoutError, "worker 0 of 1"),
        (fail, CheckpointError, "ValueError: no such shard"),
        (cut, CheckpointError, "EOFError: cut short"),
    ],
)
def test_what_happens_to_a_worker_is_raised(deed: Callable[[], Any], error: type[Exception], message: str) -> None:
    timeout = 0.5 if deed is sleep else 60.0
    with loader(sources=Bad(deed), workers=1, timeout=timeout) as one, pytest.raises(error, match=message):
        next(one)


def test_a_worker_that_has_died_fails_the_save_of_every_rank(tmp_path: Path) -> None:
    def save(collective: Collective) -> str:
        with loader(collective.rank, 3, workers=2) as own:
            next(own)
            if collective.rank == 1:
                workers_of(own)[1].kill()
                workers_of(own)[1].join(30)
            with pytest.raises(PeerLostError) as caught:
                bytecheckpoint.save(tmp_path / "c", {"dataloader": own})
            return str(caught.value)

    found = ThreadWorld(3).run(save, timeout=100)
    assert all(
        "data loader worker 1 of 2, which feeds stream 3, died with exit code -9" in message for message in found
    )
    assert found[0].startswith("rank 1, ")


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(UsageError, match="cannot be sent to a forkserver worker"):
        next(loader(tokenizer=lambda text: [1], workers=1))


def test_workers_end_with_their_loader() -> None:
    one = loader(workers=2)
    next(one)
    processes = workers_of(one)
    one.close()
    assert not any(process.is_alive() for process in processes)
    one = loader(workers=1)
    next(one)
    (process,) = workers_of(one)
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


@pytest.mark.parametrize("method", quick(["fork", "forkserver"], every=2))
def test_workers_end_with_a_killed_process(method: str) -> None:
    program = (
        "import time; from tests.dataloader.token_loaders import loader, workers_of\n"
        f"if __name__ == '__main__':\n    one = loader(workers=2, start_method={method!r}); next(one)\n"
        "    print(*(worker.pid for worker in workers_of(one)), flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(forked("-c", program), stdout=subprocess.PIPE, text=True)
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
    yield "lost", {"sources": Numbers("other", 49)}, "lacks the source numbers .*does not know the source other"
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
        ({"epochs": 1, "ranks": 2}, "pass gather="),
        ({"allow": ("seed",)}, "does not know seed"),
        ({"seed": 2**70}, "seed must be"),
        ({"document_end": -1}, "document_end must be a token id"),
        ({"document_end": 3.7}, "document_end must be a token id"),
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
    with pytest.raises(UsageError, match="document 41 of source 'numbers': the tokenizer raised KeyError: 'no'"):
        next(loader(sources=Text(), tokenizer=lambda text: {}["no"]))


# --- what users do besides ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_closed_loader_keeps_its_position(tmp_path: Path, workers: int) -> None:
    wanted = reference(6)
    with loader(workers=workers) as one:
        for batch in wanted[:3]:
            assert tokens_of(next(one)) == batch
    one.close()
    bytecheckpoint.save(tmp_path, {"dataloader": one})
    assert tokens_of(next(one)) == wanted[3]
    one.close()
    assert tokens_of(next(one)) == wanted[4]
    two = loader()
    bytecheckpoint.load(tmp_path, {"dataloader": two})
    assert [tokens_of(next(two)) for _ in range(3)] == wanted[3:6]


def test_a_loader_that_an_error_has_left_says_so(tmp_path: Path) -> None:
    one = loader(workers=1)
    next(one)
    with pytest.raises(KeyError), one:
        raise KeyError
    for use in (lambda: next(one), lambda: bytecheckpoint.save(tmp_path, {"dataloader": one})):
        with pytest.raises(CheckpointError, match="its position is lost: load a checkpoint"):
            use()


class Fails(Numbers):
    """Has a document that cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 40:
            raise ValueError("document 40 is broken")
        return super().__getitem__(index)


def test_what_comes_before_an_error_of_a_worker_can_be_saved(tmp_path: Path) -> None:
    plain = loader(sources=Fails(shuffle=False))
    wanted = []
    with contextlib.suppress(ValueError):
        while True:
            wanted.append(tokens_of(next(plain)))
    with loader(sources=Fails(shuffle=False), workers=1, ahead=4) as one:
        for batch in wanted[:-1]:
            assert tokens_of(next(one)) == batch
        bytecheckpoint.save(tmp_path / "before", {"dataloader": one})
        assert tokens_of(next(one)) == wanted[-1]
        for _ in range(2):  # at once, and for the same reason
            with pytest.raises(CheckpointError, match="document 40 is broken"):
                next(one)
        bytecheckpoint.save(tmp_path / "after", {"dataloader": one})
    repaired = reference(len(wanted) + 2, sources=Numbers(shuffle=False))
    for name, batches in (("before", repaired[len(wanted) - 1 :]), ("after", repaired[len(wanted) :])):
        two = loader(sources=Numbers(shuffle=False))
        bytecheckpoint.load(tmp_path / name, {"dataloader": two})
        assert [tokens_of(next(two)) for _ in batches] == batches


@pytest.mark.parametrize("new", [{"a": 0.9, "b": 0.1}, {"a": 0.45, "b": 0.45, "c": 0.1}], ids=["ratios", "source"])
def test_new_ratios_hold_from_the_load_on(tmp_path: Path, new: dict[str, float]) -> None:
    def mixture(ratios: dict[str, float]) -> TokenBufferLoader:
        sources = {Numbers(name, 900, 1000 * (ord(name) - 96)): share for name, share in ratios.items()}
        return loader(sources=sources, allow=("ratios", "sources"))

    one = mixture({"a": 0.5, "b": 0.5})
    for _ in range(400):
        next(one)
    bytecheckpoint.save(tmp_path, {"dataloader": one})
    two = mixture(new)
    bytecheckpoint.load(tmp_path, {"dataloader": two})
    fed = torch.cat([next(two)["tokens"].reshape(-1) for _ in range(100)]) // 1000
    for name, share in new.items():
        assert abs((fed == ord(name) - 96).float().mean().item() - share) < 0.05


@pytest.mark.parametrize("workers", [0, 1])
def test_many_streams_need_few_descriptors(tmp_path: Path, workers: int) -> None:
    options = {"sources": Numbers(count=2000), "global_batch": 400, "streams": 400, "workers": workers}
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 200, most[1]))
    try:
        with loader(**options) as one, loader(**options) as two:
            next(one)
            bytecheckpoint.save(tmp_path, {"dataloader": one})
            bytecheckpoint.load(tmp_path, {"dataloader": two})
            assert tokens_of(next(one)) == tokens_of(next(two))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


class Counting:
    """An iterable whose state is what it goes on changing."""

    def __init__(self) -> None:
        self.state = {"next": 0}

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.state["next"] += 1
            yield np.full(5, self.state["next"])

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


def counting(stream: int, streams: int, epoch: int) -> Counting:
    return Counting()


def test_a_state_that_goes_on_changing_is_copied() -> None:
    one = loader(sources=IterableSource(counting, "counting"))
    for _ in range(5):
        next(one)
    states = one.stream_states()
    wanted = [tokens_of(next(one)) for _ in range(5)]
    two = loader(sources=IterableSource(counting, "counting"))
    two.load_streams(one.shared_state() | {"batches": 5}, states)
    assert [tokens_of(next(two)) for _ in range(5)] == wanted


def test_a_forked_process_ends_no_worker() -> None:
    one = loader(workers=1, timeout=60)
    next(one)
    (worker, _) = one._makers[0]
    child = multiprocessing.get_context("fork").Process(target=worker.close)
    child.start()
    child.join(30)
    assert child.exitcode == 0 and worker._process.is_alive()
    next(one)
    one.close()
