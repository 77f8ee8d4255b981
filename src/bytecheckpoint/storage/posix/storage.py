"""Local and mounted POSIX file systems. Those of a network are retried while their server is away (decision 0024)."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from bytecheckpoint.concurrency import call_with_timeout
from bytecheckpoint.errors import StorageError, StorageUnavailableError
from bytecheckpoint.retries import retry
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.base import (
    Capabilities,
    FileReader,
    FileStat,
    FileWriter,
    NewFile,
    Storage,
    call_timeout,
    check_name,
)
from bytecheckpoint.storage.optional import CacheProbe, FolderProbe
from bytecheckpoint.storage.posix.files import (
    content_of,
    durable_version,
    fsync_directory,
    fsync_parents,
    in_page_cache,
    may_pass,
    open_file,
    read_file,
    stat_file,
    translated,
    version_of,
)
from bytecheckpoint.storage.posix.mounts import is_in_memory, mounted, network_mount, on_network
from bytecheckpoint.storage.posix.open_files import PosixReader, PosixWriter
from bytecheckpoint.storage.posix.publish import publish
from bytecheckpoint.storage.remote import BriefRetries

__all__ = ["LocalStorage", "PosixStorage"]

_T = TypeVar("_T")
#: How long deletions are retried after another call has failed.
_BRIEF = BriefRetries(120.0, 5.0)
#: Errors of a link where the file must be copied: another file system, none with links, too many links to it, another
#: user's file that this one may not write to, or a file of that name.
_NO_LINK = {errno.EXDEV, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EPERM, errno.EACCES, errno.EEXIST}


def _sizes(entries: Iterable[os.DirEntry[str]]) -> Iterator[tuple[str, int]]:
    """Iterate over (name, size) of the files among `entries`, without those that are removed meanwhile."""
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            if entry.is_file():
                yield entry.name, entry.stat().st_size


def _retry_if_removed(function: Callable[[], _T]) -> _T:
    """Return `function()`, which makes a folder and a file in it, and retry it when the folder disappears in between.

    Another process may delete the folder's last file, and with it the folder, since no storage lists empty folders.
    """
    for _ in range(3):
        with contextlib.suppress(FileNotFoundError):
            return function()
    return function()


class PosixStorage(Storage, CacheProbe, FolderProbe):
    """A folder of a POSIX file system.

    Args:
        root: absolute path of the folder; the first write creates it.
        url: its address for users.
    """

    def __init__(self, root: str, url: str) -> None:
        self.root = root
        self.url = url
        self.capabilities = Capabilities(in_memory=is_in_memory(root), page_cache=True, links=True)
        self._failed_at = float("-inf")
        network_mount(root)  # from now on known as one

    def _path(self, name: str) -> str:
        return os.path.join(self.root, *check_name(name).split("/"))

    def _label(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    def _retry(self, call: Callable[[], _T], *, brief: bool = False) -> _T:
        """Return `call()`, and call it again while its errors may pass.

        Args:
            call: one attempt.
            brief: retry for a short time only, if another call has failed a moment ago.
        """
        if self.capabilities.in_memory:
            return call()
        # The caller gives up after `call_timeout`, and must receive the error before.
        seconds = min(settings().storage.timeout, call_timeout(self) / 2)
        if brief and time.monotonic() - self._failed_at < _BRIEF.window:
            seconds = min(seconds, _BRIEF.seconds)
        try:
            return retry(call, seconds, lambda error: may_pass(error.__cause__, self.root))
        except StorageUnavailableError:
            self._failed_at = time.monotonic()
            raise

    def _attempt(self, action: str, label: str, call: Callable[[], _T], absent: bool = False) -> Callable[[], _T]:
        """Return `call` with typed errors, also for a network file system that is not mounted."""

        def attempt() -> _T:
            with translated(action, label, may_be_absent=absent), mounted(network_mount(self.root)):
                return call()

        return attempt

    def _run(
        self,
        action: str,
        label: str,
        call: Callable[[], _T],
        *,
        absent: bool = False,
        undecided: bool = False,
        brief: bool = False,
    ) -> _T:
        """Return `call()`, and call it again while its errors may pass; each time with a timeout.

        The engine creates, writes, opens and reads files on its own threads, for which it waits with a timeout.

        Args:
            action: verb for messages, "read".
            label: address of the file or folder, for messages.
            call: one attempt.
            absent: a missing file is FileNotFoundError.
            undecided: a call without an answer may take effect later.
            brief: see `_retry`.

        Raises:
            StorageError: typed. StorageUnavailableError: the file system (a mount whose server is gone) does not answer.
        """
        attempt = self._attempt(action, label, call, absent)
        if self.capabilities.in_memory:
            return attempt()
        what = f"cannot {action} {label}"
        return self._retry(
            lambda: call_with_timeout(call_timeout(self), attempt, what, undecided=undecided), brief=brief
        )

    def create(self, request: NewFile) -> FileWriter:
        path, label = self._path(request.name), self._label(request.name)
        folder = os.path.dirname(path)
        again = False

        def create() -> FileWriter:
            nonlocal again
            self._make_folder(folder)
            # tmpfs, overlay and network file systems have anonymous device numbers, and rarely gain from direct I/O.
            disk = os.major(os.stat(folder).st_dev) != 0
            direct = request.direct and (disk or settings().storage.direct_io == "on")
            remote = not (disk or self.capabilities.in_memory) and on_network(folder)
            first, again = not again, True
            return PosixWriter(
                path, label, request, direct=direct, reserve=disk or self.capabilities.in_memory, first=first,
                retry=self._retry if remote else None,
            )  # fmt: skip

        return self._retry(self._attempt("create", label, lambda: _retry_if_removed(create)))

    def open(self, name: str) -> FileReader:
        path, label = self._path(name), self._label(name)
        return self._retry(self._attempt("open", label, lambda: PosixReader(path, label, self._retry), absent=True))

    def read(self, name: str) -> bytes:
        path = self._path(name)
        return self._run("read", self._label(name), lambda: read_file(path), absent=True)

    def is_cached(self, name: str, offsets: Sequence[int]) -> bool:
        path = self._path(name)

        def probe() -> bool:
            fd, _ = open_file(path)
            try:
                return not on_network(path) and in_page_cache(fd, offsets)
            finally:
                os.close(fd)

        return self.capabilities.in_memory or self._run("open", self._label(name), probe, absent=True)

    def stat(self, name: str) -> FileStat:
        path = self._path(name)
        found = self._run("look at", self._label(name), lambda: stat_file(path), absent=True)
        # A file that a save has adopted is as old as its bytes, and this name of it may be new.
        modified = found.st_mtime if found.st_nlink == 1 else max(found.st_mtime, found.st_ctime)
        return FileStat(found.st_size, modified, version_of(found))

    def version(self, name: str) -> str:
        path = self._path(name)
        return self._run("look at", self._label(name), lambda: durable_version(path))

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        path, label = self._path(name), self._label(name)
        folder = os.path.dirname(path)
        again = False

        def publish_it() -> None:
            nonlocal again
            self._make_folder(folder)
            # The answer to an earlier attempt may have been lost after the file got its name.
            if not (again and content_of(path) == data):
                again = True
                publish(path, label, data, expected)
            fsync_directory(folder)

        # A call that hangs may still take effect later, if nobody else has published meanwhile.
        self._run("publish", label, lambda: _retry_if_removed(publish_it), undecided=True)

    def _make_folder(self, folder: str) -> None:
        """Create `folder` with durable names for all new parents, or a crash could lose a committed folder."""
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            fsync_directory(os.path.dirname(path))

    def open_lock(self, name: str) -> int:
        """Open a file, created if missing, that processes of this machine can lock; returns its descriptor."""
        path = self._path(name)

        def opened() -> int:
            self._make_folder(os.path.dirname(path))
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

        return self._run("create", self._label(name), opened)

    def exists(self) -> bool:
        return self._run("look at", self.url, lambda: os.path.isdir(self.root))

    def folders(self) -> list[str]:
        def folders() -> list[str]:
            try:
                return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
            except (FileNotFoundError, NotADirectoryError):
                return []

        return self._run("list", self.url, folders)

    def _list(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        try:
            entries = list(os.scandir(self.root))
        except (FileNotFoundError, NotADirectoryError):
            return []
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inside = []
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    inside = list(os.scandir(entry.path))
                found += [(f"{entry.name}/{name}", size) for name, size in _sizes(inside)]
            else:
                found += _sizes([entry])
        return sorted(found)

    def list(self) -> list[tuple[str, int]]:
        return self._run("list", self.url, self._list)

    def free_bytes(self) -> int:
        """Return how many bytes the file system still takes.

        Raises:
            StorageError: it does not say.
        """
        folder = self.root
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        try:
            found = os.statvfs(folder)
        except OSError as error:
            raise StorageError(f"cannot look at {self.url}: {error.strerror}") from error
        return found.f_bavail * found.f_frsize

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        self._run("delete files of", self.url, lambda: self._delete(names), brief=True)

    def _delete(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self._path(name)
            with (
                translated("delete", self._label(name)),
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
            ):
                os.unlink(path)
            if "/" in name:
                folders.add(os.path.dirname(path))
        for folder in folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def adopt(self, name: str, from_url: str) -> bool:
        folder = self._other_root(from_url)
        if folder is None:
            return False
        path = self._path(name)
        other = os.path.join(folder, *name.split("/"))

        def link() -> bool:
            if os.path.islink(other):
                return False
            self._make_folder(os.path.dirname(path))
            try:
                os.link(other, path)
            except OSError as error:
                if error.errno in _NO_LINK:
                    return False
                raise
            fsync_directory(os.path.dirname(path))
            return True

        try:
            return self._run("link", self._label(name), lambda: _retry_if_removed(link), absent=True)
        except FileNotFoundError:  # removed by the run's retention, for example
            return False

    def _other_root(self, url: str) -> str | None:
        """Return the path of a folder, by its address; None if it is not of the same kind."""
        return None

    def sync(self, names: Iterable[str]) -> None:
        folders = {os.path.dirname(self._path(name)) for name in names}

        def sync() -> None:
            for folder in sorted(folders | {self.root}):
                fsync_directory(folder)
            fsync_parents(self.root)

        self._run("sync", self.url, sync)


class LocalStorage(PosixStorage):
    """A folder of a local or mounted file system. A relative path is resolved at construction."""

    def __init__(self, path: str) -> None:
        try:
            root = os.path.abspath(path)
        except FileNotFoundError:
            raise StorageError(
                f"{path}: the working directory of this process is gone; change to another one, or give an absolute path"
            ) from None
        super().__init__(root, root)

    def _other_root(self, url: str) -> str | None:
        return None if "://" in url else os.path.abspath(url)
