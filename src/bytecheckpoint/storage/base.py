"""The storage protocol: bytes under names inside one checkpoint folder. Nothing here knows what the bytes mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

__all__ = ["FileReader", "FileWriter", "Storage"]


class FileWriter(ABC):
    """A new file being written. Several threads may call `write_at` at once with ranges that do not overlap."""

    #: Whether every buffer, offset and length (but the file's tail) must be a multiple of 4096.
    direct: bool = False

    @abstractmethod
    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` one after the other at byte `offset`; returns when all bytes were taken."""

    @abstractmethod
    def finish(self, size: int) -> None:
        """Cut the file at `size` bytes, make its bytes durable, close it."""

    @abstractmethod
    def abort(self) -> None:
        """Close and remove the file; never raises."""


class FileReader(ABC):
    """A file being read. Several threads may call `read_into` at once."""

    #: Length of the file in bytes when it was opened.
    size: int

    @abstractmethod
    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` one after the other from byte `offset`; returns the bytes read, fewer only at the file's end."""

    @abstractmethod
    def close(self) -> None:
        """Release the file."""


class Storage(ABC):
    """One checkpoint folder in some storage.

    Names are relative, with "/" between folder and file. Errors are `StorageError`s, but for a name that does not
    exist, which is Python's FileNotFoundError (the caller knows what its absence means).
    """

    #: Address of the folder as a user would write it, absolute.
    url: str

    @abstractmethod
    def create(self, name: str, size: int, *, direct: bool = False) -> FileWriter:
        """Start a new file of about `size` bytes; the name must not exist. `direct` asks to bypass caches if possible."""

    @abstractmethod
    def open(self, name: str) -> FileReader:
        """Open a file for ranged reads. Raises FileNotFoundError."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """All bytes of a small file. Raises FileNotFoundError."""

    @abstractmethod
    def publish(self, name: str, data: bytes) -> None:
        """Put `data` under `name` atomically and durably: readers see the old bytes or the new ones, never a mixture."""

    @abstractmethod
    def list(self) -> list[tuple[str, int]]:
        """(name, size) of every file of the folder and its direct sub-folders; empty when there is no folder."""

    def modified(self, name: str) -> float:
        """When a file was last written, seconds since 1970; 0.0 where the storage does not know."""
        return 0.0

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove files (and folders that this empties); absent ones are fine."""

    @abstractmethod
    def sync(self, names: Iterable[str]) -> None:
        """Make the names of finished files durable (directory entries)."""
