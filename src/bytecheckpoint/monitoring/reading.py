"""Read the metrics that stand beside a run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from bytecheckpoint.monitoring.analysis.rows import Rows
from bytecheckpoint.monitoring.sinks.files import METRICS_FOLDER, decode_table
from bytecheckpoint.monitoring.table import MESH_AXES, SCHEMA, OperationRecord
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.threads import parallel_map
from bytecheckpoint.storage.time_limits import with_time_limits

__all__ = ["RunMetrics", "read_run", "records_of"]

_JOINED = "joined-"
_SUFFIX = ".parquet"
#: How often files are looked for that somebody joins while they are read.
_LISTINGS = 3
#: Larger worlds are a damaged file.
_MOST_RANKS = 1 << 22


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """The metrics of a run.

    Attributes:
        records: of saves and loads, in order of time, each once.
        skipped: damaged or foreign files.
    """

    records: list[OperationRecord]
    skipped: int


def read_run(root: str, newest: int | None = None) -> RunMetrics:
    """Read the metrics of a run.

    Args:
        root: folder or URL of the run, which holds the folders of its checkpoints.
        newest: so many operations are enough, the newest ones; None: all.

    Raises:
        StorageError: the storage does not answer.
    """
    folder = with_time_limits(resolve(f"{root.rstrip('/')}/{METRICS_FOLDER}"))
    records: dict[str, OperationRecord] = {}
    seen: set[str] = set()
    skipped = 0
    for _ in range(_LISTINGS):
        names = [name for name in _wanted(folder, newest) if name not in seen]
        seen.update(names)
        gone = False
        for table in parallel_map(
            lambda name: _read(folder, name), names, folder.parallel_reads, "bytecheckpoint-metrics"
        ):
            gone |= table is None
            skipped += table is False
            for record in records_of(table) if isinstance(table, pa.Table) else ():
                records.setdefault(record.id, record)
        if not gone:
            break
    found = sorted(records.values(), key=lambda record: record.began)
    return RunMetrics(found if newest is None else found[max(len(found) - newest, 0) :], skipped)


def _wanted(folder: Storage, newest: int | None) -> list[str]:
    """Return the names of files with the newest operations. Names begin with the time of their first operation."""
    names = sorted((name for name, _ in folder.list() if name.endswith(_SUFFIX)), reverse=True)
    if newest is None:
        return names
    joined = [name for name in names if name.startswith(_JOINED)]
    # A joined file holds many operations; of jobs that ran side by side, the times of two may overlap.
    return [name for name in names if not name.startswith(_JOINED)][:newest] + joined[: newest // 64 + 2]


def _read(folder: Storage, name: str) -> pa.Table | bool | None:
    """Return the table of a file; False if it is damaged or foreign, None if it is gone."""
    try:
        return _conform(decode_table(folder.read(name)))
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return False


def _conform(table: pa.Table) -> pa.Table:
    """Return a table of `SCHEMA`, whatever columns a later version has added.

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
    rank, size = table.column("rank"), table.column("world_size")
    if not len(table) or rank.null_count or size.null_count or table.column("operation").null_count:
        raise ValueError("no rows, or rows without a rank")
    ranks, sizes = rank.to_numpy(), size.to_numpy()
    if ranks.min() < 0 or (ranks >= sizes).any() or sizes.max() > _MOST_RANKS:
        raise ValueError("impossible ranks")
    return pa.table(columns, schema=SCHEMA)


def records_of(table: pa.Table) -> Iterator[OperationRecord]:
    """Iterate over the operations of a table."""
    codes, names = Rows(table).texts("operation")
    edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    parts: dict[str, list[pa.Table]] = {}
    for first, last in itertools.pairwise(edges):
        parts.setdefault(names[codes[first]], []).append(table.slice(first, last - first))
    for name, slices in parts.items():
        rows = pa.concat_tables(slices)
        own = Rows(rows)
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
