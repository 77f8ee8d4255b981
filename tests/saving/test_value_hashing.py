"""Values are hashed in the background, from the bytes that are saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, SingleProcess, use
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.engine.writing import FilesWriter
from bytecheckpoint.saving import capture
from bytecheckpoint.saving.capture import content_digest
from bytecheckpoint.world import world_of
from tests.support.settings import using
from tests.support.variants import crossed

_ROWS = 3000
_BYTES = _ROWS * 1024


class _Digests:
    """Stands in for `content_digest`: notes the threads that hash large tensors, and lets those of saves wait.

    Attributes:
        threads: names of the threads.
        may_hash: threads of saves wait for it.
    """

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.may_hash = threading.Event()
        self.may_hash.set()

    def __call__(self, data: torch.Tensor, dtype: str) -> bytes:
        if data.nbytes >= _BYTES:
            name = threading.current_thread().name
            self.threads.add(name.rpartition("_")[0] or name)
            if name.startswith("bytecheckpoint-save"):
                assert self.may_hash.wait(30)
        return content_digest(data, dtype)


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> _Digests:
    stand_in = _Digests()
    monkeypatch.setattr(capture, "content_digest", stand_in)
    return stand_in


def _tensor(step: int) -> torch.Tensor:
    return torch.arange(_ROWS * 256, dtype=torch.float32).reshape(_ROWS, 256) + step


@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_the_caller_does_not_hash(tmp_path: Path, digests: _Digests, staging: str) -> None:
    with use(SingleProcess()) as collective:
        for step in range(3):
            states = {"extra_states": {"big": _tensor(step)}}
            bytecheckpoint.save(tmp_path / "step", states, async_checkpoint=True, staging=staging).result(60)
        world_of(collective).close()
    assert digests.threads == {"bytecheckpoint-save"}


def test_values_are_hashed_while_they_are_written(
    tmp_path: Path, digests: _Digests, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FilesWriter.write_staged

    def noted(self: FilesWriter, *arguments: Any) -> Any:
        assert not digests.threads, "the values were hashed before the first byte was written"
        return write(self, *arguments)

    monkeypatch.setattr(FilesWriter, "write_staged", noted)
    with use(SingleProcess()) as collective, using(writer="thread"):
        states = {"extra_states": {"big": _tensor(0)}}
        bytecheckpoint.save(tmp_path / "step", states, async_checkpoint=True).result(60)
        world_of(collective).close()
    assert digests.threads == {"bytecheckpoint-save"}


def _step(collective: Collective, path: Path, big: torch.Tensor, staging: str) -> bytecheckpoint.SaveHandle:
    states = {"model": {"w": torch.ones(5)}, "extra_states": {"big": big, "rank": collective.rank}}
    return bytecheckpoint.save(path, states, async_checkpoint=True, staging=staging)


@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_the_callers_of_several_ranks_hash_for_a_new_plan_only(tmp_path: Path, digests: _Digests, staging: str) -> None:
    def save(collective: Collective) -> int:
        _step(collective, tmp_path / "step", _tensor(0), staging).result(60)
        world_of(collective).saves.drain()
        return world_of(collective).resources.pools.shared.capacity

    world = ThreadWorld(2)
    world.run(save)
    if staging == "background":
        assert digests.threads == {"bytecheckpoint-save"}
    digests.threads.clear()
    pools = world.run(save)
    assert digests.threads == {"bytecheckpoint-save"}
    assert min(pools) >= _BYTES, "a rank stages what it does not write too, or it would touch new memory in every save"


_LAYOUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "contiguous": _tensor,
    "transposed": lambda step: _tensor(step).T.contiguous().T,
    "float8": lambda step: _tensor(step).reshape(-1).view(torch.float8_e4m3fn),
}


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("layout", "staging", "staging_bytes"), crossed(list(_LAYOUTS), ["blocking", "background"], [0, 2 << 20])
)
def test_a_change_after_staging_is_not_saved(
    tmp_path: Path, digests: _Digests, staging: str, layout: str, staging_bytes: int
) -> None:
    make = _LAYOUTS[layout]

    def save(collective: Collective) -> list[int]:
        written = []
        for step in range(3):
            differs = step == 2 and collective.rank == 1  # although the plan is one for equal values
            big = make(step + 7 * differs)
            handle = _step(collective, tmp_path / "step", big, staging)
            handle.staged.result(60)
            big.copy_(make(50 + collective.rank))
            both.wait(30)
            digests.may_hash.set()
            written.append(handle.result(60).bytes_written)
            both.wait(30)
            # The first save hashes for its plan. Chunks in a small pool leave no copy, so their hash comes before `staged`.
            if not staging_bytes:
                digests.may_hash.clear()
            both.wait(30)
        return written

    def load(collective: Collective) -> torch.Tensor:
        destination = {"big": make(90), "rank": -1}
        bytecheckpoint.load(tmp_path / "step", {"extra_states": destination})
        assert destination["rank"] == collective.rank
        return destination["big"]  # type: ignore[return-value]

    world = ThreadWorld(2)
    both = threading.Barrier(2)
    with using(staging_bytes=staging_bytes, chunk_bytes=1 << 20):
        first, second = world.run(save)
        loaded = world.run(load)
    assert _equal(loaded[0], make(2))
    assert _equal(loaded[1], make(9))
    assert all(one + other < 1.5 * _BYTES for one, other in zip(first[:2], second[:2], strict=True)), "one copy each"
    assert first[2] + second[2] > 2 * _BYTES
