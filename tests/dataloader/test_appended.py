"""Documents that are added to the sources of a run: where they are fed, and which additions are accepted."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.dataloader import (
    IterableSource,
    JsonLinesSource,
    MegatronSource,
    ParquetSource,
    SequenceSource,
    TextSource,
    TokenFileSource,
)
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from tests.dataloader.token_loaders import gather_over, loader, numbers_of_stream, tokens_of


def numbers(count: int, **options: Any) -> SequenceSource:
    """Return documents of one token, which is their number."""
    return SequenceSource([[i] for i in range(count)], "numbers", **options)


def fed(folder: Path, counts: list[int], batches: list[int | None], **options: Any) -> list[list[list[int]]]:
    """Feed jobs with more documents each; return the rows of each batch."""
    found = []
    for job, (count, end) in enumerate(zip(counts, batches, strict=True)):
        one = loader(sources=numbers(count, shuffle=options.get("shuffle", True)), allow="appended", context_length=1,
                     **{k: v for k, v in options.items() if k != "shuffle"})  # fmt: skip
        if job:
            bytecheckpoint.load(folder / str(job - 1), {"dataloader": one})
        found += [tokens_of(batch) for batch in islice(one, end)]
        bytecheckpoint.save(folder / str(job), {"dataloader": one})
    return found


@pytest.mark.parametrize("streams", [1, 3, 6])
def test_new_documents_end_the_running_epoch(tmp_path: Path, streams: int) -> None:
    rows = fed(tmp_path, [10, 13, 14, 15], [4, 1, 2, 20], shuffle=False, global_batch=streams, streams=streams)
    place = 4 * streams
    order = [*range(10)] * ((place - 1) // 10 + 1) + [10, 11, 12]
    place += streams  # in the next job
    order += [*range(13)] * (place > len(order)) + [13]
    place += 2 * streams
    while len(order) < place:
        order += range(14)
    order += [14] + [*range(15)] * 20
    assert [*chain(*chain(*rows))] == order[: len(rows) * streams]


@pytest.mark.parametrize("options", [{}, {"shuffle_buffer": 5}, {"streams": 2}, {"epochs": 3}])
@pytest.mark.parametrize("ends", [(3, 2), (8, 1), (None, None), (0, 5), (4, 0)])
def test_all_documents_are_fed_in_each_epoch_from_the_running_one_on(
    tmp_path: Path, ends: tuple[int | None, int | None], options: dict[str, Any]
) -> None:
    """The old ones in all of them, also where the run had ended."""
    options = {"epochs": 1} | options
    rows = fed(tmp_path, [48, 60, 72], [*ends, None], **options)
    found = Counter(chain(*chain(*rows)))
    whole = [end if end is not None else 8 * options["epochs"] for end in ends]
    first = max(whole[0] - 1, 0) // 8 if whole[0] else 0  # the epoch that ran at the addition
    assert {found[i] for i in range(48)} == {options["epochs"]}
    assert {found[i] for i in range(48, 60)} == {options["epochs"] - first}
    assert set(found) == {*range(72)} and set(found.values()) <= {1, 2, 3}


def test_a_run_that_ended_with_fewer_documents_than_streams(tmp_path: Path) -> None:
    """Streams without a document in the last epochs wait for new ones."""
    step = tmp_path / "step"
    for job, count in enumerate([1, 40]):
        source = SequenceSource([[0] * 60, *([i] for i in range(1, count))], "data")
        one = loader(sources=source, epochs=3, context_length=1, allow="appended")
        if job:
            bytecheckpoint.load(step, {"dataloader": one})
        found = Counter(chain(*chain(*(tokens_of(batch) for batch in one))))
        bytecheckpoint.save(step, {"dataloader": one})
    assert sum(found[i] for i in range(1, 40)) > 39 - 6 and {*found.values()} == {1}


def test_the_epoch_of_a_pass_over_new_documents(tmp_path: Path) -> None:
    one = loader(sources=numbers(6), context_length=1)
    for _ in range(2):  # two epochs of six documents
        next(one)
    bytecheckpoint.save(tmp_path, {"dataloader": one})
    two = loader(sources=numbers(12), context_length=1, allow="appended")
    bytecheckpoint.load(tmp_path, {"dataloader": two})
    assert [(next(two), two.progress()["numbers"].epoch)[1] for _ in range(5)] == [1, 2, 2, 3, 3]


def test_ranks_workers_and_resumes_feed_the_same(tmp_path: Path) -> None:
    def job(collective: Collective, step: int, end: int, workers: int, allow: tuple[str, ...]) -> list[list[list[int]]]:
        sources = {numbers(30 if step == 0 else 45): 0.5, numbers_b: 0.3, IterableSource(numbers_of_stream, "c"): 0.2}
        options: dict[str, Any] = {"epochs": 6, "shuffle_buffer": 3, "workers": workers, "allow": allow}
        one = loader(collective.rank, collective.world_size, sources=sources, gather=gather_over(collective), **options)
        with one:
            if step:
                bytecheckpoint.load(tmp_path / str(step), {"dataloader": one})
            found = [tokens_of(batch) for batch in islice(one, end - step)]
            bytecheckpoint.save(tmp_path / str(step + len(found)), {"dataloader": one})
            return found

    numbers_b = SequenceSource([[1000 + i] * (i % 4 + 1) for i in range(30)], "b")
    one_rank = ThreadWorld(1).run(job, 0, 9, 0, (), timeout=60)
    wanted = ThreadWorld(1).run(job, 9, 200, 0, ("appended",), timeout=60)[0]
    assert one_rank[0] and 9 < len(wanted) < 200
    step = 9
    for ranks, end, workers in ((3, 11, 0), (2, 15, 1), (6, 17, 0), (1, 200, 2)):
        allow = ("appended",) if step == 9 else ()
        parts = ThreadWorld(ranks).run(job, step, end, workers, allow, timeout=100)
        found = [[*chain(*rows)] for rows in zip(*parts, strict=True)]
        assert found == wanted[step - 9 : step - 9 + len(found)]
        step += len(found)
    assert step == 9 + len(wanted)


# --- which additions are accepted --------------------------------------------------------------------------------------

LINES = [f"line {i}" for i in range(20)]


def text(lines: list[str], name: str = "a.txt") -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text("".join(line + "\n" for line in lines))


def tokens(count: int, name: str = "a.bin") -> Callable[[Path], Any]:
    return lambda folder: np.arange(count, dtype=np.uint16).tofile(folder / name)


def table(count: int, name: str) -> Callable[[Path], Any]:
    return lambda folder: pq.write_table(pa.table({"text": LINES[:count]}), folder / name, row_group_size=3)


def megatron(count: int, length: int = 2) -> Callable[[Path], Any]:
    """Write documents of two sequences each."""

    def write(folder: Path) -> None:
        lengths = np.full(2 * count, length, "<i4")
        lengths[1::2] += 1
        np.arange(lengths.sum(), dtype="<u2").tofile(folder / "a.bin")
        places = (np.cumsum(lengths) - lengths).astype("<i8") * 2
        begins = np.arange(0, 2 * count + 1, 2, "<i8")
        head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(begins))
        (folder / "a.idx").write_bytes(head + lengths.tobytes() + places.tobytes() + begins.tobytes())

    return write


Make = Callable[[Path], Any]
KINDS: dict[str, tuple[Make, list[Make], list[Make]]] = {
    "lines": (
        lambda folder: TextSource(folder / "*.txt", "data"),
        [text(LINES[:9])],
        [text(LINES[:12]), text(LINES[:3], "b.txt")],
    ),
    "a line that ended with the file": (
        lambda folder: TextSource(folder / "*.txt", "data"),
        [lambda folder: (folder / "a.txt").write_text("one\ntwo")],
        [lambda folder: (folder / "a.txt").write_text("one\ntwo\n\nthree")],
    ),
    "files": (lambda folder: TextSource(folder / "*.txt", "data", by="file"), [text(LINES)], [text(LINES, "b.txt")]),
    "files that were empty": (
        lambda folder: TextSource(folder / "*.txt", "data"),
        [text(LINES), text([], "b.txt"), text([], "c.txt")],
        [text(LINES, "c.txt"), text(LINES, "d.txt")],
    ),
    "jsonl": (
        lambda folder: JsonLinesSource(folder / "*.txt", "data", cache=folder / "cache"),
        [text([json.dumps({"text": line}) for line in LINES[:9]])],
        [text([json.dumps({"text": line}) for line in LINES])],
    ),
    "pieces": (lambda folder: TokenFileSource(folder / "*.bin", "data", length=4), [tokens(40)], [tokens(50)]),
    "end token": (
        lambda folder: TokenFileSource(folder / "*.bin", "data", document_end=7),
        [tokens(8)],
        [tokens(30), tokens(30, "b.bin")],
    ),
    "offsets": (
        lambda folder: TokenFileSource(
            folder / "a.bin", "data", offsets=[*range(0, (folder / "a.bin").stat().st_size // 2 + 1, 10)]
        ),
        [tokens(40)],
        [tokens(70)],
    ),
    "megatron": (lambda folder: MegatronSource(folder / "a", "data"), [megatron(9)], [megatron(14)]),
    "parquet": (lambda folder: ParquetSource(folder / "*.parquet", "data"), [table(9, "a.parquet")],
                [table(5, "b.parquet")]),
    "list": (
        lambda folder: SequenceSource((folder / "a.txt").read_text().splitlines(), "data"),
        [text(LINES[:9])],
        [text(LINES)],
    ),
    "list of a version": (
        lambda folder: SequenceSource((folder / "a.txt").read_text().splitlines(), "data", fingerprint="1"),
        [text(LINES[:9])],
        [text(LINES)],
    ),
}  # fmt: skip


def documents_of(source: Any) -> list[str]:
    taken = source.cursor(0, 1, 0, 0)
    return [str(next(taken)) for _ in range(len(source))]


@pytest.mark.parametrize("kind", KINDS)
def test_sources_with_documents_behind_the_others(tmp_path: Path, kind: str) -> None:
    make, before, after = KINDS[kind]
    for step in before:
        step(tmp_path)
    tokenizer = {"tokenizer": lambda text: [1] * 40}
    one = loader(sources=make(tmp_path), epochs=1, **tokenizer)
    old = documents_of(make(tmp_path))
    for step in after:
        step(tmp_path)
    source = make(tmp_path)
    grown = loader(sources=source, epochs=1, allow="appended", **tokenizer)
    shared = one.shared_state()
    assert grown.choose_streams(shared, range(6)) == range(6)
    with pytest.raises(
        IncompatibleCheckpointError, match=r"documents were added to source data \(allow=\(\"appended\""
    ):
        loader(sources=source, epochs=1, **tokenizer).choose_streams(shared, range(6))
    assert sorted(documents_of(source.section(0, len(old)))) == sorted(old)
    new = documents_of(source.section(len(old), len(source)))
    assert sorted(old + new) == sorted(documents_of(source)) and len(new) == len(source) - len(old) > 0


CHANGES: dict[str, tuple[Make, list[Make], list[Make]]] = {
    "shrank": (KINDS["lines"][0], [text(LINES)], [text(LINES[:10])]),
    "a line": (KINDS["lines"][0], [text(LINES[:9])], [text(["other"] + LINES[1:20])]),
    "lines between": (KINDS["lines"][0], [text(LINES[:9]), text(LINES[:9], "c.txt")], [text(LINES[9:], "b.txt")]),
    "a file before the last one": (KINDS["lines"][0], [text(LINES[:9]), text(LINES, "c.txt")], [text(LINES)]),
    "the last line": (
        KINDS["lines"][0],
        [lambda folder: (folder / "a.txt").write_text("one\ntwo")],
        [lambda folder: (folder / "a.txt").write_text("one\ntwo more\nthree")],
    ),
    "the last piece": (KINDS["pieces"][0], [tokens(39)], [tokens(50)]),
    "the last tokens": (KINDS["end token"][0], [tokens(12)], [tokens(30)]),
    "rows of a file": (KINDS["parquet"][0], [table(9, "a.parquet")], [table(20, "a.parquet")]),
    "a list": (KINDS["list"][0], [text(LINES[:9])], [text(LINES[5:])]),
    "sequences": (
        KINDS["megatron"][0],
        [megatron(9)],
        [megatron(14, 3)],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_changes_are_refused(tmp_path: Path, change: str) -> None:
    make, before, after = CHANGES[change]
    for step in before:
        step(tmp_path)
    shared = loader(sources=make(tmp_path)).shared_state()
    for step in after:
        step(tmp_path)
    with pytest.raises(IncompatibleCheckpointError, match="the data of source data has changed"):
        loader(sources=make(tmp_path), allow="appended").choose_streams(shared, range(6))


def test_runs_of_the_older_rule_take_no_additions() -> None:
    shared = loader(sources=numbers(9)).shared_state() | {"dealing": 1}
    with pytest.raises(IncompatibleCheckpointError, match="older rule"):
        loader(sources=numbers(20), allow="appended").choose_streams(shared, range(6))


def test_states_of_all_streams_are_needed() -> None:
    one, other = loader(sources=numbers(9)), loader(sources=numbers(12), allow="appended")
    with pytest.raises(UsageError, match="states of all streams"):
        other.load_streams(one.shared_state(), {0: one.stream_states()[0]})
