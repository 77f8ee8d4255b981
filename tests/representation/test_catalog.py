from __future__ import annotations

import contextlib
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_file import decode, decode_summary, encode
from bytecheckpoint.representation.catalog_validation import catalog_problem
from bytecheckpoint.representation.names import new_generation
from bytecheckpoint.representation.shards import TensorKey
from tests.support.catalogs import (
    ANY_TEXT,
    GENERATION,
    Spec,
    assert_same,
    catalog_of,
    resealed,
    small,
    specs,
    with_footer,
)
from tests.support.processes import run_program


@given(specs(), st.integers(1, 4))
def test_catalogs_round_trip(tensors: Spec, files: int) -> None:
    catalog = catalog_of(tensors, files, aliases={"a": {"\ud800": "x"}}, info={"a": [1, None, "\ufdd0"]})
    data = encode(catalog)
    assert data == encode(catalog)
    again = decode(data)
    assert_same(catalog, again)
    assert encode(again) == data
    assert decode_summary(data) == again.summary() and again.summary().states == again.states()
    assert again.keys() == [TensorKey(*key[:3]) for key, *_ in tensors]


@given(specs(), st.lists(st.tuples(ANY_TEXT, ANY_TEXT, ANY_TEXT), max_size=5), st.integers(-2, 3))
def test_find_agrees_with_a_dictionary(tensors: Spec, others: list[tuple[str, str, str]], owner: int) -> None:
    catalog = decode(encode(catalog_of(tensors)))
    place = {key: i for i, (key, *_) in enumerate(tensors)}
    wanted = [TensorKey(*key[:3]) for key in place] + [TensorKey(*key) for key in others]
    assert catalog.find(wanted, owner).tolist() == [place.get((*key, owner), -1) for key in wanted]


def test_find_resolves_aliases_and_owners() -> None:
    catalog = small()
    keys = [
        TensorKey("model", "head"),
        TensorKey("optimizer", "head", "step"),
        TensorKey("optimizer", "head", "exp_avg"),
        TensorKey("extra_states", "rng"),
        TensorKey("model", "layers.0.weight"),
        TensorKey("nothing", "head"),
    ]
    assert catalog.find(keys).tolist() == [1, 2, -1, -1, 0, -1]
    assert catalog.find(keys, owner=1).tolist() == [-1, -1, -1, 4, -1, -1]
    assert catalog.find([]).shape == (0,)
    assert catalog_of([]).find(keys).tolist() == [-1] * 6


def test_accessors() -> None:
    catalog = small()
    assert catalog.count == 6 and catalog.states() == ["model", "optimizer", "extra_states"]
    assert catalog.of_state("extra_states").tolist() == [3, 4, 5] and catalog.of_state("x").tolist() == []
    assert catalog.fqns("extra_states") == ["rng"] and catalog.fqns("model") == ["layers.0.weight", "embed"]
    assert catalog.key(2) == TensorKey("optimizer", "embed", "step") and catalog.shape(2) == ()
    assert catalog.shape(0) == (100, 64) and catalog.dtype[1] == "bfloat16"
    assert catalog.boxes.tensor.tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert catalog.boxes.offsets[:3, 0].tolist() == [0, 30, 60]


def test_the_next_save_changes_only_the_files() -> None:
    catalog = small()
    later = new_generation("test", 1)
    files = [replace(f, name=f.name.replace(GENERATION, later), generation=later) for f in catalog.files]
    new = catalog.with_files(files, [sums + np.uint64(1) for sums in catalog.file_sums])
    again = decode(encode(new))
    assert_same(new, again)
    assert again.files[0].generation == later and again.sums(0)[0] == catalog.sums(0)[0] + np.uint64(1)


