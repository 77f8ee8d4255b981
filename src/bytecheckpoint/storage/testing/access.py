"""Access to the stored files by other means than the storage under test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

__all__ = ["FolderAccess", "RawAccess"]


class RawAccess(ABC):
    """The files of one storage folder by other means than the storage under test."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return name and content of all files in the folder, at any depth, hidden ones included."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Create or replace a file."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file."""


class FolderAccess(RawAccess):
    """Access to the files of a storage on a mounted file system.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def files(self) -> dict[str, bytes]:
        found = (path for path in self._path.rglob("*") if path.is_file())
        return {path.relative_to(self._path).as_posix(): path.read_bytes() for path in found}

    def put(self, name: str, data: bytes) -> None:
        path = self._path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.new")
        temporary.write_bytes(data)
        temporary.replace(path)

    def remove(self, name: str) -> None:
        (self._path / name).unlink()
