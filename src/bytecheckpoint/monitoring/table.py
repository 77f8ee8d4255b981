"""The records of all ranks of one operation as one table, which is what sinks, files and analyses work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bytecheckpoint.monitoring.record import LEVELS, ROW, RankRecord

__all__ = ["MESH_AXES", "SCHEMA", "OperationRecord", "operation_record"]

#: Mesh dimensions that have columns of their own.
MESH_AXES = ("dp", "tp", "pp", "cp", "ep")
_TEXT = pa.dictionary(pa.int32(), pa.string())
#: `ROW` with numbers of strings of all ranks.
_WIDE = [(name, "<i4" if name in ("name", "phase", "subject") else ROW[name]) for name in ROW.names or ()]
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
#: Phases that all ranks end at the same moment, because rank 0 tells them: the clocks of machines are compared by them.
_COMMON_ENDS = {"save": "commit", "load": "agree"}


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """What all ranks did in one operation.

    Attributes:
        id: unique among all operations of all jobs.
        kind: "save" or "load".
        path: of the checkpoint, without credentials.
        step: the training step; None where it is not known.
        began: seconds since 1970, by the clock of rank 0's machine.
        world_size: number of ranks.
        missing: ranks that reported nothing in time.
        table: of `SCHEMA`.
    """

    id: str
    kind: str
    path: str
    step: int | None
    began: float
    world_size: int
    missing: tuple[int, ...]
    table: pa.Table


class _Strings:
    """Numbers for strings, in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def column(self, codes: NDArray[Any]) -> pa.Array:
        return pa.DictionaryArray.from_arrays(
            pa.array(codes.astype(np.int32)), pa.array(list(self._numbers), pa.string())
        )


def operation_record(records: Sequence[RankRecord], world_id: str, world_size: int) -> OperationRecord:
    """Join the records of the ranks of one operation.

    Args:
        records: of at least one rank, in any order.
        world_id: of the ranks' collective.
        world_size: number of ranks, those without a record included.
    """
    records = sorted(records, key=lambda record: record.rank)
    first = records[0]
    missing = sorted(set(range(world_size)) - {record.rank for record in records})
    text, hosts, meshes = _Strings(), _Strings(), _Strings()
    begins = _begins(records)
    parts = [_rows(record, begin, text) for record, begin in zip(records, begins, strict=True)]
    if missing:
        lost = np.zeros(len(missing), _WIDE)
        lost["name"], lost["phase"], lost["subject"], lost["failed"] = text("missing"), text(""), text(""), 1
        parts.append(lost)
    rows = np.concatenate(parts)
    ranks = np.array([record.rank for record in records], np.int32)
    counts = np.array([len(part) for part in parts[: len(records)]])
    holders = np.repeat(np.arange(len(records)), counts)
    of_rank = np.concatenate([ranks[holders], np.array(missing, np.int32)])

    def per_row(values: Sequence[int], absent: int) -> NDArray[np.int32]:
        found = np.array(values, np.int32)[holders]
        return np.concatenate([found, np.full(len(missing), absent, np.int32)])

    def constant(value: Any, kind: pa.DataType) -> pa.Array:
        if kind == _TEXT:
            return pa.DictionaryArray.from_arrays(
                pa.array(np.zeros(len(rows), np.int32)), pa.array([value], pa.string())
            )
        return pa.repeat(pa.scalar(value, kind), len(rows))

    identity = f"{world_id}-{first.kind}-{first.number}"
    known = [record for record in records if not record.error] or records
    path = known[0].path
    step = next((record.step for record in known if record.step is not None), None)
    axes = {axis: per_row([record.mesh.get(axis, -1) for record in records], -1) for axis in MESH_AXES}
    columns = {
        "operation": constant(identity, _TEXT),
        "kind": constant(first.kind, _TEXT),
        "path": constant(path, _TEXT),
        "step": constant(step, pa.int64()),
        "began": constant(datetime.fromtimestamp(first.began, UTC), SCHEMA.field("began").type),
        "world_size": constant(world_size, pa.int32()),
        "rank": pa.array(of_rank),
        "host": hosts.column(per_row([hosts(record.host) for record in records], hosts(""))),
        "mesh": meshes.column(per_row([meshes(_mesh_text(record.mesh)) for record in records], meshes(""))),
        **{axis: pa.array(values, mask=values < 0) for axis, values in axes.items()},
        "level": pa.DictionaryArray.from_arrays(pa.array(rows["level"].astype(np.int32)), pa.array(LEVELS)),
        "name": text.column(rows["name"]),
        "phase": text.column(rows["phase"]),
        "subject": text.column(rows["subject"]),
        "failed": pa.array(rows["failed"] != 0),
        **{name: pa.array(rows[name]) for name in ("begin", "seconds", "count", "nbytes")},
    }
    table = pa.table([columns[field.name] for field in SCHEMA], schema=SCHEMA)
    return OperationRecord(identity, first.kind, path, step, first.began, world_size, tuple(missing), table)


def _begins(records: Sequence[RankRecord]) -> list[float]:
    """Return when each rank began, in seconds after the first of `records`.

    The clocks of machines may differ by hours. Ranks hear of the end of the operation at the same time, so this end tells
    by how much.
    """

    def end(record: RankRecord) -> float | None:
        rows = np.frombuffer(record.rows, ROW)
        try:
            name = record.strings.index(_COMMON_ENDS[record.kind])
        except (KeyError, ValueError):
            return None
        ends = rows[(rows["level"] == 1) & (rows["name"] == name)]
        return float(ends["begin"][-1] + ends["seconds"][-1]) if len(ends) and not record.error else None

    reference = end(records[0])
    begins = []
    for record in records:
        own = end(record)
        apart = record.began - records[0].began
        begins.append(apart if own is None or reference is None else reference - own)
    return begins


def _rows(record: RankRecord, begin: float, text: _Strings) -> NDArray[Any]:
    """Return the rows of a rank, with `text`'s numbers, after the row for its part as a whole."""
    numbers = np.array([text(string) for string in record.strings], np.int32)
    own = np.frombuffer(record.rows, ROW)
    rows = np.empty(len(own) + 2, _WIDE)
    for name in ROW.names or ():
        rows[name][2:] = numbers[own[name]] if name in ("name", "phase", "subject") else own[name]
    rows["begin"][2:][own["level"] != LEVELS.index("total")] += begin
    status, empty = text("failed" if record.error else "done"), text("")
    rows[0] = (
        0, bool(record.error), status, text(record.stage), text(record.error),
        begin, record.seconds, record.attempt, record.nbytes,
    )  # fmt: skip
    rows[1] = (LEVELS.index("total"), 0, text("blocking"), empty, empty, 0.0, record.blocking_seconds, 1, 0)
    return rows


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{name}={place}" for name, place in mesh.items())
