"""HDFS: `hdfs://cluster/...`, through hdfs-native (Rust; no JVM).

The NameNode serves all ranks of all jobs, so it is asked for as little as possible: three calls for a file or sub-file
written (create, a block, complete), one for joining sub-files, one for a file opened, one for a folder listed.
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

from ..errors import StorageConflictError, StorageError, StorageUnavailableError
from .base import FileReader, FileStat, check_name
from .hdfs_cluster import Cluster, Contact, bounded, cluster_of
from .hdfs_config import parse_url
from .hdfs_errors import absent
from .hdfs_upload import PART_MARK, Upload
from .parallel import at_the_same_time
from .ranged import Cut, Piece, fill
from .uploading import Pieces, UploadingStorage

__all__ = ["HdfsStorage"]

_T = TypeVar("_T")
#: The shortest and the longest requests of a read, in bytes: every one is a connection to a DataNode of its own.
_REQUEST_BYTES = 2 << 20, 8 << 20
_LISTINGS = 8
_DELETIONS = 8
_TEMPORARY = ".bytecheckpoint-publishing-"
_CLAIM = ".bytecheckpoint-replacing-"
#: A claim this old belongs to nobody any more, and a temporary file this old neither.
_CLAIM_SECONDS = 30.0
_ABANDONED_SECONDS = 3600.0
_BLOCK = 16 << 20


class HdfsStorage(UploadingStorage):
    """A folder of an HDFS.

    Args:
        url: "hdfs://authority/path"; the authority is a name service of the Hadoop configuration, "host:port" or "host".
            Without one, fs.defaultFS is meant. The path is taken as it is, without any decoding.
    """

    def __init__(self, url: str) -> None:
        authority, path = parse_url(url)
        self.url = f"hdfs://{authority}{path}".rstrip("/")
        self._root = path.rstrip("/")
        self._cluster: Cluster = cluster_of(authority)
        self._contact = Contact()
        # Sub-files of unfinished files, by the file's name, and abandoned files ("") as `list` has seen them.
        self._left: dict[str, list[str]] = {}
        # What is in each folder, as `list` has seen it.
        self._inside: dict[str, set[str]] = {}

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _shown(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _run(self, action: str, shown: str, call: Callable[[Any], _T], **how: bool) -> _T:
        return self._cluster.run(action, shown, lambda: call(self._cluster.client), self._contact, **how)

    # --- files ------------------------------------------------------------------------------------------------

    def upload(self, name: str, size: int, pieces: Pieces) -> None:
        Upload(self._cluster, self._contact, self._path(name), self._shown(name), size, pieces).send()

    def open(self, name: str) -> FileReader:
        return _Reader(self._cluster, self._contact, self._path(name), self._shown(name))

    def read(self, name: str) -> bytes:
        path = self._path(name)

        def whole() -> bytes:
            # Opened for every try, read as a whole: what replaces a file has other blocks, and the old ones go.
            file = bounded(lambda: self._cluster.reader.read(path), self._cluster.limit(self._contact))
            data: bytes = self._cluster.read(file.read)
            return data

        return self._cluster.run("read", self._shown(name), whole, self._contact, limited=False)

    def stat(self, name: str) -> FileStat:
        path = self._path(name)
        found = self._run("look at", self._shown(name), lambda client: client.get_file_info(path))
        if found.isdir:
            raise absent(self._shown(name))
        # The block size of what was published is drawn (see `_write`): times alone may be equal.
        version = f"{found.modification_time}-{found.length}-{found.blocksize}"
        return FileStat(found.length, found.modification_time / 1000, version)

    # --- commit -----------------------------------------------------------------------------------------------

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        path, shown = self._path(name), self._shown(name)
        folder, _, last = path.rpartition("/")
        temporary = f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}"
        self._write(temporary, data, shown)
        try:
            if expected:
                claim = f"{folder}/{_CLAIM}{hashlib.sha256(f'{last}:{expected}'.encode()).hexdigest()[:16]}"
                self._claim(temporary, claim, name, expected)
                temporary = claim
                if self.version(name) != expected:
                    raise _conflict(shown)
                self._rename(claim, path, shown, overwrite=True)
            elif self._rename(temporary, path, shown, overwrite=expected is None):
                return
            # It was renamed by somebody: by an earlier try whose answer got lost, or it was taken away from this writer.
            if self._content(name) != data:
                raise _conflict(shown)
        except StorageUnavailableError:
            raise  # it may be in place all the same, or soon
        except (FileExistsError, StorageError) as error:
            with contextlib.suppress(StorageError):
                self._discard(temporary, shown)
            if isinstance(error, FileExistsError):
                raise _conflict(shown) from None
            raise

    def _write(self, path: str, data: bytes, shown: str) -> None:
        """Write a small file under a name of its own."""
        # A file's block size is free to choose and changes nothing for a file of one block: drawn at random, it tells
        # files apart that were written in the same millisecond.
        block = _BLOCK + 512 * random.SystemRandom().randrange(1 << 17)
        whole = memoryview(data)

        def pieces(start: int = 0, stop: int = len(data)) -> Iterator[memoryview]:
            return iter([whole[start:stop]] if data else [])

        Upload(self._cluster, self._contact, path, shown, len(data), pieces, block=block, action="publish").send()

    def _rename(self, source: str, target: str, shown: str, *, overwrite: bool) -> bool:
        """Move a file; False when the source is not there.

        Raises:
            FileExistsError: the target is, and is not to be overwritten.
        """
        try:
            self._run("publish", shown, lambda client: client.rename(source, target, overwrite), writes=True)
        except FileNotFoundError:
            return False
        return True

    def _claim(self, temporary: str, claim: str, name: str, expected: str) -> None:
        """Get the exclusive right to replace version `expected`: by moving the new file to a name that only one can have.

        A claim holds the complete new file. Its owner moves it over the old one; everybody else may only remove it, and
        does so when it has stood for a while, because its owner was killed. An owner that was only slow then finds
        nothing to move and has a conflict.
        """
        shown = self._shown(name)
        seen, since = "", 0.0
        while True:
            try:
                self._rename(temporary, claim, shown, overwrite=False)
                return
            except FileExistsError:
                pass
            if self.version(name) != expected:
                raise _conflict(shown)
            mark = self.version(claim[len(self._root) + 1 :])
            if mark != seen:
                seen, since = mark, time.monotonic()
            elif mark and time.monotonic() - since > _CLAIM_SECONDS:
                self._discard(claim, shown)
            time.sleep(0.2)

    def _content(self, name: str) -> bytes | None:
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def _discard(self, path: str, shown: str) -> None:
        self._run("publish", shown, lambda client: client.delete(path), brief=True)

    # --- folders ----------------------------------------------------------------------------------------------

    def folders(self) -> list[str]:
        return sorted(self._listing("")[1])

    def _listing(self, folder: str) -> tuple[list[tuple[str, int, int]], list[str]]:
        """Files (name, size, time in ms) and folders directly in a folder ("" or "name/")."""
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
        inside = at_the_same_time(lambda f: self._listing(f + "/")[0], folders, _LISTINGS, "bytecheckpoint-list")
        found += [(folder + "/", inner) for folder, inner in zip(folders, inside, strict=True)]
        sizes: dict[str, int] = {}
        left: defaultdict[str, list[str]] = defaultdict(list)
        self._inside = {folder[:-1]: {folder + name for name, _, _ in entries} for folder, entries in found if folder}
        for folder, entries in found:
            for name, size, modified in entries:
                if name.startswith(PART_MARK):
                    # An unfinished file: it is seen as a whole, so that who finds it can remove it.
                    owner = folder + name[len(PART_MARK) :].partition("-")[2]
                    left[owner].append(folder + name)
                    sizes.setdefault(owner, 0)
                elif name.startswith((_TEMPORARY, _CLAIM)):
                    if modified / 1000 < time.time() - _ABANDONED_SECONDS:
                        left[""].append(folder + name)
                else:
                    sizes[folder + name] = size
        self._left = dict(left)
        return sorted(sizes.items())

    def delete(self, names: Iterable[str]) -> None:
        wanted = list(names)
        for name in wanted:
            check_name(name)
        left = self._left
        more = itertools.chain.from_iterable(left.pop(name, ()) for name in [*wanted, ""])
        gone = {*wanted, *more}
        at_the_same_time(self._delete, sorted(gone), _DELETIONS, "bytecheckpoint-delete")
        for folder in sorted({name.rpartition("/")[0] for name in wanted if "/" in name}):
            inside = self._inside.get(folder, set())
            inside -= gone
            if not inside:
                with contextlib.suppress(StorageError):
                    self._delete(folder)  # if there is nothing else in it

    def _delete(self, name: str) -> None:
        path = f"{self._root}/{name}"
        try:
            self._run("delete", self._shown(name), lambda client: client.delete(path), brief=True)
        except FileNotFoundError:
            pass


class _Reader(FileReader):
    step_bytes = 16 << 20

    def __init__(self, cluster: Cluster, contact: Contact, path: str, shown: str) -> None:
        self._cluster = cluster
        self._contact = contact
        self._path = path
        self._shown = shown
        self._lock = threading.Lock()
        self._opener: Any = None
        self._file: Any = cluster.run("open", shown, self._open, contact)
        self.size = len(self._file)

    def _open(self) -> Any:
        self._opener = self._cluster.reader
        return self._opener.read(self._path)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        with self._cluster.connections.share() as parts:
            return fill(self._get, offset, buffers, self.size, Cut(parts, *_REQUEST_BYTES))

    def _get(self, piece: Piece) -> int:
        """Fill one piece; 0 when the file was removed meanwhile."""
        start, target = piece
        failed: Any = None

        def pour(file: Any) -> int:
            # Packet by packet: pages for the whole piece would have to be touched first, which costs more than the copy.
            filled = 0
            for packet in file.read_range_stream(start, len(target)):
                target[filled : filled + len(packet)] = np.frombuffer(packet, np.uint8)
                filled += len(packet)
            return filled

        def once() -> int:
            nonlocal failed
            file = self._fresh(failed)
            try:
                return self._cluster.read(lambda: pour(file))
            except Exception:
                failed = file
                raise

        try:
            return self._cluster.run("read", self._shown, once, self._contact, limited=False)
        except FileNotFoundError:
            return 0

    def _fresh(self, failed: Any) -> Any:
        """The open file; opened again, with the blocks' places of now, if it is the one that has failed.

        So it is when another client should do that now.
        """
        with self._lock:
            if self._file is failed or self._opener is not self._cluster.reader:
                found = bounded(self._open, self._cluster.limit(self._contact))
                if len(found) != self.size:
                    raise absent(self._shown)  # another file has its name
                self._file = found
            return self._file

    def close(self) -> None:
        self._file = None


def _conflict(shown: str) -> StorageConflictError:
    return StorageConflictError(
        f"cannot publish {shown}: another save replaced it meanwhile; let one job at a time save to a path"
    )