def test_rows_carry_the_sums_of_the_blocks_that_begin_in_them(tmp_path: Path) -> None:
    import duckdb

    catalog = small()
    path = tmp_path / "metadata.parquet"
    path.write_bytes(encode(catalog))
    rows = duckdb.sql(f"select * from '{path}' order by file, byte_offset, byte_length").fetchall()
    columns = duckdb.sql(f"select * from '{path}'").columns
    assert len(rows) == len(catalog.boxes)
    for number in range(2):
        mine = [dict(zip(columns, row, strict=True)) for row in rows if row[columns.index("file")] == number]
        assert [x for row in mine for x in row["sums"]] == catalog.sums(number).tolist()
        for row in mine:
            begin = row["byte_offset"] - 4096
            block = range(-(-begin // 4096), -(-(begin + row["byte_length"]) // 4096))
            assert row["sums"] == [int(catalog.sums(number)[b]) for b in block]


def test_pandas_and_duckdb_read_it_without_this_package(tmp_path: Path) -> None:
    import duckdb
    import pandas as pd

    path = tmp_path / "metadata.parquet"
    path.write_bytes(encode(small()))
    frame = pd.read_parquet(path)
    assert frame["fqn"][0] == "layers.0.weight" and frame["global_shape"][0].tolist() == [100, 64]
    assert frame["offsets"][2].tolist() == [60, 0] and frame["lengths"][2].tolist() == [40, 64]
    assert frame["owner"].tolist() == [-1] * 5 + [0, 1, -1] and frame["view"].isna().all()
    query = f"select sum(byte_length), count(distinct kind) from '{path}' where kind != 'optimizer'"
    assert duckdb.sql(query).fetchall() == [(100 * 64 * 4 + 5000 + 16 + 4097, 2)]


def test_every_changed_byte_is_noticed() -> None:
    data = encode(small())
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CorruptCheckpointError, match="cannot be trusted"):
            decode(bytes(damaged))


def test_every_cut_and_addition_is_noticed() -> None:
    data = encode(small())
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            decode(data[:length])
    for damaged in (data + b"\0", data + data, b"\0" + data, data[:99] + data[100:], data[:99] + b"x" + data[99:]):
        with pytest.raises(CorruptCheckpointError):
            decode(damaged)


@given(st.binary(max_size=200))
def test_noise_is_not_a_catalog(noise: bytes) -> None:
    for data in (noise, b"PAR1" + noise, b"PAR1" + noise + b"PAR1", b"PAR1" + noise + struct.pack("<I", 1) + b"PAR1"):
        with pytest.raises(CorruptCheckpointError):
            decode(data)


def test_other_parquet_files_are_not_catalogs(tmp_path: Path) -> None:
    import pandas as pd

    path = tmp_path / "x.parquet"
    pd.DataFrame({"a": range(1000)}).to_parquet(path)
    with pytest.raises(CorruptCheckpointError, match="without a catalog's seal"):
        decode(path.read_bytes())
    with pytest.raises(CorruptCheckpointError, match="not a catalog"):
        decode(b"hello")


def test_newer_formats_are_refused_with_both_versions() -> None:
    data = encode(small())
    assert resealed(data) == data
    with pytest.raises(IncompatibleCheckpointError, match="version 07, this package reads up to 6"):
        decode(resealed(data, b"bytecheckpoint07"))
    assert_same(decode(with_footer(data, lambda footer: None)), small())
    with pytest.raises(IncompatibleCheckpointError, match="version 7, this package reads up to 6"):
        decode(with_footer(data, lambda footer: footer.update(version=7)))


def broken(**changes: Any) -> Catalog:
    return replace(small(), **changes)


def file_changed(**changes: Any) -> Catalog:
    catalog = small()
    return replace(catalog, files=(replace(catalog.files[0], **changes), *catalog.files[1:]))


def box_changed(offset: int = 0, length: int = 0) -> Catalog:
    boxes = small().boxes
    offsets, lengths = boxes.offsets.copy(), boxes.lengths.copy()
    offsets[2, 0] += offset
    lengths[2, 0] += length
    return broken(boxes=BoxTable(boxes.tensor, offsets, lengths))


BROKEN = {
    "lists a file twice": lambda: file_changed(name=small().files[1].name),
    "does not stay inside": lambda: file_changed(name="../secret"),
    "cannot have generation": lambda: file_changed(generation="x"),
    "cannot have blocks": lambda: file_changed(block_bytes=4095),
    "blocks and": lambda: file_changed(block_bytes=8192),
    "cannot have 10 bytes": lambda: file_changed(size=10, block_bytes=0),
    "do not cover": lambda: file_changed(size=small().files[0].size + 1),
    "lie outside file": lambda: broken(byte_offset=small().byte_offset + 1),
    "not listed": lambda: broken(file=small().file + np.int32(1)),
    "outside its shape": lambda: box_changed(offset=1),
    "another size": lambda: box_changed(length=-1),
    "twice": lambda: broken(fqn=with_duplicate_name(small())),
    "do not match": lambda: broken(ndims=small().ndims[:-1]),
    "not in order": lambda: box_changed(offset=-31),
    "impossible owner": lambda: broken(owner=small().owner - np.int32(1)),
    "negative": lambda: broken(shapes=-small().shapes),
}


def with_duplicate_name(catalog: Catalog) -> Any:
    names = catalog.fqn.to_list()
    names[1] = names[0]
    return type(catalog.fqn).of(names)


@pytest.mark.parametrize("what", BROKEN)
def test_faults_of_buggy_and_hostile_writers_are_found(what: str) -> None:
    catalog = BROKEN[what]()
    assert what in (catalog_problem(catalog) or "")
    with pytest.raises(AssertionError, match="must not be written"):
        encode(catalog)
    try:
        data = encode(catalog, check=False)
    except (ValueError, IndexError):
        return  # cannot even be written
    if what == "blocks and":
        return  # the rows then hold as many as there are blocks
    with pytest.raises(CorruptCheckpointError):
        decode(data)


@given(st.data())
def test_hostile_bytes_under_a_right_seal_raise_only_our_errors(data: st.DataObject) -> None:
    content = bytearray(encode(small()))
    for _ in range(data.draw(st.integers(1, 3))):
        at, changed = data.draw(st.integers(0, len(content) - 9)), data.draw(st.binary(min_size=1, max_size=300))
        content[at : at + len(changed)] = changed
    with contextlib.suppress(CheckpointError):
        decode_summary(resealed(bytes(content)))
    try:
        catalog = decode(resealed(bytes(content)))
    except CheckpointError:
        return
    assert catalog_problem(catalog) is None


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {"count": 10**15}},
        {"files": {"header_sum": "f" * 17}},
        {"files": {"size": -1}},
        {"files": {"rank": [0]}},
        {"sums": {"0": "00"}},
        {"aliases": {"model": 3}},
        {"version": None},
        {"info": []},
    ],
)
def test_hostile_footers_are_corrupt(change: dict[str, Any]) -> None:
    def apply(footer: dict[str, Any]) -> None:
        for name, value in change.items():
            footer[name] = {**footer[name], **value} if name == "files" and value else value

    with pytest.raises(CorruptCheckpointError):
        decode(with_footer(encode(small()), apply))


