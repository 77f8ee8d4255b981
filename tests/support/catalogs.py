"""Catalogs of checkpoints, and catalog files that no writer of this package makes: other seals, other footers."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_file import SEAL_BYTES
from bytecheckpoint.storage import resolve

_FOOTER_KEY = b"bytecheckpoint"


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
