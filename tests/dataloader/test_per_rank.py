"""Loaders whose state belongs to a rank: exact at the same degree, split and merged at another, and never silently lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.dataloader.per_rank import PerRankLoader
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError


class Strided:
    """Counts rank, rank + ranks, ..., as loaders of other projects do."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.next, self.ranks = rank, ranks

    def __iter__(self) -> Any:
        while True:
            self.next += self.ranks
            yield self.next - self.ranks

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "seen": (self.ranks, None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Elastic(Strided):
    def merge(self, states: list[dict[str, Any]]) -> int:
        return min(state["next"] for state in states)

    def split(self, first: int, rank: int, ranks: int) -> dict[str, Any]:
        return {"next": first + rank}


def train(collective: Collective, path: Path, kind: type[Strided], goes_on: bool, **options: Any) -> list[int]:
    rank, ranks = collective.rank, collective.world_size
    loader = PerRankLoader(kind(rank, ranks), rank=rank, ranks=ranks, **options)
    if goes_on:
        bytecheckpoint.load(path, {"dataloader": loader})
    numbers = [number for number, _ in zip(loader, range(12 // ranks), strict=False)]
    loader.loader.next = numbers[-1] + ranks  # zip took one more
    bytecheckpoint.save(path, {"dataloader": loader})
    return numbers


def test_the_same_degree_goes_on(tmp_path: Path) -> None:
    for number in range(3):
        found = ThreadWorld(3).run(train, tmp_path / "c", Strided, number > 0, timeout=60)
        assert sorted(sum(found, [])) == [*range(12 * number, 12 * number + 12)]  # noqa: RUF017


@pytest.mark.parametrize("as_methods", [True, False])
def test_split_and_merge_serve_another_degree(tmp_path: Path, as_methods: bool) -> None:
    functions = Elastic(0, 1)
    options: dict[str, Any] = {} if as_methods else {"merge": functions.merge, "split": functions.split}
    for number, ranks in enumerate((2, 4, 1, 3)):
        kind = Elastic if as_methods else Strided
        world = ThreadWorld(ranks)
        found = world.run(train, tmp_path / "c", kind, number > 0, timeout=60, **options)
        assert sorted(sum(found, [])) == [*range(12 * number, 12 * number + 12)]  # noqa: RUF017


def test_another_degree_is_refused_without_them(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "c", {"dataloader": PerRankLoader(Strided(0, 1))})

    def load(collective: Collective) -> str:
        loader = PerRankLoader(Strided(collective.rank, 2), rank=collective.rank, ranks=2)
        with pytest.raises(IncompatibleCheckpointError) as caught:
            bytecheckpoint.load(tmp_path / "c", {"dataloader": loader})
        assert loader.loader.next == collective.rank  # type: ignore[attr-defined]
        return str(caught.value)

    for message in ThreadWorld(2).run(load, timeout=60):
        assert "1 ranks saved the states of their Strided, and 2 cannot share them" in message


def test_another_kind_of_loader_is_refused(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "c", {"dataloader": PerRankLoader(Strided(0, 1))})
    with pytest.raises(IncompatibleCheckpointError, match="wraps was 'Strided' and is 'Elastic'"):
        bytecheckpoint.load(tmp_path / "c", {"dataloader": PerRankLoader(Elastic(0, 1))})


def test_bad_arguments_are_named() -> None:
    with pytest.raises(UsageError, match="a list has no state_dict"):
        PerRankLoader([1])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="merge and split belong together"):
        PerRankLoader(Strided(0, 1), merge=max)
    with pytest.raises(UsageError, match="rank None of 2"):
        PerRankLoader(Strided(0, 1), ranks=2)
