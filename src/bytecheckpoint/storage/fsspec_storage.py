"""Any file system of fsspec, as `fsspec+scheme://...`: slower than a backend of one's own, and right.

Nothing is taken for granted that file systems differ in: files are sent whole, what was written is looked at again, and
a checkpoint is published by writing it beside its place and moving it there, which replaces it at once both where moving
is a rename and where it is a copy to a new object. Versions are told by the bytes. One thread at a time uses a file system,
unless it is made for several, and one that has lost its connection is made anew.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import fsspec
import numpy as np
import xxhash
from fsspec.registry import known_implementations

from ..errors import (
    CheckpointError,
    StorageConflictError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    UsageError,
)
from ..settings import settings
from .base import UNENCODABLE, Capabilities, FileReader, FileStat, check_name
from .local import FULL, TRANSIENT
from .object_errors import cleaned
from .retrying import retry
from .uploading import Pieces, UploadingStorage

__all__ = ["FsspecStorage"]

_T = TypeVar("_T")
_TEMPORARY = ".publishing-"
_READ_BYTES = 16 << 20
_LOCAL = {"file", "local"}
_FOLDER_TRIES = 3
#: What file systems say about a file that changes when it is replaced, by any of their names for it.
_MARKS = (
    "ETag", "etag", "generation", "version_id", "md5", "checksum", "size", "ino", "mtime", "created", "LastModified",
    "last_modified", "modified", "updated",
)  # fmt: skip
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
#: What errors that pass are called, or say when they have no number.
_PASSING = re.compile(
    r"Timeout|Connect|Disconnect|Reset|BrokenPipe|Throttl|ServiceUnavailable|EOFError|SSHException|error_temp"
)
_PASSING_WORDS = re.compile(r"(?i)socket is closed|not active|connection (lost|dropped|closed)")


class FsspecStorage(UploadingStorage):
    """A folder of a file system of fsspec, which takes its options from the environment and fsspec's configuration."""

    def __init__(self, url: str) -> None:
        inner = url.partition("+")[2]
        scheme, _, rest = inner.partition("://")
        if "?" in rest or re.match(r"[^/]*:[^/]*@", rest):
            raise UsageError(
                f"an fsspec+{scheme}:// URL takes no password and no query: put them into fsspec's configuration or the "
                f"environment"
            )
        path = rest.strip("/")
        if not scheme or not path or "::" in rest or (scheme in _LOCAL and not rest.startswith("/")):
            raise UsageError(
                f"{url!r} is not a checkpoint path: write fsspec+file:///folder or fsspec+scheme://..., without '::'"
            )
        if any(part in ("", ".", "..") for part in path.split("/")) or UNENCODABLE.search(path):
            raise UsageError(
                f"{url!r} is not a checkpoint path: it has an empty, '.' or '..' part or a control character"
            )
        self.url = f"fsspec+{inner}".rstrip("/")
        self._inner = inner
        self._renewing = threading.Lock()
        try:
            with _translated("use", self.url, 1):  # some connect to their server here
                self._fs, root = _file_system(inner)
        except FileNotFoundError:
            raise StorageError(f"cannot use {self.url}: no such file or folder (attempt 1)") from None
        self._root = root.rstrip("/")
        self.capabilities = Capabilities(
            # A class that was registered in this process is known to no other.
            shared=scheme != "memory" and scheme in known_implementations,
            exclusive_publish=False,
            whole_files=True,
        )

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _shown(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _run(self, action: str, shown: str, call: Callable[[Any], _T]) -> _T:
        """What `call` makes of the file system, with typed errors, tried again after transient ones."""
        tries = itertools.count(1)

        def once() -> _T:
            fs = self._fs
            try:
                with _translated(action, shown, next(tries)), _turn(fs):
                    return call(fs)
            except StorageUnavailableError:
                self._renew(fs)
                raise

        return retry(once, settings().storage_timeout)

    def _renew(self, fs: Any) -> None:
        """Take another file system in the place of `fs`, whose connection may be lost for good."""
        with self._renewing, contextlib.suppress(Exception):  # the next try will show what is the matter
            if self._fs is fs:
                type(fs).clear_instance_cache()
                self._fs, _ = _file_system(self._inner)

    # --- files ------------------------------------------------------------------------------------------------

    def upload(self, name: str, size: int, pieces: Pieces) -> None:
        path = self._path(name)
        self._run("upload", self._shown(name), lambda fs: self._write(fs, path, size, pieces()))

    def _write(self, fs: Any, path: str, size: int, pieces: Iterator[memoryview]) -> None:
        """Write a file and see that it is there; a part of one is removed."""
        _make_folder(fs, path.rpartition("/")[0])
        try:
            with fs.open(path, "wb") as file:
                for piece in pieces:
                    _write_fully(file, piece)
            fs.invalidate_cache()
            found = fs.info(path)["size"]
            if found != size:
                raise StorageError(f"{self.url}: {found} bytes of {size} arrived at {path}")
        except BaseException as error:
            with contextlib.suppress(Exception):
                fs.rm_file(path)
            if isinstance(error, FileNotFoundError):  # whoever removes a folder's last file removes the folder
                raise StorageUnavailableError(f"{self.url}: {path} was removed while it was written") from None
            raise

    def open(self, name: str) -> FileReader:
        return _Reader(self, name, self.stat(name).size)

    def read(self, name: str) -> bytes:
        path = self._path(name)
        self.stat(name)  # some file systems take a folder for an empty file
        return self._run("read", self._shown(name), lambda fs: bytes(fs.cat_file(path)))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, fewer at its end."""
        path = self._path(name)
        return self._run("read", self._shown(name), lambda fs: bytes(fs.cat_file(path, start=start, end=stop)))

    def stat(self, name: str) -> FileStat:
        path = self._path(name)

        def look(fs: Any) -> dict[str, Any]:
            fs.invalidate_cache()
            found: dict[str, Any] = fs.info(path)
            return found

        info = self._run("look at", self._shown(name), look)
        if info.get("type") != "file":
            raise FileNotFoundError(2, "no such file", self._shown(name))
        if info.get("size") is None:
            raise StorageError(f"cannot look at {self._shown(name)}: its file system does not say how long it is")
        marks = [f"{mark}={info[mark]}" for mark in _MARKS if info.get(mark) is not None]
        return FileStat(int(info["size"]), _time(info), ";".join(marks))

    def version(self, name: str) -> str:
        # What is said of a file may be the same for two of one length that were written in one second.
        try:
            return xxhash.xxh3_128_hexdigest(self.read(name))
        except FileNotFoundError:
            return ""

    # --- commit -----------------------------------------------------------------------------------------------

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        path, shown = self._path(name), self._shown(name)
        if expected is not None and self.version(name) != expected:
            raise StorageConflictError(
                f"cannot publish {shown}: another save replaced it meanwhile; let one job at a time save to a path"
            )
        folder, _, last = path.rpartition("/")
        temporary = f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}-{last}"

        def put(fs: Any) -> None:
            self._write(fs, temporary, len(data), iter([memoryview(data)]))
            _move(fs, temporary, path)
            fs.invalidate_cache()
            if fs.exists(temporary):
                raise StorageError(f"cannot publish {shown}: its file system did not replace it; use another storage")

        try:
            self._run("publish", shown, put)
        except BaseException:
            with contextlib.suppress(Exception), _turn(self._fs):
                self._fs.rm_file(temporary)
            raise

    # --- folders ----------------------------------------------------------------------------------------------

    def _listing(self, path: str) -> tuple[list[tuple[str, int]], list[str]]:
        def call(fs: Any) -> Sequence[dict[str, Any]]:
            fs.invalidate_cache()
            try:
                # Listings of web servers name files and say no more.
                found = fs.ls(path, detail=True)
                return [fs.info(e["name"]) if e["type"] == "file" and e["size"] is None else e for e in found]
            except (FileNotFoundError, NotADirectoryError):
                return []

        entries = [(e["name"].rstrip("/"), e) for e in self._run("list", self.url, call)]
        inside = [(name.rpartition("/")[2], e) for name, e in entries if name != path and _TEMPORARY not in name]
        files = [(name, int(e["size"])) for name, e in inside if e["type"] == "file"]
        return files, [name for name, e in inside if e["type"] == "directory"]

    def folders(self) -> list[str]:
        return sorted(self._listing(self._root)[1])

    def list(self) -> list[tuple[str, int]]:
        found, folders = self._listing(self._root)
        for folder in folders:
            found = found + [(f"{folder}/{name}", size) for name, size in self._listing(f"{self._root}/{folder}")[0]]
        return sorted(found)

    def delete(self, names: Iterable[str]) -> None:
        paths = [(self._path(name), self._shown(name), "/" in name) for name in names]
        for path, shown, _ in paths:
            self._remove(path, shown)
        for folder in {path.rpartition("/")[0] for path, _, nested in paths if nested}:
            with contextlib.suppress(Exception), _turn(self._fs):  # not empty, or not a thing that can be removed
                self._fs.rmdir(folder)

    def _remove(self, path: str, shown: str) -> None:
        def remove(fs: Any) -> None:
            try:
                fs.rm_file(path)
            except Exception:  # not all say that a file is not there as Python does
                fs.invalidate_cache()
                if fs.isfile(path):
                    raise

        self._run("delete", shown, remove)


def _file_system(inner: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    # Some take what stands behind a "#" for an option: it is kept from them.
    plain, mark, _ = inner.partition("#")
    base = plain[: plain.rindex("/") + 1] if mark else inner
    try:
        fs, root = fsspec.core.url_to_fs(base)
    except (ImportError, ValueError) as error:
        scheme = inner.partition("://")[0]
        known = (
            ""
            if scheme in fsspec.available_protocols()
            else f"; it knows {', '.join(sorted(set(known_implementations)))}"
        )
        raise UsageError(f"cannot use fsspec+{scheme}://: {cleaned(str(error))}{known}") from None
    return fs, f"{root.rstrip('/')}/{inner[len(base) :]}" if mark else root


@contextlib.contextmanager
def _turn(fs: Any) -> Iterator[None]:
    """Have a file system to oneself: those that are not asynchronous inside may hold one connection for one request."""
    if fs.async_impl:
        yield
        return
    with vars(fs).setdefault("_bytecheckpoint_turn", threading.RLock()):  # it is shared by all storages on it
        yield


def _make_folder(fs: Any, path: str) -> None:
    """Create a folder with all above it, which other ranks may be doing at the same moment."""
    for tries_left in reversed(range(_FOLDER_TRIES)):
        try:
            fs.makedirs(path, exist_ok=True)
            return
        except Exception:
            fs.invalidate_cache()
            if fs.isdir(path):
                return
            if not tries_left:
                raise


def _move(fs: Any, source: str, target: str) -> None:
    """Rename a file where that is one operation, else copy it and remove it."""
    if type(fs).mv is fsspec.AbstractFileSystem.mv:
        # That one takes "[" and "*" for patterns.
        fs.cp_file(source, target)
        fs.rm_file(source)
    else:
        fs.mv(source, target)


class _Reader(FileReader):
    step_bytes = _READ_BYTES

    def __init__(self, storage: FsspecStorage, name: str, size: int) -> None:
        self._storage = storage
        self._name = name
        self.size = size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        position = offset
        for buffer in buffers:
            target = np.frombuffer(buffer, np.uint8)
            while len(target) and position < self.size:
                stop = min(position + len(target), position + _READ_BYTES, self.size)
                try:
                    got = np.frombuffer(self._storage.read_range(self._name, position, stop), np.uint8)
                except FileNotFoundError:
                    return position - offset  # it was removed meanwhile
                if not len(got):
                    return position - offset
                np.copyto(target[: len(got)], got)
                target = target[len(got) :]
                position += len(got)
        return position - offset

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _translated(action: str, shown: str, attempt: int) -> Iterator[None]:
    """Turn what file systems raise, which may be anything and hold secrets, into typed errors."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise FileNotFoundError(2, "no such file", shown) from None
    except Exception as error:  # noqa: BLE001  a typed one takes its place
        reason = cleaned(str(error))[:200] or type(error).__name__
        what = f"cannot {action} {shown}: {reason}"
        number = error.errno if isinstance(error, OSError) else None
        if number in FULL:
            raise StorageFullError(f"{what} (attempt {attempt}); free space and save again") from None
        passing = any(_PASSING.search(cls.__name__) for cls in type(error).__mro__[:-2])
        if number in TRANSIENT or passing or (number is None and _PASSING_WORDS.search(str(error))):
            raise StorageUnavailableError(f"{what}; check that the storage can be reached", undecided=True) from None
        raise StorageError(f"{what} (attempt {attempt})") from None


def _write_fully(file: Any, piece: memoryview) -> None:
    while len(piece):
        done = file.write(piece)
        piece = piece[len(piece) if done is None else done :]


def _time(info: dict[str, Any]) -> float:
    for key in _TIMES:
        value = info.get(key)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
    return 0.0
