"""Whole runs: jobs of any size that save, die and go on from checkpoints feed what one uninterrupted process does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.dataloader.loader import TokenBufferLoader
from bytecheckpoint.dataloader.sources.base import Source
from bytecheckpoint.dataloader.sources.iterable import IterableSource, from_hugging_face
from bytecheckpoint.dataloader.sources.parquet import ParquetSource
from bytecheckpoint.dataloader.sources.text import JsonLinesSource, TextSource
from bytecheckpoint.dataloader.sources.tokens import TokenFileSource
from tests.dataloader.segments import Part, Reference, Segment, play, segments
from tests.dataloader.token_loaders import Numbers, gather_over, loader, numbers_of_stream, rows_of
from tests.support.variants import quick


@pytest.fixture(autouse=True)
def _quick_saves() -> None:
    bytecheckpoint.configure(timeout=30.0)


# --- token loaders ------------------------------------------------------------------------------------------------------


def letters(text: str) -> list[int]:
    return [*text.encode()]


def write_files(folder: Path) -> None:
    """Write the files that some sources read: 11 to 20 documents of each kind."""
    (folder / "lines.txt").write_text("".join(f"line {i}{'.' * (i % 5)}\n" for i in range(20)))
    (folder / "fields.jsonl").write_text("".join(f'{{"text": "field {i}"}}\n' for i in range(13)))
    np.concatenate([[300 + i] * (i % 4 + 1) + [0] for i in range(15)]).astype(np.uint16).tofile(folder / "tokens.bin")
    rows = pa.table({"text": [f"row {i}" for i in range(11)]})
    pq.write_table(rows, folder / "rows.parquet", row_group_size=4)


def files_in(folder: Path) -> dict[Source, float]:
    return {
        TextSource(folder / "lines.txt"): 1.0,
        JsonLinesSource(folder / "fields.jsonl", shuffle=False): 1.0,
        TokenFileSource(folder / "tokens.bin", document_end=0): 2.0,
        ParquetSource(folder / "rows.parquet", window_bytes=64): 1.0,
    }


def streaming(folder: Path) -> list[Source]:
    """Read streaming data sets of Hugging Face: one goes on by its own state, the other is read again."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(40)]}).to_iterable_dataset(num_shards=8)
    mixed = rows.shuffle(seed=3, buffer_size=6)
    return [from_hugging_face(rows, "in order", "text"), from_hugging_face(mixed, "mixed", "text")]


#: Of a token loader: name -> (its sources, from the folder of the files; its tokenizer).
SOURCES: dict[str, tuple[Callable[[Path], Any], Callable[[Any], Any] | None]] = {
    "one": (lambda _: Numbers(), None),
    "mixed": (lambda _: {Numbers("a", 11): 1.0, Numbers("b", 7, first=100, shuffle=False): 2.0}, None),
    "iterable": (lambda _: {IterableSource(numbers_of_stream, "made"): 1.0, Numbers("few", 6, first=100): 3.0}, None),
    "files": (files_in, letters),
    "streaming": (streaming, letters),
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
        "context_length": draw(st.sampled_from([8, 21])),
    }
    return options, draw(st.lists(segments(streams), min_size=2, max_size=6))


def play_tokens(options: dict[str, Any], run: list[Segment], folder: Path) -> int:
    """Play a run with checkpoints in `folder`; return its newest committed step."""
    sources, tokenizer = SOURCES[options["sources"]]
    write_files(folder)

    def own(rank: int, ranks: int, **others: Any) -> TokenBufferLoader:
        return loader(rank, ranks, **options | {"sources": sources(folder), "tokenizer": tokenizer} | others)

    def make(segment: Segment, data: int, other: int, collective: Collective) -> tuple[Any, Iterator[Part]]:
        gather = gather_over(collective)
        found = own(data, segment.ranks, saves=other == 0, workers=segment.workers, gather=gather)
        return found, map(rows_of, found)

    return play(run, folder, make, Reference(map(rows_of, own(0, 1))))


@settings(max_examples=10)
@given(token_runs())
@example(({"sources": "one", "streams": 5, "global_batch": 5}, [Segment(2, 2, killed=3), Segment(5), Segment(3, 2)]))
def test_any_sequence_of_jobs_goes_on_exactly(case: tuple[dict[str, Any], list[Segment]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        play_tokens(*case, Path(folder))


@pytest.mark.parametrize(
    "options",
    quick(
        [{"sources": "files", "state_every": 2}, {"sources": "iterable", "epochs": 9, "ahead": 3, "streams": 3}],
        every=2,
    ),
)
def test_jobs_with_worker_processes_go_on_exactly(options: dict[str, Any], tmp_path: Path) -> None:
    run = [
        Segment(2, 2, workers=2, saves=(4, 1), lost=2),
        Segment(3, workers=1, saves=(2,), killed=1),
        Segment(1, workers=4, saves=(0, 3), lost=1),
        Segment(2, 2, False, workers=3, saves=(), lost=3),
        Segment(3, saves=(), lost=9),
    ]
    assert play_tokens({"shuffle_buffer": 9, **options}, run, tmp_path) >= 10
