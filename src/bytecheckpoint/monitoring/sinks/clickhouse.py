"""Insert metrics as rows of a table in ClickHouse, over its HTTP interface, as in section 5.3 of the paper."""

from __future__ import annotations

import gzip
import http.client
import os
import re
from urllib.parse import parse_qs, quote, unquote

import pyarrow as pa
import pyarrow.compute as pc

from bytecheckpoint.errors import UsageError
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.sinks.base import Sink, split_address
from bytecheckpoint.monitoring.table import NULLABLE, SCHEMA, OperationRecord

__all__ = ["ClickHouseSink", "create_statement", "insert_statement", "tab_separated"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Seconds that one step of a request may take.
_TIMEOUT = 5.0
_UNKNOWN_TABLE = re.compile(rb"Code: 60\b")
_ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"))


class ClickHouseSink(Sink):
    """Inserts the rows of `SCHEMA`, one request per operation; creates the table if it is absent.

    The user and the password are those of the address, else CLICKHOUSE_USER and CLICKHOUSE_PASSWORD of the environment.

    Args:
        address: clickhouse://host:8123/database?table=name; clickhouses:// for HTTPS.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        parts = split_address(address)
        self._secure = parts.scheme == "clickhouses"
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or (8443 if self._secure else 8123)
        database, table = parts.path.strip("/") or "default", parse_qs(parts.query).get("table", ["bytecheckpoint"])[0]
        if not (_NAME.fullmatch(database) and _NAME.fullmatch(table)):
            raise UsageError(f"setting metrics: give {parts.scheme}://host:port/database?table=name, with plain names")
        self._table = f"{database}.{table}"
        user = unquote(parts.username or "") or os.environ.get("CLICKHOUSE_USER", "")
        password = unquote(parts.password or "") or os.environ.get("CLICKHOUSE_PASSWORD", "")
        given = {"X-ClickHouse-User": user, "X-ClickHouse-Key": password}
        self._headers = {name: value for name, value in given.items() if value}

    def deliver(self, record: OperationRecord, summary: OperationSummary) -> None:
        """Insert the rows of an operation."""
        rows = gzip.compress(tab_separated(record.table), 1)
        try:
            self._ask(insert_statement(self._table), rows)
        except _UnknownTableError:
            self._ask(create_statement(self._table))
            self._ask(insert_statement(self._table), rows)

    def _ask(self, statement: str, data: bytes = b"") -> None:
        """Send a statement, with gzipped data to insert. Never sends it twice, which could count an operation twice."""
        connect = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=_TIMEOUT)
        headers = self._headers | ({"Content-Encoding": "gzip"} if data else {})
        try:
            connection.request("POST", f"/?query={quote(statement)}", data, headers)
            response = connection.getresponse()
            answer = response.read(1000)
        finally:
            connection.close()
        if _UNKNOWN_TABLE.search(answer) and response.status != http.client.OK:
            raise _UnknownTableError
        if response.status != http.client.OK:
            raise RuntimeError(f"HTTP status {response.status}: {answer.decode(errors='replace').strip()}")


class _UnknownTableError(Exception):
    """The table is absent."""


def create_statement(table: str) -> str:
    """Return the SQL that creates a table, in the dialect of all versions since 18."""
    columns = ", ".join(f"`{field.name}` {_type(field)}" for field in SCHEMA)
    order = "kind, level, began, operation, rank"
    return (
        f"CREATE TABLE IF NOT EXISTS {table} ({columns}) "
        f"ENGINE = MergeTree PARTITION BY toYYYYMM(began) ORDER BY ({order})"
    )


def insert_statement(table: str) -> str:
    """Return the SQL that inserts rows of `tab_separated`."""
    return f"INSERT INTO {table} ({', '.join(f'`{name}`' for name in SCHEMA.names)}) FORMAT TabSeparated"


def _type(field: pa.Field) -> str:
    kind = field.type
    if pa.types.is_dictionary(kind):
        return "String"
    if pa.types.is_timestamp(kind):
        return "DateTime"
    if pa.types.is_boolean(kind):
        return "UInt8"
    plain = f"{'Float' if pa.types.is_floating(kind) else 'Int'}{kind.bit_width}"
    return f"Nullable({plain})" if field.name in NULLABLE else plain


def tab_separated(table: pa.Table) -> bytes:
    """Return rows of `SCHEMA` as text. It works by columns, as a large job has a hundred thousand rows."""
    lines = pc.binary_join_element_wise(*[_text(column.combine_chunks()) for column in table.columns], "\t")
    return bytes(pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "\n")[0].as_buffer())


def _text(column: pa.Array) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    if pa.types.is_dictionary(column.type):
        values = column.dictionary
        for plain, escaped in _ESCAPES:
            values = pc.replace_substring(values, plain, escaped)
        return values.take(column.indices)
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("s", "UTC"), safe=False).cast(pa.int64())
    elif pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return pc.fill_null(column.cast(pa.string()), "\\N")
