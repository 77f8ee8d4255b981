"""Files that are compressed or on another storage, and places of documents, in a local cache."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import pickle
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bytecheckpoint.dataloader import JsonLinesSource, ParquetSource, TextSource, TokenFileSource
from bytecheckpoint.dataloader.sources import text
from bytecheckpoint.dataloader.sources.files import SourceFiles
from bytecheckpoint.errors import StorageError, UsageError

LINES = [f"line {i}" for i in range(500)]
TEXT = "\n".join(LINES).encode()


@pytest.mark.parametrize(("ending", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_compressed_files(tmp_path: Path, ending: str, compress: Callable[[bytes], bytes]) -> None:
    """They are the same data as the plain file."""
    (tmp_path / f"x.txt.{ending}").write_bytes(compress(TEXT))
    (tmp_path / "x.txt").write_bytes(TEXT)
    source = TextSource(tmp_path / f"x.txt.{ending}", "x", cache=tmp_path / "cache", shuffle=False)
    assert [source[i] for i in range(len(source))] == LINES
    assert source.describe() == TextSource(tmp_path / "x.txt", "x", shuffle=False).describe()
    assert pickle.loads(pickle.dumps(source))[7] == "line 7"
    with pytest.raises(UsageError, match=r"is compressed, .* pass cache="):
        TextSource(tmp_path / f"x.txt.{ending}")


def test_files_of_another_storage(tmp_path: Path) -> None:
    """By a pattern, in order; a file that has changed is copied anew, and the others are not."""
    memory = fsspec.filesystem("memory")
    for number in range(3):
        memory.pipe(f"/data/part-{number}.jsonl.gz", gzip.compress(f'{{"text": "{number}"}}'.encode()))
    cache = tmp_path / "cache"

    def read() -> list[str]:
        source = JsonLinesSource("memory://data/part-*.jsonl.gz", cache=cache, shuffle=False)
        return [source[i] for i in range(len(source))]

    assert read() == ["0", "1", "2"]
    before = {entry.name: entry.stat().st_ino for entry in os.scandir(cache)}
    memory.pipe("/data/part-1.jsonl.gz", gzip.compress(b'{"text": "another"}'))
    assert read() == ["0", "another", "2"]
    after = {entry.name: entry.stat().st_ino for entry in os.scandir(cache)}
    assert before.items() <= after.items() and not [name for name in after if name.endswith(".tmp")]
    memory.pipe("/data/tokens.bin", np.arange(10, dtype=np.uint16).tobytes())
    tokens = TokenFileSource("memory://data/tokens.bin", document_end=4, cache=cache, shuffle=False)
    assert [tokens[i].tolist() for i in range(len(tokens))] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    with memory.open("/data/x.parquet", "wb") as file:
        pq.write_table(pa.table({"text": ["a", "b"]}), file)
    assert len(ParquetSource("memory://data/x.parquet", cache=cache)) == 2
    with pytest.raises(UsageError, match="no file matches"):
        JsonLinesSource("memory://data/none-*", cache=cache)
    with pytest.raises(StorageError, match="cannot be copied"):
        JsonLinesSource("memory://data/none", cache=cache)
    with pytest.raises(UsageError, match="cannot be opened"):
        JsonLinesSource("nostorage://data/none", cache=cache)


def test_a_damaged_file_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(TEXT)[:-9])
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot be copied"):
            TextSource(tmp_path / "x.txt.gz", cache=tmp_path / "cache")
    assert all(name.endswith(".lock") for name in os.listdir(tmp_path / "cache"))


def test_places_of_documents_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of several processes that begin at once; and again when the file has changed."""
    passes: list[int] = []
    bounds_of = text._line_bounds
    monkeypatch.setattr(text, "_line_bounds", lambda *arguments: (passes.append(1), bounds_of(*arguments))[1])
    (tmp_path / "x.txt").write_bytes(TEXT)

    def make(_: Any = None) -> TextSource:
        return TextSource(tmp_path / "x.txt", cache=tmp_path / "cache", shuffle=False)

    with ThreadPoolExecutor(8) as pool:
        assert all(source[499] == "line 499" for source in pool.map(make, range(8)))
    assert len(passes) == 1 and make().describe() == TextSource(tmp_path / "x.txt", shuffle=False).describe()
    passes.clear()
    (tmp_path / "x.txt").write_bytes(TEXT + b"\nmore")
    assert make()[500] == "more" and len(passes) == 1


