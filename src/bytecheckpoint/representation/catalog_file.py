"""The catalog as a file: Parquet with one row per stored shard, sealed by a hash (docs/format.md, section 3).

A large catalog is written in groups, of which a reader takes those that it needs (`catalog_groups`).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bytecheckpoint.representation.arrow_columns import flat_list_array, number_array
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog import Catalog, StorageFile
from bytecheckpoint.representation.catalog_footer import (
    CATALOG_FORMAT_VERSION,
    FOOTER_KEY,
    SEAL_BYTES,
    check_seal,
    decode_footer,
    encode_footer,
    files_of,
    seal,
)
from bytecheckpoint.representation.catalog_groups import CatalogGroups, divide, encode_index
from bytecheckpoint.representation.catalog_rows import (
    WRITE_OPTIONS,
    catalog_of_rows,
    decoding,
    open_parquet,
    ranges,
    read_tensors,
    sums_of_rows,
    tensor_columns,
)
from bytecheckpoint.representation.catalog_validation import catalog_problem

__all__ = ["CATALOG_FORMAT_VERSION", "SEAL_BYTES", "decode", "decode_outline", "encode"]

_COLUMNS: Final = (
    *("kind", "fqn", "slot", "dtype", "device", "global_shape", "offsets", "lengths", "file", "byte_offset"),
    *("byte_length", "owner", "requires_grad", "sums", "view"),
)


def encode(catalog: Catalog, *, check: bool = True) -> bytes:
    """Return the bytes of the catalog's file; equal catalogs give equal bytes.

    Args:
        catalog: the catalog to write.
        check: assert that the catalog is sound. Only tests, which need unsound files, turn this off.
    """
    problem = catalog_problem(catalog) if check else None
    assert problem is None, f"this catalog must not be written: {problem}"
    first_sum, sum_counts = sums_of_rows(catalog)
    all_sums = np.concatenate([np.zeros(0, np.uint64), *catalog.file_sums])

    def table(rows: Int64s) -> Any:
        columns = tensor_columns(catalog, catalog.boxes.take(rows))
        columns["file"] = number_array(catalog.file[rows], pa.int32())
        columns["byte_offset"] = number_array(catalog.byte_offset[rows], pa.int64())
        columns["byte_length"] = number_array(catalog.byte_length[rows], pa.int64())
        sums = all_sums[ranges(first_sum[rows], sum_counts[rows])]
        columns["sums"] = flat_list_array(number_array(sums, pa.uint64()), sum_counts[rows])
        columns["view"] = pa.nulls(len(rows), pa.string())
        return pa.Table.from_arrays([columns[name] for name in _COLUMNS], names=_COLUMNS)

    groups = divide(catalog)
    places = []
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table(groups[0][:0]).schema, **WRITE_OPTIONS) as writer:
        for rows in groups:
            places.append(sink.tell())
            writer.write_table(table(rows), row_group_size=max(len(rows), 1))
        places.append(sink.tell())
        writer.add_key_value_metadata({FOOTER_KEY: encode_footer(catalog, 1 if len(groups) == 1 else 2)})
    parquet = memoryview(sink.getvalue())
    return seal(parquet, b"" if len(groups) == 1 else encode_index(catalog, groups, places, parquet))


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


def decode_outline(data: bytes) -> tuple[list[StorageFile], dict[str, Any]]:
    """Return the table of files and the info of the catalog in `data`, without its rows. Raises as `decode`."""
    check_seal(data)
    with decoding():
        footer = decode_footer(open_parquet(data))
        return files_of(footer), footer.info
