"""Read the news of running operations, and tell those in which a job was killed."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from bytecheckpoint.errors import StorageError, StorageUnavailableError
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.progress import OperationProgress
from bytecheckpoint.monitoring.table import MOST_RANKS, OperationFacts
from bytecheckpoint.storage import Storage

__all__ = ["LIVE_PREFIX", "cut_off_summary", "is_cut_off", "read_live"]

#: Prefix of the files of running operations, one per job.
LIVE_PREFIX = "live-"
#: Seconds without news after which a job was killed for certain, and those after which another job's save shows it.
_FORGOTTEN, _QUIET = 600.0, 10.0


def read_live(folder: Storage, names: Iterable[str]) -> dict[str, OperationProgress]:
    """Return the last news of the newest operation of each job, by the names of their files, as far as they can be read.

    Args:
        folder: folder of the metrics of a run.
        names: names of its files.

    Raises:
        StorageUnavailableError: the storage does not answer.
    """
    found = {}
    for name in names:
        if not name.startswith(LIVE_PREFIX):
            continue
        try:
            progress = msgspec.json.decode(folder.read(name), type=OperationProgress)
        except StorageUnavailableError:
            raise
        except (StorageError, FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        lengths = {len(column) for column in msgspec.to_builtins(progress.ranks).values()}
        if len(lengths) == 1 and 0 < lengths.pop() <= progress.world_size <= MOST_RANKS:
            found[name] = progress
    return found


def is_cut_off(progress: OperationProgress, operations: Iterable[OperationFacts]) -> bool:
    """Return whether the job was killed in the operation: no news come, and another job saves, or much time has passed.

    Args:
        progress: last news of the operation.
        operations: operations of the run that have ended.
    """
    quiet = time.time() - progress.time
    job = _job_of(progress.operation)
    later = (one.kind == "save" and one.began > progress.time and _job_of(one.id) != job for one in operations)
    return not progress.ended and (quiet > _FORGOTTEN or (quiet > _QUIET and any(later)))


def _job_of(operation: str) -> str:
    return operation.rsplit("-", 2)[0]


def cut_off_summary(progress: OperationProgress) -> OperationSummary:
    """Describe an operation in which the job was killed, as far as its last news go: no rank has reported its end."""
    ranks, behind, seconds = progress.ranks, progress.furthest_behind, max(progress.time - progress.began, 0.0)
    return OperationSummary(
        id=progress.operation,
        kind=progress.kind,
        path=progress.path,
        step=progress.step,
        began=progress.began,
        world_size=progress.world_size,
        missing=tuple(range(progress.world_size)),
        seconds=seconds,
        blocking_seconds=0.0,
        nbytes=progress.done,
        bandwidth=0.0,
        phases=(),
        stragglers=(),
        critical_path=((ranks["phase"][behind], ranks["rank"][behind], 0.0, seconds),),
        balance=1.0,
        retries=0,
        retry_seconds=0.0,
        totals={},
        failures=(),
        hosts=len(set(ranks["host"])),
    )
