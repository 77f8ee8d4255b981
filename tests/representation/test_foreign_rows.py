"""Catalogs of foreign files (version 4): rows with strides, which may overlap in bytes and leave bytes out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog import FOREIGN, Catalog, StorageFile, TensorTable
from bytecheckpoint.representation.catalog_file import decode, encode
from bytecheckpoint.representation.catalog_validation import catalog_problem
from bytecheckpoint.tuning import tuned
from tests.support.catalogs import assert_same


def foreign(rows: int = 3) -> Catalog:
    """Tensors of 2 x 3 elements of 4 bytes, of which every other one is transposed, from byte 5 of one file on."""
    tensors = TensorTable.of(
        states=["model"] * rows, fqns=[f"w{i}" for i in range(rows)], slots=[""] * rows, dtypes=["float32"] * rows,
        shapes=np.tile([2, 3], (rows, 1)), ndims=np.full(rows, 2), owner=np.full(rows, -1, np.int32),
        requires_grad=np.zeros(rows, bool),
    )  # fmt: skip
    catalog = Catalog.build(
        tensors, boxes=BoxTable.build(range(rows), [[0, 0]] * rows, [[2, 3]] * rows), file=np.zeros(rows, np.int32),
        byte_offset=5 + 20 * np.arange(rows), byte_length=np.full(rows, 24), sums=[np.zeros(0, np.uint64)],
        files=[StorageFile("pytorch_model.bin", "model", 0, 20 * rows + 9, 0, 0, 0, "", FOREIGN)],
    )  # fmt: skip
    strides = np.where(np.arange(rows)[:, None] % 2, [1, 2], [3, 1])
    return replace(catalog, strides=strides)


@pytest.mark.parametrize("group_bytes", [1, 200, 1 << 22])
def test_the_file_says_what_the_catalog_says(group_bytes: int) -> None:
    catalog = foreign(40)
    with tuned(catalog_group_bytes=group_bytes):
        data = encode(catalog)
    found = decode(data)
    assert_same(found, catalog)
    assert b"bytecheckpoint04" in data and np.array_equal(found.strides, catalog.strides)
    assert decode(encode(replace(catalog, strides=None))).strides is None


@pytest.mark.parametrize(
    ("strides", "why"),
    [([-1, 1], "impossible strides"), ([1 << 62, 1], "impossible strides"), ([4, 1], "another size")],
)
def test_wrong_strides(strides: list[int], why: str) -> None:
    catalog = replace(foreign(), strides=np.tile(strides, (3, 1)))
    assert why in str(catalog_problem(catalog))
    with pytest.raises(CorruptCheckpointError, match=why):
        decode(encode(catalog, check=False))


def test_only_foreign_files_are_used_in_part() -> None:
    catalog = foreign()
    own = replace(catalog, files=(replace(catalog.files[0], format="safetensors"),), strides=None)
    assert "exactly once" in str(catalog_problem(own))
