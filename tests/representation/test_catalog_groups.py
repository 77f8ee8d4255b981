"""A large catalog in groups: parts of it are read and verified without the rest, and are what the whole says."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError
from bytecheckpoint.planning.intersect import intersect
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog
from bytecheckpoint.representation.catalog_file import decode, decode_summary, encode
from bytecheckpoint.representation.catalog_footer import LOCATOR_BYTES, SEAL_BYTES, read_locator, seal, tail_start
from bytecheckpoint.representation.catalog_groups import CatalogGroups
from bytecheckpoint.representation.catalog_validation import catalog_problem
from bytecheckpoint.tuning import tuned
from tests.support.catalogs import Spec, assert_same, catalog_of, small, specs
from tests.support.variants import quick


def in_groups(catalog: Catalog) -> bytes:
    """The catalog's file with a group for each file that has rows."""
    with tuned(catalog_group_bytes=1):
        return encode(catalog)


class File:
    """A catalog's file of which the ranges that are read are noted."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.groups: Any = None
        self.read = np.zeros(len(data), bool)

    def read_into(self, offset: int, memory: memoryview) -> None:
        memory[:] = self.data[offset : offset + len(memory)]
        self.read[offset : offset + len(memory)] = True

    def open(self) -> CatalogGroups:
        found = CatalogGroups.open(len(self.data), self.read_into)
        assert found is not None
        self.groups = found
        return found

    def rows(self, numbers: Int64s) -> Catalog:
        for number in np.unique(numbers).tolist():
            self.groups.load(number, self.read_into)
        found: Catalog = self.groups.catalog(numbers)
        return found


def read_in_parts(data: bytes) -> Catalog:
    file = File(data)
    file.groups = CatalogGroups.open(len(data), file.read_into)
    # Another version, it seems, is read whole, and its seal checked.
    return decode(data) if file.groups is None else file.rows(np.unique(file.groups.group))


def sharded(ranks: int = 40, tensors: int = 30) -> Catalog:
    """A catalog as FSDP writes it: each rank's file has a piece of each tensor."""
    spec: Spec = [(("model", f"w{i}", "", -1), "float32", (ranks * 2, 8), [2] * ranks) for i in range(tensors)]
    spec.append((("extra_states", "", VALUES_SLOT, -1), "uint8", (100,), [100]))
    return catalog_of(spec, files=ranks)


@given(specs(), st.integers(1, 4), st.data())
def test_parts_are_what_the_whole_says(tensors: Spec, files: int, data: st.DataObject) -> None:
    catalog = catalog_of(tensors, files, aliases={"a": {"\ud800": "x"}}, info={"a": [1, None, "\ufdd0"]})
    places = np.column_stack([catalog.boxes.tensor, catalog.boxes.offsets])
    assume(len(np.unique(places, axis=0)) == len(places))  # two boxes in one place have no order
    encoded = in_groups(catalog)
    assert encoded == in_groups(catalog)
    assert_same(catalog, decode(encoded))
    assert decode_summary(encoded) == decode(encoded).summary()
    if encode(catalog) == encoded:
        return  # hardly any rows
    file = File(encoded)
    groups = file.open()
    wanted = data.draw(st.lists(st.sampled_from(np.unique(groups.group).tolist()), unique=True))
    part = file.rows(np.array(wanted, np.int64))
    assert part.keys() == catalog.keys() and part.files == catalog.files and part.info == catalog.info
    assert part.files_read is not None
    rows = np.flatnonzero(part.files_read[catalog.file])
    assert set(groups.file[np.isin(groups.group, wanted)]) <= set(np.flatnonzero(part.files_read))
    for name in ("file", "byte_offset", "byte_length"):
        np.testing.assert_array_equal(getattr(part, name), getattr(catalog, name)[rows], name)
    for name in ("tensor", "offsets", "lengths"):
        np.testing.assert_array_equal(getattr(part.boxes, name), getattr(catalog.boxes.take(rows), name), name)
    for number in np.flatnonzero(part.files_read).tolist():
        np.testing.assert_array_equal(part.sums(number), catalog.sums(number))


