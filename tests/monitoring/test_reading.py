"""Files of metrics: in any storage, joined, damaged, foreign, or of a later version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from bytecheckpoint.errors import StorageError, StorageUnavailableError
from bytecheckpoint.monitoring import reading
from bytecheckpoint.monitoring.analysis.summary import summarize
from bytecheckpoint.monitoring.reading import RunReader, read_run
from bytecheckpoint.monitoring.simulation import Fault, SimulatedRun
from bytecheckpoint.monitoring.sinks import files
from bytecheckpoint.monitoring.sinks.files import METRICS_FOLDER, decode_table, encode_table
from bytecheckpoint.monitoring.table import OperationRecord
from bytecheckpoint.storage import resolve
from tests.support.metrics_runs import write_metrics

RECORDS = list(SimulatedRun({"dp": 2}, saves=5, loads=1).records())


def put(root: str, name: str, data: bytes) -> None:
    """Write one file of metrics."""
    resolve(f"{root}/{METRICS_FOLDER}").publish(name, data)


@pytest.mark.parametrize("scheme", ["", "mem://"])
def test_each_operation_once_in_order(tmp_path: Path, scheme: str) -> None:
    root = f"{scheme}{tmp_path.name if scheme else tmp_path}"
    for number in (5, 3, 4):
        put(root, f"{number}.parquet", encode_table(RECORDS[number].table))
    put(root, "joined-0.parquet", encode_table(pa.concat_tables([record.table for record in RECORDS[:4]])))
    put(root, "live-x.json", b"{}")
    run = read_run(root)
    assert [record.id for record in run.records] == [record.id for record in RECORDS] and not run.skipped
    assert run.operations == [summarize(record) for record in RECORDS]
    reader = RunReader(root, newest=2)
    for _ in range(2):
        assert [record.id for record in reader.read().records] == [record.id for record in RECORDS[-2:]]


def bad_summaries(record: OperationRecord) -> list[bytes]:
    """Return files with a summary that cannot be."""
    changes: list[dict[str, Any]] = [{"kind": "other"}, {"began": 1e300}, {"world_size": 0}, {"phases": None}]
    return [msgspec.json.encode([replace(summarize(record), **change)]) for change in changes]


def test_damaged_and_foreign_files_are_counted(tmp_path: Path) -> None:
    sound = encode_table(RECORDS[1].table)
    table = RECORDS[2].table
    columns = table.column_names
    bad = {
        "empty": b"",
        "cut": sound[:-100],
        "flipped": sound[: len(sound) // 2] + b"\xff" * 50 + sound[len(sound) // 2 + 50 :],
        "foreign": encode_table(pa.table({"a": [1]})),
        "no rows": encode_table(table.slice(0, 0)),
        "no seconds": encode_table(table.drop_columns(["seconds"])),
        "text for seconds": encode_table(table.set_column(columns.index("seconds"), "seconds", [["x"] * len(table)])),
        "rank 9 of 2": encode_table(
            table.set_column(columns.index("rank"), "rank", pa.array([9] * len(table), pa.int32()))
        ),
    }
    for name, values in {
        "kind": ["other"], "path": [None], "host": [None], "name": [None], "began": [1 << 62], "seconds": [float("nan")],
    }.items():  # fmt: skip
        column = pa.array(values * len(table)).cast(table.schema.field(name).type)
        bad[f"{name} {values}"] = encode_table(table.set_column(columns.index(name), name, column))
    for name, data in bad.items():
        put(str(tmp_path), f"{name}.parquet", data)
    put(str(tmp_path), "sound.parquet", sound)
    bad_alerts = [
        b"",
        b"{}",
        b'[{"rule": 1}]',
        b"\xff",
        b'[{"rule": "a", "severity": "b", "text": "c", "time": 1e300}]',
    ]
    bad_alerts += [b'[{"rule": "a", "x": ' + b"[" * 100_000]
    for number, data in enumerate(bad_alerts):
        put(str(tmp_path), f"alerts-{number}.json", data)
    for number, data in enumerate([b"", b"[{}]", b"[[[", b"\xff", *bad_summaries(RECORDS[2])]):
        put(str(tmp_path), f"summaries-{number}.json", data)
    put(str(tmp_path), "limits-1.json", b'{"host": "a"}')
    put(str(tmp_path), "limits-2.json", b'{"host":"a","time":1,"write":0,"read":null,"nbytes":1,"threads":1}')
    run = read_run(str(tmp_path))
    assert [record.id for record in run.records] == [RECORDS[1].id] and run.skipped == len(bad) + len(
        bad_alerts
    ) + 8 + 2


def test_a_file_that_may_not_be_read_is_counted_and_a_storage_that_is_away_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        put(str(tmp_path), f"{number}.parquet", encode_table(RECORDS[number].table))
    put(str(tmp_path), "alerts-1.json", b"[]")
    folder = type(resolve(f"{tmp_path}/{METRICS_FOLDER}"))
    read, error = folder.read, StorageError("permission denied")

    def refuse(storage: object, name: str) -> bytes:
        if name != "2.parquet":
            raise error
        return read(storage, name)  # type: ignore[arg-type]

    monkeypatch.setattr(folder, "read", refuse)
    run = read_run(str(tmp_path))
    assert [one.id for one in run.operations] == [RECORDS[2].id] and run.skipped == 2
    error = StorageUnavailableError("no answer")
    with pytest.raises(StorageUnavailableError):
        read_run(str(tmp_path))


def test_columns_of_another_version(tmp_path: Path) -> None:
    table = RECORDS[1].table
    later = table.append_column("temperature", pa.array([1.5] * len(table))).drop_columns(["ep"])
    put(str(tmp_path), "later.parquet", encode_table(later))
    (record,) = read_run(str(tmp_path)).records
    assert record.table.schema == table.schema and summarize(record) == summarize(RECORDS[1])


def test_files_that_are_joined_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        put(str(tmp_path), f"{number}.parquet", encode_table(RECORDS[number].table))
    folder = resolve(f"{tmp_path}/{METRICS_FOLDER}")
    read = type(folder).read

    def join_first(storage: object, name: str) -> bytes:
        monkeypatch.setattr(type(folder), "read", read)
        files._join(folder, {f"{number}.parquet": RECORDS[number].table for number in (1, 2)})
        return read(storage, name)  # type: ignore[arg-type]

    monkeypatch.setattr(type(folder), "read", join_first)
    run = read_run(str(tmp_path))
    assert [record.id for record in run.records] == [RECORDS[1].id, RECORDS[2].id] and not run.skipped


def test_only_new_files_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(reading, "decode_table", lambda data: read.append(len(data)) or decode_table(data))
    for number in (1, 2):
        put(str(tmp_path), f"{number}.parquet", encode_table(RECORDS[number].table))
    put(str(tmp_path), "foreign.parquet", b"nothing of ours")
    reader = RunReader(str(tmp_path))
    assert len(reader.read().operations) == 2 and len(read) == 3
    put(str(tmp_path), "3.parquet", encode_table(RECORDS[3].table))
    assert len(reader.read().operations) == 3 and len(read) == 4
    resolve(f"{tmp_path}/{METRICS_FOLDER}").delete(["1.parquet", "foreign.parquet"])
    run = reader.read()
    assert [one.id for one in run.operations] == [RECORDS[number].id for number in (2, 3)]
    assert [record.id for record in run.records] == [one.id for one in run.operations] and not run.skipped
    assert len(read) == 4


def test_rows_of_the_newest_operations_only_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation of 8,960 ranks takes 20 MB; a thousand of them would not fit."""
    records = list(SimulatedRun({"dp": 2}, saves=40, loads=1).records())
    rows = records[-1].table.num_rows
    monkeypatch.setattr(reading, "KEPT_ROWS", 3 * rows)
    write_metrics(tmp_path, records)
    reader = RunReader(str(tmp_path))
    for _ in range(2):
        run = reader.read()
        assert [one.id for one in run.operations] == [record.id for record in records]
        kept = [record.id for record in run.records]
        assert kept[-2:] == [record.id for record in records[-2:]] and 3 <= len(kept) <= 4
        assert kept[0] == next(record.id for record in records if record.kind == "load"), "the only one of its kind"


