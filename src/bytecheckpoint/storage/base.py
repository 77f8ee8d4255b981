"""The storage protocol: bytes under names inside one checkpoint folder. It knows nothing of their meaning.

A backend implements `Storage` with a `FileWriter` and a `FileReader`. A backend that can only take whole files derives from
`uploading.UploadingStorage` instead. The tests of a backend derive from `bytecheckpoint.storage.testing`. Several threads
call every method at once.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bytecheckpoint.errors import StorageConflictError, UsageError
from bytecheckpoint.representation.names import check_file_name, is_uri
from bytecheckpoint.settings import settings

__all__ = [
    "PREFERRED_BYTES",
    "UNENCODABLE",
    "Capabilities",
    "FileReader",
    "FileStat",
    "FileWriter",
    "NewFile",
    "Storage",
    "call_timeout",
    "check_name",
    "conflict_error",
    "file_size",
]

#: Bytes per call that suit a POSIX file system: few enough to stay in the processor's cache between hashing and writing,
#: and enough to make the cost of the call small.
PREFERRED_BYTES = 1 << 20
#: A call that moves fewer bytes per second counts as hung.
_MIN_BANDWIDTH = 4 << 20
#: Characters that no URL path may hold: control characters, and surrogates, which cannot be encoded.
UNENCODABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The guarantees of a storage.

    Attributes:
        shared: all processes that resolve the URL see the same files. Otherwise the helper process cannot write them.
        exclusive_publish: `publish` with `expected` is one atomic step. Otherwise it compares first and then publishes.
        whole_files: a file is sent when it is complete; buffers that are not stable pass through a local spool file.
        machine_only: by design, processes of other machines see other files under the same URL.
        in_memory: the files are in this machine's memory. No call waits for a device or a server, so calls have no
            timeout, which would cost more than the call.
        page_cache: this machine's page cache keeps what a rank reads, so each rank of a load reads the catalog by itself.
            Otherwise one rank reads it for all, if the storage is shared.
        parallel_reads: number of reads that each process should make at a time, to keep a processor or connection busy.
        extra_seconds: seconds that a call may take beyond the timeout.
        links: files of other folders can get a name here (`adopt`), if they are in the same file system.
    """

    shared: bool = True
    exclusive_publish: bool = True
    whole_files: bool = False
    machine_only: bool = False
    in_memory: bool = False
    page_cache: bool = False
    parallel_reads: int = 2
    extra_seconds: float = 0.0
    links: bool = False


@dataclass(frozen=True, slots=True)
class NewFile:
    """A request for a new file. It is a class, so that a hint added later breaks no backend.

    Attributes:
        name: relative name, under which nothing was ever written.
        size: estimated length in bytes.
        direct: bypass the page cache, if the storage can.
        stable: buffers given to the writer keep their contents until `finish` or `abort` has returned, so the writer may
            refer to them instead of copying them.
    """

    name: str
    size: int
    direct: bool = False
    stable: bool = False


@dataclass(frozen=True, slots=True)
class FileStat:
    """Size, time and version of a file.

    Attributes:
        size: length in bytes.
        modified: time of the last write, or of the last change of its names if it has several; seconds since 1970; 0.0
            where the storage does not know it.
        version: opaque token, never empty. It changes with the content as far as the storage can tell without reading the
            file; `Storage.version` is reliable.
    """

    size: int
    modified: float
    version: str


class FileWriter(ABC):
    """A new file that is being written. Several threads may call `write_at` at once, with ranges that do not overlap.

    The ranges of all calls tile the file. They come in any order. The first bytes of the file come last, because they
    hold the checksums of the others.
    """

    #: Whether buffer addresses, offsets and lengths must be multiples of 4096, except the length of the file's tail.
    direct: bool = False
    #: Bytes that one call of `write_at` should carry, if the caller has so many.
    preferred_bytes: int = PREFERRED_BYTES

    @abstractmethod
    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` one after the other at byte `offset`; return when all bytes are taken."""

    @abstractmethod
    def finish(self, size: int) -> None:
        """Truncate the file to `size` bytes, make its bytes durable and close it."""

    def interrupt(self) -> None:
        """Make calls in progress on other threads fail soon, because `abort` follows; never raises."""

    @abstractmethod
    def abort(self) -> None:
        """Close and remove the file, finished or not; never raises."""


class FileReader(ABC):
    """An open file. Several threads may call `read_into` at once."""

    #: Length of the file in bytes when it was opened.
    size: int
    #: Bytes that one call of `read_into` should ask for, if the caller wants so many.
    preferred_bytes: int = PREFERRED_BYTES

    @abstractmethod
    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` one after the other from byte `offset`.

        Returns:
            The bytes read: fewer only at the file's end, or none when the file was removed meanwhile.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the file."""

    def match_size(self, size: int) -> bool:
        """Return whether the file has `size` bytes. A file with several copies drops those of another length."""
        return self.size == size

    def other_copies(self) -> Iterator[FileReader]:
        """Iterate over further copies of the file, for bytes that fail verification. This reader closes them."""
        return iter(())


