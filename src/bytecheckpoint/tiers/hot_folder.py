"""The hot folder of one step on one machine: the step's files, its catalog, and the records beside them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence

import msgspec

from bytecheckpoint.errors import StorageError, StorageUnavailableError
from bytecheckpoint.representation.catalog_file import decode
from bytecheckpoint.representation.names import CATALOG_NAME, is_uri
from bytecheckpoint.storage.base import Storage
from bytecheckpoint.storage.posix.storage import PosixStorage
from bytecheckpoint.tiers.names import INTERNAL_FILES, LOCK, Record, record_name

__all__ = ["HotFolder", "HotStep", "list_own_files"]

# Built at import: msgspec (0.22) crashes if two threads use a type for the first time at once.
_RECORD_DECODER = msgspec.json.Decoder(Record)

_log = logging.getLogger("bytecheckpoint")


class HotStep(msgspec.Struct, frozen=True):
    """A step that is committed in a hot tier.

    Attributes:
        catalog: the bytes of its catalog.
        record: what is known about it.
    """

    catalog: bytes
    record: Record


class HotFolder:
    """What a machine has of one step, and what it stores about it.

    Args:
        files: the folder.
        url: display name of the tier.
    """

    def __init__(self, files: PosixStorage, url: str) -> None:
        self._files = files
        self._url = url

    # --- reading ---

    def catalog(self) -> bytes | None:
        """Return the catalog of the step; None when there is none, or it cannot be read."""
        try:
            return self._files.read(CATALOG_NAME)
        except FileNotFoundError:
            return None
        except StorageError as error:
            _log.warning("%s: the hot copy cannot be read: %s", self._url, error)
            return None

    def record(self, catalog: bytes) -> Record | None:
        """Return what this machine stores about the step with this catalog; None when there is nothing."""
        try:
            return _RECORD_DECODER.decode(self._files.read(record_name(catalog)))
        except (FileNotFoundError, StorageError, msgspec.MsgspecError):
            return None

    def step(self) -> HotStep | None:
        """Return the step, if it is committed here and has a record."""
        catalog = self.catalog()
        record = self.record(catalog) if catalog is not None else None
        return HotStep(catalog, record) if catalog is not None and record is not None else None

    def needed_files(self) -> set[str]:
        """Return the names that the step consists of; none when no step is committed here."""
        step = self.step()
        if step is None:
            return set()
        return {CATALOG_NAME, LOCK, record_name(step.catalog), *(file.name for file in decode(step.catalog).files)}

    # --- records ---

    def write_record(self, catalog: bytes, record: Record) -> None:
        """Store what is known about the step with this catalog."""
        self._files.publish(record_name(catalog), msgspec.json.encode(record))

    def update_record(self, step: HotStep, ranks: Sequence[int], *, flushed: bool = False) -> None:
        """Store what has become known about a step since its save, if this machine has the step.

        A failure is logged only: the step itself is complete without.

        Args:
            step: as it was known.
            ranks: the ranks that saved on this machine.
            flushed: whether the durable storage has the step.
        """
        if self.catalog() != step.catalog:
            return
        try:
            self.write_record(step.catalog, msgspec.structs.replace(step.record, ranks=list(ranks), flushed=flushed))
        except StorageError as error:
            _log.warning("%s: %s", self._url, error)

    def remove_other_records(self, catalog: bytes) -> None:
        """Remove the records of steps that the one with this catalog has replaced."""
        current = record_name(catalog)
        with contextlib.suppress(StorageError):
            names = [name for name, _ in self._files.list()]
            self._files.delete([name for name in names if name.startswith("tier-") and name != current])

    # --- removing ---

    def remove_step(self, catalog: bytes) -> None:
        """Remove the step with this catalog, but no file that a save may have begun to write in its place."""
        if self.catalog() == catalog:
            self._files.delete([CATALOG_NAME])  # first: what a kill leaves then is no checkpoint
        self.remove([record_name(catalog), *(file.name for file in decode(catalog).files if not is_uri(file.name))])

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and the folder when nothing else is in it."""
        self._files.delete(names)
        self.remove_if_empty()

    def remove_if_empty(self) -> None:
        """Remove the folder when only internal files are left in it."""
        with contextlib.suppress(StorageError, OSError):
            names = [name for name, _ in self._files.list()]
            if all(INTERNAL_FILES.fullmatch(name) for name in names):
                self._files.delete(names)
                for folder in self._files.folders():
                    os.rmdir(os.path.join(self._files.root, folder))
                os.rmdir(self._files.root)


def list_own_files(storage: Storage) -> list[tuple[str, int]]:
    """List a folder without its internal files; nothing when it does not answer."""
    try:
        return [(name, size) for name, size in storage.list() if not INTERNAL_FILES.fullmatch(name)]
    except StorageUnavailableError as error:
        _log.warning("%s cannot be listed: %s", storage.url, error)
        return []
