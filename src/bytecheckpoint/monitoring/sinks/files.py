"""Write metrics as files beside the run: one Parquet file per operation, many of them joined into one later."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Mapping

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.progress import OperationProgress
from bytecheckpoint.monitoring.sinks.base import Sink
from bytecheckpoint.monitoring.table import OperationRecord, run_of_path
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.optional import folder_exists
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.tuning import tuning

__all__ = [
    "ALERTS_PREFIX",
    "LIVE_PREFIX",
    "METRICS_FOLDER",
    "FilesSink",
    "decode_table",
    "encode_table",
    "remove_forgotten",
]

#: Folder of the metrics, in the folder of the run.
METRICS_FOLDER = ".bytecheckpoint-metrics"
#: Prefix of the files of running operations, one per job.
LIVE_PREFIX = "live-"
#: Prefix of the files of alerts, one per process, and most alerts in one.
ALERTS_PREFIX = "alerts-"
_ALERTS = 200
#: Seconds without news after which the file of a running operation belongs to a killed job.
_FORGOTTEN = 86400.0
#: Most bytes of a file that is joined with others.
_SMALL = 1 << 18
#: Fewest rows of a table for which better compression is worth its time.
_MANY_ROWS = 1 << 14


class FilesSink(Sink):
    """Writes files to the storage of the run that an operation belongs to.

    A load writes only where saves have left metrics: reading a folder should not leave files in it. Nothing is written into
    the system's folder for temporary files. A checkpoint directly in it, as of
    `with TemporaryDirectory() as path: save(path, states)`, belongs to no run, and the folder belongs to all users.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._runs: set[str] = set()  # runs with a folder of metrics
        self._homeless: set[str] = set()  # running operations of runs without a folder of metrics
        self._small: dict[str, dict[str, pa.Table]] = {}  # tables of this process's small files, by folder
        self._alerts: dict[str, deque[Alert]] = {}  # newest alerts, by folder
        self._alerts_name = f"{ALERTS_PREFIX}{uuid.uuid4().hex}.json"
        self._live: dict[tuple[str, str], tuple[Storage, str]] = {}  # operations by file

    def deliver(self, record: OperationRecord, summary: OperationSummary) -> None:
        """Write the file of an operation, and join small files when there are many."""
        self._homeless.discard(record.id)
        folder = self._folder(record.kind, record.path)
        if folder is None:
            return
        when = time.strftime("%Y%m%dT%H%M%S", time.gmtime(record.began))
        name = f"{when}-{record.id}.parquet"
        data = encode_table(record.table)
        if self._folder(record.kind, record.path) is None:  # the run was removed meanwhile
            return
        folder.publish(name, data)
        if len(data) <= _SMALL:
            small = self._small.setdefault(folder.url, {})
            small[name] = record.table
            if len(small) >= tuning().files_joined:
                del self._small[folder.url]
                _join(folder, small)

    def progress(self, progress: OperationProgress) -> None:
        """Replace the file with the progress of the running operation."""
        if (
            not progress.path or progress.operation in self._homeless
        ):  # the path is unknown yet, or its run has no metrics
            return
        folder = self._folder(progress.kind, progress.path)
        if folder is None:
            if progress.kind != "save":  # a save makes the folder soon
                self._homeless.add(progress.operation)
        else:
            name = f"{LIVE_PREFIX}{progress.operation.split('-', 1)[0]}.json"
            _, written = self._live.get((folder.url, name), (None, ""))
            if progress.ended and written != progress.operation:
                return  # the next operation runs already
            if not written:
                remove_forgotten(folder, LIVE_PREFIX)
            folder.publish(name, msgspec.json.encode(progress))
            self._live[folder.url, name] = folder, progress.operation

    def alert(self, alert: Alert) -> None:
        """Replace the file with the alerts of this process. Some, as of a full storage, cannot be found again later."""
        folder = self._folder("save" if "-save-" in alert.operation else "", alert.path)
        if folder is not None:
            kept = self._alerts.setdefault(folder.url, deque(maxlen=_ALERTS))
            kept.append(alert)
            folder.publish(self._alerts_name, msgspec.json.encode(list(kept)))

    def close(self) -> None:
        """Remove the files of running operations."""
        for (_, name), (folder, _) in self._live.items():
            folder.delete([name])
        self._live.clear()

    def _folder(self, kind: str, path: str) -> Storage | None:
        """Return the folder for the metrics of an operation; None if it has none."""
        if not path:  # the argument was no path
            return None
        run = run_of_path(path)
        storage = with_time_limits(resolve(run))
        if storage.url == os.path.abspath(tempfile.gettempdir()) or not folder_exists(storage):
            return None
        if run not in self._runs:
            if kind != "save" and METRICS_FOLDER not in storage.folders():
                return None
            self._runs.add(run)
        return with_time_limits(resolve(f"{run}/{METRICS_FOLDER}"))


def remove_forgotten(folder: Storage, prefix: str) -> None:
    """Remove the files with a prefix that killed jobs have left."""
    for name, _ in folder.list():
        if name.startswith(prefix):
            with contextlib.suppress(FileNotFoundError):
                modified = folder.stat(name).modified
                if modified and time.time() - modified > _FORGOTTEN:
                    folder.delete([name])


def _join(folder: Storage, files: Mapping[str, pa.Table]) -> None:
    """Replace files by a joined one. A reader that sees both counts each operation once."""
    names = sorted(name for name, _ in folder.list() if name in files)  # a user may have removed some
    if names:
        joined = pa.concat_tables([files[name] for name in names])
        folder.publish(f"joined-{names[0]}", encode_table(joined))
        folder.delete(names)


def encode_table(table: pa.Table) -> bytes:
    """Return a table as a Parquet file."""
    sink = io.BytesIO()
    # Of a small table, zstd takes three times as long as all the rest.
    compression = "zstd" if len(table) >= _MANY_ROWS else "snappy"
    pq.write_table(table, sink, compression=compression, use_dictionary=True, write_statistics=False)
    return sink.getvalue()


def decode_table(data: bytes) -> pa.Table:
    """Return the table of a Parquet file."""
    return pq.ParquetFile(io.BytesIO(data)).read()  # `read_table` imports pandas