class Storage(ABC):
    """One checkpoint folder in some storage.

    Names are relative, with "/" between folder and file (`check_name`). Methods raise `StorageError`, except for a missing
    file, which is Python's FileNotFoundError because its meaning depends on the caller, and for an invalid name, which is
    a UsageError.
    """

    #: Absolute address of the folder as a user would write it, without credentials. In another process with the same
    #: environment, `resolve(url)` makes the same storage.
    url: str
    capabilities: Capabilities = Capabilities()
    #: Seconds after which a call that has not returned is an error; None: `settings().timeout`.
    timeout: float | None = None
    #: Suffix of the storage files that a save writes here: "delta" if they become differences from earlier ones.
    file_suffix: str = "safetensors"

    def __str__(self) -> str:
        return self.url

    @abstractmethod
    def create(self, request: NewFile) -> FileWriter:
        """Start a new file. Before `finish`, the file is invisible or recognizably unfinished."""

    @abstractmethod
    def open(self, name: str) -> FileReader:
        """Open a file for ranged reads. Raises FileNotFoundError."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read a small file whole. Raises FileNotFoundError."""

    @abstractmethod
    def stat(self, name: str) -> FileStat:
        """Return size, time and version of a file. Raises FileNotFoundError."""

    def version(self, name: str) -> str:
        """Return a token that changes with the file's content, for `publish`; "" when there is no such file."""
        try:
            return self.stat(name).version
        except FileNotFoundError:
            return ""

    @abstractmethod
    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        """Put `data` under `name` atomically and durably: readers see the old bytes or the new ones, never a mixture.

        Args:
            name: file to replace or create.
            data: the new content.
            expected: the `version` that must be present, "" for no file; None: any.

        Raises:
            StorageConflictError: another version is present. It is left untouched.
            StorageUnavailableError: `undecided` is set when the data may be present all the same, now or soon.
        """

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the names of the direct sub-folders, sorted."""

    @abstractmethod
    def list(self) -> list[tuple[str, int]]:
        """Return (name, size) of every file in the folder and its direct sub-folders, sorted; [] without a folder."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove files, and folders that become empty; absent files are ignored."""

    def sync(self, names: Iterable[str]) -> None:
        """Make the names of finished files durable (directory entries)."""

    def adopt(self, name: str, from_url: str) -> bool:
        """Give a file of another folder the same name here too, durably and without copying its bytes.

        Both names are equal: the bytes stay until the last one is deleted.

        Args:
            name: name of the file in both folders.
            from_url: address of the other folder.

        Returns:
            Whether it now has the name here. If not, nothing has changed: the storage cannot, the other folder has no such
            file, or this one has one already.
        """
        return False

    def encoded_bytes(self, name: str) -> int:
        """Return the stored bytes of a file that this object has written as differences; 0 for any other file."""
        return 0

    def check_publish(self, name: str, expected: str) -> None:
        """Raise the error that a later `publish` with the same arguments would raise, as far as it can be foreseen.

        The rank that commits calls this once, before a save writes anything.
        """


def file_size(storage: Storage, name: str) -> int:
    """Return the size of a file in bytes, -1 if there is none."""
    try:
        return storage.stat(name).size
    except FileNotFoundError:
        return -1


def call_timeout(storage: Storage, nbytes: int = 0) -> float:
    """Return the timeout in seconds of a call that moves `nbytes`: a mount whose server is gone may never answer."""
    seconds = settings().timeout if storage.timeout is None else storage.timeout
    if storage.capabilities.whole_files:
        seconds += settings().storage.timeout  # such a storage retries for so long by itself
    return seconds + storage.capabilities.extra_seconds + nbytes / _MIN_BANDWIDTH


def check_name(name: str) -> str:
    """Return `name` if it names a file inside the folder on every platform.

    Raises:
        UsageError: it is empty, absolute or a URI, or has a control character, a backslash, a drive, or a component
            that is empty, "." or "..".
    """
    if is_uri(name):
        raise UsageError(f"file name {name[:200]!r} is a URI, not a name inside the checkpoint: resolve it first")
    return check_file_name(name)


def conflict_error(label: str) -> StorageConflictError:
    """Return the error of a `publish` that finds another version than the expected one.

    Args:
        label: address of the file.
    """
    return StorageConflictError(
        f"cannot publish {label}: another save replaced it meanwhile; let one job at a time save to a path"
    )
