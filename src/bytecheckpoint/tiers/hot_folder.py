"""The hot folder of one step on one machine: the step's files, its catalog, and the records beside them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence

import msgspec

from bytecheckpoint.engine.view_files import view_names
from bytecheckpoint.errors import StorageError, StorageUnavailableError
from bytecheckpoint.representation.catalog_file import decode_outline
from bytecheckpoint.representation.names import CATALOG_NAME, companions, is_uri
from bytecheckpoint.storage.base import Storage
from bytecheckpoint.storage.posix.storage import PosixStorage
from bytecheckpoint.tiers.names import INTERNAL_FILES, IS_RECORD, LOCK, record_name

__all__ = ["UNKNOWN", "HotFolder", "HotStep", "StepRecord", "list_own_files"]

_log = logging.getLogger("bytecheckpoint")

#: The version of a durable catalog whose storage did not answer.
UNKNOWN = "?"


class StepRecord(msgspec.Struct, frozen=True):
    """A record of a step in the hot tier of a machine, in a file beside the step.

    Attributes:
        url: address of the durable checkpoint.
        replaces: version of the durable catalog when the save began, "" for none, UNKNOWN when its storage did not answer.
        saved: time of the commit in the hot tier, seconds since 1970; later than for all older steps of the run on the
            machine, also if its clock was set back.
        ranks: the ranks that saved on this machine; empty while that is unknown.
        flushed: True if the durable storage has the step.
    """

    url: str
    replaces: str
    saved: float
    ranks: list[int] = []
    flushed: bool = False


# Built at import: msgspec (0.22) crashes if two threads use a type for the first time at once.
_RECORD_DECODER = msgspec.json.Decoder(StepRecord)


class HotStep(msgspec.Struct, frozen=True):
    """A step that is committed in a hot tier.

    Attributes:
        catalog: the bytes of its catalog.
        record: record of the step.
    """

    catalog: bytes
    record: StepRecord


class HotFolder:
    """The files of one step on this machine, and the records beside them.

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

    def record(self, catalog: bytes) -> StepRecord | None:
        """Return the record of the step with this catalog; None when there is none."""
        return self._record(record_name(catalog))

    def _record(self, name: str) -> StepRecord | None:
        try:
            return _RECORD_DECODER.decode(self._files.read(name))
        except (FileNotFoundError, StorageError, msgspec.MsgspecError):
            return None

    def may_be(self, wanted: Callable[[StepRecord], bool], names: Iterable[str]) -> bool:
        """Return whether the step may have a record that `wanted` takes, without a look at its catalog, which may be large.

        Args:
            wanted: function that returns whether a record is looked for.
            names: names of the files in the folder.
        """
        records = (self._record(name) for name in names if IS_RECORD.fullmatch(name))
        return any(record is not None and wanted(record) for record in records)

    def step(self) -> HotStep | None:
        """Return the step, if it is committed here and has a record."""
        catalog = self.catalog()
        record = self.record(catalog) if catalog is not None else None
        return HotStep(catalog, record) if catalog is not None and record is not None else None

    def files(self) -> dict[str, int]:
        """Return all files of the folder with their sizes."""
        return dict(self._files.list())

    def needed_files(self) -> set[str]:
        """Return the names of all files that the committed step needs, with or without a record; none without a step.

        Raises:
            CheckpointError: the catalog cannot be read, so nobody knows.
        """
        try:
            catalog = self._files.read(CATALOG_NAME)
        except FileNotFoundError:
            return set()
        return {CATALOG_NAME, LOCK, record_name(catalog), *self._names_in(catalog)}

    # --- records ---

    def write_record(self, catalog: bytes, record: StepRecord) -> None:
        """Store the record of the step with this catalog."""
        self._files.publish(record_name(catalog), msgspec.json.encode(record))

    def update_record(
        self, step: HotStep, ranks: Sequence[int], *, flushed: bool = False, saved: float | None = None
    ) -> None:
        """Store the ranks that saved a step here and whether it is flushed, if this machine has the step.

        A failure is only logged: the step is complete without this.

        Args:
            step: the step with its present record.
            ranks: the ranks that saved on this machine.
            flushed: True if the durable storage has the step.
            saved: time of the save; None to keep the time in the record.
        """
        if self.catalog() != step.catalog:
            return
        saved = saved or (self.record(step.catalog) or step.record).saved
        record = msgspec.structs.replace(step.record, ranks=list(ranks), flushed=flushed, saved=saved)
        try:
            self.write_record(step.catalog, record)
        except StorageError as error:
            _log.warning("%s: %s", self._url, error)

    def remove_other_records(self, catalog: bytes) -> None:
        """Remove the records of the steps that the step with this catalog has replaced."""
        current = record_name(catalog)
        with contextlib.suppress(StorageError):
            names = [name for name, _ in self._files.list()]
            self._files.delete([name for name in names if IS_RECORD.fullmatch(name) and name != current])

    # --- removing ---

    def remove_step(self, catalog: bytes) -> None:
        """Remove the step with this catalog. Files that a save may be writing in its place stay."""
        if self.catalog() == catalog:
            self._files.delete([CATALOG_NAME])  # first, so that a kill leaves no damaged checkpoint
        self.remove([record_name(catalog), *self._names_in(catalog)])

    def _names_in(self, catalog: bytes) -> list[str]:
        """Return the names of the storage files, of those beside them, and of the view of the step with this catalog."""
        files, info = decode_outline(catalog)
        names = [file.name for file in files if not is_uri(file.name)]
        return [*view_names(info, self.files()), *names, *companions(names)]

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and then the folder if only internal files are left in it."""
        self._files.delete(names)
        self.remove_if_empty()

    def remove_if_empty(self) -> None:
        """Remove the folder if only internal files are left in it."""
        with contextlib.suppress(StorageError, OSError):
            names = [name for name, _ in self._files.list()]
            if all(INTERNAL_FILES.fullmatch(name) for name in names):
                self._files.delete(names)
                for folder in self._files.folders():
                    os.rmdir(os.path.join(self._files.root, folder))
                os.rmdir(self._files.root)


def list_own_files(storage: Storage) -> list[tuple[str, int]]:
    """List a folder without its internal files. The list is empty when the storage does not answer."""
    try:
        return [(name, size) for name, size in storage.list() if not INTERNAL_FILES.fullmatch(name)]
    except StorageUnavailableError as error:
        _log.warning("%s cannot be listed: %s", storage.url, error)
        return []
