"""The states that workers hand over: in memory that is used again, and before the save where the cadence is known."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import psutil
import torch

from bytecheckpoint.dataloader.handover import StateReceiver, StateSender
from bytecheckpoint.dataloader.loader import TokenBufferLoader, WorkerOptions
from bytecheckpoint.dataloader.recipe import TokenRecipe
from bytecheckpoint.dataloader.sources.base import MapSource
from tests.support.processes import wait_until


class Numbers(MapSource):
    """Documents of 1 to 40 tokens."""

    name, shuffle = "numbers", True

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> Any:
        return np.full(index * 7 % 40 + 1, index)

    def describe(self) -> dict[str, Any]:
        return {}


def loader(workers: int = 0, **options: Any) -> TokenBufferLoader:
    recipe = TokenRecipe(Numbers(), 16, 4, streams=4, shuffle_buffer=10)
    return TokenBufferLoader(recipe, workers=WorkerOptions(workers, **options))


def plain(states: dict[int, Any]) -> Any:
    """Return states with lists in place of tensors."""
    if isinstance(states, dict):
        return {key: plain(value) for key, value in states.items()}
    return states.tolist() if isinstance(states, torch.Tensor) else states


def addresses(states: dict[int, Any]) -> list[int]:
    return [state["shuffle_buffer"]["tokens"].data_ptr() for state in states.values()]


def test_states_keep_their_memory_and_stay_as_they_are() -> None:
    local = loader()
    with loader(workers=2, state_every=2) as own:
        held, expected, used = [], [], list[int]()
        for batch in range(1, 13):
            next(own), next(local)
            if batch % 2 == 0 or batch == 7:  # a save at another batch is as exact
                states = own.stream_states()
                assert plain(states) == plain(local.stream_states())
                if batch < 6:
                    held.append(states)
                    expected.append(plain(states))
                else:
                    used += addresses(states)
        assert [plain(states) for states in held] == expected
        # The memory of a state that is gone is used again: all these lie in few places.
        assert len({*used}) < len(used)


def test_a_state_is_there_before_the_save() -> None:
    with loader(workers=1, state_every=3, timeout=60) as own:
        for batch in range(1, 7):
            next(own)
            if batch == 3:
                own.stream_states()  # the first one shows the memory, for which the worker is needed
        (process,) = psutil.Process().children(recursive=True)[-1:]
        link = own._makers[0][0]._link
        wait_until(link.poll, 60)  # rows come before the state of their batch
        os.kill(process.pid, signal.SIGSTOP)
        try:
            assert own.stream_states().keys() == {0, 1, 2, 3}
        finally:
            os.kill(process.pid, signal.SIGCONT)


def test_memory_that_no_state_needs_is_freed() -> None:
    sender, receiver = StateSender(), StateReceiver()

    def states(count: int) -> dict[int, Any]:
        def make(allocate: Any) -> dict[int, Any]:
            tensors = {"tokens": allocate(count, torch.int32), "lengths": allocate(1, torch.int64)}
            tensors["tokens"].fill_(count)
            return {0: {"rows": 1, "shuffle_buffer": tensors, "token_buffer": tensors}}

        return receiver.receive(sender.send(4 * count + 256, make))

    first = states(100)
    second, third = states(1000), states(10_000)
    view = first[0]["shuffle_buffer"]["tokens"][3:5]
    del first
    assert receiver.released() == []  # a part of it is held
    assert view.tolist() == [100, 100]
    del view, second
    assert sorted(receiver.released()) == [(1, False), (2, True)]
    sender.release(1, keep=False)
    sender.release(2, keep=True)
    again = states(900)
    assert len(sender._memory) == len(receiver._memory) == 2
    assert again[0]["shuffle_buffer"]["tokens"].unique().tolist() == [900]
    assert third[0]["shuffle_buffer"]["tokens"].unique().tolist() == [10_000]
