"""HDFS: `hdfs://cluster/...`, through hdfs-native (Rust; no JVM).

The NameNode serves all ranks of all jobs, so this makes as few calls as possible: three to write a file or sub-file
(create, addBlock, complete), one to join sub-files, one to open a file, one to list a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.errors import StorageError, StorageUnavailableError
from bytecheckpoint.storage.base import FileReader, FileStat, check_name, conflict_error
from bytecheckpoint.storage.hdfs.cluster import Cluster, call_client, check_room, cluster_of
from bytecheckpoint.storage.hdfs.config import parse_url
from bytecheckpoint.storage.hdfs.errors import absent
from bytecheckpoint.storage.hdfs.upload import PART_MARK, Upload
from bytecheckpoint.storage.optional import FolderProbe, RoomCheck
from bytecheckpoint.storage.ranged import RangeRequest, RequestSizes, read_in_parallel
from bytecheckpoint.storage.uploading import Pieces, UploadingStorage
from bytecheckpoint.tracing.operation import pause
from bytecheckpoint.tuning import tuning

__all__ = ["HdfsStorage"]

_T = TypeVar("_T")
#: The shortest and the longest requests of a read, in bytes. Each opens a connection to a DataNode.
_REQUEST_BYTES = 2 << 20, 8 << 20
_LISTINGS = 8
_DELETIONS = 8
_TEMPORARY = ".bytecheckpoint-publishing-"
_LOCK = ".bytecheckpoint-replacing-"
_BLOCK = 16 << 20


class HdfsStorage(UploadingStorage, FolderProbe, RoomCheck):
    """A folder of an HDFS.

    Args:
        url: "hdfs://authority/path"; the authority is a name service of the Hadoop configuration, "host:port" or "host".
            An empty one means fs.defaultFS. The path is not decoded.
    """

    def __init__(self, url: str) -> None:
        authority, path = parse_url(url)
        self.url = f"hdfs://{authority}{path}".rstrip("/")
        self._root = path.rstrip("/")
        self._cluster: Cluster = cluster_of(authority)
        # What `list` has seen, for `delete`: sub-files by the name of their unfinished file, abandoned temporary files and
        # locks, and names by folder.
        self._sub_files: dict[str, list[str]] = {}
        self._abandoned: list[str] = []
        self._names: dict[str, set[str]] = {}

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _label(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _run(self, action: str, label: str, call: Callable[[Any], _T], **options: bool) -> _T:
        return self._cluster.run(action, label, lambda: call(self._cluster.client), **options)

    # --- files ------------------------------------------------------------------------------------------------

    def upload(self, name: str, size: int, pieces: Pieces) -> None:
        Upload(self._cluster, self._path(name), self._label(name), size, pieces).send()

    def open(self, name: str) -> FileReader:
        return _HdfsReader(self._cluster, self._path(name), self._label(name))

    def read(self, name: str) -> bytes:
        path = self._path(name)

        def whole() -> bytes:
            # Opened anew for every attempt: a file that replaces this one has other blocks, and the old ones disappear.
            file = call_client(lambda: self._cluster.reader.read(path), self._cluster.call_timeout())
            data: bytes = self._cluster.read(file.read)
            return data

        return self._cluster.run("read", self._label(name), whole, timeout=False)

    def stat(self, name: str) -> FileStat:
        path = self._path(name)
        found = self._run("look at", self._label(name), lambda client: client.get_file_info(path))
        if found.isdir:
            raise absent(self._label(name))
        # Times alone may be equal, so published files have random block sizes (see `_write`).
        version = f"{found.modification_time}-{found.length}-{found.blocksize}"
        return FileStat(found.length, found.modification_time / 1000, version)

    def check_room(self, nbytes: int) -> None:
        check_room(self._cluster, self._root, self.url, nbytes)

    # --- commit -----------------------------------------------------------------------------------------------

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        path, label = self._path(name), self._label(name)
        folder, _, last = path.rpartition("/")
        temporary = f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}"
        self._write(temporary, data, label)
        try:
            if expected:
                lock = f"{folder}/{_LOCK}{hashlib.sha256(f'{last}:{expected}'.encode()).hexdigest()[:16]}"
                self._acquire_lock(temporary, lock, name, expected)
                temporary = lock
                if self.version(name) != expected:
                    raise conflict_error(label)
                self._rename(lock, path, label, overwrite=True)
            elif self._rename(temporary, path, label, overwrite=expected is None):
                return
            # The source is gone: an earlier attempt whose answer was lost has renamed it, or another writer has removed it.
            if self._content(name) != data:
                raise conflict_error(label)
        except StorageUnavailableError:
            raise  # the rename may have taken effect, or may do so soon
        except (FileExistsError, StorageError) as error:
            with contextlib.suppress(StorageError):
                self._discard(temporary, label)
            if isinstance(error, FileExistsError):
                raise conflict_error(label) from None
            raise

    def _write(self, path: str, data: bytes, label: str) -> None:
        """Write a small file under a name that nobody else uses."""
        # The block size means nothing for a file of one block. A random one distinguishes files of the same millisecond.
        block = _BLOCK + 512 * random.SystemRandom().randrange(1 << 17)
        whole = memoryview(data)

        def pieces(start: int = 0, stop: int = len(data)) -> Iterator[memoryview]:
            return iter([whole[start:stop]] if data else [])

        Upload(self._cluster, path, label, len(data), pieces, block=block, action="publish").send()

    def _rename(self, source: str, target: str, label: str, *, overwrite: bool) -> bool:
        """Rename a file. Returns False when the source is missing.

        Raises:
            FileExistsError: the target exists, and `overwrite` is false.
        """
        try:
            self._run("publish", label, lambda client: client.rename(source, target, overwrite), writes=True)
        except FileNotFoundError:
            return False
        return True

    def _acquire_lock(self, temporary: str, lock: str, name: str, expected: str) -> None:
        """Get the exclusive right to replace version `expected`: rename the new file to a name that only one can have.

        The lock is the complete new file. Its holder renames it over the old file. Other writers remove a lock that has
        become old, since its holder was probably killed. A holder that was only slow then finds no file to rename and gets
        a conflict.
        """
        label = self._label(name)
        seen, since = "", 0.0
        while True:
            try:
                self._rename(temporary, lock, label, overwrite=False)
                return
            except FileExistsError:
                pass
            if self.version(name) != expected:
                raise conflict_error(label)
            present = self.version(lock[len(self._root) + 1 :])
            if present != seen:
                seen, since = present, time.monotonic()
            elif present and time.monotonic() - since > tuning().hdfs_lock_expiry:
                self._discard(lock, label)
            pause(0.2)

    def _content(self, name: str) -> bytes | None:
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def _discard(self, path: str, label: str) -> None:
        self._run("publish", label, lambda client: client.delete(path), brief=True)

    # --- folders ----------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        try:
            self._run("look at", self.url, lambda client: client.get_file_info(self._root or "/"))
        except FileNotFoundError:
            return False
        return True

    def folders(self) -> list[str]:
        return sorted(self._listing("")[1])

    def _listing(self, folder: str) -> tuple[list[tuple[str, int, int]], list[str]]:
        """Return the files (name, size, time in ms) and the folders directly in a folder ("" or "name/")."""
        path = f"{self._root}/{folder}".rstrip("/") or "/"
        try:
            found = self._run("list", self.url, lambda client: list(client.list_status(path)))
        except FileNotFoundError:
            return [], []
        entries = [(entry.path.rpartition("/")[2], entry) for entry in found if entry.path.rstrip("/") != path]
        files = [(name, entry.length, entry.modification_time) for name, entry in entries if not entry.isdir]
        return files, [name for name, entry in entries if entry.isdir]

    def list(self) -> list[tuple[str, int]]:
        files, folders = self._listing("")
        found = [("", files)]
        inside = parallel_map(lambda f: self._listing(f + "/")[0], folders, _LISTINGS, "bytecheckpoint-list")
        found += [(folder + "/", inner) for folder, inner in zip(folders, inside, strict=True)]
        sizes: dict[str, int] = {}
        sub_files: defaultdict[str, list[str]] = defaultdict(list)
        abandoned: list[str] = []
        # By the NameNode's clock: this machine's may be hours ahead.
        newest = max((modified for _, files in found for _, _, modified in files), default=0)
        self._names = {folder[:-1]: {folder + name for name, _, _ in entries} for folder, entries in found if folder}
        for folder, entries in found:
            for name, size, modified in entries:
                if name.startswith(PART_MARK):
                    # Listed under the name of the unfinished file, so that a cleanup finds and removes it.
                    owner = folder + name[len(PART_MARK) :].partition("-")[2]
                    sub_files[owner].append(folder + name)
                    sizes.setdefault(owner, 0)
                elif name.startswith((_TEMPORARY, _LOCK)):
                    if modified < newest - 1000 * tuning().hdfs_abandoned:
                        abandoned.append(folder + name)
                else:
                    sizes[folder + name] = size
        self._sub_files, self._abandoned = dict(sub_files), abandoned
        return sorted(sizes.items())

    def delete(self, names: Iterable[str]) -> None:
        wanted = list(names)
        for name in wanted:
            check_name(name)
        sub_files, abandoned, self._abandoned = self._sub_files, self._abandoned, []
        removed = {*wanted, *abandoned, *itertools.chain.from_iterable(sub_files.pop(name, ()) for name in wanted)}
        parallel_map(self._delete, sorted(removed), _DELETIONS, "bytecheckpoint-delete")
        for folder in sorted({name.rpartition("/")[0] for name in wanted if "/" in name}):
            names = self._names.get(folder, set())
            names -= removed
            if not names:
                with contextlib.suppress(StorageError):
                    self._delete(folder)  # which HDFS refuses if the folder is not empty after all

    def _delete(self, name: str) -> None:
        path = f"{self._root}/{name}"
        try:
            self._run("delete", self._label(name), lambda client: client.delete(path), brief=True)
        except FileNotFoundError:
            pass


class _HdfsReader(FileReader):
    preferred_bytes = 16 << 20

    def __init__(self, cluster: Cluster, path: str, label: str) -> None:
        self._cluster = cluster
        self._path = path
        self._label = label
        self._lock = threading.Lock()
        self._opener: Any = None
        self._file: Any = cluster.run("open", label, self._open)
        self.size = len(self._file)

    def _open(self) -> Any:
        self._opener = self._cluster.reader
        return self._opener.read(self._path)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        with self._cluster.connections.share() as connections:
            sizes = RequestSizes(connections, *_REQUEST_BYTES)
            return read_in_parallel(self._get, offset, buffers, self.size, sizes)

    def _get(self, request: RangeRequest) -> int:
        """Carry out one request. Returns the bytes read, 0 when the file was removed meanwhile."""
        start, target = request
        failed: Any = None

        def copy_packets(file: Any) -> int:
            # Packet by packet: to touch fresh pages for the whole request costs more than the copy.
            filled = 0
            for packet in file.read_range_stream(start, len(target)):
                target[filled : filled + len(packet)] = np.frombuffer(packet, np.uint8)
                filled += len(packet)
            return filled

        def attempt() -> int:
            nonlocal failed
            file = self._open_file(failed)
            try:
                return self._cluster.read(lambda: copy_packets(file))
            except Exception:
                failed = file
                raise

        try:
            return self._cluster.run("read", self._label, attempt, timeout=False)
        except FileNotFoundError:
            return 0

    def _open_file(self, failed: Any) -> Any:
        """Return the open file, opened anew if a read of it has failed or the cluster's reading client has changed.

        A new open updates the places of the blocks.
        """
        with self._lock:
            if self._file is failed or self._opener is not self._cluster.reader:
                file = call_client(self._open, self._cluster.call_timeout())
                if len(file) != self.size:
                    raise absent(self._label)  # another file has its name
                self._file = file
            return self._file

    def close(self) -> None:
        self._file = None
