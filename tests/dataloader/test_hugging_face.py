"""Streaming data sets of Hugging Face go on exactly, at any data-parallel degree."""

from __future__ import annotations

import importlib.util
import tempfile
import threading
from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.dataloader.hugging_face import HuggingFaceLoader
from bytecheckpoint.dataloader.per_rank import PerRankLoader
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from tests.dataloader.segments import Part, Reference, Segment, play, segments
from tests.support.variants import quick

# Imported by the tests, since every worker collects all files, and this takes seconds.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="NOT TESTED HERE: needs datasets")


def read(shards: list[range]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"id": number} for number in shard)


def dataset_of(shards: int, length: int = 23, how: str = "plain") -> Any:
    from datasets import IterableDataset

    bounds = [length * i // shards for i in range(shards + 1)]
    parts = [range(a, b) for a, b in pairwise(bounds)]
    found = IterableDataset.from_generator(read, gen_kwargs={"shards": parts})
    if how == "mapped":
        return found.map(lambda example: {"id": 2 * example["id"]}).filter(lambda example: example["id"] % 3 > 0)
    if how == "shards":
        return found.shuffle(seed=4, buffer_size=1)
    return found.shuffle(seed=4, buffer_size=5) if how == "buffer" else found


def loaders_of(dataset: Any, ranks: int, streams: int = 4, batch: int = 8, **options: Any) -> list[HuggingFaceLoader]:
    return [
        HuggingFaceLoader(
            dataset,
            batch,
            streams=streams,
            rank=rank,
            ranks=ranks,
            collate=lambda rows: [r["id"] for r in rows],
            **options,
        )
        for rank in range(ranks)
    ]


def take(loaders: Sequence[Any], count: int) -> list[list[int]]:
    return [[*chain(*parts)] for parts in islice(zip(*loaders, strict=True), count)]


def hand_over(old: Sequence[HuggingFaceLoader], new: Sequence[HuggingFaceLoader]) -> None:
    states: dict[int, Any] = {}
    for loader in old:
        states |= loader.stream_states()
    for loader in new:
        chosen = loader.choose_streams(old[0].shared_state(), sorted(states))
        loader.load_streams(old[0].shared_state(), {n: states[n] for n in chosen})


@pytest.mark.parametrize("how", quick(["plain", "mapped", "shards", "buffer"], every=2))
@settings(max_examples=5)
@given(st.sampled_from([3, 4, 8]), st.lists(segments(4), min_size=2, max_size=4))
# The last examples of a part: datasets keeps the positions of all parts in one place.
@example(3, [Segment(1, saves=(2,)), Segment(1, saves=(1,))])
def test_any_sequence_of_jobs_goes_on_exactly(how: str, shards: int, run: list[Segment]) -> None:
    options = {"replay": how == "buffer"}

    def make(segment: Segment, data: int, other: int, collective: Collective) -> tuple[Any, Iterator[Part]]:
        loader = loaders_of(dataset_of(shards, how=how), segment.ranks, **options)[data]
        return loader, iter(loader)

    [alone] = loaders_of(dataset_of(shards, how=how), 1, **options)
    with tempfile.TemporaryDirectory() as folder:
        play(run, Path(folder), make, Reference(iter(alone)))


@pytest.mark.parametrize("how", ["plain", "shards", "buffer"])
def test_a_closed_loader_has_no_threads_and_goes_on(how: str) -> None:
    options = {"replay": how == "buffer"}
    [whole] = loaders_of(dataset_of(3, how=how), 1, **options)
    [loader] = loaders_of(dataset_of(3, how=how), 1, **options)
    wanted = take([whole], 5)
    whole.close()
    before = threading.active_count()
    with loader:
        fed = take([loader], 2)
    assert threading.active_count() <= before
    assert fed + take([loader], 3) == wanted


def test_each_epoch_feeds_everything_once() -> None:
    [loader] = loaders_of(dataset_of(4, length=16), 1)
    batches = take([loader], 4)
    assert sorted([*chain(*batches[:2])]) == sorted([*chain(*batches[2:])]) == [*range(16)]
    [shuffled] = loaders_of(dataset_of(8, length=16, how="shards"), 1)
    batches = take([shuffled], 4)
    assert sorted([*chain(*batches[:2])]) == sorted([*chain(*batches[2:])]) and batches[:2] != batches[2:]


def test_the_states_of_ranks_go_on_at_the_same_degree(tmp_path: Path) -> None:
    from datasets.distributed import split_dataset_by_node

    def loader() -> PerRankLoader:
        return PerRankLoader(split_dataset_by_node(dataset_of(2), rank=1, world_size=2))

    old, new = loader(), loader()
    fed = [*islice(old, 5)]
    bytecheckpoint.save(tmp_path / "c", {"dataloader": old})
    bytecheckpoint.load(tmp_path / "c", {"dataloader": new})
    assert [*fed, *new] == [*loader()]


def test_a_failed_read_loses_nothing() -> None:
    failures = ["a lost connection"]

    def unreliable(example: dict[str, int]) -> dict[str, int]:
        if example["id"] == 21 and failures:
            raise OSError(failures.pop())
        return example

    dataset = dataset_of(4).map(unreliable)
    [loader] = loaders_of(dataset, 1)
    fed = take([loader], 2)
    shared, states = loader.shared_state(), loader.stream_states()
    with pytest.raises(OSError, match="a lost connection"):
        take([loader], 1)
    for go_on in (loader.stream_states, lambda: next(iter(loader))):
        with pytest.raises(UsageError, match="broken off in the middle of a batch"):
            go_on()
    loader.load_streams(shared, states)
    fed += take([loader], 3)
    assert fed == take(loaders_of(dataset_of(4), 1), 5)


def test_inexact_states_are_refused() -> None:
    from datasets import concatenate_datasets

    with pytest.raises(UsageError, match="leaves out its shuffle buffer of 5 examples: pass replay=True"):
        loaders_of(dataset_of(4, how="buffer"), 1)
    with pytest.raises(UsageError, match="leaves out its shuffle buffer of 5 examples: use HuggingFaceLoader"):
        PerRankLoader(dataset_of(4, how="buffer"))
    with pytest.raises(UsageError, match="leaves out its shuffle buffer of 5 examples"):
        loaders_of(concatenate_datasets([dataset_of(4), dataset_of(4, how="buffer").take(3)]), 1)
    with pytest.raises(UsageError, match="leaves out its batched map in a table format"):
        loaders_of(dataset_of(4).with_format("arrow").map(lambda table: table, batched=True), 1)


def test_states_of_older_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.__version__", "4.8.1")
    loaders_of(dataset_of(4), 1)
    with pytest.raises(UsageError, match="leaves out examples behind its map or filter"):
        loaders_of(dataset_of(4, how="mapped"), 1)


def test_a_shuffle_without_a_seed_is_noticed() -> None:
    first, second = (loaders_of(dataset_of(4).shuffle(buffer_size=1), 1) for _ in range(2))
    with pytest.raises(IncompatibleCheckpointError, match="shuffle_seeds was"):
        hand_over(first, second)


def test_other_streams_are_refused() -> None:
    old = loaders_of(dataset_of(4), 1)
    for options, message in (
        ({"streams": 2}, "streams was 4 and is 2"),
        ({"batch": 4}, "global_batch was 8 and is 4"),
        ({"replay": True}, "replay was False and is True"),
        ({"fingerprint": "b"}, "dataset_fingerprint was None and is 'b'"),
    ):
        with pytest.raises(IncompatibleCheckpointError, match=message):
            hand_over(old, loaders_of(dataset_of(4), 1, **options))


def test_bad_arguments_are_named() -> None:
    from datasets import Dataset

    with pytest.raises(UsageError, match="streams is 4, which is no stream for each of 5"):
        loaders_of(dataset_of(4), 5)
    with pytest.raises(UsageError, match="a global batch of 6 examples cannot take equally many from 4"):
        loaders_of(dataset_of(4), 1, batch=6)
    with pytest.raises(UsageError, match="this is a Dataset;"):
        loaders_of(Dataset.from_dict({"id": [1]}), 1)
    with pytest.raises(UsageError, match="has no examples: the data set needs fewer streams"):
        take(loaders_of(dataset_of(1, length=3), 1), 1)
