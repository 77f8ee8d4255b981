"""Optional operations of storages, and functions that call them and answer for every other storage too.

A backend derives from the classes here whose operations it has. Everybody else calls the functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from bytecheckpoint.storage.base import Storage

__all__ = [
    "CacheProbe",
    "FolderProbe",
    "RoomCheck",
    "ServerCopy",
    "UnfinishedUpload",
    "UploadCleanup",
    "abort_uploads",
    "check_room",
    "copy_on_server",
    "folder_exists",
    "is_cached",
    "unfinished_uploads",
]


class UnfinishedUpload(NamedTuple):
    """An upload that was begun and not completed. It takes up space, and no listing of files shows it.

    Attributes:
        name: relative name of the file, which may be in a folder of any depth.
        age: seconds since the upload was begun, by the storage's clock.
        token: name of the upload in the storage.
    """

    name: str
    age: float
    token: str


class CacheProbe(ABC):
    """A storage that knows whether bytes of a file are in this machine's memory."""

    @abstractmethod
    def is_cached(self, name: str, offsets: Sequence[int]) -> bool:
        """Return whether the bytes at `offsets` of a file are in this machine's memory now. This starts no read."""


class FolderProbe(ABC):
    """A storage in which a folder exists or not. Others take any name at any time."""

    @abstractmethod
    def exists(self) -> bool:
        """Return whether the folder is there."""


class RoomCheck(ABC):
    """A storage that knows how many bytes still fit."""

    @abstractmethod
    def check_room(self, nbytes: int) -> None:
        """Raise `StorageFullError` if `nbytes` more do not fit."""


class ServerCopy(ABC):
    """A storage that copies files without sending their bytes through this machine."""

    @abstractmethod
    def copy_from(self, source: Storage, name: str, size: int) -> bool:
        """Copy a file of another folder, as `copy_on_server`."""


class UploadCleanup(ABC):
    """A storage in which uploads that were not completed last until somebody aborts them."""

    @abstractmethod
    def unfinished_uploads(self) -> Sequence[UnfinishedUpload]:
        """Return the uploads to the folder, and to folders in it, that were not completed."""

    @abstractmethod
    def abort_uploads(self, uploads: Sequence[UnfinishedUpload]) -> None:
        """Abort uploads that `unfinished_uploads` has returned; ignore those that are gone."""


def is_cached(storage: Storage, name: str, offsets: Sequence[int]) -> bool:
    """Return whether the bytes at `offsets` of a file are known to be in this machine's memory now.

    This starts no read. Raises FileNotFoundError.
    """
    if isinstance(storage, CacheProbe):
        return storage.is_cached(name, offsets)
    return storage.capabilities.in_memory


def folder_exists(storage: Storage) -> bool:
    """Return whether a storage's folder is there; True for a store without folders."""
    return storage.exists() if isinstance(storage, FolderProbe) else True


def check_room(storage: Storage, nbytes: int) -> None:
    """Raise `StorageFullError` if it is known that `nbytes` more do not fit."""
    if isinstance(storage, RoomCheck):
        storage.check_room(nbytes)


def copy_on_server(source: Storage, target: Storage, name: str, size: int) -> bool:
    """Let the server copy a file from one folder to another, without sending its bytes through this machine.

    Args:
        source: folder with the file.
        target: folder without a file of that name.
        name: name of the file in both folders.
        size: length of the file in bytes.

    Returns:
        Whether the file was copied; False where this is not possible. The caller verifies the copy.
    """
    return isinstance(target, ServerCopy) and target.copy_from(source, name, size)


def unfinished_uploads(storage: Storage) -> Sequence[UnfinishedUpload]:
    """Return the uploads to a folder, and to folders in it, that were not completed and do not end by themselves."""
    return storage.unfinished_uploads() if isinstance(storage, UploadCleanup) else ()


def abort_uploads(storage: Storage, uploads: Sequence[UnfinishedUpload]) -> None:
    """Abort uploads that `unfinished_uploads` has returned; ignore those that are gone."""
    if isinstance(storage, UploadCleanup):
        storage.abort_uploads(uploads)
