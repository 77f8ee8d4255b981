"""Write metrics as files beside the run: one Parquet file per operation, many of them joined into one later."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from bytecheckpoint.errors import StorageError, StorageUnavailableError, UsageError
from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.analysis.summary import OperationSummary, summarize
from bytecheckpoint.monitoring.live import LIVE_PREFIX, cut_off_summary, is_cut_off, read_live
from bytecheckpoint.monitoring.progress import OperationProgress
from bytecheckpoint.monitoring.sinks.base import Sink
from bytecheckpoint.monitoring.table import OperationRecord, conform, records_of, run_of_path
from bytecheckpoint.representation.names import METRICS_FOLDER
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.optional import folder_exists
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.tiers.storage import PREFIX
from bytecheckpoint.tuning import tuning

__all__ = [
    "ALERTS_PREFIX",
    "METRICS_FOLDER",
    "SUMMARIES_PREFIX",
    "FilesSink",
    "decode_table",
    "encode_table",
    "remove_forgotten",
    "thin",
]

#: Prefix of the files of alerts, one per process, and most alerts in one.
ALERTS_PREFIX = "alerts-"
_ALERTS = 200
#: Prefix of the files with summaries of old operations.
SUMMARIES_PREFIX = "summaries-"
#: Bytes of the records of a run, beyond which the oldest become summaries.
_KEPT_BYTES = 1 << 30
#: Number of operations after which a job looks at the size of its folder.
_THINNED_EVERY = 16
#: Most files that are read then: of 8,960 ranks, for six seconds of a core.
_READ_AT_ONCE = 64
_JOINED = "joined-"
#: End of the path of a checkpoint of a run: step_100, epoch=3.ckpt.
_NUMBERED = re.compile(r"\d(\.\w+)?$")
#: Seconds without news after which the file of a running operation belongs to a killed job.
_FORGOTTEN = 86400.0
#: Most bytes of a file that is joined with others.
_SMALL = 1 << 18
#: Fewest rows of a table for which better compression is worth its time.
_MANY_ROWS = 1 << 14


class FilesSink(Sink):
    """Writes files to the storage of the run that an operation belongs to.

    A path that ends in a number, or lies in a folder with metrics, is a checkpoint of a run. Any other, such as "ckpt" in
    the working directory, is one by itself, and its metrics lie in its own folder.

    A load writes only where saves have left metrics: reading a folder should not leave files in it. Nothing is written into
    the system's folder for temporary files. A checkpoint directly in it, as of
    `with TemporaryDirectory() as path: save(path, states)`, belongs to no run, and the folder belongs to all users.

    Args:
        address: "files", or files://?keep_gib=N to keep N GiB of a run's records instead of one; of older operations,
            summaries stay.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._keep = _kept_bytes(address)
        self._delivered: Counter[str] = Counter()  # operations by folder
        self._full: dict[str, set[str]] = {}  # files that stay full, by folder
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
        if self._delivered[folder.url] % _THINNED_EVERY == 0:  # also in a job that is restarted often
            thin(folder, self._keep, self._full.setdefault(folder.url, set()))
        self._delivered[folder.url] += 1

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
                _put_away_killed(folder)
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
        run, alone = run_of_path(path), path.removeprefix(PREFIX).rstrip("/")
        storage = with_time_limits(resolve(run))
        if storage.url == os.path.abspath(tempfile.gettempdir()):
            return None
        in_run = alone not in self._runs and (
            run in self._runs or _NUMBERED.search(alone) or METRICS_FOLDER in storage.folders()
        )
        if not in_run:
            run, storage = alone, with_time_limits(resolve(alone))
        if not folder_exists(storage):
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


def _put_away_killed(folder: Storage) -> None:
    """Remove the files of jobs that were killed. Of one killed in an operation a summary stays, its only trace."""
    for name, progress in read_live(folder, [name for name, _ in folder.list()]).items():
        cut_off = is_cut_off(progress, ())
        if cut_off:
            _publish_summaries(folder, [cut_off_summary(progress)])
        if cut_off or time.time() - progress.time > _FORGOTTEN:
            folder.delete([name])


def _publish_summaries(folder: Storage, summaries: Sequence[OperationSummary]) -> None:
    folder.publish(f"{SUMMARIES_PREFIX}{uuid.uuid4().hex}.json", msgspec.json.encode(summaries))


def _join(folder: Storage, files: Mapping[str, pa.Table]) -> None:
    """Replace files by a joined one. A reader that sees both counts each operation once."""
    names = sorted(name for name, _ in folder.list() if name in files)  # a user may have removed some
    if names:
        joined = pa.concat_tables([files[name] for name in names])
        folder.publish(f"{_JOINED}{names[0]}", encode_table(joined))
        folder.delete(names)


def thin(folder: Storage, keep: float, full: set[str]) -> None:
    """Replace the files of the oldest operations by one of their summaries, if all files take more than `keep` bytes.

    Files of failed and slow operations stay longer, up to half of these bytes. A reader that sees a record and a summary of
    an operation counts it once.

    Args:
        folder: folder of the metrics.
        keep: bytes that may stay. A quarter less stays, so that this is needed seldom.
        full: names of files that stay; gets those of operations that failed or were slow, and of damaged files.
    """
    sizes = {name: size for name, size in folder.list() if name.endswith(".parquet")}
    if (excess := sum(sizes.values()) - keep) <= 0:
        return
    excess += keep / 4
    room = keep / 2 - sum(sizes.get(name, 0) for name in full)
    summaries: list[OperationSummary] = []
    thinned: list[str] = []
    by_time = sorted(sizes, key=lambda name: name.removeprefix(_JOINED))
    for name in [name for name in by_time[:-1] if name not in full][:_READ_AT_ONCE]:
        if excess <= 0:
            break
        try:
            found = [summarize(record) for record in records_of(conform(decode_table(folder.read(name))))]
        except FileNotFoundError:  # another job thins too
            continue
        except StorageUnavailableError:
            raise
        except (StorageError, pa.ArrowException, ValueError, KeyError):
            full.add(name)
            continue
        if sizes[name] <= room and any(one.failed or one.missing or one.stragglers for one in found):
            full.add(name)
            room -= sizes[name]
        else:
            thinned.append(name)
            summaries += found
            excess -= sizes[name]
    if thinned:
        _publish_summaries(folder, summaries)
        folder.delete(thinned)


def _kept_bytes(address: str) -> float:
    """Return the bytes that an address allows.

    Raises:
        UsageError: the address has another form.
    """
    _, _, options = address.partition("://?keep_gib=")
    if address in ("files", "files://"):
        return _KEPT_BYTES
    with contextlib.suppress(ValueError):
        if (gib := float(options)) >= 0:
            return gib * (1 << 30)
    raise UsageError("setting metrics: write files, or files://?keep_gib=N with a number N")


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
