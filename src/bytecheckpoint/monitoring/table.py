"""Join the records of all ranks of one operation into a table, for sinks, files and analyses.

Arrays are made from buffers: `pa.array` imports pandas, which takes a second of a training's processor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from bytecheckpoint.monitoring.alert import DATES_END
from bytecheckpoint.monitoring.record import LEVELS, ROW, RankRecord
from bytecheckpoint.representation.arrow_columns import as_numpy, dictionary_array, number_array
from bytecheckpoint.tiers.storage import PREFIX

__all__ = [
    "KINDS",
    "MESH_AXES",
    "MOST_RANKS",
    "NULLABLE",
    "SCHEMA",
    "MetricRows",
    "OperationFacts",
    "OperationRecord",
    "conform",
    "operation_id",
    "operation_record",
    "records_of",
    "run_of_path",
]

#: Mesh dimensions that have columns of their own.
MESH_AXES = ("dp", "tp", "pp", "cp", "ep")
#: Columns in which a value may be unknown.
NULLABLE = {"step", *MESH_AXES}
#: A file with more ranks is damaged.
MOST_RANKS = 1 << 22
#: The kinds of operations.
KINDS = ("save", "load")
_TEXT = pa.dictionary(pa.int32(), pa.string())
#: Columns of `ROW` that hold indices of strings.
_TEXTS = ("name", "phase", "subject")
#: One row per rank, phase, total and span; docs/metrics.md describes the columns.
SCHEMA = pa.schema(
    [
        ("operation", _TEXT),
        ("kind", _TEXT),
        ("path", _TEXT),
        ("step", pa.int64()),
        ("began", pa.timestamp("us", tz="UTC")),
        ("world_size", pa.int32()),
        ("rank", pa.int32()),
        ("host", _TEXT),
        ("mesh", _TEXT),
        *((axis, pa.int32()) for axis in MESH_AXES),
        ("level", _TEXT),
        ("name", _TEXT),
        ("phase", _TEXT),
        ("subject", _TEXT),
        ("failed", pa.bool_()),
        ("begin", pa.float32()),
        ("seconds", pa.float32()),
        ("count", pa.int64()),
        ("nbytes", pa.int64()),
    ],
    metadata={"bytecheckpoint.metrics": "1"},
)
#: Phases that all ranks end at the same moment, by a message of rank 0. They reveal how the clocks of machines differ.
_COMMON_ENDS = {"save": "commit", "load": "agree"}


@dataclass(frozen=True, slots=True)
class OperationFacts:
    """The identity of one save or load.

    Attributes:
        id: unique among all operations of all jobs.
        kind: "save" or "load".
        path: path of the checkpoint, without credentials.
        step: training step; None if unknown.
        began: seconds since 1970, by the clock of rank 0's machine.
        world_size: number of ranks.
        missing: ranks that reported nothing in time.
    """

    id: str
    kind: str
    path: str
    step: int | None
    began: float
    world_size: int
    missing: tuple[int, ...]

    @property
    def name(self) -> str:
        """Kind and step, for people."""
        step = "" if self.step is None else f" of step {self.step}"
        return f"{self.kind}{step}"


@dataclass(frozen=True, slots=True)
class OperationRecord(OperationFacts):
    """The metrics of all ranks for one operation.

    Attributes:
        table: rows of `SCHEMA`.
    """

    table: pa.Table


class MetricRows:
    """The columns of a table of metrics as numpy arrays; text columns as codes of strings.

    Args:
        table: rows of `SCHEMA`, of one operation.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._texts: dict[str, tuple[NDArray[np.int64], list[str]]] = {}

    def numbers(self, name: str) -> NDArray[Any]:
        """Return a column of numbers, with 0 for null."""
        column = self._table.column(name)
        return as_numpy((column.fill_null(0) if column.null_count else column).combine_chunks())

    def known(self, name: str) -> NDArray[np.bool_]:
        """Return a mask of the rows in which a column is not null."""
        values: NDArray[np.bool_] = self._table.column(name).is_valid().to_numpy()
        return values

    def texts(self, name: str) -> tuple[NDArray[np.int64], list[str]]:
        """Return a column of text as codes (-1 for null), and the strings that the codes stand for."""
        if name not in self._texts:
            column = self._table.column(name)
            if not pa.types.is_dictionary(column.type):
                column = column.dictionary_encode()
            joined = column.chunk(0) if column.num_chunks == 1 else column.unify_dictionaries().combine_chunks()
            numbers = joined.indices.fill_null(-1) if joined.indices.null_count else joined.indices
            codes = as_numpy(numbers).astype(np.int64)
            self._texts[name] = codes, joined.dictionary.to_pylist()
        return self._texts[name]

    def where(self, name: str, text: str) -> NDArray[np.bool_]:
        """Return a mask of the rows that have `text` in the column `name`."""
        codes, strings = self.texts(name)
        found: NDArray[np.bool_] = codes == (strings.index(text) if text in strings else -2)
        return found