def test_a_rank_reads_the_groups_of_its_boxes() -> None:
    catalog = sharded()
    file = File(in_groups(catalog))
    groups = file.open()
    assert len(np.unique(groups.group)) == 40 + 1  # with that of the values
    before = int(file.read.sum())
    boxes = BoxTable.build(range(30), [[13, 0]] * 30, [[4, 8]] * 30)  # of ranks 6, 7 and 8
    found = np.unique(groups.group[intersect(groups.hulls, boxes).left])
    assert len(found) == 3
    part = file.rows(found)
    assert len(part.boxes) <= 3 * 31
    assert int(file.read.sum()) - before < len(file.data) / 10
    assert len(intersect(part.boxes, boxes)) == len(intersect(catalog.boxes, boxes)) == 3 * 30
    file.rows(np.append(found, groups.value_groups))
    with pytest.raises(AssertionError, match="not read"):
        part.sums(0)


def test_plain_values_have_groups_of_their_own() -> None:
    spec: Spec = [(("model", "w", "", -1), "float32", (40, 2), [10] * 4)]
    spec += [(("extra_states", "", VALUES_SLOT, rank), "uint8", (8,), [8]) for rank in range(4)]
    catalog = catalog_of(spec, files=8)
    with tuned(catalog_group_bytes=100):
        groups = File(encode(catalog)).open()
    tensors = groups.hulls.tensor[np.isin(groups.group, groups.value_groups)]
    assert sorted(tensors.tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("first", quick(range(7), every=7))
def test_every_changed_byte_is_noticed_by_those_who_read_it(first: int) -> None:
    data = in_groups(small())
    for place in range(first, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CorruptCheckpointError, match="cannot be trusted"):
            decode(bytes(damaged))
    # What a reader of parts does not need: the first magic, and the hash over the whole file.
    seal_at = tail_start(memoryview(data), len(data)) + LOCATOR_BYTES
    ignored = {*range(4), *range(seal_at + 16, seal_at + SEAL_BYTES)}
    for place in sorted({*range(first, len(data), 7)} - ignored):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CorruptCheckpointError, match="cannot be trusted"):
            read_in_parts(bytes(damaged))


def test_a_damaged_group_hurts_only_those_who_read_it() -> None:
    data = bytearray(in_groups(sharded()))
    whole = File(bytes(data)).open()
    data[whole._contents.places.offsets[5] + 20] ^= 1
    file = File(bytes(data))
    groups = file.open()
    for number in np.unique(groups.group).tolist():
        if number == 5:
            with pytest.raises(CorruptCheckpointError, match="row group 5 do not match their hash"):
                file.rows(np.array([4, 5]))
        else:
            assert len(file.rows(np.array([number])).boxes)


def test_small_catalogs_have_no_groups() -> None:
    data = encode(small())
    assert CatalogGroups.open(len(data), File(data).read_into) is None
    assert CatalogGroups.find(memoryview(data)) is None


def parts_of(data: bytes) -> Sequence[bytes]:
    """The pages, the index and the footer of a catalog in groups."""
    end = memoryview(data)
    (length,) = struct.unpack("<I", end[-8:-4])
    located = read_locator(end[tail_start(end, len(data)) :])
    assert located is not None
    offset, size, _ = located
    return data[:offset], data[offset : offset + size], data[-8 - length :]


@given(st.data())
def test_hostile_bytes_under_right_hashes_raise_only_our_errors(data: st.DataObject) -> None:
    pages, index, footer = parts_of(in_groups(small()))
    content = bytearray(pages + index)
    for _ in range(data.draw(st.integers(1, 3))):
        at, changed = data.draw(st.integers(0, len(content) - 1)), data.draw(st.binary(min_size=1, max_size=100))
        content[at : at + len(changed)] = changed[: len(content) - at]
    sealed = seal(memoryview(bytes(content[: len(pages)]) + footer), bytes(content[len(pages) :]))
    try:
        catalog = decode(sealed)
    except CheckpointError:
        return
    assert catalog_problem(catalog) is None
