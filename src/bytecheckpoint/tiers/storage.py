"""The storage behind `tier+URL`: a hot tier in front of a durable storage.

Saves go to memory (or a local disk) of each machine and are copied to the durable storage in the background. Reads take
the nearest copy. This module is one machine's view. The other modules of this folder are about what machines do together:
replicas in each other's memory, the flush, the restore (decision 0015).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from bytecheckpoint.concurrency import call_with_timeout
from bytecheckpoint.engine.catalogs import refuse_foreign
from bytecheckpoint.errors import (
    StorageConflictError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    UsageError,
)
from bytecheckpoint.representation.catalog_file import decode_outline
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.base import Capabilities, FileReader, FileStat, FileWriter, NewFile, Storage, check_name
from bytecheckpoint.storage.posix.storage import PosixStorage
from bytecheckpoint.storage.wrappers import unwrapped, wrapped_like
from bytecheckpoint.tiers.copies import AnyCopy
from bytecheckpoint.tiers.current_copy import ask_durable, hot_copy_counts, missing_files, open_durable_catalog
from bytecheckpoint.tiers.hot_folder import UNKNOWN, HotFolder, StepRecord, list_own_files
from bytecheckpoint.tiers.names import hot_folder_of, step_name
from bytecheckpoint.tiers.room import with_room
from bytecheckpoint.tuning import tuning

__all__ = ["PREFIX", "HotTier", "TierStorage", "hot_part", "hot_tier", "tier_of"]

PREFIX = "tier+"

_log = logging.getLogger("bytecheckpoint")


def tier_of(storage: Storage) -> TierStorage | None:
    """Return the tier inside of a storage's wrappers; None if a commit in the storage is durable at once."""
    inner = unwrapped(storage)
    return inner if isinstance(inner, TierStorage) else None


def hot_part(storage: Storage) -> Storage:
    """Return the part of a storage that works while its durable storage does not: a tier's hot folder, else all of it."""
    tier = tier_of(storage)
    if tier is None or isinstance(tier, HotTier):
        return storage
    return wrapped_like(storage, HotTier(tier.url))


def hot_tier(folder: str = "") -> PosixStorage:
    """Return this machine's hot tier, or a folder of it.

    Raises:
        UsageError: `tier_hot` is not a folder of this machine.
    """
    from bytecheckpoint.storage.registry import resolve

    root = settings().tier.hot.rstrip("/")
    hot = resolve(f"{root}/{folder}" if folder else root)
    if not isinstance(hot, PosixStorage):
        raise UsageError(f"setting tier_hot is {root!r}: use mem://name or a folder of a local disk")
    return hot


