"""Files into HDFS: large ones as sub-files, written at the same time and joined by the NameNode.

One stream to HDFS goes through one chain of DataNodes. A large file is therefore cut into sub-files beside it, each one
block, which go through chains of their own; then one operation on metadata (concat) makes them one file. They are closed at
the same time too, because the client sleeps half a second in a close that comes before the DataNodes' report.

A sub-file that fails is written again, from memory or the spool. That is also how a dead DataNode is survived which the
NameNode still believes in: the client cannot tell it to choose others, so another block is asked for, and in the end a
block on one DataNode, whose copies the NameNode makes later.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import hdfs_native

from ..errors import CheckpointError, StorageConflictError, StorageError
from ..settings import settings
from .hdfs_cluster import Cluster, Contact, bounded
from .hdfs_errors import facts_of
from .hdfs_rpc import RemoteError
from .parallel import at_the_same_time
from .uploading import Pieces

__all__ = ["PART_MARK", "Upload", "part_name"]

_log = logging.getLogger("bytecheckpoint")
#: A sub-file is at least and at most so long; between the two, a file has eight.
_LEAST_PART = 16 << 20
_MOST_PART = 128 << 20
_PARTS = 8
_LEAST_BLOCK = 16 << 20
_PARTS_IN_FLIGHT = 8
#: Bytes of one call of the client. It wants them as `bytes`: out of a view of memory it takes one number after the other,
#: at some 25 s of core time per GiB, under the interpreter's lock.
_STEP = 1 << 20
#: A call of a writer that takes longer hangs: the client itself gives up on a DataNode after one minute, and a close may
#: wait 16 s for a DataNode's report.
_STALL_SECONDS = 120.0
_LEAST_STALL_SECONDS = 20.0
#: Failures of a chain of DataNodes after which one DataNode must do.
_CHAIN_FAILURES = 2
#: Beginning of the names of sub-files: "<mark>0001-<name of the file>".
PART_MARK = ".bytecheckpoint-part-"
#: Refusals of a concat that hold for every file of the folder: encryption zones, erasure coding, old servers.
_CANNOT_JOIN = ("encryption zone", "erasure", "striped", "Unknown method", "storage policy", "snapshot")


def part_name(path: str, number: int) -> str:
    """Path of a sub-file of `path`, in the same folder."""
    folder, _, last = path.rpartition("/")
    return f"{folder}/{PART_MARK}{number:04d}-{last}"


class Upload:
    """One file on its way.

    Args:
        cluster: where to.
        contact: of the storage.
        path: of the file. Nobody else writes it.
        shown: its address, for messages.
        size: its length in bytes.
        pieces: its bytes.
        block: length of its blocks; 0: what suits.
        action: what is being done, for messages.
    """

    def __init__(
        self,
        cluster: Cluster,
        contact: Contact,
        path: str,
        shown: str,
        size: int,
        pieces: Pieces,
        *,
        block: int = 0,
        action: str = "upload",
    ) -> None:
        self._cluster = cluster
        self._contact = contact
        self._path = path
        self._shown = shown
        self._size = size
        self._pieces = pieces
        self._block = block
        self._length = size  # of what is written as one stream
        self._action = action
        self._begun: dict[str, None] = {}

    def send(self) -> None:
        """Write the file; what was begun is removed if that fails."""
        try:
            if self._block or not self._in_parts():
                self._put(self._path, 0, self._size, whole=True)
        except BaseException:
            at_the_same_time(self._remove, self._begun, _PARTS_IN_FLIGHT, "bytecheckpoint-delete")
            raise

    def _in_parts(self) -> bool:
        """Whether the file could be sent in parts."""
        self._length = length = min(max(-(-self._size // (_PARTS << 20)) << 20, _LEAST_PART), _MOST_PART)
        if self._size <= length or not self._cluster.joins:
            self._length = self._size
            return False
        starts = range(0, self._size, length)
        paths = [self._path, *(part_name(self._path, number) for number in range(1, len(starts)))]

        def one(number: int) -> None:
            start = starts[number]
            self._put(paths[number], start, min(start + length, self._size), whole=False)

        at_the_same_time(one, range(len(starts)), _PARTS_IN_FLIGHT, "bytecheckpoint-put")
        return self._join(paths)

    def _join(self, paths: list[str]) -> bool:
        call = os.urandom(16)
        tries = itertools.count()

        def once() -> None:
            again = next(tries) > 0
            try:
                self._cluster.join(paths[0], paths[1:], call)
            except RemoteError:
                # The answer of an earlier try got lost, and the NameNode no longer remembers it.
                if not again or self._cluster.client.get_file_info(paths[0]).length != self._size:
                    raise

        try:
            self._cluster.run("join the parts of", self._shown, once, self._contact, writes=True, limited=False)
        except StorageError as error:
            if not any(word in str(error) for word in _CANNOT_JOIN):
                raise
            _log.warning("files of %s are sent as single streams, which is slower: %s", self._shown, error)
            self._cluster.joins = False
            self._length = self._size
            for path in paths:
                self._remove(path)
            self._begun.clear()
            return False
        except FileNotFoundError:
            raise self._removed() from None
        return True

    # --- one stream -------------------------------------------------------------------------------------------

    def _put(self, path: str, start: int, stop: int, *, whole: bool) -> None:
        """Write bytes [start, stop) as the file `path`, again and again if need be."""
        chain_failures = removals = 0

        def once() -> None:
            nonlocal chain_failures, removals
            data = self._steps(start, stop)
            first = next(data, None)  # raises when the file is not wanted any more
            writer = self._create(path, whole)
            try:
                replication = self._on_one_datanode(path) if chain_failures >= _CHAIN_FAILURES else 0
                for piece in data if first is None else itertools.chain([first], data):
                    self._bounded(functools.partial(writer.write, bytes(piece)))
                self._bounded(writer.close)
                if replication:
                    self._call(lambda: self._cluster.client.set_replication(path, replication))
            except CheckpointError:
                raise
            except Exception as error:
                facts = facts_of(error)
                chain_failures += facts.transient
                if not facts.absent:
                    raise
                # Once it can be this upload itself: a creation that was given up has taken effect late, in its place.
                removals += 1
                if removals > 1:
                    raise self._removed() from None
                raise InterruptedError("it was removed while it was being written") from None

        try:
            self._cluster.run(self._action, self._shown, once, self._contact, writes=True, limited=False)
        except FileExistsError:
            raise StorageError(f"cannot {self._action} {self._shown}: another writer has it open") from None
        except FileNotFoundError:
            raise StorageError(f"cannot {self._action} {self._shown}: a part of the path is a file") from None

    def _removed(self) -> StorageConflictError:
        return StorageConflictError(
            f"cannot {self._action} {self._shown}: somebody removed it while it was being written, as another save to this "
            f"path does; let one job at a time save to a path"
        )

    def _create(self, path: str, whole: bool) -> Any:
        # A sub-file is one block: it needs one chain of DataNodes, and never waits for the block before. A block that is
        # longer than the file would be room that the NameNode looks for in vain on DataNodes that are nearly full.
        fitting = max(-(-self._length >> 20) << 20, _LEAST_BLOCK)
        block = self._block or (None if whole and self._size > _MOST_PART else fitting)
        options = hdfs_native.WriteOptions(block_size=block, overwrite=True, create_parent=True)
        self._begun[path] = None
        # Not `client.create`: what that returns asks the NameNode for up to 16 s to complete a file that was given up,
        # in whatever thread happens to collect the garbage.
        writer = self._call(lambda: self._cluster.client.inner.create(path, options))
        self._contact.made()
        return writer

    def _on_one_datanode(self, path: str) -> int:
        """Let the blocks of a new file have one copy for now; how many there should be."""
        wanted: int = self._call(lambda: self._cluster.client.get_file_info(path)).replication
        if wanted < 2:
            return 0
        self._call(lambda: self._cluster.client.set_replication(path, 1))
        return wanted

    def _steps(self, start: int, stop: int) -> Iterator[memoryview]:
        for piece in self._pieces(start, stop):
            for at in range(0, len(piece), _STEP):
                yield piece[at : at + _STEP]

    def _call(self, call: Callable[[], Any]) -> Any:
        """A call of the NameNode."""
        return bounded(call, self._cluster.limit(self._contact))

    @staticmethod
    def _bounded(call: Callable[[], Any]) -> None:
        """A call that moves data."""
        bounded(call, min(_STALL_SECONDS, max(settings().storage_timeout, _LEAST_STALL_SECONDS)))

    def _remove(self, path: str) -> None:
        try:
            self._cluster.run(
                "delete", self._shown, lambda: self._cluster.client.delete(path), self._contact, brief=True
            )
        except FileNotFoundError:
            pass
        except StorageError as error:
            _log.warning("%s: what was sent could not be removed: %s", self._shown, error)
