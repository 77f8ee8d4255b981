"""Catalogs of checkpoints, and catalog files that no writer of this package makes: other seals, other footers."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from hypothesis import strategies as st

from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog, StorageFile, TensorTable
from bytecheckpoint.representation.catalog_file import SEAL_BYTES
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.names import new_generation, storage_file_name
from bytecheckpoint.storage import resolve

_FOOTER_KEY = b"bytecheckpoint"
GENERATION = new_generation("test", 0)
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=6)
Spec = list[tuple[tuple[str, str, str, int], str, tuple[int, ...], list[int]]]


def catalog_at(path: str | os.PathLike[str]) -> Catalog:
    """Read the catalog of the checkpoint at `path`."""
    return read_catalog(resolve(path))[0]


def resealed(data: bytes, magic: bytes | None = None) -> bytes:
    """Return the catalog file with a valid seal again, with another magic if one is given."""
    at = _end_of_pages(data) - SEAL_BYTES
    return _joined(data[:at], magic or data[at : at + 16], data[at + SEAL_BYTES :])


def with_footer(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return the catalog file with the footer's JSON object changed in place by `change`, validly sealed."""
    parquet = pq.ParquetFile(pa.BufferReader(data))
    footer = json.loads(parquet.metadata.metadata[_FOOTER_KEY])
    change(footer)
    sink = pa.BufferOutputStream()
    table = parquet.read()
    with pq.ParquetWriter(sink, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_FOOTER_KEY: json.dumps(footer).encode()})
    changed = sink.getvalue().to_pybytes()
    end = _end_of_pages(changed)
    return _joined(changed[:end], b"bytecheckpoint01", changed[end:])


def _end_of_pages(data: bytes) -> int:
    (footer_length,) = struct.unpack("<I", data[-8:-4])
    return len(data) - 8 - int(footer_length)


def _joined(pages: bytes, magic: bytes, footer: bytes) -> bytes:
    return pages + magic + xxhash.xxh3_128_digest(pages + magic + footer) + footer


def catalog_of(tensors: Spec, files: int = 2, block: int = 4096, **columns: Any) -> Catalog:
    """A catalog of tensors cut along their first dimension; the pieces are dealt to the files in turn.

    Values are in a further file for each of their states.

    Args:
        tensors: ((state, fqn, slot, owner), dtype, shape, lengths of the pieces along the first dimension).
    """
    number: list[int] = []
    offsets: list[tuple[int, ...]] = []
    lengths: list[tuple[int, ...]] = []
    for i, (_, _, shape, cuts) in enumerate(tensors):
        begin = 0
        for cut in cuts or [0]:
            number.append(i)
            offsets.append((begin, *(0 for _ in shape[1:])) if shape else ())
            lengths.append((cut, *shape[1:]) if shape else ())
            begin += cut
    states = ["model"] * files + sorted({t[0][0] for t in tensors if t[0][2] == VALUES_SLOT})
    file = np.arange(len(number), dtype=np.int32) % files
    for place, i in enumerate(number):
        if tensors[i][0][2] == VALUES_SLOT:
            file[place] = states.index(tensors[i][0][0], files)
    sizes = [math.prod(n) * itemsize(tensors[i][1]) for i, n in zip(number, lengths, strict=True)]
    ends = [4096] * len(states)
    byte_offset = []
    for f, size in zip(file.tolist(), sizes, strict=True):
        byte_offset.append(ends[f])
        ends[f] += size
    table = [
        StorageFile(storage_file_name(state, i, GENERATION), state, i, end, 4096, i + 2**63, block, GENERATION)
        for i, (state, end) in enumerate(zip(states, ends, strict=True))
    ]
    shapes = BoxTable.build(range(len(tensors)), [t[2] for t in tensors], [t[2] for t in tensors])
    shuffled = np.random.default_rng(len(number)).permutation(len(number))
    return Catalog.build(
        TensorTable.of(
            states=[t[0][0] for t in tensors],
            fqns=[t[0][1] for t in tensors],
            slots=[t[0][2] for t in tensors],
            owner=np.array([t[0][3] for t in tensors], np.int32),
            dtypes=[t[1] for t in tensors],
            shapes=shapes.lengths,
            ndims=np.array([len(t[2]) for t in tensors], np.int64),
            requires_grad=np.arange(len(tensors)) % 2 == 0,
            devices=["cpu" if i % 3 else "cuda" for i in range(len(tensors))],
        ),
        boxes=BoxTable.build(number, offsets, lengths).take(shuffled),
        file=file[shuffled],
        byte_offset=np.array(byte_offset, np.int64)[shuffled],
        byte_length=np.array(sizes, np.int64)[shuffled],
        files=table,
        sums=[np.random.default_rng(i).integers(0, 2**64, f.blocks, np.uint64) for i, f in enumerate(table)],
        **columns,
    )


def small() -> Catalog:
    return catalog_of(
        [
            (("model", "layers.0.weight", "", -1), "float32", (100, 64), [30, 30, 40]),
            (("model", "embed", "", -1), "bfloat16", (0, 5), []),
            (("optimizer", "embed", "step", -1), "float32", (), []),
            (("extra_states", "rng", "", 0), "uint8", (5000,), [5000]),
            (("extra_states", "rng", "", 1), "uint8", (16,), [16]),
            (("extra_states", "", VALUES_SLOT, -1), "uint8", (4097,), [4097]),
        ],
        aliases={"model": {"head": "embed"}, "optimizer": {"head": "embed"}},
        info={"world_size": 2, "versions": {"torch": "2.13"}, "odd": "\ud800"},
    )


def assert_same(a: Catalog, b: Catalog) -> None:
    assert a.keys() == b.keys() and a.files == b.files and a.aliases == b.aliases and a.info == b.info
    assert [a.shape(i) for i in range(a.count)] == [b.shape(i) for i in range(b.count)]
    assert a.dtype.to_list() == b.dtype.to_list() and a.device.to_list() == b.device.to_list()
    for name in ("owner", "requires_grad", "ndims", "shapes", "file", "byte_offset", "byte_length"):
        one, other = getattr(a, name), getattr(b, name)
        np.testing.assert_array_equal(one, other, name)
        assert one.dtype == other.dtype, name
    for name in ("tensor", "offsets", "lengths"):
        np.testing.assert_array_equal(getattr(a.boxes, name), getattr(b.boxes, name), name)
    for i in range(len(a.files)):
        np.testing.assert_array_equal(a.sums(i), b.sums(i))


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    keys = draw(st.lists(st.tuples(ANY_TEXT, ANY_TEXT, ANY_TEXT, st.integers(-1, 2)), unique=True, max_size=8))
    result: Spec = []
    for key in keys:
        cuts = draw(st.lists(st.integers(0, 700), max_size=4))
        rest = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        shape = (sum(cuts), *rest) if cuts else draw(st.sampled_from([(), (0,), (0, 3)]))
        result.append((key, draw(st.sampled_from(["float32", "bool", "complex128", "float4_e2m1fn_x2"])), shape, cuts))
    return result