def test_no_metrics(tmp_path: Path) -> None:
    assert read_run(str(tmp_path)).operations == []


def test_old_operations_become_summaries_and_the_history_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [Fault("fail", [1], first=4, last=4), Fault("slow", [1], factor=9, first=6, last=6)]
    records = list(SimulatedRun({"dp": 4}, saves=40, loads=1, faults=faults).records())
    write_metrics(tmp_path, records)
    put(str(tmp_path), "0.parquet", b"damaged")
    whole, folder = read_run(str(tmp_path)), resolve(f"{tmp_path}/{METRICS_FOLDER}")
    live, delete = RunReader(str(tmp_path)), type(folder).delete
    assert live.read().operations == whole.operations
    size = sum(size for _, size in folder.list())
    files.thin(folder, size, set())
    assert len(folder.list()) == 42, "there is room"

    def crash(storage: object, names: object) -> None:
        raise OSError("killed")

    monkeypatch.setattr(type(folder), "delete", crash)
    with pytest.raises(OSError, match="killed"):
        files.thin(folder, size / 2, set())
    assert live.read().operations == read_run(str(tmp_path)).operations == whole.operations
    monkeypatch.setattr(type(folder), "delete", delete)
    full: set[str] = set()
    for _ in range(2):
        files.thin(folder, size / 2, full)
        kept = sum(size for name, size in folder.list() if name.endswith(".parquet"))
        assert 0.3 * size < kept <= 0.5 * size
        for run in (read_run(str(tmp_path)), live.read()):
            assert run.operations == whole.operations and run.skipped == 1
    troubled = {one.id for one in whole.operations if one.failed or one.stragglers}
    assert len(troubled) == 2 and len(full) == 3
    assert troubled < {record.id for record in read_run(str(tmp_path)).records}
    newest = [one.id for one in whole.operations[-30:]]
    assert [one.id for one in read_run(str(tmp_path), 30).operations] == newest, "some of them are summaries"
    files.thin(folder, 0, set())
    assert [record.id for record in read_run(str(tmp_path)).records] == [records[-1].id]
    assert read_run(str(tmp_path)).operations == whole.operations
