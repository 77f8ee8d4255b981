"""The world of a collective: one for saves and loads, and it ends with the collective."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from bytecheckpoint import StorageError
from bytecheckpoint.collectives import SingleProcess
from bytecheckpoint.handles import SaveHandle, fail_handle
from bytecheckpoint.world import SaveQueue, World, world_of


def test_a_world_lives_as_long_as_its_collective() -> None:
    collective = SingleProcess()
    world = world_of(collective)
    assert world_of(collective) is world and world.collective is collective
    assert world_of(SingleProcess()) is not world
    ended = weakref.ref(world)
    del world
    gc.collect()
    assert ended() is not None
    del collective
    gc.collect()
    assert ended() is None


def test_prepared_states_are_the_same_objects() -> None:
    world = World(SingleProcess())
    model, optimizers = torch.nn.Linear(2, 2), [object(), object()]
    states = {"model": model, "optimizer": optimizers}
    assert not world.is_prepared(states)
    world.note_prepared(states)
    assert world.is_prepared({"model": model, "optimizer": list(optimizers)})
    assert not world.is_prepared({"model": torch.nn.Linear(2, 2), "optimizer": optimizers})
    world.note_prepared({})
    assert not world.is_prepared(states)
    assert [world.calls.begin("load", "", 1.0) for _ in range(2)] == [1, 2]


def test_saves_run_in_order_and_a_failure_is_raised_once() -> None:
    saves = SaveQueue()
    gate, seen = threading.Event(), list[int]()

    def first() -> None:
        gate.wait(30)
        seen.append(1)

    saves.submit(first)
    saves.submit(lambda: seen.append(2))
    assert not seen
    gate.set()
    saves.drain()
    assert seen == [1, 2]
    seen_one, unseen_one = SaveHandle("a"), SaveHandle("b")
    for handle in (seen_one, unseen_one):
        saves.keep_failure(handle, StorageError(f"{handle.path} is full"))
        fail_handle(handle, StorageError("full"))
    assert isinstance(seen_one.committed.exception(), StorageError)
    with pytest.raises(StorageError, match="an earlier asynchronous save failed: b is full"):
        saves.raise_failure()
    saves.raise_failure()
    saves.close()
