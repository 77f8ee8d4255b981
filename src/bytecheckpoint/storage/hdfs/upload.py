"""Uploads to HDFS. Large files go as sub-files, which are written in parallel and joined by the NameNode.

One stream to HDFS goes through one chain of DataNodes. A large file is therefore cut into sub-files beside it, of one block
each, which go through chains of their own. One metadata operation (concat) then makes them one file. They are closed in
parallel too, because the client sleeps half a second in a close that comes before the DataNodes' report.

A sub-file that fails is written again, from memory or the spool. So an upload also survives a dead DataNode that the
NameNode still takes for alive: the client cannot exclude the DataNode, so the upload asks for another block, and in the end
for a block on a single DataNode, which the NameNode replicates later.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import hdfs_native

from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.errors import CheckpointError, StorageConflictError, StorageError
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.hdfs.cluster import Cluster, call_client
from bytecheckpoint.storage.hdfs.errors import facts_of
from bytecheckpoint.storage.hdfs.rpc import RemoteError
from bytecheckpoint.storage.uploading import Pieces
from bytecheckpoint.tuning import tuning

__all__ = ["PART_MARK", "Upload", "part_name"]

_log = logging.getLogger("bytecheckpoint")
#: A file is cut into so many sub-files, whose length stays between the tuning's minimum and this maximum.
_PARTS = 8
_MAX_PART_BYTES = 128 << 20
_MIN_BLOCK_BYTES = 16 << 20
_PARTS_IN_FLIGHT = 8
#: Bytes per call of the client. It gets `bytes`: it would take a memoryview element by element, at some 25 s of core time
#: per GiB, under the interpreter's lock.
_STEP = 1 << 20
#: Factor from the timeout of one attempt at a stream to that of the next. The first is the lower bound: when a chain breaks
#: while more than 100 packets (6.4 MB) are queued, the client's call now and then never returns.
_STALL_GROWTH = 2.0
#: Failures of a chain of DataNodes after which the upload makes do with one DataNode.
_CHAIN_FAILURES = 2
#: Prefix of the names of sub-files: "<mark>0001-<name of the file>".
PART_MARK = ".bytecheckpoint-part-"
#: Refusals of a concat that hold for every file of the folder: encryption zones, erasure coding, old servers.
_CANNOT_JOIN = ("encryption zone", "erasure", "striped", "Unknown method", "storage policy", "snapshot")


def part_name(path: str, number: int) -> str:
    """Return the path of a sub-file of `path`, in the same folder."""
    folder, _, last = path.rpartition("/")
    return f"{folder}/{PART_MARK}{number:04d}-{last}"


class Upload:
    """The upload of one file.

    Args:
        cluster: cluster that receives the file.
        path: path of the file, which nobody else writes.
        label: its address, for messages.
        size: its length in bytes.
        pieces: its bytes.
        block: length of its blocks in bytes; 0: chosen by size.
        action: verb for messages, "read".
    """

    def __init__(
        self,
        cluster: Cluster,
        path: str,
        label: str,
        size: int,
        pieces: Pieces,
        *,
        block: int = 0,
        action: str = "upload",
    ) -> None:
        self._cluster = cluster
        self._path = path
        self._label = label
        self._size = size
        self._pieces = pieces
        self._block = block
        self._stream_bytes = size  # length of one stream: of the file, or of a sub-file
        self._action = action
        self._begun: dict[str, None] = {}

    def send(self) -> None:
        """Write the file. If that fails, remove everything that was begun."""
        try:
            if self._block or not self._send_parts():
                self._put(self._path, 0, self._size, whole=True)
        except BaseException:
            parallel_map(self._remove, self._begun, _PARTS_IN_FLIGHT, "bytecheckpoint-delete")
            raise

    def _send_parts(self) -> bool:
        """Send the file as sub-files. Returns False when it is too short or the cluster cannot join them."""
        per_part = -(-self._size // (_PARTS << 20)) << 20
        length = min(max(per_part, tuning().hdfs_part_bytes), _MAX_PART_BYTES)
        if self._size <= length or not self._cluster.joins:
            self._stream_bytes = self._size
            return False
        self._stream_bytes = length
        starts = range(0, self._size, length)
        paths = [self._path, *(part_name(self._path, number) for number in range(1, len(starts)))]

        def put(number: int) -> None:
            start = starts[number]
            self._put(paths[number], start, min(start + length, self._size), whole=False)

        parallel_map(put, range(len(starts)), _PARTS_IN_FLIGHT, "bytecheckpoint-put")
        return self._join(paths)

    def _join(self, paths: list[str]) -> bool:
        client_id = os.urandom(16)
        attempts = itertools.count()

        def attempt() -> None:
            repeated = next(attempts) > 0
            try:
                self._cluster.join(paths[0], paths[1:], client_id)
            except RemoteError:
                # The answer to an earlier attempt may be lost, and the NameNode may no longer remember it.
                if not repeated or self._cluster.client.get_file_info(paths[0]).length != self._size:
                    raise

        try:
            self._cluster.run("join the parts of", self._label, attempt, writes=True, timeout=False)
        except StorageError as error:
            if not any(word in str(error) for word in _CANNOT_JOIN):
                raise
            _log.warning("files of %s are sent as single streams, which is slower: %s", self._label, error)
            self._cluster.joins = False
            self._stream_bytes = self._size
            for path in paths:
                self._remove(path)
            self._begun.clear()
            return False
        except FileNotFoundError:
            raise self._removed_error() from None
        return True

    # --- one stream -------------------------------------------------------------------------------------------

    def _put(self, path: str, start: int, stop: int, *, whole: bool) -> None:
        """Write bytes [start, stop) as the file `path`, again after transient errors."""
        chain_failures = removals = 0
        stall = tuning().hdfs_shortest_stall

        def move_data(call: Callable[[], Any]) -> None:
            longest = max(settings().storage.timeout, tuning().hdfs_shortest_stall)
            call_client(call, min(stall, longest, tuning().hdfs_write_stall))

        def attempt() -> None:
            nonlocal chain_failures, removals, stall
            data = self._steps(start, stop)
            first = next(data, None)  # raises after an abort, before anything is created
            writer = self._create(path, whole)
            try:
                replication = self._on_one_datanode(path) if chain_failures >= _CHAIN_FAILURES else 0
                for piece in data if first is None else itertools.chain([first], data):
                    move_data(functools.partial(writer.write, bytes(piece)))
                move_data(writer.close)
                if replication:
                    self._call_namenode(lambda: self._cluster.client.set_replication(path, replication))
            except CheckpointError:
                raise
            except Exception as error:
                facts = facts_of(error)
                chain_failures += facts.transient
                if isinstance(error, TimeoutError):
                    stall *= _STALL_GROWTH
                if not facts.absent:
                    raise
                # The first removal may be this upload's own: a creation that timed out replaced the file late.
                removals += 1
                if removals > 1:
                    raise self._removed_error() from None
                raise InterruptedError("it was removed while it was being written") from None

        try:
            self._cluster.run(self._action, self._label, attempt, writes=True, timeout=False)
        except FileExistsError:
            raise StorageError(f"cannot {self._action} {self._label}: another writer has it open") from None
        except FileNotFoundError:
            raise StorageError(f"cannot {self._action} {self._label}: a part of the path is a file") from None

    def _removed_error(self) -> StorageConflictError:
        return StorageConflictError(
            f"cannot {self._action} {self._label}: somebody removed it while it was being written, as another save to this "
            f"path does; let one job at a time save to a path"
        )

    def _create(self, path: str, whole: bool) -> Any:
        # A sub-file is one block: it needs one chain of DataNodes and never waits for a block before it. A block longer
        # than the file would reserve space that DataNodes which are nearly full do not have.
        fitting = max(-(-self._stream_bytes >> 20) << 20, _MIN_BLOCK_BYTES)
        block = self._block or (None if whole and self._size > _MAX_PART_BYTES else fitting)
        options = hdfs_native.WriteOptions(block_size=block, overwrite=True, create_parent=True)
        self._begun[path] = None
        # Not `client.create`: when its result is garbage-collected, in any thread, it asks the NameNode for up
        # to 16 s to complete an abandoned file.
        writer = self._call_namenode(lambda: self._cluster.client.inner.create(path, options))
        self._cluster.answered = True
        return writer

    def _on_one_datanode(self, path: str) -> int:
        """Give the blocks of a new file one replica for now. Return the replication to restore, 0 for none."""
        wanted: int = self._call_namenode(lambda: self._cluster.client.get_file_info(path)).replication
        if wanted < 2:
            return 0
        self._call_namenode(lambda: self._cluster.client.set_replication(path, 1))
        return wanted

    def _steps(self, start: int, stop: int) -> Iterator[memoryview]:
        for piece in self._pieces(start, stop):
            for at in range(0, len(piece), _STEP):
                yield piece[at : at + _STEP]

    def _call_namenode(self, call: Callable[[], Any]) -> Any:
        return call_client(call, self._cluster.call_timeout())

    def _remove(self, path: str) -> None:
        def delete() -> None:
            self._cluster.client.delete(path)

        try:
            self._cluster.run("delete", self._label, delete, brief=True)
        except FileNotFoundError:
            pass
        except StorageError as error:
            _log.warning("%s: a part that was sent could not be removed: %s", self._label, error)