class _Strings:
    """A table of strings, numbered in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def column(self, codes: NDArray[Any]) -> pa.Array:
        """Return the column with the strings of `codes`."""
        return dictionary_array(codes, self._numbers)


def operation_id(world_id: str, kind: str, number: int) -> str:
    """Return the id of an operation, unique among those of all jobs."""
    return f"{world_id}-{kind}-{number}"


def run_of_path(path: str) -> str:
    """Return the folder of the run of a checkpoint: the folder that holds the checkpoint's folder.

    For a tier it is the folder in the durable storage.
    """
    path = path.removeprefix(PREFIX)
    scheme, separator, rest = path.rpartition("://")
    folder, _, name = rest.rstrip("/").rpartition("/")
    if not name or not folder:
        return path  # a bucket, or the root of a file system
    return f"{scheme}{separator}{folder}"


def operation_record(records: Sequence[RankRecord], world_id: str, world_size: int) -> OperationRecord:
    """Join the records of the ranks of one operation.

    Args:
        records: records of at least one rank, in any order.
        world_id: identifier of the ranks' collective.
        world_size: number of ranks, those without a record included.
    """
    records = sorted(records, key=lambda record: record.rank)
    first = records[0]
    known = [record for record in records if not record.error] or records
    step = next((record.step for record in known if record.step is not None), None)
    missing = sorted(set(range(world_size)) - {record.rank for record in records})
    identity = operation_id(world_id, first.kind, first.number)
    constants = {
        "operation": identity,
        "kind": first.kind,
        "path": known[0].path,
        "step": step,
        "began": int(first.began * 1e6),
        "world_size": world_size,
    }
    table = _table(records, missing, constants)
    return OperationRecord(identity, first.kind, known[0].path, step, first.began, world_size, tuple(missing), table)


def conform(table: pa.Table) -> pa.Table:
    """Return the columns of `SCHEMA` of a table; a later version may have added others.

    Raises:
        KeyError: a column is missing.
        ValueError: a column has another type, or an impossible value.
    """
    columns = []
    for field in SCHEMA:
        if field.name in MESH_AXES and field.name not in table.column_names:
            columns.append(pa.nulls(len(table), field.type))
            continue
        column = table.column(field.name)
        if pa.types.is_dictionary(field.type) and not pa.types.is_dictionary(column.type):
            column = column.cast(pa.string()).dictionary_encode()
        columns.append(column.cast(field.type))
    conform = pa.table(columns, schema=SCHEMA)
    if not len(conform) or any(conform[name].null_count for name in SCHEMA.names if name not in NULLABLE):
        raise ValueError("no rows, or rows without a value")
    rows = MetricRows(conform)
    ranks, sizes, began = rows.numbers("rank"), rows.numbers("world_size"), conform["began"].cast(pa.int64()).to_numpy()
    if ranks.min() < 0 or (ranks >= sizes).any() or sizes.max() > MOST_RANKS:
        raise ValueError("impossible ranks")
    if not all(np.isfinite(rows.numbers(name)).all() for name in ("begin", "seconds")):
        raise ValueError("impossible times")
    if began.min() < 0 or began.max() >= DATES_END * 1_000_000 or not set(rows.texts("kind")[1]) <= set(KINDS):
        raise ValueError("impossible operations")
    return conform


def records_of(table: pa.Table) -> Iterator[OperationRecord]:
    """Iterate over the operations of a table."""
    codes, names = MetricRows(table).texts("operation")
    edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    parts: dict[str, list[pa.Table]] = {}
    for first, last in itertools.pairwise(edges):
        parts.setdefault(names[codes[first]], []).append(table.slice(first, last - first))
    for name, slices in parts.items():
        rows = pa.concat_tables(slices)
        own = MetricRows(rows)
        missing = own.numbers("rank")[own.where("level", "rank") & own.where("name", "missing")]
        first_row = rows.slice(0, 1).to_pylist()[0]
        yield OperationRecord(
            name,
            first_row["kind"],
            first_row["path"],
            first_row["step"],
            first_row["began"].timestamp(),
            first_row["world_size"],
            tuple(sorted(set(missing.tolist()))),
            rows,
        )


def _table(records: Sequence[RankRecord], missing: Sequence[int], constants: Mapping[str, Any]) -> pa.Table:
    """Make the table without a Python loop over rows: rank 0 does this for thousands of ranks beside a training."""
    text, hosts, meshes = _Strings(), _Strings(), _Strings()
    counts = np.array([len(record.rows) for record in records]) // ROW.itemsize
    own = np.frombuffer(b"".join([record.rows for record in records]), ROW)
    holder = np.repeat(np.arange(len(records)), counts)
    begins = _begins(records, own, holder)
    # The codes of each rank's strings, one rank after the other.
    strings = np.array([text(string) for record in records for string in record.strings], np.int32)
    firsts = np.concatenate([[0], np.cumsum([len(record.strings) for record in records])[:-1]])[holder]
    empty, total = text(""), LEVELS.index("total")
    nothing = np.zeros(len(records), np.int32)
    ranks = np.array([record.rank for record in records] + [*missing], np.int32)
    hosts_of = np.array([hosts(record.host) for record in records] + [hosts("")] * len(missing), np.int32)
    meshes_of = np.array(
        [meshes(_mesh_text(record.mesh)) for record in records] + [meshes("")] * len(missing), np.int32
    )

    def joined(name: str, of_rank: ArrayLike, blocking: Any, of_missing: Any) -> NDArray[Any]:
        """Concatenate a column: the ranks' own rows, a row per rank, a row per blocking time, a row per missing rank."""
        rows = strings[firsts + own[name]] if name in _TEXTS else own[name]
        if name == "begin":
            rows = rows + np.where(own["level"] == total, 0.0, begins[holder])
        ends = [np.asarray(of_rank), nothing + blocking, np.full(len(missing), of_missing)]
        return np.concatenate([rows, *(end.astype(rows.dtype) for end in ends)])

    seconds_blocking = np.array([record.blocking_seconds for record in records])
    rows = {
        "level": joined("level", nothing, total, 0),
        "name": joined(
            "name", [text("failed" if r.error else "done") for r in records], text("blocking"), text("missing")
        ),
        "phase": joined("phase", [text(r.stage) for r in records], empty, empty),
        "subject": joined("subject", [text(r.error) for r in records], empty, empty),
        "failed": joined("failed", [bool(r.error) for r in records], 0, 1),
        "begin": joined("begin", begins, 0, 0),
        "seconds": joined("seconds", [r.seconds for r in records], seconds_blocking, 0),
        "count": joined("count", [r.attempt for r in records], 1, 0),
        "nbytes": joined("nbytes", [r.nbytes for r in records], 0, 0),
    }
    of_row = np.concatenate([holder, np.arange(len(records)), np.arange(len(ranks))])
    columns = {name: text.column(rows[name]) for name in _TEXTS}
    columns |= {name: _numbers(name, rows[name]) for name in ("begin", "seconds", "count", "nbytes", "failed")}
    columns["level"] = dictionary_array(rows["level"], LEVELS)
    columns["rank"] = _numbers("rank", ranks[of_row])
    columns["host"], columns["mesh"] = hosts.column(hosts_of[of_row]), meshes.column(meshes_of[of_row])
    for axis in MESH_AXES:
        places = np.array([record.mesh.get(axis, -1) for record in records] + [-1] * len(missing), np.int32)[of_row]
        columns[axis] = _numbers(axis, places, places >= 0)
    for name, value in constants.items():
        if isinstance(value, str):
            columns[name] = dictionary_array(np.zeros(len(of_row), np.int32), [value])
        else:
            known = np.full(len(of_row), value is not None)
            columns[name] = _numbers(name, np.full(len(of_row), value or 0), known)
    return pa.table([columns[field.name] for field in SCHEMA], schema=SCHEMA)


