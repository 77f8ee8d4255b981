"""Parquet files as sources: every row once, exact restarts, few row groups in memory and few reads of each."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.dataloader import TokenBufferLoader, TokenRecipe
from bytecheckpoint.dataloader.sources.parquet import ParquetSource
from bytecheckpoint.errors import StorageError, UsageError
from tests.dataloader.reading import assert_exact_restarts, drain, epoch_of


def write(path: Path, sizes: list[int], first: int = 0) -> Path:
    """Write a file with row groups of `sizes` rows; row i is "row i"."""
    schema = pa.schema({"text": pa.string(), "other": pa.int64()})
    with pq.ParquetWriter(path, schema) as writer:
        for size in sizes:
            rows = range(first, first + size)
            writer.write_table(pa.table({"text": [f"row {i}" for i in rows], "other": list(rows)}, schema=schema))
            first += size
    return path


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=5), min_size=1, max_size=3).filter(
        lambda files: any(map(sum, files))
    ),
    st.integers(1, 9),
    st.sampled_from([1, 300, 10**6]),
    st.booleans(),
)
def test_every_row_once_and_exact_restarts(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], streams: int, window_bytes: int, shuffle: bool
) -> None:
    folder, count = tmp_path_factory.mktemp("rows"), 0
    for number, sizes in enumerate(files):
        write(folder / f"{number}.parquet", sizes, count)
        count += sum(sizes)
    source = ParquetSource(f"{folder}/*", shuffle=shuffle, window_bytes=window_bytes)
    by_stream = assert_exact_restarts(source, streams, trials=2)
    rows = [f"row {i}" for i in range(count)]
    assert len(source) == count and max(map(len, by_stream)) - min(map(len, by_stream)) <= 1
    found = list(itertools.chain(*by_stream))
    assert (sorted(found) == sorted(rows)) if shuffle else (found == rows)
    shutil.rmtree(folder)


def test_windows(tmp_path: Path) -> None:
    """A window mixes the rows of its row groups; a window of one byte is one row group."""
    path = write(tmp_path / "x.parquet", [20] * 10)
    for window_bytes, most in [(1, 1), (10**6, 10)]:
        source = ParquetSource(path, window_bytes=window_bytes)
        read = [int(text.split()[1]) // 20 for text in epoch_of(source, 1)]
        assert len(set(read[:20])) <= most and (most == 1 or len(set(read[:20])) > 4)
        assert read != epoch_of(source, 1, epoch=1) and read != sorted(read)


def test_streams_share_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups are read about once in an epoch, and let go after their window."""
    source = ParquetSource(write(tmp_path / "x.parquet", [50] * 12), window_bytes=1)
    reads: list[int] = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, n, **options: reads.append(n) or read(self, n, **options)
    )
    cursors = [source.cursor(s, 5, 0, 0) for s in range(5)]
    done = False
    while not done:
        done = not max(len(drain(cursor, 7)) for cursor in cursors)
        gc.collect(1)
        assert len(source._shared) <= 5
    assert sorted(set(reads)) == list(range(12)) and len(reads) <= 12 + 4
    assert not source._shared
    reads.clear()
    drain(ParquetSource(tmp_path / "x.parquet", window_bytes=1).cursor(0, 1, 0, 0, 599))
    assert len(reads) == 1  # a restart reads no window before its own


def test_kinds_of_values(tmp_path: Path) -> None:
    columns = {
        "bytes": pa.array([b"a"]),
        "large": pa.array(["a"], pa.large_string()),
        "tokens": pa.array([[1, 2]], pa.list_(pa.uint16())),
        "fixed": pa.array([[1, 2]], pa.list_(pa.int32(), 2)),
        "struct": pa.array([{"text": "a", "id": 1}]),
        "texts": pa.array([["a"]]),
        "dictionary": pa.array(["a"]).dictionary_encode(),
        "struct.x": pa.array([5]),
    }
    pq.write_table(pa.table(columns), tmp_path / "x")
    found = {name: epoch_of(ParquetSource(tmp_path / "x", column=name), 1)[0] for name in columns}
    for name, dtype in [("tokens", "uint16"), ("fixed", "int32")]:
        value = found.pop(name)
        assert isinstance(value, np.ndarray) and value.dtype == dtype and value.tolist() == [1, 2]
    with pytest.raises(UsageError, match=r"no column 'struct\.text'"):
        ParquetSource(tmp_path / "x", column="struct.text")
    assert found == {
        "bytes": b"a",
        "large": "a",
        "struct": {"text": "a", "id": 1},
        "texts": ["a"],
        "dictionary": "a",
        "struct.x": 5,
    }


def test_descriptions(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [20, 20])
    shutil.copy(path, tmp_path / "b")
    described = [
        ParquetSource(path).describe(),
        ParquetSource(path, column="other").describe(),
        ParquetSource(path, shuffle=False).describe(),
        ParquetSource(path, window_bytes=1).describe(),
        ParquetSource(write(tmp_path / "c", [20, 21])).describe(),
        ParquetSource(write(tmp_path / "d", [20, 20], first=1)).describe(),
    ]
    assert ParquetSource(tmp_path / "b").describe() == described[0]
    assert len({repr(one) for one in described}) == len(described)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no Parquet\n")
    with pytest.raises(UsageError, match=r"/text is not a Parquet file"):
        ParquetSource(tmp_path / "text")
    path = write(tmp_path / "x", [3])
    with pytest.raises(UsageError, match=r"/x has no column 'txt', but text, other"):
        ParquetSource(path, column="txt")
    with pytest.raises(UsageError, match="'empty' has no documents"):
        ParquetSource(write(tmp_path / "empty", [0]))


def test_a_null_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b", "c", None]}), tmp_path / "x", row_group_size=3)
    cursor = ParquetSource(tmp_path / "x", shuffle=False).cursor(0, 1, 0, 0)
    drain(cursor, 3)
    for _ in range(2):  # an error is no end of the epoch
        with pytest.raises(UsageError, match="/x: row 3 of column 'text' is null"):
            next(cursor)
    recipe = TokenRecipe(
        ParquetSource(tmp_path / "x"), 1, 1, epochs=2, tokenizer=lambda text: [ord(text)], skip_bad=True
    )
    loader = TokenBufferLoader(recipe)
    assert sorted(int(batch["tokens"]) for batch in loader) == sorted(2 * [ord(one) for one in "abc"])


def test_files_that_change_while_they_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [30, 30])
    cursor = ParquetSource(path, window_bytes=1, shuffle=False).cursor(0, 1, 0, 0)
    drain(cursor, 30)
    copied = pickle.loads(pickle.dumps(ParquetSource(path)))
    content = path.read_bytes()
    write(path, [30, 31, 50])
    for _ in range(2):
        with pytest.raises(StorageError, match="/x has 31 rows in row group 1, and had 30"):
            next(cursor)
    path.write_bytes(content)
    os.truncate(path, 100)
    with pytest.raises(StorageError, match="/x has 100 bytes, but had"):
        next(cursor)
    path.unlink()
    with pytest.raises(StorageError, match="/x cannot be read: No such file"):
        epoch_of(copied, 1)
