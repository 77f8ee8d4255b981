"""Read the metrics of a run from its files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import pyarrow as pa

from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.errors import StorageError, StorageUnavailableError
from bytecheckpoint.monitoring.alert import DATES_END, Alert
from bytecheckpoint.monitoring.analysis.limits import LIMITS_PREFIX, StorageLimit
from bytecheckpoint.monitoring.analysis.summary import OperationSummary, summarize
from bytecheckpoint.monitoring.live import cut_off_summary, is_cut_off, read_live
from bytecheckpoint.monitoring.sinks.files import ALERTS_PREFIX, METRICS_FOLDER, SUMMARIES_PREFIX, decode_table
from bytecheckpoint.monitoring.table import KINDS, OperationRecord, conform, records_of
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.time_limits import with_time_limits

__all__ = ["KEPT_ROWS", "RunMetrics", "RunReader", "read_run"]

_T = TypeVar("_T")
_JOINED = "joined-"
_SUFFIX = ".parquet"
#: Length of the time at the beginning of a name.
_TIME = len("20261124T235959")
#: How often the files are listed anew, if a job joins files while they are read.
_LISTINGS = 3
#: Most rows in memory, some 200 MB: seven operations of 8,960 ranks.
KEPT_ROWS = 2_000_000


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """The metrics of a run.

    Attributes:
        operations: saves and loads in order of time, each once, with those in which a job was killed.
        records: records of the newest operations and of the newest of each kind, in order of time: all would take too much
            memory, and of old operations files may have summaries only.
        skipped: number of files that are damaged or foreign, or that this user may not read.
        alerts: alerts of the jobs.
        limits: measured bandwidths of the storage.
    """

    operations: Sequence[OperationSummary]
    records: Sequence[OperationRecord]
    skipped: int = 0
    alerts: Sequence[Alert] = ()
    limits: Sequence[StorageLimit] = ()

    @classmethod
    def of(cls, records: Sequence[OperationRecord]) -> RunMetrics:
        """Return the metrics of records in memory.

        Args:
            records: records in order of time.
        """
        return cls([summarize(record) for record in records], records)


def read_run(root: str, newest: int | None = None, progress: Callable[[int, int], None] | None = None) -> RunMetrics:
    """Read the metrics of a run once, by a `RunReader`. `progress` gets (files read, files in all) from any thread."""
    return RunReader(root, newest).read(progress)


class RunReader:
    """Reads the metrics of a run; later calls read new files only. One thread at a time may call it.

    Args:
        root: folder or URL of the run, which holds the folders of its checkpoints.
        newest: number of operations to read, the newest ones; None for all.
    """

    def __init__(self, root: str, newest: int | None = None) -> None:
        self._folder = with_time_limits(resolve(f"{root.rstrip('/')}/{METRICS_FOLDER}"))
        self._newest = newest
        self._files: dict[str, list[str]] = {}  # ids of operations by file; a file without any is damaged or foreign
        self._operations: dict[str, OperationSummary] = {}
        self._records: dict[str, OperationRecord] = {}
        self._rows = 0  # in `_records`
        self._lock = threading.Lock()  # guards the four above while threads read files

    def read(self, progress: Callable[[int, int], None] | None = None) -> RunMetrics:
        """Return the metrics that the run's files hold now.

        Args:
            progress: function of (files read, files in all), called by any thread.

        Raises:
            StorageError: the storage does not answer, or refuses to list the folder.
        """
        for _ in range(_LISTINGS):
            names = _wanted(self._folder, self._newest)
            new = [name for name in names if name not in self._files]
            parallel_map(self._take, new, self._folder.capabilities.parallel_reads, "bytecheckpoint-metrics", progress)
            if all(name in self._files for name in names):
                break
        self._files = {name: self._files[name] for name in names if name in self._files}
        ids = {identity for found in self._files.values() for identity in found}
        self._operations = {identity: self._operations[identity] for identity in ids}
        self._records = {identity: record for identity, record in self._records.items() if identity in ids}
        self._keep_newest()
        listed = [name for name, _ in self._folder.list()]
        news = read_live(self._folder, listed).values()
        live = [one for one in news if one.operation not in self._operations]
        cut_off = [cut_off_summary(one) for one in live if is_cut_off(one, self._operations.values())]
        operations = sorted([*self._operations.values(), *cut_off], key=lambda one: one.began)
        if self._newest is not None:
            operations = operations[-self._newest :]
        skipped = sum(not found for found in self._files.values())
        records = [self._records[one.id] for one in operations if one.id in self._records]
        lists, damaged_alerts = self._read_json(listed, ALERTS_PREFIX, list[Alert])
        limits, damaged_limits = self._read_json(listed, LIMITS_PREFIX, StorageLimit)
        skipped += damaged_alerts + damaged_limits
        alerts = [alert for of_process in lists for alert in of_process]
        if self._newest is not None:
            known = {one.id for one in operations}
            alerts = [alert for alert in alerts if alert.operation in known]
        return RunMetrics(operations, records, skipped, alerts, limits)

    def _read_json(self, names: Sequence[str], prefix: str, content: type[_T]) -> tuple[list[_T], int]:
        """Return the contents of the files with a prefix, and the number of damaged or foreign ones."""
        found, damaged = [], 0
        for name in names:
            if name.startswith(prefix):
                try:
                    found.append(msgspec.json.decode(self._folder.read(name), type=content))
                except FileNotFoundError:
                    continue
                except StorageUnavailableError:
                    raise
                except (StorageError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    damaged += 1
        return found, damaged

    def _take(self, name: str) -> None:
        """Read a file, unless it is gone."""
        found: list[OperationRecord] = []
        try:
            data = self._folder.read(name)
            if name.startswith(SUMMARIES_PREFIX):
                summaries = _decode_summaries(data)
            else:
                found = list(records_of(conform(decode_table(data))))
                summaries = [summarize(record) for record in found]
        except FileNotFoundError:
            return
        except StorageUnavailableError:
            raise
        except (StorageError, pa.ArrowException, msgspec.MsgspecError, OSError, ValueError, KeyError, RecursionError):
            found, summaries = [], []
        with self._lock:
            self._files[name] = [summary.id for summary in summaries]
            for summary in summaries:  # the record of an operation says more than a summary of its last news
                if found or summary.id not in self._operations:
                    self._operations[summary.id] = summary
            self._records.update((record.id, record) for record in found)
            self._rows += sum(record.table.num_rows for record in found)
            if self._rows > 2 * KEPT_ROWS:
                self._keep_newest()

    def _keep_newest(self) -> None:
        kept: dict[str, OperationRecord] = {}
        kinds: set[str] = set()
        self._rows = 0
        for record in sorted(self._records.values(), key=lambda one: one.began, reverse=True):
            if record.kind not in kinds or self._rows + record.table.num_rows <= KEPT_ROWS:
                kept[record.id] = record
                kinds.add(record.kind)
                self._rows += record.table.num_rows
        self._records = kept


def _wanted(folder: Storage, newest: int | None) -> list[str]:
    """Return the names of the files with the newest operations. A name begins with the time of the first operation."""
    listed = [name for name, _ in folder.list()]
    names = sorted((name for name in listed if name.endswith(_SUFFIX)), reverse=True)
    summaries = [name for name in listed if name.startswith(SUMMARIES_PREFIX)]  # small, and of any age
    if newest is None:
        return names + summaries
    joined = [name for name in names if name.startswith(_JOINED)]
    single = [name for name in names if not name.startswith(_JOINED)]
    if len(single) > newest:  # names give the second only
        oldest = single[newest - 1][:_TIME]
        single = [name for name in single if name[:_TIME] >= oldest]
    # A joined file holds many operations; of jobs that ran side by side, the times of two may overlap.
    return single + joined[: newest // 64 + 2] + summaries


def _decode_summaries(data: bytes) -> list[OperationSummary]:
    """Return the summaries of a file.

    Raises:
        ValueError: a summary has an impossible value.
    """
    summaries = msgspec.json.decode(data, type=list[OperationSummary])
    if not all(0 <= one.began < DATES_END and one.kind in KINDS and one.world_size > 0 for one in summaries):
        raise ValueError("impossible operations")
    return summaries