def test_a_damaged_index_is_made_anew(tmp_path: Path) -> None:
    """Also one of another size, which a file that grew in the meantime would have."""
    path, cache = tmp_path / "x.txt", tmp_path / "cache"
    path.write_bytes(TEXT)
    TextSource(path, cache=cache)
    (index,) = cache.glob("*.npy")
    good = index.read_bytes()
    for damage in (b"", b"\x93NUMPY", good[:-8], good[:-8] + np.int64(10**9).tobytes(), good.replace(b"<i8", b"<f8")):
        index.write_bytes(damage)
        assert len(TextSource(path, cache=cache)) == 500 and index.read_bytes() == good


def test_a_file_that_grows_while_its_documents_are_found(tmp_path: Path) -> None:
    path, cache = tmp_path / "x.txt", tmp_path / "cache"
    path.write_bytes(TEXT)
    files = SourceFiles(path, cache)
    path.write_bytes(TEXT + b"\nmore")
    (bounds,) = files.bounds("lines", lambda file: np.array([0, int(files.sizes[file])]))
    assert bounds.tolist() == [0, len(TEXT)] and len(TextSource(path, cache=cache)) == 501


def test_an_index_of_a_file_that_was_replaced_at_equal_size_and_time(tmp_path: Path) -> None:
    path, cache = tmp_path / "x.txt", tmp_path / "cache"
    for lines in (["aa", "b"], ["a", "bb"]):
        path.write_text("\n".join(lines))
        os.utime(path, ns=(0, 0))
        source = TextSource(path, cache=cache, shuffle=False)
        assert [source[i] for i in range(2)] == lines


def test_what_a_killed_process_left_is_used_again(tmp_path: Path) -> None:
    path, cache = tmp_path / "x.txt", tmp_path / "cache"
    path.write_bytes(TEXT)
    TextSource(path, cache=cache)
    (index,) = cache.glob("*.npy")
    index.rename(f"{index}.tmp")
    TextSource(path, cache=cache)
    assert [*cache.glob("*.tmp")] == [] and index.exists()


def test_folders_that_are_no_cache(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(TEXT)
    with pytest.raises(UsageError, match=r"the cache .* cannot be made: File exists"):
        TextSource(path, cache=path)
    (tmp_path / "cache").mkdir()
    source = TextSource(path, cache=tmp_path / "cache")
    (index,) = (tmp_path / "cache").glob("*.npy")
    index.unlink()
    index.mkdir()
    with pytest.raises(StorageError, match=r"the cache .* cannot be used: Is a directory"):
        TextSource(path, cache=tmp_path / "cache")
    assert len(source) == 500


@pytest.mark.parametrize("name", ["n" * 250, "ü" * 120, "br[1].txt", os.fsdecode(b"\xff.txt")])
def test_names_of_any_kind(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(TEXT)
    assert len(TextSource(tmp_path / name, cache=tmp_path / "cache")) == 500
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(TEXT))
    assert len(TextSource(tmp_path / f"{name}.gz", cache=tmp_path / "cache")) == 500


def test_a_pattern_with_files_of_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two\n"))
    source = TextSource(tmp_path / "*.txt*", cache=tmp_path / "cache", shuffle=False)
    assert [*map(source.__getitem__, range(len(source)))] == ["one", "two"]
    with pytest.raises(UsageError, match=r"b\.txt\.gz is compressed"):
        TextSource(tmp_path / "*.txt*")


def test_an_archive_of_several_files(tmp_path: Path) -> None:
    for count in (1, 2):
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            for number in range(count):
                archive.writestr(str(number), TEXT)
        if count == 1:
            assert len(TextSource(tmp_path / "x.zip", cache=tmp_path / "cache")) == 500
    with pytest.raises(UsageError, match=r"^\S*x\.zip has 2 files"):
        TextSource(tmp_path / "x.zip", cache=tmp_path / "cache")


def test_a_file_of_another_storage_that_changed_at_equal_size(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for content in (b"one\n", b"two\n"):
        memory.pipe("/same/x.txt", content)
        assert TextSource("memory://same/x.txt", cache=tmp_path)[0] == content.decode().strip()
