"""The header of a file of fragments is that of its boxes, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bytecheckpoint.representation.header_writer import build_header
from bytecheckpoint.representation.names import new_generation
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.storage_file import StoredEntry, StoredFragments

COUNT = 70


def fragments(key: TensorKey, offset: int, dtype: str = "float32", size: int = 4) -> StoredFragments:
    offsets = np.stack([np.arange(COUNT), np.zeros(COUNT, np.int64)], axis=1)
    lengths = np.stack([np.ones(COUNT, np.int64), np.arange(COUNT) % 3 + 1], axis=1)
    return StoredFragments(
        key, dtype, (COUNT, 5), offsets, lengths, ("a%d", 'b"\udc80'), True, offset, lengths[:, 1] * size
    )


def plain(name: str, offset: int, offsets: tuple[int, ...] = (0,), shape: tuple[int, ...] = (2,)) -> StoredEntry:
    lengths = (2,) if len(offsets) == 1 else (1, 1)
    nbytes = 4 * int(np.prod(lengths))
    key = TensorKey("model", name)
    return StoredEntry(key, "float32", shape, offsets, lengths, byte_offset=offset, byte_length=nbytes)


def text(entries: list[Any]) -> bytes:
    end = entries[-1].byte_offset + entries[-1].byte_length
    header = build_header(
        entries,
        state="model",
        rank=1,
        world_size=2,
        generation=new_generation("world", 1),
        data_length=end,
        block_bytes=4096,
    )
    return header.render(np.zeros(header.blocks, np.uint64), new_generation("other", 1))


@pytest.mark.parametrize(
    "case", ["alone", "odd names", "bytes", "among others", "equal keys", "equal names", "the same tensor"]
)
def test_a_header_of_fragments(case: str) -> None:
    one = fragments(TensorKey("model", "w"), 0)
    end = one.byte_length
    entries: dict[str, list[StoredEntry | StoredFragments]] = {
        "alone": [one],
        "odd names": [fragments(TensorKey("mo%del", 'a"%d\udcff', "s%%"), 0)],
        "bytes": [fragments(TensorKey("model", "w"), 0, "complex64", 8)],
        "among others": [plain("é", 0), fragments(TensorKey("model", "w"), 8), plain("x", 8 + end)],
        "equal keys": [one, plain("w[3:4,0:1]", end)],
        "equal names": [one, fragments(TensorKey("optimizer", "w"), end)],
        "the same tensor": [one, plain("w", end, (0, 4), (COUNT, 5))],
    }
    found = entries[case]
    boxes = [b for e in found for b in (e.entries() if isinstance(e, StoredFragments) else (e,))]
    assert text(found) == text(boxes)
