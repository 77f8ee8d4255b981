"""The folder or file into which a checkpoint is exported, and the report."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from bytecheckpoint.errors import CheckpointError, StorageError, StorageFullError, UsageError
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.posix.files import fsync_directory
from bytecheckpoint.storage.posix.storage import LocalStorage
from bytecheckpoint.tiers.storage import tier_of

__all__ = ["ExportReport", "check_target", "new_folder", "translated"]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export.

    Attributes:
        path: the folder.
        files: names of the files, in order.
        tensors: number of tensors.
        nbytes: bytes of tensors, without headers.
        cast: number of converted tensors.
        overflowed: names of tensors in which the conversion made finite elements infinite.
        skipped: keys of plain values, or names of states, which the format cannot hold.
        left_out: keys of tensors that do not belong to the adapter.
        others: names of further files that were written: configuration and tokenizer.
    """

    path: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    cast: int
    overflowed: tuple[str, ...]
    skipped: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def check_target(storage: Storage, force: bool | None) -> list[str]:
    """Check that the target can take an export. Return the names in it.

    Args:
        storage: the target.
        force: True to take a folder with files; None for a format that replaces none.

    Raises:
        UsageError: the target cannot take an export.
    """
    tier = tier_of(storage)
    if tier is not None:
        raise UsageError(f"export writes to the storage itself: give {tier.durable.url}, without the tier")
    if isinstance(storage, LocalStorage) and os.path.lexists(storage.url) and not os.path.isdir(storage.url):
        raise UsageError(f"{storage.url} is a file: give a folder")
    if isinstance(storage, LocalStorage):
        with translated(f"look into {storage.url}"):
            present = sorted(os.listdir(storage.url)) if os.path.isdir(storage.url) else []
    else:
        present = sorted({*(name for name, _ in storage.list() if "/" not in name), *storage.folders()})
    if CATALOG_NAME in present:
        raise UsageError(f"{storage.url} is a checkpoint: export into another folder")
    if present and not force:
        advice = "give a new folder" if force is None else "give a new folder, or force the export"
        raise UsageError(f"{storage.url} is not empty (it holds {present[0]!r}): {advice}")
    return present


@contextlib.contextmanager
def translated(action: str) -> Iterator[None]:
    """Turn errors of the file system in a `with` block into those of a storage; `action` says what the block does."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        text = f"cannot {action}: {error.strerror or error}"
        raise (StorageFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError)(text) from error


@contextlib.contextmanager
def new_folder(folder: str) -> Iterator[str]:
    """Yield a temporary folder beside a new or empty one, which it replaces at the end of the `with` block."""
    temporary = os.path.join(os.path.dirname(folder), f".{os.path.basename(folder)}.exporting-{secrets.token_hex(6)}")
    os.makedirs(temporary)
    try:
        yield temporary
        os.rename(temporary, folder)
        fsync_directory(os.path.dirname(folder))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
