"""Any file system of fsspec, as `fsspec+scheme://...`: correct on all of them, but slower than a backend of its own.

The backend relies on nothing in which file systems differ. It sends files whole and checks them afterwards. It
publishes a file by writing it under a temporary name and moving it. That is atomic where a move is a rename, and where
it copies to a new object. Versions are hashes of the content. One thread at a time uses a file system, unless it is
asynchronous inside. A file system that has lost its connection is made anew.
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

from bytecheckpoint.calls import SharedLock
from bytecheckpoint.errors import (
    CheckpointError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    UsageError,
)
from bytecheckpoint.retries import retry
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.base import UNENCODABLE, Capabilities, FileReader, FileStat, check_name, conflict_error
from bytecheckpoint.storage.posix.files import FULL_ERRNOS, TRANSIENT_ERRNOS, may_pass
from bytecheckpoint.storage.remote import cleaned
from bytecheckpoint.storage.uploading import Pieces, UploadingStorage
from bytecheckpoint.tracing.operation import count_retries

__all__ = ["FsspecStorage"]

_T = TypeVar("_T")
_TEMPORARY = ".publishing-"
_READ_BYTES = 16 << 20
_LOCAL = {"file", "local"}
_FOLDER_ATTEMPTS = 3
#: Attributes of a file that change when it is replaced, by the names that file systems use.
_VERSION_KEYS = (
    "ETag", "etag", "generation", "version_id", "md5", "checksum", "size", "ino", "mtime", "created", "LastModified",
    "last_modified", "modified", "updated",
)  # fmt: skip
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
#: Class names of transient errors, and words of transient errors that have no number.
_TRANSIENT_CLASS = re.compile(
    r"Timeout|Connect|Disconnect|Reset|BrokenPipe|Throttl|ServiceUnavailable|EOFError|SSHException|error_temp"
)
_TRANSIENT_WORDS = re.compile(r"(?i)socket is closed|not active|connection (lost|dropped|closed)")


class FsspecStorage(UploadingStorage):
    """A folder of a file system of fsspec, configured by the environment and fsspec's configuration files."""

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
        self._inner, self._local = inner, scheme in _LOCAL
        self._renewing = threading.Lock()
        try:
            with _translated("use", self.url, 1):  # some file systems connect to their server here
                self._fs, root = _file_system(inner)
        except FileNotFoundError:
            raise StorageError(f"cannot use {self.url}: no such file or folder (attempt 1)") from None
        self._root = root.rstrip("/")
        self.capabilities = Capabilities(
            # A class that was registered in this process is unknown to others.
            shared=scheme != "memory" and scheme in known_implementations,
            exclusive_publish=False,
            whole_files=True,
            page_cache=self._local,
            parallel_reads=8,
        )

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _label(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _run(self, action: str, label: str, call: Callable[[Any], _T], *, exclusive: bool = True) -> _T:
        """Return `call(file system)`, and call it again after transient errors. Errors are typed.

        Args:
            action: "upload", for error messages.
            label: the file or folder, for error messages.
            call: the requests.
            exclusive: lock the file system meanwhile; otherwise `call` does.
        """
        attempts = itertools.count(1)

        def attempt() -> _T:
            fs = self._fs
            try:
                with (
                    _translated(action, label, next(attempts)),
                    _exclusive(fs) if exclusive else contextlib.nullcontext(),
                ):
                    return call(fs)
            except StorageUnavailableError:
                self._renew(fs)
                raise

        # On local file systems the errors may pass that `PosixStorage` retries.
        return retry(
            attempt,
            settings().storage.timeout,
            lambda error: not self._local or may_pass(error.__context__, self._root),
        )

    def _renew(self, fs: Any) -> None:
        """Replace `fs`, whose connection may be lost for good, by another file system."""
        with self._renewing, contextlib.suppress(Exception):  # the next attempt raises the error
            if self._fs is fs:
                type(fs).clear_instance_cache()
                self._fs, _ = _file_system(self._inner)

    # --- files ------------------------------------------------------------------------------------------------

    def upload(self, name: str, size: int, pieces: Pieces) -> None:
        path = self._path(name)
        self._run("upload", self._label(name), lambda fs: self._write(fs, path, size, pieces()), exclusive=False)

    def _write(self, fs: Any, path: str, size: int, pieces: Iterator[memoryview]) -> None:
        """Write a file and check its length; remove a partial file."""
        with _exclusive(fs):
            _make_folder(fs, path.rpartition("/")[0])
        file = None
        try:
            with _exclusive(fs):
                file = fs.open(path, "wb")
            # The lock is not held between pieces: they may come from another thread that reads this very file system.
            for piece in pieces:
                with _exclusive(fs):
                    _write_fully(file, piece)
            with _exclusive(fs):
                file.close()
                fs.invalidate_cache()
                found = fs.info(path)["size"]
            if found != size:
                raise StorageError(f"{self.url}: {found} bytes of {size} arrived at {path}")
        except BaseException as error:
            with _exclusive(fs):
                with contextlib.suppress(Exception):
                    if file is not None:
                        file.close()
                with contextlib.suppress(Exception):
                    fs.rm_file(path)
            if isinstance(error, FileNotFoundError):  # a delete of a folder's last file removes the folder
                raise StorageUnavailableError(f"{self.url}: {path} was removed while it was written") from None
            raise

    def open(self, name: str) -> FileReader:
        return _FsspecReader(self, name, self.stat(name).size)

    def read(self, name: str) -> bytes:
        path = self._path(name)
        self.stat(name)  # some file systems read a folder as an empty file
        return self._run("read", self._label(name), lambda fs: bytes(fs.cat_file(path)))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Read bytes [start, stop) of a file, fewer at its end."""
        path = self._path(name)
        return self._run("read", self._label(name), lambda fs: bytes(fs.cat_file(path, start=start, end=stop)))

    def stat(self, name: str) -> FileStat:
        path = self._path(name)

        def look(fs: Any) -> dict[str, Any]:
            fs.invalidate_cache()
            try:
                found: dict[str, Any] = fs.info(path)
            except NotADirectoryError:  # the folder is a file
                raise FileNotFoundError from None
            return found

        info = self._run("look at", self._label(name), look)
        if info.get("type") != "file":
            raise FileNotFoundError(2, "no such file", self._label(name))
        if info.get("size") is None:
            raise StorageError(f"cannot look at {self._label(name)}: its file system does not say how long it is")
        values = [f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key) is not None]
        return FileStat(int(info["size"]), _time(info), ";".join(values))

    def version(self, name: str) -> str:
        # The attributes may be equal for two files of one length that were written in one second.
        try:
            return xxhash.xxh3_128_hexdigest(self.read(name))
        except FileNotFoundError:
            return ""

    # --- commit -----------------------------------------------------------------------------------------------

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        path, label = self._path(name), self._label(name)
        if expected is not None and self.version(name) != expected:
            raise conflict_error(label)
        folder, _, last = path.rpartition("/")
        temporary = f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}-{last}"

        def put(fs: Any) -> None:
            self._write(fs, temporary, len(data), iter([memoryview(data)]))
            _move(fs, temporary, path)
            if _is_file(fs, temporary):
                raise StorageError(f"cannot publish {label}: its file system did not replace it; use another storage")

        try:
            self._run("publish", label, put)
        except BaseException:
            with contextlib.suppress(Exception), _exclusive(self._fs):
                self._fs.rm_file(temporary)
            raise

    # --- folders ----------------------------------------------------------------------------------------------

    def _listing(self, path: str) -> tuple[list[tuple[str, int]], list[str]]:
        def call(fs: Any) -> Sequence[dict[str, Any]]:
            fs.invalidate_cache()
            try:
                # Listings of web servers have names only.
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
        paths = [(self._path(name), self._label(name), "/" in name) for name in names]
        for path, label, _ in paths:
            self._remove(path, label)
        for folder in {path.rpartition("/")[0] for path, _, nested in paths if nested}:
            with contextlib.suppress(Exception), _exclusive(self._fs):  # not empty, or without folders
                self._fs.rmdir(folder)

    def _remove(self, path: str, label: str) -> None:
        def remove(fs: Any) -> None:
            try:
                fs.rm_file(path)
            except Exception:  # not all file systems raise FileNotFoundError
                if _is_file(fs, path):
                    raise

        self._run("delete", label, remove)


def _file_system(inner: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    # Some file systems treat the text after a "#" as an option, so they get only the path before the part with the "#".
    plain, mark, _ = inner.partition("#")
    base = plain[: plain.rindex("/") + 1] if mark else inner
    try:
        fs, root = fsspec.core.url_to_fs(base)
    except (ImportError, ValueError) as error:
        scheme = inner.partition("://")[0]
        known = ""
        if scheme not in fsspec.available_protocols():
            known = f"; it knows {', '.join(sorted(set(known_implementations)))}"
        raise UsageError(f"cannot use fsspec+{scheme}://: {cleaned(str(error))}{known}") from None
    return fs, f"{root.rstrip('/')}/{inner[len(base) :]}" if mark else root


@contextlib.contextmanager
def _exclusive(fs: Any) -> Iterator[None]:
    """Lock a file system that is not asynchronous inside. It may have one connection, for one request at a time."""
    if fs.async_impl:
        yield
        return
    with vars(fs).setdefault("_bytecheckpoint_lock", SharedLock()):  # all storages on it share the lock
        yield


def _make_folder(fs: Any, path: str) -> None:
    """Create a folder and its parents, while other ranks may do the same."""
    for attempts_left in reversed(range(_FOLDER_ATTEMPTS)):
        try:
            fs.makedirs(path, exist_ok=True)
            return
        except Exception:
            fs.invalidate_cache()
            if fs.isdir(path):
                return
            if not attempts_left:
                raise
            count_retries()


def _is_file(fs: Any, path: str) -> bool:
    """Return whether a file is there. `fs.isfile` would also return False when the server does not answer."""
    fs.invalidate_cache()
    try:
        return bool(fs.info(path)["type"] == "file")
    except FileNotFoundError:
        return False


def _move(fs: Any, source: str, target: str) -> None:
    """Rename a file where that is one operation; otherwise copy and remove it."""
    if type(fs).mv is fsspec.AbstractFileSystem.mv:
        # The base class treats "[" and "*" as patterns.
        fs.cp_file(source, target)
        fs.rm_file(source)
    else:
        fs.mv(source, target)


class _FsspecReader(FileReader):
    preferred_bytes = _READ_BYTES

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
def _translated(action: str, label: str, attempt: int) -> Iterator[None]:
    """Translate the errors of file systems, which may be of any class and hold secrets, into typed errors."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise FileNotFoundError(2, "no such file", label) from None
    except Exception as error:  # noqa: BLE001  translated
        reason = cleaned(str(error))[:200] or type(error).__name__
        what = f"cannot {action} {label}: {reason}"
        number = error.errno if isinstance(error, OSError) else None
        if number in FULL_ERRNOS:
            raise StorageFullError(f"{what} (attempt {attempt}); {FULL_ERRNOS[number]}") from None
        transient = any(_TRANSIENT_CLASS.search(cls.__name__) for cls in type(error).__mro__[:-2])
        if number in TRANSIENT_ERRNOS or transient or (number is None and _TRANSIENT_WORDS.search(str(error))):
            raise StorageUnavailableError(f"{what}; check that the storage can be reached", undecided=True) from None
        raise StorageError(f"{what} (attempt {attempt})") from None


def _write_fully(file: Any, piece: memoryview) -> None:
    while len(piece):
        done = file.write(piece)
        piece = piece[len(piece) if done is None else done :]


def _time(info: dict[str, Any]) -> float:
    for key in _TIME_KEYS:
        value = info.get(key)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
    return 0.0