def _numbers(name: str, values: NDArray[Any], known: NDArray[np.bool_] | None = None) -> pa.Array:
    """Return the column of numbers `name`, with null for unknown values."""
    kind = SCHEMA.field(name).type
    letter = "f" if pa.types.is_floating(kind) else "i"
    plain = np.bool_ if pa.types.is_boolean(kind) else np.dtype(f"{letter}{kind.bit_width // 8}")
    column = number_array(values.astype(plain), kind)
    if known is None:
        return column
    validity = pa.py_buffer(np.packbits(known, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [validity, column.buffers()[1]])


def _begins(records: Sequence[RankRecord], rows: NDArray[Any], holder: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the beginning of each rank's operation, in seconds after that of the first record.

    The clocks of machines may differ by hours. All ranks receive the end of the operation at the same time, which shows the
    difference.

    Args:
        records: records of the ranks.
        rows: rows of all records.
        holder: index into `records` of each row's rank.
    """
    begins = np.array([record.began - records[0].began for record in records])
    last = _COMMON_ENDS.get(records[0].kind, "")
    numbers = np.array([r.strings.index(last) if last in r.strings and not r.error else -1 for r in records])
    at = np.flatnonzero((rows["level"] == LEVELS.index("phase")) & (rows["name"] == numbers[holder]))
    ends = np.full(len(records), np.nan)
    ends[holder[at]] = rows["begin"][at] + rows["seconds"][at]  # of several, the last one stays
    return begins if np.isnan(ends[0]) else np.where(np.isnan(ends), begins, ends[0] - ends)


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{name}={place}" for name, place in mesh.items())