class TierStorage(Storage):
    """`tier+URL`: writes to the hot tier of this machine, reads the nearest copy.

    Args:
        url: the URL of the durable storage, behind the prefix `tier+`.

    Attributes:
        hot_root: this machine's hot tier.
        hot: its folder for the checkpoint.
        hot_folder: the step in that folder, with its record.
        durable: the storage that flushes copy the checkpoint to.
    """

    def __init__(self, url: str) -> None:
        from bytecheckpoint.storage.registry import resolve

        inner = url[len(PREFIX) :]
        if inner.lower().startswith(PREFIX):
            raise UsageError(f"{url!r}: one tier in front of a storage is enough")
        self.durable = resolve(inner)
        local = isinstance(self.durable, PosixStorage) and "://" not in self.durable.url
        self.url = f"{PREFIX}file://{self.durable.url}" if local else PREFIX + self.durable.url
        self.hot_root, self.hot = hot_tier(), hot_tier(hot_folder_of(self.url[len(PREFIX) :]))
        self.hot_folder = HotFolder(self.hot, self.url)
        self.capabilities = Capabilities(
            machine_only=True,
            parallel_reads=self.durable.capabilities.parallel_reads,  # a machine without a hot copy reads the durable one
            extra_seconds=tuning().tier_load_timeout,  # the durable storage says which copy counts
        )

    # --- which copy counts ------------------------------------------------------------------------------------

    def hot_copy_counts(self, catalog: bytes, record: StepRecord | None) -> bool:
        """Return whether a hot step equals or is newer than the durable one (see `current_copy`)."""
        return hot_copy_counts(self.url, self.durable, catalog, record)

    def copies(self, name: str) -> list[Callable[[], FileReader]]:
        """Return functions that open the copies of a file, the nearest first."""
        return [lambda: self.hot.open(name), lambda: self.durable.open(name)]

    def _open_catalog(self) -> FileReader:
        """Open the catalog that counts."""
        missing: list[str] = []
        catalog = self.hot_folder.catalog()
        if catalog is not None and self.hot_copy_counts(catalog, self.hot_folder.record(catalog)):
            missing = missing_files(catalog, (self.hot, self.durable))
            if not missing:
                return self.hot.open(CATALOG_NAME)
        return open_durable_catalog(self.url, self.durable, missing, "other machines only, if at all")

    # --- Storage ----------------------------------------------------------------------------------------------

    def create(self, request: NewFile) -> FileWriter:
        """Start a new file in the hot tier, or in the durable storage if the hot tier has no room for it."""
        try:
            return with_room(self.hot_root, request.size, lambda: self.hot.create(request))
        except StorageFullError as error:
            _log.warning("%s/%s goes straight to the durable storage: %s", self.url, request.name, error)
            return self.durable.create(request)

    def open(self, name: str) -> FileReader:
        if check_name(name) == CATALOG_NAME:
            return self._open_catalog()
        return AnyCopy(f"{self.url}/{name}", self.copies(name))

    def read(self, name: str) -> bytes:
        if name == CATALOG_NAME:
            with contextlib.closing(self._open_catalog()) as reader:
                data = bytearray(reader.size)
                return bytes(memoryview(data)[: reader.read_into(0, [memoryview(data)])])
        try:
            return self.hot.read(name)
        except (FileNotFoundError, StorageError):
            return self.durable.read(name)

    def stat(self, name: str) -> FileStat:
        with contextlib.suppress(FileNotFoundError):
            return self.hot.stat(name)
        return ask_durable(self.url, lambda: self.durable.stat(name), tuning().tier_save_timeout)

    def version(self, name: str) -> str:
        hot = self.hot.version(name)
        try:
            durable = ask_durable(self.url, lambda: self.durable.version(name), tuning().tier_save_timeout)
        except StorageUnavailableError as error:
            self._warn_unavailable(error)
            durable = UNKNOWN
        return f"{hot} {durable}" if hot or durable else ""

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        hot_version, _, durable_version = (expected or " ").partition(" ")

        def publish() -> None:
            if name == CATALOG_NAME:
                replaces = durable_version if expected is not None else UNKNOWN
                self.hot_folder.write_record(data, StepRecord(self.durable.url, replaces, time.time()))
            try:
                self.hot.publish(name, data, expected=None if expected is None else hot_version)
            except StorageConflictError:
                if not (hot_version and durable_version) or self.hot.version(name):
                    raise
                self.hot.publish(name, data, expected="")  # the flushed step to replace was evicted meanwhile

        with_room(self.hot_root, len(data), publish)
        if name == CATALOG_NAME:
            self.hot_folder.remove_other_records(data)

    def folders(self) -> list[str]:
        return sorted({*map(step_name, self.hot.folders()), *self.durable.folders()})

    def list(self) -> list[tuple[str, int]]:
        return sorted({**dict(self.durable.list()), **dict(list_own_files(self.hot))}.items())

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        self.hot_folder.remove(names)
        self.durable.delete(names)

    def adopt(self, name: str, from_url: str) -> bool:
        from bytecheckpoint.storage.registry import resolve

        source = resolve(from_url)
        return isinstance(source, TierStorage) and self.hot.adopt(name, source.hot.url)

    def sync(self, names: Iterable[str]) -> None:
        hot, others = self._by_place(names)
        if hot:
            self.hot.sync(hot)
        if others:
            self.durable.sync(others)

    def _by_place(self, names: Iterable[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Divide files into those that the hot tier has and the others."""
        names, present = tuple(names), dict(self.hot.list())
        return [n for n in names if n in present], [n for n in names if n not in present]

    def check_publish(self, name: str, expected: str) -> None:
        _, _, durable_version = expected.partition(" ")

        def check() -> None:
            if durable_version and name == CATALOG_NAME:
                refuse_foreign(self.durable)
            self.durable.check_publish(name, durable_version)

        if durable_version != UNKNOWN:
            try:
                call_with_timeout(tuning().tier_save_timeout, check)
            except StorageUnavailableError as error:
                self._warn_unavailable(error)

    def _warn_unavailable(self, error: StorageUnavailableError) -> None:
        _log.warning("%s: going on without the durable storage: %s", self.url, error)


class HotTier(TierStorage):
    """A tier of which only the hot folder is read, listed and changed.

    A save uses it, because the durable checkpoint that the save replaces is needed until the flush. A listing uses it to
    show what this machine has while the durable storage does not answer.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.capabilities = replace(self.capabilities, extra_seconds=0.0)

    def _open_catalog(self) -> FileReader:
        return self.hot.open(CATALOG_NAME)

    def folders(self) -> list[str]:
        return sorted(map(step_name, self.hot.folders()))

    def list(self) -> list[tuple[str, int]]:
        return list_own_files(self.hot)

    def delete(self, names: Iterable[str]) -> None:
        hot, others = self._by_place(names)
        self.hot_folder.remove(hot)
        if others:
            # Files that did not fit into the hot tier. The files of the durable checkpoint stay in any case.
            needed = {CATALOG_NAME}
            with contextlib.suppress(FileNotFoundError):
                needed |= {file.name for file in decode_outline(self.durable.read(CATALOG_NAME))[0]}
            self.durable.delete([name for name in others if name not in needed])
