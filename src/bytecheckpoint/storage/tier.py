"""A quick tier in front of a durable storage: `tier+s3://bucket/run/step_100`, or any other URL behind `tier+`.

Saves go to memory (or a local disk) of each machine and are copied to the durable storage in the background; reads take
the nearest copy. This module knows one machine. What the machines do together (copies in each other's memory, the
flush, restoring) is in `bytecheckpoint.tiers`; docs/decisions/0015 has the reasons.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from ..errors import CheckpointError, CheckpointNotFoundError, StorageError, StorageUnavailableError, UsageError
from ..representation.catalog_file import decode
from ..representation.names import CATALOG_NAME, is_uri
from ..settings import settings
from .base import Capabilities, FileReader, FileStat, FileWriter, NewFile, Storage, check_name
from .copies import AnyCopy
from .hot_names import HOUSEHOLD, LOCK, UNKNOWN, Record, digest_of, place_of, record_name, unplaced
from .local import PosixStorage
from .parallel import within

__all__ = ["HOUSEHOLD", "LOCK", "PREFIX", "UNKNOWN", "HotSide", "Record", "TierStorage", "digest_of", "unplaced"]

PREFIX = "tier+"
#: Seconds that a save waits for the durable storage's word about what is there, before it goes on without.
_PATIENCE = 5.0
#: The same of a load. It waits longer: without the word it cannot tell whether the hot copy was replaced since.
_LOAD_PATIENCE = 15.0

_log = logging.getLogger("bytecheckpoint")


class TierStorage(Storage):
    """`tier+URL`: writes to the hot tier of this machine, reads whatever is nearest.

    The hot copy counts while the durable catalog is what the hot save was to replace, or is the same: whoever
    replaces the durable checkpoint without this tier makes the hot copy void.

    Attributes:
        hot: this machine's folder for the checkpoint.
        durable: where it goes in the end.
    """

    capabilities = Capabilities(machine_only=True)

    def __init__(self, url: str) -> None:
        from .registry import resolve

        inner = url[len(PREFIX) :]
        if inner.lower().startswith(PREFIX):
            raise UsageError(f"{url!r}: one tier in front of a storage is enough")
        self.durable = resolve(inner)
        local = isinstance(self.durable, PosixStorage) and "://" not in self.durable.url
        self.url = f"{PREFIX}file://{self.durable.url}" if local else PREFIX + self.durable.url
        root = settings().tier_hot.rstrip("/")
        hot = resolve(f"{root}/{place_of(self.url[len(PREFIX) :])}")
        if not isinstance(hot, PosixStorage):
            raise UsageError(f"settings.tier_hot is {root!r}: use mem://name or a folder of a local disk")
        self.hot = hot
        self.reads = self.durable.reads  # which it is on a machine that has no hot copy

    # --- what counts ------------------------------------------------------------------------------------------

    def record(self, catalog: bytes) -> Record | None:
        """What this machine remembers of the hot step with this catalog."""
        try:
            return msgspec.json.decode(self.hot.read(record_name(digest_of(catalog))), type=Record)
        except (FileNotFoundError, StorageError, msgspec.MsgspecError):
            return None

    def remember(self, catalog: bytes, record: Record) -> None:
        """Write the record of the hot step with this catalog."""
        self.hot.publish(record_name(digest_of(catalog)), msgspec.json.encode(record))

    def note(self, catalog: bytes, record: Record, ranks: Sequence[int], *, flushed: bool = False) -> None:
        """Write down what has become known of a hot step since its save, if it is here.

        Should there be no room, it goes on without.

        Args:
            catalog: of the step.
            record: what was known.
            ranks: those that saved on this machine.
            flushed: whether the durable storage has it.
        """
        if self.hot_catalog() != catalog:
            return
        try:
            self.remember(catalog, msgspec.structs.replace(record, ranks=list(ranks), flushed=flushed))
        except StorageError as error:
            _log.warning("%s: %s", self.url, error)

    def hot_catalog(self) -> bytes | None:
        """The catalog of the hot step here, None when there is none (or it cannot be read)."""
        try:
            return self.hot.read(CATALOG_NAME)
        except FileNotFoundError:
            return None
        except StorageError as error:
            _log.warning("%s: the hot copy cannot be read: %s", self.url, error)
            return None

    def supersedes(self, catalog: bytes, record: Record | None) -> bool:
        """Whether a hot step is what the durable storage has, or is newer.

        Args:
            catalog: of the hot step.
            record: its record, where one is left.
        """
        try:
            present = within(_LOAD_PATIENCE, lambda: self.durable.version(CATALOG_NAME))
            if not present or (record is not None and present == record.replaces):
                return True
            durable = self.durable.read(CATALOG_NAME)
        except FileNotFoundError:
            return True
        except StorageUnavailableError as error:
            _log.warning("%s: the durable storage cannot be asked, so the hot copy counts: %s", self.url, error)
            return True
        if durable == catalog:
            return True
        if record is None or record.replaces != UNKNOWN:
            return False
        # Nobody could look at the time of the save: the later one counts.
        try:
            return float(decode(catalog).info["created"]) > float(decode(durable).info["created"])
        except (CheckpointError, KeyError, TypeError, ValueError):
            return True

    def lacking(self, catalog: bytes) -> list[str]:
        """The files of a catalog that are neither here nor in the durable storage, by name and size."""
        try:
            wanted = {f.name: f.size for f in decode(catalog).files if not is_uri(f.name)}
        except CheckpointError:
            return [CATALOG_NAME]
        for tier in (self.hot, self.durable):
            if wanted:
                present = dict(_listed(tier))
                wanted = {name: size for name, size in wanted.items() if present.get(name) != size}
        return sorted(wanted)

    def durable_catalog(self, lacking: list[str], where: str) -> bytes:
        """The durable catalog, for want of a hot step that counts.

        Args:
            lacking: files of a hot step that would count, if they were to be had.
            where: they were looked for, besides the durable storage.

        Raises:
            FileNotFoundError: there is none.
            CheckpointNotFoundError: there is none, and a hot step is not whole.
        """
        first = next(iter(lacking), "")
        what = f"{self.url}: of the step in memory {len(lacking)} files are on {where} (the first: {first})"
        try:
            data = self.durable.read(CATALOG_NAME)
        except FileNotFoundError:
            if not lacking:
                raise
            raise CheckpointNotFoundError(
                f"{what}, and {self.durable.url} holds no committed checkpoint; load on the machines that saved it, or "
                "use another step"
            ) from None
        if lacking:
            _log.warning("%s; the durable checkpoint is read instead", what)
        return data

    def _catalog(self) -> bytes:
        lacking: list[str] = []
        hot = self.hot_catalog()
        if hot is not None and self.supersedes(hot, self.record(hot)):
            lacking = self.lacking(hot)
            if not lacking:
                return hot
        return self.durable_catalog(lacking, "other machines only, if at all")

    # --- Storage ----------------------------------------------------------------------------------------------

    def create(self, request: NewFile) -> FileWriter:
        return self.hot.create(request)

    def copies(self, name: str) -> list[Callable[[], FileReader]]:
        """What opens the copies of a file, the nearest first."""
        return [lambda: self.hot.open(name), lambda: self.durable.open(name)]

    def open(self, name: str) -> FileReader:
        check_name(name)
        return AnyCopy(f"{self.url}/{name}", self.copies(name))

    def read(self, name: str) -> bytes:
        if name == CATALOG_NAME:
            return self._catalog()
        try:
            return self.hot.read(name)
        except (FileNotFoundError, StorageError):
            return self.durable.read(name)

    def stat(self, name: str) -> FileStat:
        hot = durable = None
        with contextlib.suppress(FileNotFoundError):
            hot = self.hot.stat(name)
        version = UNKNOWN
        try:
            durable = within(_PATIENCE, lambda: self.durable.stat(name))
            version = durable.version
        except FileNotFoundError:
            version = ""
            if hot is None:
                raise
        except StorageUnavailableError as error:
            _log.warning("%s: going on without the durable storage: %s", self.url, error)
        if hot is None and durable is None:
            # Nothing here, and nobody knows what is there: a save may go on, a reader finds out when it reads.
            return FileStat(0, 0.0, f" {version}")
        best = hot or durable
        assert best is not None
        return FileStat(best.size, best.modified, f"{hot.version if hot else ''} {version}")

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        here, _, there = (expected or " ").partition(" ")
        if name == CATALOG_NAME:
            there = there if expected is not None else UNKNOWN
            self.remember(data, Record(self.durable.url, there, time.time()))
        self.hot.publish(name, data, expected=None if expected is None else here)
        if name == CATALOG_NAME:
            self.forget_records(but=data)

    def folders(self) -> list[str]:
        return sorted({*map(unplaced, self.hot.folders()), *self.durable.folders()})

    def list(self) -> list[tuple[str, int]]:
        return sorted({**dict(self.durable.list()), **dict(_listed(self.hot))}.items())

    def nearby(self) -> Storage:
        return HotSide(self.url)

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        self.remove(names)
        self.durable.delete(names)

    def sync(self, names: Iterable[str]) -> None:
        self.hot.sync(names)

    def probe(self, name: str, expected: str) -> None:
        _, _, there = expected.partition(" ")
        if there != UNKNOWN:
            try:
                within(_PATIENCE, lambda: self.durable.probe(name, there))
            except StorageUnavailableError as error:
                _log.warning("%s: going on without the durable storage: %s", self.url, error)

    # --- keeping house ----------------------------------------------------------------------------------------

    def forget(self, catalog: bytes) -> None:
        """Remove the hot copy of a step, and nothing that a save may have begun to write in its place.

        Args:
            catalog: of the step.
        """
        if self.hot_catalog() == catalog:
            self.hot.delete([CATALOG_NAME])  # first: what is left by a kill is no checkpoint
        self.remove([record_name(digest_of(catalog)), *(f.name for f in decode(catalog).files if not is_uri(f.name))])

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of the hot copy, and its folder when nothing else is in it."""
        self.hot.delete(names)
        self.tidy_up()

    def needed(self) -> set[str]:
        """The files of the hot folder that its step consists of; none where there is no whole step."""
        catalog = self.hot_catalog()
        if catalog is None or self.record(catalog) is None:
            return set()
        return {CATALOG_NAME, LOCK, record_name(digest_of(catalog)), *(file.name for file in decode(catalog).files)}

    def forget_records(self, *, but: bytes) -> None:
        """Remove what is remembered of steps that others have replaced here.

        Args:
            but: the catalog of the step whose record stays.
        """
        keep = record_name(digest_of(but))
        with contextlib.suppress(StorageError):
            self.hot.delete([name for name, _ in self.hot.list() if name.startswith("tier-") and name != keep])

    def tidy_up(self) -> None:
        """Remove the hot folder when nothing but records is left in it."""
        with contextlib.suppress(StorageError, OSError):
            names = [name for name, _ in self.hot.list()]
            if all(HOUSEHOLD.fullmatch(name) for name in names):
                self.hot.delete(names)
                for folder in self.hot.folders():
                    os.rmdir(os.path.join(self.hot.root, folder))
                os.rmdir(self.hot.root)

    def neighbours(self) -> Iterator[tuple[TierStorage, bytes, Record]]:
        """The steps of the same run that this machine has in its hot tier, with catalog and record."""
        parent, _, _ = self.url.rpartition("/")
        try:
            names = sorted(entry.name for entry in os.scandir(os.path.dirname(self.hot.root)) if entry.is_dir())
        except OSError:
            return
        for name in names:
            try:
                step = TierStorage(f"{parent}/{unplaced(name)}")
            except CheckpointError:
                continue
            catalog = step.hot_catalog()
            record = step.record(catalog) if catalog is not None else None
            if catalog is not None and record is not None:
                yield step, catalog, record


class HotSide(TierStorage):
    """A tier of which only the hot one is read, listed and changed.

    So a save sees it, since the durable checkpoint that it replaces is needed until the flush; and whoever wants to know
    what is here while the durable storage is away.
    """

    def _catalog(self) -> bytes:
        return self.hot.read(CATALOG_NAME)

    def folders(self) -> list[str]:
        return sorted(map(unplaced, self.hot.folders()))

    def list(self) -> list[tuple[str, int]]:
        return _listed(self.hot)

    def nearby(self) -> Storage:
        return self

    def delete(self, names: Iterable[str]) -> None:
        self.remove(names)


def _listed(storage: Storage) -> list[tuple[str, int]]:
    """The files of a tier but for records; nothing when it does not answer."""
    try:
        return [(name, size) for name, size in storage.list() if not HOUSEHOLD.fullmatch(name)]
    except StorageUnavailableError as error:
        _log.warning("%s cannot be listed: %s", storage.url, error)
        return []
