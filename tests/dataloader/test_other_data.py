"""Loaders refuse other data by name, and take data that was moved, and states of earlier versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from bytecheckpoint.dataloader import (
    HuggingFaceLoader,
    JsonLinesSource,
    ParquetSource,
    ResumableLoader,
    ResumableSampler,
    SequenceSource,
    TextSource,
    TorchdataLoader,
    from_hugging_face,
)
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from tests.dataloader.map_loaders import Numbers as Plain
from tests.dataloader.map_loaders import hand_over, loader_of, take
from tests.dataloader.token_loaders import loader

# --- data sets of others -----------------------------------------------------------------------------------------------


def resumable(dataset: Any, **options: Any) -> ResumableLoader:
    return ResumableLoader(DataLoader(dataset, batch_sampler=ResumableSampler(dataset, 5, **options)))


def table(count: int, word: str = "row") -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"text": [f"{word} {i}" for i in range(count)], "n": range(count)})


PAIRS: dict[str, Any] = {
    "list": lambda: ([*"abcdefghij"], [*"abcdefghix"]),
    "range": lambda: (range(10), range(1, 11)),
    "tensor": lambda: (torch.arange(10), torch.arange(10) * 2),
    "array": lambda: (np.arange(10), np.arange(10.0)),
    "tensors": lambda: (TensorDataset(torch.arange(10)), TensorDataset(torch.ones(10))),
    "subset": lambda: (Subset(Plain(20), range(10)), Subset(Plain(20), range(2, 12))),
    "concat": lambda: (ConcatDataset([[1, 2] * 2, [3] * 6]), ConcatDataset([[1, 2] * 2, [4] * 6])),
    "hugging face": lambda: (table(10), table(10, "other")),
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_other_items_of_an_equal_number_are_refused(pair: Any) -> None:
    (one, other), (again, _) = pair(), pair()
    hand_over([resumable(one)], [resumable(again)])
    with pytest.raises(IncompatibleCheckpointError, match="the samples of the data set were"):
        hand_over([resumable(one)], [resumable(other)])
    hand_over([resumable(one, fingerprint="v1")], [resumable(other, fingerprint="v1")])


def test_states_without_facts_are_taken() -> None:
    old = resumable(range(10)).shared_state()
    del old["data"]
    resumable(range(10)).choose_streams(old, [0])


def streaming(tmp_path: Path, **counts: int) -> Any:
    datasets = pytest.importorskip("datasets")
    tmp_path.mkdir(exist_ok=True)
    for name, count in counts.items():
        pq.write_table(pa.table({"text": [f"row {i}" for i in range(count)]}), tmp_path / f"{name}.parquet")
    return datasets.load_dataset("parquet", data_files=f"{tmp_path}/*.parquet", streaming=True, split="train")


def two(dataset: Any) -> HuggingFaceLoader:
    return HuggingFaceLoader(dataset, 4, streams=2)


def test_other_streaming_data_is_refused(tmp_path: Path) -> None:
    def check(one: Any, other: Any, message: str) -> None:
        with pytest.raises(IncompatibleCheckpointError, match=message):
            HuggingFaceLoader(other, 4, streams=2).choose_streams(
                HuggingFaceLoader(one, 4, streams=2).shared_state(), [0, 1]
            )
        recipe: dict[str, Any] = {"tokenizer": lambda text: [*text.encode()]}
        shared = loader(sources=from_hugging_face(one, "rows", "text"), **recipe).shared_state()
        with pytest.raises(IncompatibleCheckpointError, match=message):
            loader(sources=from_hugging_face(other, "rows", "text"), **recipe).choose_streams(shared, range(6))

    one = table(40).to_iterable_dataset(num_shards=4)
    check(
        one, table(400).to_iterable_dataset(num_shards=4), r"numbers of rows \(shards, part 0\) .* were 40 and are 400"
    )
    check(one, table(40, "other").to_iterable_dataset(num_shards=4), "the samples")
    files = streaming(tmp_path / "a", x=5, y=9)
    check(files, streaming(tmp_path / "b", x=50, y=9), "names and sizes of files")
    check(files, streaming(tmp_path / "c", x=5, z=9), "names and sizes of files")
    moved = streaming(tmp_path / "d", x=5, y=9)
    two(moved).choose_streams(two(files).shared_state(), [0, 1])


def test_torchdata_has_a_fingerprint() -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def own(data: Any, **options: Any) -> TorchdataLoader:
        return TorchdataLoader(loaders.StatefulDataLoader(data, batch_size=2), **options)

    shared = own([1, 2, 3, 4], fingerprint="a").shared_state()
    own([1, 2, 3, 4], fingerprint="a").choose_streams(shared, [0])
    with pytest.raises(IncompatibleCheckpointError, match="dataset_fingerprint was 'a' and is 'b'"):
        own([1, 2, 3, 4], fingerprint="b").choose_streams(shared, [0])
    with pytest.raises(IncompatibleCheckpointError, match="the samples of the data set"):
        own([1, 2, 3, 5]).choose_streams(own([1, 2, 3, 4]).shared_state(), [0])


def test_a_position_at_which_a_rank_would_have_no_sample_is_refused() -> None:
    one = loader_of(10, 4, allow="global_batch")
    [*take([old := loader_of(10, 5)], 1)]
    hand_over([old], [one])  # 5 samples of 10: batches of 4 and 1 follow
    for rank in range(4):
        wide = loader_of(10, 4, rank=rank, ranks=4, drop_last=True, allow=("global_batch", "drop_last"))
        hand_over([one], [wide])  # drops the one
        with pytest.raises(IncompatibleCheckpointError, match="epoch has 1 samples, which is none for some of 2"):
            hand_over([one], [loader_of(10, 4, rank=rank % 2, ranks=2)])
        with pytest.raises(UsageError, match="has 1 samples, which is none for some of 2"):
            loader_of(10, 4, rank=rank % 2, ranks=2).sampler.seek(0, 5)


# --- sources -----------------------------------------------------------------------------------------------------------


def refusal(one: Any, other: Any) -> str:
    shared = loader(sources=one, tokenizer=len_of).shared_state()
    with pytest.raises(IncompatibleCheckpointError) as caught:
        loader(sources=other, tokenizer=len_of).choose_streams(shared, range(6))
    return str(caught.value)


def len_of(text: Any) -> list[int]:
    return [len(text)]


def files(folder: Path, **texts: str) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


def test_a_renamed_file_keeps_its_source_by_name(tmp_path: Path) -> None:
    one = TextSource(files(tmp_path, old="a\nb\n"))
    renamed = files(tmp_path, new="a\nb\n")
    assert "the source old of the checkpoint is new here: pass name='old' to it;" in refusal(one, TextSource(renamed))
    shared = loader(sources=one, tokenizer=len_of).shared_state()
    loader(sources=TextSource(renamed, "old"), tokenizer=len_of).choose_streams(shared, range(6))


def test_the_file_that_has_changed_is_named(tmp_path: Path) -> None:
    one = TextSource(files(tmp_path / "a", x="a\nb\n", y="c\n", z="d\n"), "s")
    found = refusal(one, TextSource(files(tmp_path / "b", x="a\nb\n", y="e\n", z="d\n"), "s"))
    assert "fingerprint was" in found and found.count(" differs") == 1 and "/b/y differs" in found
    for folder, rows in (("a", 3), ("b", 4)):
        pq.write_table(pa.table({"text": ["x"] * rows}), tmp_path / folder / "p")
    assert "/b/p differs" in refusal(ParquetSource(tmp_path / "a" / "p"), ParquetSource(tmp_path / "b" / "p"))


def test_descriptions_without_later_entries_are_taken(tmp_path: Path) -> None:
    source = TextSource(files(tmp_path, x="a\nb\n"))
    shared = loader(sources=source, tokenizer=len_of).shared_state()
    del shared["sources"]["x"]["files"]
    loader(sources=source, tokenizer=len_of).choose_streams(shared, range(6))


def test_paths_that_are_not_local_are_refused(tmp_path: Path) -> None:
    for make in (TextSource, JsonLinesSource, ParquetSource):
        with pytest.raises(UsageError, match=r"s3://bucket/x.jsonl is no local file"):
            make("s3://bucket/x.jsonl")  # type: ignore[operator]


def test_messages_are_short() -> None:
    with pytest.raises(UsageError) as caught:
        loader(sources=["a long text"] * 1000)
    assert len(str(caught.value)) < 200 and "SequenceSource takes a list" in str(caught.value)


# --- documents that fail -----------------------------------------------------------------------------------------------


def chosen(text: str) -> list[int]:
    if "bad" in text:
        raise LookupError("no such word")
    return [1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_document_that_a_tokenizer_fails_at_is_named(tmp_path: Path, workers: int) -> None:
    x, y = files(tmp_path, x="a\n", y="b\nbad\n")
    pq.write_table(pa.table({"text": ["a", "bad"]}), tmp_path / "p")
    options = {"tokenizer": chosen, "streams": 1, "workers": workers}
    for source, place in {
        TextSource([x, y], "s"): rf"document 2 \(from byte 2 of {y}\) of source 's'",
        SequenceSource(["a", "bad"], "s"): "document 1 of source 's'",
        ParquetSource(tmp_path / "p", "s"): f"{tmp_path}/p: row 1 of column 'text' of source 's'",
    }.items():
        with (
            loader(sources=source, **options) as one,
            pytest.raises(UsageError, match=place + ".*LookupError: no"),
        ):
            next(one)
