"""The catalog as a file: Parquet with one row per stored shard, sealed by a hash (docs/format.md, section 3).

A large catalog is written in groups, of which a reader takes those that it needs (`catalog_groups`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bytecheckpoint.representation.catalog import Catalog, CatalogSummary, StorageFile
from bytecheckpoint.representation.catalog_footer import (
    CATALOG_FORMAT_VERSION,
    FOOTER_KEY,
    SEAL_BYTES,
    TILED,
    check_seal,
    decode_footer,
    encode_footer,
    files_of,
    seal,
)
from bytecheckpoint.representation.catalog_groups import CatalogGroups
from bytecheckpoint.representation.catalog_rows import (
    WRITE_OPTIONS,
    catalog_of_rows,
    decoding,
    open_parquet,
    read_summary,
    read_tensors,
)
from bytecheckpoint.representation.catalog_validation import catalog_problem
from bytecheckpoint.representation.catalog_writer import divide, encode_index, sums_column, table_of, tilings_table

__all__ = ["CATALOG_FORMAT_VERSION", "SEAL_BYTES", "decode", "decode_outline", "decode_summary", "encode"]


def encode(catalog: Catalog, *, check: bool = True) -> bytes:
    """Return the bytes of the catalog's file; equal catalogs give equal bytes.

    Args:
        catalog: the catalog to write.
        check: assert that the catalog is sound. Only tests, which need unsound files, turn this off.
    """
    problem = catalog_problem(catalog) if check else None
    assert problem is None, f"this catalog must not be written: {problem}"
    groups = divide(catalog)
    version = 3 if catalog.tilings is not None else 1 if len(groups) == 1 else 2
    if catalog.is_foreign:
        version = 4
    elif catalog.has_differences:
        version = 6 if version == 3 else 5
    sums = sums_column(catalog)
    tables: Iterator[Any] = (table_of(catalog, group, sums) for group in groups)
    if version in TILED:
        tables = itertools.chain([tilings_table(catalog)], tables)
    places = []
    sink = pa.BufferOutputStream()
    first = next(tables)
    with pq.ParquetWriter(sink, first.schema, **WRITE_OPTIONS) as writer:
        for table in itertools.chain([first], tables):
            places.append(sink.tell())
            writer.write_table(table, row_group_size=max(len(table), 1))
        places.append(sink.tell())
        writer.add_key_value_metadata({FOOTER_KEY: encode_footer(catalog, version)})
    parquet = memoryview(sink.getvalue())
    return seal(parquet, b"" if version == 1 else encode_index(catalog, groups, places, parquet), version)


def decode(data: bytes) -> Catalog:
    """Return the catalog in `data`, the whole content of its file.

    Raises:
        CorruptCheckpointError: a byte was changed, removed or added, or the content contradicts itself.
        IncompatibleCheckpointError: a newer version of the format wrote the file.
    """
    check_seal(data)
    groups = CatalogGroups.find(memoryview(data))
    if groups is not None:
        return groups.catalog()
    with decoding():
        parquet = open_parquet(data)
        footer = decode_footer(parquet)
        table = parquet.read(use_threads=False)
        table.validate(full=True)
        return catalog_of_rows(*read_tensors(table), table, footer)


def decode_summary(data: bytes) -> CatalogSummary:
    """Return the facts of the catalog in `data` for which no rows are needed, in an eighth of the time. Raises as `decode`.

    The seal shows that the bytes are those of the save. Contradictions between rows are not found.
    """
    check_seal(data)
    if CatalogGroups.find(memoryview(data)) is not None:
        return decode(data).summary()
    with decoding():
        parquet = open_parquet(data)
        return read_summary(parquet, decode_footer(parquet))


def decode_outline(data: bytes) -> tuple[list[StorageFile], dict[str, Any]]:
    """Return the table of files and the info of the catalog in `data`, without its rows. Raises as `decode`."""
    check_seal(data)
    with decoding():
        footer = decode_footer(open_parquet(data))
        return files_of(footer), footer.info
