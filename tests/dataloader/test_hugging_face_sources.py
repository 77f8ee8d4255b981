"""Datasets of Hugging Face as sources: map-style and streaming ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from bytecheckpoint.dataloader.sources.iterable import from_hugging_face
from bytecheckpoint.errors import UsageError
from tests.dataloader.reading import assert_exact_restarts, drain, epoch_of
from tests.support.variants import crossed

ROWS = 50


def dataset(rows: int = ROWS) -> Any:
    from datasets import Dataset  # takes seconds, and every worker collects all files

    return Dataset.from_dict({"text": [f"row {i}" for i in range(rows)], "number": list(range(rows))})


def cases() -> dict[str, Any]:
    from datasets import concatenate_datasets

    streaming = dataset().to_iterable_dataset(num_shards=6)
    return {
        "plain": streaming,
        "map": streaming.map(shout),
        "batched": streaming.map(same, batched=True, batch_size=7),
        "filter": streaming.filter(is_kept),
        "skip": streaming.skip(5).take(30),
        "concatenated": concatenate_datasets([streaming, streaming.map(shout)]),
        "shuffled": streaming.shuffle(seed=3, buffer_size=20).map(shout),
        "formatted": streaming.with_format("numpy"),
    }


def shout(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": row["text"] + "!"}


def same(rows: dict[str, Any]) -> dict[str, Any]:
    return {"text": rows["text"]}


def is_kept(row: dict[str, Any]) -> bool:
    return bool(row["number"] % 3)


@pytest.mark.parametrize(
    ("case", "streams"),
    crossed(["plain", "map", "batched", "filter", "skip", "concatenated", "shuffled", "formatted"], [1, 3, 4]),
)
def test_streaming_goes_on_exactly(case: str, streams: int) -> None:
    """The states of streams that one process reads in turns do not mix, whether shards or rows are split (3, 4)."""
    source = from_hugging_face(cases()[case], "rows", "text")
    for epoch in (0, 1):  # in epoch 0, the parts of a dataset are those of the user's
        documents = list(map(str, itertools.chain(*assert_exact_restarts(source, streams, epoch, trials=2))))
        assert len(set(documents)) == len(documents) == sum(1 for _ in cases()[case])


def test_what_the_state_of_a_dataset_lacks_is_read_again() -> None:
    for case, exact in [("plain", True), ("concatenated", True), ("shuffled", False), ("formatted", False)]:
        cursor = from_hugging_face(cases()[case], "rows").cursor(0, 1, 0, 0)
        drain(cursor, 3)
        assert (cursor.state()["iterable"] is not None) == exact


def test_older_versions_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.__version__", "5.1.0")
    source = from_hugging_face(cases()["plain"], "rows")
    assert_exact_restarts(source, 3)
    cursor = source.cursor(0, 1, 0, 0)
    drain(cursor, 3)
    assert cursor.state() == {"taken": 3, "iterable": None}


def test_a_worker_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = from_hugging_face(dataset().to_iterable_dataset(num_shards=6), "rows", "text")
    monkeypatch.setattr(torch.utils.data, "get_worker_info", object)
    with pytest.raises(UsageError, match="a stream would lack documents"):
        source.cursor(0, 1, 0, 0)


def test_epochs_of_a_shuffled_dataset_differ() -> None:
    source = from_hugging_face(cases()["shuffled"], "rows", "text")
    assert epoch_of(source, 2, 0) == epoch_of(source, 2, 0) != epoch_of(source, 2, 1)


def test_map_style() -> None:
    source = from_hugging_face(dataset(), "rows", "text")
    assert sorted(itertools.chain(*assert_exact_restarts(source, 3))) == sorted(dataset()["text"])
    assert drain(from_hugging_face(dataset(), "rows", shuffle=False).cursor(0, 1, 0, 0), 1) == [
        {"text": "row 0", "number": 0}
    ]


def test_descriptions() -> None:
    streaming = dataset().to_iterable_dataset(num_shards=6)
    described = [
        from_hugging_face(one, "rows", column).describe()
        for one, column in [
            (dataset(), None),
            (dataset(), "text"),
            (dataset(ROWS + 1), "text"),
            (streaming, "text"),
            (streaming, "number"),
            (dataset().to_iterable_dataset(num_shards=5), "text"),
            (streaming.shuffle(seed=3), "text"),
            (streaming.shuffle(seed=4), "text"),
        ]
    ]
    assert len({repr(one) for one in described}) == len(described)
    assert from_hugging_face(streaming.shuffle(seed=4), "rows", "text").describe() == described[-1]


def test_other_objects() -> None:
    from datasets import DatasetDict

    with pytest.raises(UsageError, match="is a DatasetDict: give one"):
        from_hugging_face(DatasetDict({"train": dataset()}), "rows")
    with pytest.raises(UsageError, match="is a list: give one"):
        from_hugging_face([1], "rows")
    for one in (dataset(), dataset().to_iterable_dataset()):
        with pytest.raises(UsageError, match="no column 'txt', but text, number"):
            from_hugging_face(one, "rows", "txt")


def test_parts_are_made_while_other_threads_open_file_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set refers to the cache of all file systems, which is none of its own state."""

    class Cache(dict[str, Any]):
        def __deepcopy__(self, memo: object) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    streaming = dataset().to_iterable_dataset(num_shards=6)
    monkeypatch.setattr(streaming, "_IterableDataset__hffs_cache", Cache())
    assert len(epoch_of(from_hugging_face(streaming, "rows", "text"), 3)) == ROWS
