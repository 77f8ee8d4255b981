"""Indexed data sets of Megatron. Those of `megatron-data` were written by IndexedDatasetBuilder of megatron-core 0.19.2."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytecheckpoint.dataloader import MegatronSource, TokenBufferLoader, TokenRecipe
from bytecheckpoint.errors import UsageError

DATA = Path(__file__).parent / "megatron-data"
SEQUENCES = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10], [11], [12, 13], [40000, 65535]]
DOCUMENTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13], [40000, 65535]]


def read(source: MegatronSource) -> list[list[int]]:
    return [source[i].tolist() for i in range(len(source))]


def test_documents_and_sequences() -> None:
    for path in (DATA / "uint16", f"{DATA / 'uint16'}.bin", f"{DATA / 'uint16'}.idx"):
        assert read(MegatronSource(path, shuffle=False)) == DOCUMENTS
    assert read(MegatronSource(DATA / "uint16", by="sequence", shuffle=False)) == SEQUENCES
    small = MegatronSource(DATA / "int32")
    assert read(small) == DOCUMENTS[:2] and small[0].dtype == np.int32 and small.name == "int32"
    cursor = MegatronSource(DATA / "uint16").cursor(1, 2, 3, 7)
    next(cursor)
    again = MegatronSource(DATA / "uint16").cursor(1, 2, 3, 7, cursor.state())
    assert next(again).tolist() == next(cursor).tolist()


def test_a_loader() -> None:
    loader = TokenBufferLoader(TokenRecipe(MegatronSource(DATA / "uint16"), 5, 2, epochs=2))
    found = sorted(token for batch in loader for token in batch["tokens"].reshape(-1).tolist())
    assert len(found) == 30 and found == sorted(2 * [t for d in DOCUMENTS for t in d])


def test_the_description_knows_the_division() -> None:
    described = [MegatronSource(DATA / "uint16", by=by).describe() for by in ("document", "sequence")]  # type: ignore[arg-type]
    assert described[0] != described[1] and described[0]["documents"] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda idx: b"MMIDIDX\0\1" + idx[9:], "is no index of Megatron"),
        (lambda idx: idx[:20], "is no index of Megatron"),
        (lambda idx: idx[:9] + struct.pack("<Q", 2) + idx[17:], "version 2"),
        (lambda idx: idx[:17] + b"\x07" + idx[18:], "dtype code 7"),
        (lambda idx: idx[:-1], "ends before its"),
        (lambda idx: idx[:17] + b"\x04" + idx[18:], "do not follow one another"),
        (lambda idx: idx[:-8] + struct.pack("<q", 5), "do not cover its"),
    ],
)
def test_damaged_indices(tmp_path: Path, change: Any, message: str) -> None:
    shutil.copytree(DATA, tmp_path / "d")
    index = tmp_path / "d/uint16.idx"
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(UsageError, match=message):
        MegatronSource(tmp_path / "d/uint16")


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    shutil.copytree(DATA, tmp_path / "d")
    (tmp_path / "d/uint16.bin").write_bytes(b"1234")
    with pytest.raises(UsageError, match=r"uint16.bin has 4 bytes, and its index counts 30"):
        MegatronSource(tmp_path / "d/uint16")
    (tmp_path / "d/uint16.bin").unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        MegatronSource(tmp_path / "d/uint16")
    with pytest.raises(UsageError, match="by is 'token'"):
        MegatronSource(tmp_path / "d/uint16", by="token")  # type: ignore[arg-type]


def test_a_negative_length(tmp_path: Path) -> None:
    np.arange(4, dtype="<u2").tofile(tmp_path / "x.bin")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 4)
    (tmp_path / "x.idx").write_bytes(head + struct.pack("<3i3q4q", 3, -2, 3, 0, 6, 2, 0, 1, 2, 3))
    with pytest.raises(UsageError, match="do not follow one another"):
        MegatronSource(tmp_path / "x")
