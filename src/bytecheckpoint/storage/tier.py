"""A quick tier in front of a durable storage: `tier+s3://bucket/run/step_100`, or any other URL behind `tier+`.

Saves go to memory (or a local disk) of each machine and are copied to the durable storage in the background; reads take
the nearest copy. This module knows one machine. What the machines do together (copies in each other's memory, the
flush, restoring) is in `bytecheckpoint.tiers`; docs/decisions/0015 has the reasons.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar
from urllib.parse import quote, unquote

import msgspec
import xxhash

from ..errors import CheckpointError, StorageError, StorageUnavailableError, UsageError
from ..representation.catalog_file import decode
from ..representation.names import CATALOG_NAME, is_uri
from ..settings import settings
from .base import Capabilities, FileReader, FileStat, FileWriter, NewFile, Storage, check_name
from .local import PosixStorage

__all__ = ["LOCK", "PREFIX", "UNKNOWN", "AnyCopy", "HotSide", "Record", "TierStorage", "digest_of"]

PREFIX = "tier+"
#: The version of a durable catalog at which nobody could look.
UNKNOWN = "?"
#: File that flushes of a step hold while they work.
LOCK = "tier.lock"
_RECORD = re.compile(r"tier-([0-9a-f]{16})\.json|tier\.lock")
#: Seconds that a save waits for the durable storage's word about what is there, before it goes on without.
_PATIENCE = 5.0

_log = logging.getLogger("bytecheckpoint")
_T = TypeVar("_T")


def digest_of(catalog: bytes) -> str:
    """What a hot step is called in its record."""
    return xxhash.xxh3_64_hexdigest(catalog)


class Record(msgspec.Struct, frozen=True):
    """What a machine remembers about a step in its hot tier.

    Attributes:
        url: of the durable checkpoint.
        replaces: version of the durable catalog when the save began, "" for none, UNKNOWN when it could not be told.
        saved: when it was committed here, seconds since 1970.
        ranks: those that saved on this machine; empty when that is not known (yet).
        flushed: whether the durable storage has it.
    """

    url: str
    replaces: str
    saved: float
    ranks: list[int] = []
    flushed: bool = False


class TierStorage(Storage):
    """`tier+URL`: writes to the hot tier of this machine, reads whatever is nearest.

    The hot copy counts while the durable catalog is what the hot save was to replace, or is the same: whoever
    replaces the durable checkpoint without this tier makes the hot copy void.

    Attributes:
        hot: this machine's folder for the checkpoint.
        durable: where it goes in the end.
    """

    capabilities = Capabilities(durable=False, machine_only=True)

    def __init__(self, url: str) -> None:
        from .registry import resolve

        inner = url[len(PREFIX) :]
        if inner.lower().startswith(PREFIX):
            raise UsageError(f"{url!r}: one tier in front of a storage is enough")
        self.durable = resolve(inner)
        local = isinstance(self.durable, PosixStorage) and "://" not in self.durable.url
        self.url = f"{PREFIX}file://{self.durable.url}" if local else PREFIX + self.durable.url
        root = settings().tier_hot.rstrip("/")
        hot = resolve(f"{root}/{_place(self.url[len(PREFIX) :])}")
        if not isinstance(hot, PosixStorage):
            raise UsageError(f"settings.tier_hot is {root!r}: use mem://name or a folder of a local disk")
        self.hot = hot

    # --- what counts ------------------------------------------------------------------------------------------

    def record(self, catalog: bytes) -> Record | None:
        """What this machine remembers of the hot step with this catalog."""
        try:
            return msgspec.json.decode(self.hot.read(_record_name(digest_of(catalog))), type=Record)
        except (FileNotFoundError, StorageError, msgspec.MsgspecError):
            return None

    def remember(self, catalog: bytes, record: Record) -> None:
        """Write the record of the hot step with this catalog."""
        self.hot.publish(_record_name(digest_of(catalog)), msgspec.json.encode(record))

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
            present = self.durable.version(CATALOG_NAME)
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

    def complete(self, catalog: bytes) -> bool:
        """Whether every file of a catalog is here or in the durable storage, by name and size."""
        if not catalog:
            return False
        try:
            wanted = {f.name: f.size for f in decode(catalog).files if not is_uri(f.name)}
        except CheckpointError:
            return False
        for tier in (self.hot, self.durable):
            present = dict(_listed(tier))
            wanted = {name: size for name, size in wanted.items() if present.get(name) != size}
            if not wanted:
                return True
        return False

    def _catalog(self) -> bytes:
        hot = self.hot_catalog()
        if hot is not None and self.supersedes(hot, self.record(hot)) and self.complete(hot):
            return hot
        return self.durable.read(CATALOG_NAME)

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
        except FileNotFoundError:
            return self.durable.read(name)

    def stat(self, name: str) -> FileStat:
        hot = durable = None
        with contextlib.suppress(FileNotFoundError):
            hot = self.hot.stat(name)
        version = UNKNOWN
        try:
            durable = _soon(lambda: self.durable.stat(name))
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

    def folders(self) -> list[str]:
        return sorted({*self.hot.folders(), *self.durable.folders()})

    def list(self) -> list[tuple[str, int]]:
        return sorted({**dict(self.durable.list()), **dict(_listed(self.hot))}.items())

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        self.hot.delete(names)
        self.durable.delete(names)

    def sync(self, names: Iterable[str]) -> None:
        self.hot.sync(names)

    def probe(self, name: str, expected: str) -> None:
        _, _, there = expected.partition(" ")
        if there != UNKNOWN:
            try:
                self.durable.probe(name, there)
            except StorageUnavailableError as error:
                _log.warning("%s: going on without the durable storage: %s", self.url, error)

    # --- keeping house ----------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Remove the hot copy."""
        self.hot.delete([CATALOG_NAME])  # first: what is left by a kill is no checkpoint
        shutil.rmtree(self.hot.root, ignore_errors=True)

    def neighbours(self) -> Iterator[tuple[TierStorage, bytes, Record]]:
        """The steps of the same run that this machine has in its hot tier, with catalog and record."""
        parent, _, _ = self.url.rpartition("/")
        try:
            names = sorted(entry.name for entry in os.scandir(os.path.dirname(self.hot.root)) if entry.is_dir())
        except OSError:
            return
        for name in names:
            try:
                step = TierStorage(f"{parent}/{unquote(name)}")
            except CheckpointError:
                continue
            catalog = step.hot_catalog()
            record = step.record(catalog) if catalog is not None else None
            if catalog is not None and record is not None:
                yield step, catalog, record


