"""Whether a checkpoint fits into a cluster, by what the NameNode tells before the first byte is sent."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from functools import partial

from bytecheckpoint.errors import StorageFullError
from bytecheckpoint.storage.hdfs.cluster import Cluster, call_client
from bytecheckpoint.storage.hdfs.errors import facts_of
from bytecheckpoint.tracing.operation import pause

__all__ = ["check_room"]

_log = logging.getLogger("bytecheckpoint")
#: Timeout of one question. Without an answer the save goes on: what does not fit fails then.
_SECONDS = 5.0
#: Seconds in which DataNodes register at a NameNode that was restarted, and until then count as none: two heartbeats.
_REGISTRATION = 6.0
#: Folders that are looked at for a quota: the checkpoint's, and those above it. A NameNode that knows no quota of a folder
#: counts all files in it, which must not be those of the whole cluster.
_FOLDERS = 3
#: The client reports "none", which is -1 for the NameNode, as a number without a sign.
_NO_QUOTA = 1 << 63


def check_room(cluster: Cluster, path: str, label: str, nbytes: int) -> None:
    """Raise an error if `nbytes` more do not fit.

    Args:
        cluster: where the folder is.
        path: of the folder, which need not exist.
        label: its address, for messages.
        nbytes: bytes of its files.

    Raises:
        StorageFullError: they do not fit.
    """
    try:
        remaining = _remaining(cluster)
        if remaining is not None and nbytes > remaining:
            pause(_REGISTRATION)
            remaining = _remaining(cluster)
        limits = [("the cluster", remaining)] if remaining is not None else []
        for what, available in itertools.chain(limits, _quotas(cluster, path)):
            if nbytes > available:
                raise StorageFullError(
                    f"cannot save to {label}: it takes {nbytes} bytes, and {what} has {max(available, 0)} left; free space "
                    f"or raise the quota, then save again"
                )
    except StorageFullError:
        raise
    except Exception as error:  # noqa: BLE001  the NameNode refuses or does not answer: the save finds out if it matters
        _log.info("%s: the room is unknown: %s", label, facts_of(error).reason)


def _remaining(cluster: Cluster) -> int | None:
    """Return the free bytes of the cluster, which writes fewer replicas than asked for if no more fit."""
    return call_client(lambda: cluster.remaining_bytes(_SECONDS), 2 * _SECONDS)


def _quotas(cluster: Cluster, path: str) -> Iterator[tuple[str, int]]:
    """Yield the folders with a quota, and the bytes of files that each has left."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), max(len(parts) - _FOLDERS, 0), -1):
        folder = "/" + "/".join(parts[:depth])
        if folder in cluster.without_quota:
            continue
        try:
            summary = call_client(partial(cluster.client.get_content_summary, folder), _SECONDS)
        except Exception as error:
            if not facts_of(error).absent:
                raise
            continue
        if summary.space_quota >= _NO_QUOTA:  # a quota that is set later is the NameNode's to enforce
            cluster.without_quota.add(folder)
        else:
            # A byte counts once per replica, or less with erasure coding: as those that are there do.
            per_byte = max(summary.space_consumed / summary.length, 1.0) if summary.length else 1.0
            yield f"the space quota of {folder}", int((summary.space_quota - summary.space_consumed) / per_byte)
