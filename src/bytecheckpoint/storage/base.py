"""The storage protocol: bytes under names inside one checkpoint folder. Nothing here knows what the bytes mean.

A backend implements `Storage` with a `FileWriter` and a `FileReader` (or derives from `uploading.UploadingStorage`, when
it can only take whole files), and proves it by deriving a test class from `bytecheckpoint.storage.testing`. All of it is
called from several threads at once.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..representation.names import check_relative, is_uri
from ..settings import settings

__all__ = [
    "STEP_BYTES",
    "UNENCODABLE",
    "Capabilities",
    "FileReader",
    "FileStat",
    "FileWriter",
    "NewFile",
    "Storage",
    "check_name",
]

#: What a POSIX file system likes to move in one call: small enough that bytes which were hashed just before are still in
#: the processor's cache, large enough that the call costs little.
STEP_BYTES = 1 << 20
#: What moves fewer bytes in a second than this is taken for hanging.
_SLOWEST = 4 << 20
#: What the path of a URL may not hold: control characters, and halves of characters, which no encoding has.
UNENCODABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the callers of a storage may rely on; constant for a class of storages.

    Attributes:
        shared: any process that resolves the URL sees the same files. Otherwise the helper process cannot write them.
        exclusive_publish: `publish` with `expected` is one atomic step. Otherwise it compares first and publishes then.
        whole_files: a file is sent when it is complete; buffers that are not stable pass through a local spool file.
        machine_only: processes of other machines see other files under the same URL, and that is as it should be.
    """

    shared: bool = True
    exclusive_publish: bool = True
    whole_files: bool = False
    machine_only: bool = False


@dataclass(frozen=True, slots=True)
class NewFile:
    """The request for a new file. It is a class, so that a hint added later breaks no backend.

    Attributes:
        name: relative name. It is unique: nothing was ever written under it.
        size: bytes that it will have, about.
        direct: bypass the operating system's caches, if the storage can.
        stable: buffers given to the writer keep their contents until `finish` or `abort` has returned, so it may refer
            to them instead of taking their bytes at once.
    """

    name: str
    size: int
    direct: bool = False
    stable: bool = False


@dataclass(frozen=True, slots=True)
class FileStat:
    """What a storage knows about a file.

    Attributes:
        size: length in bytes.
        modified: when it was last written, seconds since 1970; 0.0 where the storage does not know.
        version: opaque token, never empty, that changes when the content does, as far as can be told without reading it;
            `Storage.version` is what can be relied on.
    """

    size: int
    modified: float
    version: str


