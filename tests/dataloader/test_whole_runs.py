"""Whole runs: jobs of any size that save, die and go on from checkpoints feed what one uninterrupted process does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.dataloader.loader import TokenBufferLoader
from bytecheckpoint.dataloader.sources.iterable import IterableSource
from tests.dataloader.segments import Part, Reference, Segment, play, segments
from tests.dataloader.token_loaders import Numbers, loader, numbers_of_stream, rows_of


@pytest.fixture(autouse=True)
def _quick_saves() -> None:
    bytecheckpoint.configure(writer="thread", timeout=30.0)


# --- token loaders ------------------------------------------------------------------------------------------------------

SOURCES = {
    "one": Numbers,
    "mixed": lambda: {Numbers("a", 11): 1.0, Numbers("b", 7, first=100, shuffle=False): 2.0},
    "iterable": lambda: {IterableSource(numbers_of_stream, "made"): 1.0, Numbers("few", 6, first=100): 3.0},
}


@st.composite
def token_runs(draw: st.DrawFn) -> tuple[dict[str, Any], list[Segment]]:
    """Draw the options of a token loader, and segments."""
    streams = draw(st.integers(1, 6))
    options = {
        "sources": draw(st.sampled_from([*SOURCES])),
        "streams": streams,
        "global_batch": streams * draw(st.integers(1, 2)),
        "shuffle_buffer": draw(st.sampled_from([0, 3, 40])),
        "document_end": draw(st.sampled_from([None, 7])),
        "epochs": draw(st.sampled_from([None, None, 4])),
        "state_every": draw(st.sampled_from([None, 2])),
        "seed": draw(st.integers(0, 3)),
    }
    return options, draw(st.lists(segments(streams), min_size=2, max_size=6))


def play_tokens(options: dict[str, Any], run: list[Segment]) -> int:
    def own(rank: int, ranks: int, **others: Any) -> TokenBufferLoader:
        return loader(rank, ranks, **options | {"sources": SOURCES[options["sources"]]()} | others)

    def make(segment: Segment, data: int, other: int, collective: Collective) -> tuple[Any, Iterator[Part]]:
        calls = count()

        def agree(ended: bool) -> bool:
            told = collective.all_gather(f"ended/{next(calls)}", bytes([ended]), timeout=60)
            return any(map(any, told))

        found = own(data, segment.ranks, saves=other == 0, workers=segment.workers, agree=agree)
        return found, map(rows_of, found)

    with tempfile.TemporaryDirectory() as folder:
        return play(run, Path(folder), make, Reference(map(rows_of, own(0, 1))))


@settings(max_examples=30)
@given(token_runs())
@example(({"sources": "one", "streams": 5, "global_batch": 5}, [Segment(2, 2, killed=3), Segment(5), Segment(3, 2)]))
def test_any_sequence_of_jobs_goes_on_exactly(case: tuple[dict[str, Any], list[Segment]]) -> None:
    play_tokens(*case)


@pytest.mark.parametrize("options", [{"state_every": 2}, {"epochs": 9, "ahead": 3, "streams": 3}])
def test_jobs_with_worker_processes_go_on_exactly(options: dict[str, Any]) -> None:
    run = [
        Segment(2, 2, workers=2, saves=(4, 1), lost=2),
        Segment(3, workers=1, saves=(2,), killed=1),
        Segment(1, workers=4, saves=(0, 3), lost=1),
        Segment(2, 2, False, workers=3, saves=(), lost=3),
        Segment(3, saves=(), lost=9),
    ]
    assert play_tokens({"sources": "iterable", "shuffle_buffer": 9, **options}, run) >= 10