def test_a_file_elsewhere_may_be_used_in_part() -> None:
    catalog = small()
    first = replace(catalog.files[0], name="s3://bucket/old/x.safetensors", size=catalog.files[0].size + 9000)
    sums = (np.arange(first.blocks, dtype=np.uint64), *catalog.file_sums[1:])
    adopted = replace(catalog, files=(first, *catalog.files[1:]), file_sums=sums)
    assert_same(adopted, decode(encode(adopted)))
    unsummed = replace(first, block_bytes=0, generation="")
    bare = replace(catalog, files=(unsummed, *catalog.files[1:]), file_sums=(sums[0][:0], *catalog.file_sums[1:]))
    assert_same(bare, decode(encode(bare)))


def test_unknown_dtypes_are_incompatible() -> None:
    data = encode(replace(small(), dtype=type(small().dtype).of(["float7"] * 6)), check=False)
    with pytest.raises(IncompatibleCheckpointError, match="float7"):
        decode(data)


def test_writing_and_reading_starts_no_threads_and_imports_neither_torch_nor_pandas() -> None:
    program = """
import os, sys
sys.argv[0] = "bytecheckpoint"  # as in our own programs
import bytecheckpoint.representation.catalog_file as cf
import bytecheckpoint.representation.header_reader, bytecheckpoint.representation.header_writer
from bytecheckpoint.representation.catalog import Catalog, TensorTable, StorageFile
from bytecheckpoint.representation.boxes import BoxTable
import numpy as np
before = len(os.listdir("/proc/self/task"))
none, one = np.zeros(0, np.int64), np.ones(1, np.int64)
for rows, column in ((0, none), (1, one)):
    tensors = TensorTable.of(states=["k"] * rows, fqns=["f"] * rows, slots=[""] * rows, dtypes=["bool"] * rows,
        shapes=np.ones((rows, 1), np.int64), ndims=column, owner=column.astype(np.int32), requires_grad=column.astype(bool))
    catalog = Catalog.build(tensors, boxes=BoxTable.build([0] * rows, [[0]] * rows, [[1]] * rows),
        file=0 * column.astype(np.int32), byte_offset=column * 0, byte_length=column,
        files=[StorageFile("f", "k", 0, 1, 0, 0, 65536, "")] * rows, sums=[np.ones(1, np.uint64)] * rows)
    assert cf.decode(cf.encode(catalog)).count == rows
print("torch" in sys.modules, "pandas" in sys.modules, len(os.listdir("/proc/self/task")) - before)
"""
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    done = run_program(program, fresh=True)
    assert done.stdout.split() == ["False", "False", "0"], done.stderr