class FileWriter(ABC):
    """A new file being written. Several threads may call `write_at` at once with ranges that do not overlap.

    The ranges of all calls together tile the file. They come in any order; the first bytes of the file come last,
    because they hold the checksums of the others.
    """

    #: Whether every buffer, offset and length (but the file's tail) must be a multiple of 4096.
    direct: bool = False
    #: Calls of `write_at` should carry this many bytes, or all that the caller has at hand if that is less.
    step_bytes: int = STEP_BYTES

    @abstractmethod
    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` one after the other at byte `offset`; returns when all bytes were taken."""

    @abstractmethod
    def finish(self, size: int) -> None:
        """Cut the file at `size` bytes, make its bytes durable, close it."""

    def interrupt(self) -> None:
        """Let calls that are under way in other threads fail soon, because `abort` will follow; never raises."""

    @abstractmethod
    def abort(self) -> None:
        """Close and remove the file, finished or not; never raises."""


class FileReader(ABC):
    """A file being read. Several threads may call `read_into` at once."""

    #: Length of the file in bytes when it was opened.
    size: int
    #: Calls of `read_into` should ask for this many bytes, or for all that the caller wants if that is less.
    step_bytes: int = STEP_BYTES

    @abstractmethod
    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` one after the other from byte `offset`; returns the bytes read, fewer only at the file's end.

        A file that was removed meanwhile either still has its bytes, or has none any more.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the file."""

    def fits(self, size: int) -> bool:
        """Whether the file has `size` bytes. Where there are several copies, those of another length are left out."""
        return self.size == size

    def others(self) -> Iterator[FileReader]:
        """Further copies of the same file, for bytes that prove wrong. They are closed with this reader."""
        return iter(())


class Storage(ABC):
    """One checkpoint folder in some storage.

    Names are relative, with "/" between folder and file (`check_name`). Errors are `StorageError`s, but for a name that
    does not exist, which is Python's FileNotFoundError (the caller knows what its absence means), and for a name that is
    none, which is a UsageError.
    """

    #: Address of the folder as a user would write it, absolute. With the environment it suffices to make the storage
    #: anew in another process; it holds no credentials.
    url: str
    capabilities: Capabilities = Capabilities()
    #: Seconds after which a call that has not returned is an error; None: `settings().timeout`.
    timeout: float | None = None
    #: Files are in this machine's own memory: no call waits for a device or a server. Only then are calls made without
    #: another thread that waits for them with a limit, which costs more than they do.
    in_memory: bool = False
    #: Reads at the same time that suit it, for one process: each should keep a processor, or a connection, busy.
    reads: int = 2

    def __str__(self) -> str:
        return self.url

    def limit(self, nbytes: int = 0) -> float:
        """Seconds that a call which moves `nbytes` may take. A mount whose server is gone may never answer."""
        seconds = settings().timeout if self.timeout is None else self.timeout
        if self.capabilities.whole_files:
            seconds += settings().storage_timeout  # such storages try again for so long, and then say what was wrong
        return seconds + nbytes / _SLOWEST

    @abstractmethod
    def create(self, request: NewFile) -> FileWriter:
        """Start a new file. Nothing is visible under its name before `finish`, or it is visibly unfinished."""

    @abstractmethod
    def open(self, name: str) -> FileReader:
        """Open a file for ranged reads. Raises FileNotFoundError."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """All bytes of a small file. Raises FileNotFoundError."""

    @abstractmethod
    def stat(self, name: str) -> FileStat:
        """Size, time and version of a file. Raises FileNotFoundError."""

    def version(self, name: str) -> str:
        """A token that changes when a file's content does, for `publish`; "" when there is no such file."""
        try:
            return self.stat(name).version
        except FileNotFoundError:
            return ""

    @abstractmethod
    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        """Put `data` under `name` atomically and durably: readers see the old bytes or the new ones, never a mixture.

        Args:
            name: what to replace or to create.
            data: the new content.
            expected: the `version` that must still be there, "" for none at all; None: whatever is there.

        Raises:
            StorageConflictError: another writer came first; what it wrote is untouched.
            StorageUnavailableError: with `undecided` set when the data may be there all the same, now or soon.
        """

    @abstractmethod
    def folders(self) -> list[str]:
        """Names of the direct sub-folders, sorted."""

    @abstractmethod
    def list(self) -> list[tuple[str, int]]:
        """(name, size) of every file of the folder and its direct sub-folders, sorted; empty when there is no folder."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove files (and folders that this empties); absent ones are fine."""

    def nearby(self) -> Storage:
        """What of this folder is read and changed without asking a storage behind it, which may be away; here: all."""
        return self

    def elsewhere(self, other: Storage) -> Storage:
        """Another folder, in which this one's checkpoint has files; a storage around others puts itself around it."""
        return other

    def sync(self, names: Iterable[str]) -> None:
        """Make the names of finished files durable (directory entries)."""

    def probe(self, name: str, expected: str) -> None:
        """Refuse now a `publish` with the same arguments that would fail at the end of a save, if that can be told.

        Called once, by the rank that commits, before anything is written.
        """


def check_name(name: str) -> str:
    """`name`, if it names a file inside the folder on any platform.

    Raises:
        UsageError: it is empty, absolute or a URI, or has a control character, a backslash, a drive, or a component
            that is empty, "." or "..".
    """
    if is_uri(name):
        raise UsageError(f"file name {name[:200]!r} is a URI, not a name inside the checkpoint: resolve it first")
    return check_relative(name)
