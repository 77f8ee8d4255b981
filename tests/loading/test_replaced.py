"""A checkpoint that another save replaces during a load: all ranks load the new one, or say why not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.collectives import Collective, SingleProcess, ThreadWorld, use
from bytecheckpoint.errors import CheckpointReplacedError
from bytecheckpoint.failures import Failure
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.wrappers import Call, WrappedStorage
from tests.support.ranks import outcomes

T = TypeVar("T")
SHAPE = (3, 1000)


def save(path: Path, step: int) -> None:
    with use(SingleProcess()):
        bytecheckpoint.save(path, {"model": {"w": torch.full(SHAPE, float(step))}})


class Replaced(WrappedStorage):
    """Another save replaces the checkpoint whenever a rank that has read the catalog opens a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(resolve(path))
        self.path = path
        self.steps = iter([2])
        self.lock = threading.Lock()

    def around(self, call: Call, do: Callable[[], T]) -> T:
        with self.lock:
            if call.operation == "open" and (step := next(self.steps, None)) is not None:
                save(self.path, step)
        return do()


class Recorded(WrappedStorage):
    """A storage that records when its catalog is opened."""

    def __init__(self, inner: Storage, calls: list[Call]) -> None:
        super().__init__(inner)
        self.calls = calls

    def around(self, call: Call, do: Callable[[], T]) -> T:
        if call.operation == "open" and call.name == CATALOG_NAME:
            self.calls.append(call)
        return do()


def load(*storages: Storage) -> list[Any]:
    """Load on one rank per storage."""

    def run(collective: Collective) -> Any:
        destination = {"w": torch.zeros(SHAPE)}
        bytecheckpoint.load(storages[collective.rank], {"model": destination}, timeout=20)
        return destination["w"].unique().tolist()

    return outcomes(ThreadWorld(len(storages)), run)


@pytest.fixture
def replaced(tmp_path: Path) -> Replaced:
    """A storage whose checkpoint is replaced once, unless the test changes `steps`."""
    save(tmp_path / "s", 1)
    return Replaced(tmp_path / "s")


def test_all_ranks_load_the_new_checkpoint(replaced: Replaced) -> None:
    assert load(replaced, replaced) == [[2.0], [2.0]]


def test_a_checkpoint_that_is_replaced_again_and_again(replaced: Replaced) -> None:
    replaced.steps = iter(range(2, 12))
    (error,) = load(replaced)
    assert type(error) is IncompatibleCheckpointError, error
    assert "was replaced 3 times while it was being loaded" in str(error)


def test_ranks_that_see_different_checkpoints(tmp_path: Path) -> None:
    for rank in (0, 1):
        save(tmp_path / str(rank), rank)
    calls: list[Call] = []
    for error in load(*(Recorded(resolve(tmp_path / str(rank)), calls) for rank in (0, 1))):
        assert type(error) is IncompatibleCheckpointError
        paths = f"rank 1 at {tmp_path / '1'}, the others at {tmp_path / '0'}"
        assert f"ranks see different checkpoints: {paths}; give all the same path" in str(error), error
    assert len(calls) == 2 * 3, "each rank tries three times"


def test_the_error_is_internal_and_travels() -> None:
    there = Failure.of(CheckpointReplacedError("gone", file="f", block=2), rank=1).as_error()
    assert type(there) is CheckpointReplacedError and isinstance(there, CorruptCheckpointError)
    assert (str(there), there.file, there.block) == ("rank 1: gone", "f", 2)
    assert not hasattr(bytecheckpoint, "CheckpointReplacedError")