class HotSide(TierStorage):
    """A tier as a save sees it: what it lists and removes is in the hot tier only.

    The durable checkpoint that the save replaces is needed until the flush.
    """

    def list(self) -> list[tuple[str, int]]:
        return _listed(self.hot)

    def delete(self, names: Iterable[str]) -> None:
        self.hot.delete(names)


class AnyCopy(FileReader):
    """A file of which there may be several copies; reads from the nearest that answers.

    Args:
        shown: what it is called in messages.
        openers: what opens the copies, the nearest first.
    """

    def __init__(self, shown: str, openers: Sequence[Callable[[], FileReader]]) -> None:
        self._shown = shown
        self._left = list(openers)
        self._copies: list[FileReader] = []
        self._lock = threading.Lock()
        self._first = 0
        first = self._copy(0)
        if first is None:
            raise FileNotFoundError(2, "no copy", shown)
        self.size, self.step_bytes = first.size, first.step_bytes

    def _copy(self, number: int) -> FileReader | None:
        """Copy `number`, opened when it is first wanted; None when there are not so many."""
        unavailable: StorageError | None = None
        with self._lock:
            while len(self._copies) <= number and self._left:
                try:
                    self._copies.append(self._left.pop(0)())
                except FileNotFoundError:
                    continue
                except StorageError as error:
                    unavailable = error
            if len(self._copies) > number:
                return self._copies[number]
        if unavailable is not None and not self._copies:
            raise unavailable
        return None

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        failed: StorageError | None = None
        number = self._first
        while (copy := self._copy(number)) is not None:
            try:
                return copy.read_into(offset, buffers)
            except StorageError as error:
                _log.warning("%s: %s; another copy is read", self._shown, error)
                failed = failed or error
            number += 1
        assert failed is not None
        raise failed

    def fits(self, size: int) -> bool:
        while (copy := self._copy(self._first)) is not None:
            if copy.size == size:
                self.size, self.step_bytes = copy.size, copy.step_bytes
                return True
            _log.warning("%s: a copy has %d bytes instead of %d; another is read", self._shown, copy.size, size)
            self._first += 1
        return False

    def others(self) -> Iterator[FileReader]:
        number = self._first + 1
        while (copy := self._copy(number)) is not None:
            if copy.size == self.size:
                yield copy
            number += 1

    def close(self) -> None:
        with self._lock:
            for copy in self._copies:
                copy.close()
            self._copies, self._left = [], []


def _place(url: str) -> str:
    """A relative path for a URL: readable, different for different URLs, with safe names only."""
    scheme, _, rest = url.partition("://")
    parts = [quote(part, safe="+=@,~") for part in rest.strip("/").split("/")]
    return "/".join([scheme.replace("+", "%2B"), *parts])


def _record_name(digest: str) -> str:
    return f"tier-{digest}.json"


def _listed(storage: Storage) -> list[tuple[str, int]]:
    """The files of a tier but for records; nothing when it does not answer."""
    try:
        return [(name, size) for name, size in storage.list() if not _RECORD.fullmatch(name)]
    except StorageUnavailableError as error:
        _log.warning("%s cannot be listed: %s", storage.url, error)
        return []


def _soon(function: Callable[[], _T]) -> _T:
    """`function()`, unless it takes longer than a save should wait.

    Raises:
        StorageUnavailableError: it does.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    thread = threading.Thread(target=work, name="bytecheckpoint-ask", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends
        return function()
    thread.join(_PATIENCE)
    if errors:
        raise errors[0]
    if not results:
        raise StorageUnavailableError(f"no answer within {_PATIENCE:g} s")
    return results[0]
