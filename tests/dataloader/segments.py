"""Runs in segments: jobs of any size that feed, save, die and go on, compared with one uninterrupted process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.errors import CheckpointError

__all__ = ["Reference", "Segment", "play", "segments"]

#: A rank's part of a global batch.
Part = list[Any]


@dataclass(frozen=True)
class Segment:
    """One job of a run: it loads the newest committed step, feeds and saves, and ends or dies.

    Attributes:
        ranks: data-parallel degree.
        copies: ranks of each data-parallel coordinate, which differ in their tensor or pipeline coordinate only.
        outer: whether the data-parallel coordinate is the outer one of a rank's number.
        workers: of each rank's loader.
        saves: batches before each save.
        lost: batches that are fed after the last save, and die with the job.
        killed: number of a rank that is killed in one more save, modulo their number; None: none is.
    """

    ranks: int
    copies: int = 1
    outer: bool = True
    workers: int = 0
    saves: tuple[int, ...] = (2,)
    lost: int = 0
    killed: int | None = None

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.ranks * self.copies

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (data-parallel coordinate, the other one) of a rank."""
        data, other = divmod(rank, self.copies) if self.outer else divmod(rank, self.ranks)[::-1]
        return data, other


def segments(most_ranks: int) -> st.SearchStrategy[Segment]:
    """Draw segments of up to `most_ranks` data-parallel ranks, without worker processes."""
    return st.builds(
        Segment,
        ranks=st.integers(1, most_ranks),
        copies=st.integers(1, 2),
        outer=st.booleans(),
        workers=st.just(0),
        saves=st.lists(st.integers(0, 4), max_size=2).map(tuple),
        lost=st.integers(0, 3),
        killed=st.none() | st.integers(0, 11),
    )


class Reference:
    """The global batches of an uninterrupted process, read as far as they are needed.

    Args:
        batches: of that process.
    """

    def __init__(self, batches: Iterator[Part]) -> None:
        self._batches, self._read = batches, list[Part | None]()

    def __getitem__(self, number: int) -> Part | None:
        """Return a global batch; None: the run has ended before it."""
        while len(self._read) <= number:
            self._read.append(next(self._batches, None))
        return self._read[number]


#: (segment, data-parallel coordinate, the other coordinate, collective of the rank) -> the rank's loader, and its parts of
#: the global batches, from the first one that is asked for.
Make = Callable[[Segment, int, int, Collective], tuple[Any, Iterator[Part]]]


def play(run: list[Segment], folder: Path, make: Make, reference: Reference) -> int:
    """Run the segments one after the other; fail unless every global batch is that of the reference.

    Args:
        run: the segments.
        folder: of the checkpoints.
        make: makes the loader of a rank.
        reference: what is to be fed.

    Returns:
        The newest committed step.
    """
    allowed = {0}
    for segment in run:
        begin = newest_step(folder)
        assert begin in allowed, f"step {begin} is committed instead of {allowed}, before {segment}"
        allowed = _play(segment, begin, folder, make, reference)
    end = newest_step(folder)
    assert end in allowed, f"step {end} is committed instead of {allowed} at the end"
    return end


def newest_step(folder: Path) -> int:
    """Return the number of the newest committed step in `folder`; 0: there is none."""
    return max((int(path.parent.name) for path in folder.glob("*/metadata.parquet")), default=0)


def _play(segment: Segment, begin: int, folder: Path, make: Make, reference: Reference) -> set[int]:
    """Run one segment from step `begin`; return the steps of which one is the newest committed one then."""
    world = ThreadWorld(segment.size)
    kill = None if segment.killed is None else segment.killed % segment.size

    def rank_of(collective: Collective) -> tuple[list[Part | None], list[int]]:
        data, other = segment.coordinates(collective.rank)
        loader, batches = make(segment, data, other, collective)
        with loader if hasattr(loader, "__exit__") else contextlib.nullcontext():
            extra = {"step": 0}
            states = {"dataloader": loader, "extra_states": extra}
            if begin:
                bytecheckpoint.load(folder / str(begin), states)
            assert extra["step"] == begin
            parts: list[Part | None] = []
            saved: list[int] = [begin]

            def feed(count: int) -> None:
                for _ in range(count):
                    if (part := next(batches, None)) is not None:
                        extra["step"] += 1
                    parts.append(part)

            handle = None
            for count in segment.saves:
                feed(count)
                handle = bytecheckpoint.save(folder / str(extra["step"]), states, async_checkpoint=True)
                saved.append(extra["step"])
            feed(segment.lost)  # while the last save goes on
            if handle is not None:
                handle.result(60)
            if kill is not None:
                saved.append(extra["step"])
                with contextlib.suppress(CheckpointError):
                    handle = bytecheckpoint.save(folder / str(extra["step"]), states, async_checkpoint=True)
                    if collective.rank == kill:
                        world.kill(kill, silent=False)
                    handle.result(60)
            return parts, saved

    found = world.run(rank_of, timeout=200)
    own: dict[int, list[Part | None]] = {}
    for rank, (parts, saved) in enumerate(found):
        data, _ = segment.coordinates(rank)
        assert own.setdefault(data, parts) == parts, f"ranks of coordinate {data} differ, in {segment}"
        assert saved == found[0][1]
    for number, parts in enumerate(zip(*(own[data] for data in range(segment.ranks)), strict=True)):
        wanted = reference[begin + number]
        if wanted is None:
            assert not any(parts), f"the run goes on behind its end in {segment}"
            break
        assert None not in parts, f"the run ends before batch {begin + number} in {segment}"
        assert [*chain(*parts)] == wanted, f"batch {begin + number} in {segment}"
    steps = found[0][1]
    committed = max(steps[: len(segment.saves) + 1])
    return {committed, max(steps)}
