"""Sources of text, JSON Lines and token files: every document found, and data that is told from other data."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.dataloader.sources.base import Source
from bytecheckpoint.dataloader.sources.parquet import ParquetSource
from bytecheckpoint.dataloader.sources.text import JsonLinesSource, TextSource
from bytecheckpoint.dataloader.sources.tokens import TokenFileSource
from bytecheckpoint.errors import StorageError, UsageError
from bytecheckpoint.tuning import tuned
from tests.dataloader.reading import drain, epoch_of


def text_lines(data: bytes) -> list[str]:
    lines = [line.removesuffix(b"\r") for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    return [line.decode() for line in lines if line]


@given(
    st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"\xef\xbb\xbf", "é".encode()]), max_size=30).map(b"".join),
    st.integers(1, 5),
)
def test_lines(tmp_path_factory: pytest.TempPathFactory, data: bytes, piece_bytes: int) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.txt"
    path.write_bytes(data)
    with tuned(source_piece=piece_bytes):
        if expected := text_lines(data):
            assert epoch_of(TextSource(path, shuffle=False), 1) == expected
        else:
            with pytest.raises(UsageError, match="has no documents"):
                TextSource(path)


def corpus(folder: Path, count: int = 3, lines: int = 5000) -> Path:
    folder.mkdir()
    for n in range(count):
        (folder / f"{n}.txt").write_text("".join(f"file {n}, document {i}\n\n" for i in range(lines)))
    (folder / "empty.txt").touch()
    return folder


def test_text_files(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "a", lines=20)
    expected = [f"file {n}, document {i}" for n in range(3) for i in range(20)]
    pattern = TextSource(f"{folder}/*.txt", shuffle=False)
    assert pattern.name == "*.txt" and len(pattern) == 60 and epoch_of(pattern, 1) == expected
    listed = TextSource([folder / "2.txt", str(folder / "0.txt")], "both", shuffle=False)
    assert listed.name == "both" and epoch_of(listed, 1) == expected[40:] + expected[:20]
    whole = TextSource(f"{folder}/*.txt", by="file", shuffle=False)
    assert epoch_of(whole, 1) == [(folder / f"{n}.txt").read_text() for n in range(3)]
    assert sorted(epoch_of(pickle.loads(pickle.dumps(TextSource(f"{tmp_path}/**/*.txt"))), 7)) == sorted(expected)


def test_more_files_than_stay_open(tmp_path: Path) -> None:
    for n in range(300):
        (tmp_path / f"{n:03}").write_text(f"{n}\n")
    before = len(os.listdir("/proc/self/fd"))
    source = TextSource(f"{tmp_path}/*")
    assert sorted(map(int, epoch_of(source, 3))) == list(range(300))
    assert len(os.listdir("/proc/self/fd")) <= before + 129
    del source
    assert len(os.listdir("/proc/self/fd")) == before


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a\n\nb\nc\xffd\n")
    with pytest.raises(UsageError, match=r"/x, line 4, is not UTF-8 \(invalid start byte\)"):
        epoch_of(TextSource(tmp_path / "x"), 1)
    assert epoch_of(TextSource(tmp_path / "x", errors="replace", shuffle=False), 1) == ["a", "b", "c\ufffdd"]


def test_json_lines(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"text": "a\\n", "n": [{}]}\n\n{"id": 1.5, "text": [1, 2]}\r\n{"text": ""}')
    source = JsonLinesSource(tmp_path / "x", shuffle=False)
    first, second, third = epoch_of(pickle.loads(pickle.dumps(source)), 1)
    assert (first, third) == ("a\n", "") and second.dtype == np.int64 and second.tolist() == [1, 2]
    assert drain(JsonLinesSource(tmp_path / "x", field=None, shuffle=False).cursor(0, 1, 0, 0), 1) == [
        {"text": "a\n", "n": [{}]}
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        ("3", "Expected `object`"),
        ('{"tex": "a"}', "missing required field `text`"),
        ('{"text": {}}', "got `object`"),
        ('{"text": null}', "got `null`"),
        ('{"text": [1, "a"]}', "got `str`"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "x").write_text(f'{{"text": "a"}}\n\n{line}\n')
    with pytest.raises(UsageError, match=f"/x, line 3, is no document: .*{reason}"):
        epoch_of(JsonLinesSource(tmp_path / "x"), 1)


def tokens(path: Path, values: Any, dtype: str = "uint16") -> Path:
    np.array(values, dtype).tofile(path)
    return path


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 9), st.sampled_from(["uint8", "<i4", ">u2"])
)
def test_documents_of_tokens(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], length: int, dtype: str
) -> None:
    path = tokens(tmp_path_factory.mktemp("tokens") / "x.bin", values, dtype)
    expected: list[list[int]] = [[]]
    for value in values:
        expected[-1].append(value)
        if value == 3:
            expected.append([])
    expected = [document for document in expected if document]
    offsets = np.cumsum([0, *map(len, expected), 0])
    np.save(path.with_name("offsets.npy"), offsets)
    with tuned(source_piece=4 * length):
        for boundaries in ({"document_end": 3}, {"offsets": offsets}, {"offsets": path.with_name("offsets.npy")}):
            found = epoch_of(TokenFileSource(path, dtype=dtype, shuffle=False, **boundaries), 1)
            assert [document.tolist() for document in found] == expected
            assert all(document.dtype == np.dtype(dtype) for document in found)
    pieces = epoch_of(TokenFileSource([path, path], dtype=dtype, length=length, shuffle=False), 1)
    cut = [values[start : start + length] for start in range(0, len(values), length)]
    assert [piece.tolist() for piece in pieces] == cut + cut


def test_wrong_arguments_for_tokens(tmp_path: Path) -> None:
    path = tokens(tmp_path / "x", [1, 2, 3])
    for options, message in [
        ({}, "give one of"),
        ({"length": 2, "offsets": np.arange(2)}, "give one of"),
        ({"length": 0}, "length is 0"),
        ({"length": 2.5}, "length is 2.5"),
        ({"offsets": "none.npy"}, "'none.npy' is no .npy file"),
        ({"offsets": __file__}, "is no .npy file"),
        ({"length": 2, "dtype": "float32"}, "tokens are integers"),
        ({"length": 2, "dtype": "uint32"}, "6 bytes, which is no whole number of uint32"),
        ({"offsets": np.array([0, 4])}, "from 0 to 4 in a file of 3 tokens"),
        ({"offsets": np.array([0, 2, 1])}, "must rise"),
        ({"offsets": np.zeros((2, 2), int)}, "of shape"),
        ({"offsets": np.array([2])}, "no documents"),
    ]:
        with pytest.raises(UsageError, match=message):
            TokenFileSource(path, **options)
    with pytest.raises(UsageError, match="for one file, not for 2"):
        TokenFileSource([path, path], offsets=np.arange(2))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "missing cannot be read: No such file"),
        ("*.none", "no file matches"),
        ("", "is a folder"),
        ("x.txt.gz", "x.txt.gz is compressed"),
        ("x.jsonl.ZST", "ZST is compressed"),
    ],
)
def test_files_that_cannot_be_sources(tmp_path: Path, name: str, message: str) -> None:
    for compressed in ("x.txt.gz", "x.jsonl.ZST"):
        (tmp_path / compressed).write_text("a\n")
    for make in (TextSource, JsonLinesSource, TokenFileSource, ParquetSource):
        with pytest.raises(UsageError, match=message):
            make(f"{tmp_path}/{name}", **({"length": 1} if make is TokenFileSource else {}))
    with pytest.raises(UsageError, match="list of paths is empty"):
        TextSource([])


FILE_SOURCES: dict[str, Callable[[Path], Source]] = {
    "lines": lambda folder: TextSource(f"{folder}/*.txt", "x"),
    "texts": lambda folder: TextSource(f"{folder}/*.txt", "x", by="file"),
    "json": lambda folder: JsonLinesSource(f"{folder}/*.txt", "x"),
    "tokens": lambda folder: TokenFileSource(f"{folder}/?.txt", "x", dtype="uint8", length=10),
}


@pytest.mark.parametrize("make", FILE_SOURCES.values(), ids=FILE_SOURCES)
def test_descriptions_of_files(tmp_path: Path, make: Callable[[Path], Source]) -> None:
    described = make(corpus(tmp_path / "a")).describe()
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    assert make(tmp_path / "moved").describe() == described == pickle.loads(pickle.dumps(described))
    path = tmp_path / "moved" / "1.txt"
    for place in (0, 100, path.stat().st_size - 4096, path.stat().st_size - 4):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        assert make(tmp_path / "moved").describe() != described
        data[place] ^= 1
        path.write_bytes(data)
    assert make(tmp_path / "moved").describe() == described
    with path.open("a") as file:
        file.write("one more\n\n")
    assert make(tmp_path / "moved").describe() != described


def test_descriptions_of_choices(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "a", lines=20)
    path = folder / "0.txt"
    descriptions = [
        TextSource(path).describe(),
        TextSource(path, shuffle=False).describe(),
        TextSource(path, by="file").describe(),
        TextSource(path, errors="replace").describe(),
        JsonLinesSource(path).describe(),
        JsonLinesSource(path, field="other").describe(),
        TokenFileSource(path, dtype="uint8", length=9).describe(),
        TokenFileSource(path, dtype="int8", length=9).describe(),
        TokenFileSource(path, dtype="uint8", length=8).describe(),
        TokenFileSource(path, dtype="uint8", document_end=10).describe(),
        TokenFileSource(path, dtype="uint8", document_end=11).describe(),
        TokenFileSource(path, dtype="uint8", offsets=np.array([0, 4, 9])).describe(),
        TokenFileSource(path, dtype="uint8", offsets=np.array([0, 5, 9])).describe(),
    ]
    assert len({repr(one) for one in descriptions}) == len(descriptions)


@pytest.mark.parametrize("make", FILE_SOURCES.values(), ids=FILE_SOURCES)
def test_files_that_change_while_they_are_read(tmp_path: Path, make: Callable[[Path], Source]) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    path = folder / "0.txt"
    path.write_text('{"text": "first document"}\n{"text": "second document"}\n')
    for opened in (True, False):
        source = make(folder)
        content = path.read_bytes()
        if opened:
            epoch_of(source, 1)
        os.truncate(path, 0)
        with pytest.raises(StorageError, match=r"0\.txt has 0 bytes, but had 55"):
            epoch_of(source, 1)
        path.write_bytes(content)
    source = pickle.loads(pickle.dumps(make(folder)))  # a worker's copy opens its own files
    path.unlink()
    with pytest.raises(StorageError, match=r"0\.txt cannot be read: No such file"):
        epoch_of(source, 1)
