"""Read and change the folder of a run: its steps, pins and owner, and the removal of steps."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.engine.catalogs import read_catalog, read_outline
from bytecheckpoint.engine.file_set import other_folders
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageConflictError,
)
from bytecheckpoint.manager.rules import KeepRule, StepInfo, finite_metrics
from bytecheckpoint.monitoring.alerts.evaluation import lacking_room
from bytecheckpoint.representation.names import CATALOG_NAME, STEP_FOLDER, is_uri
from bytecheckpoint.storage import Storage, open_stored, resolve
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.tiers.cooldown import file_uri
from bytecheckpoint.tiers.flush.lock import flush_lock
from bytecheckpoint.tiers.storage import TierStorage
from bytecheckpoint.tools.removal import collect_garbage
from bytecheckpoint.tools.retirement import finish_retirement, is_link, links_in, retire, tombstones, users_in

__all__ = ["RunFolder", "by_age", "step_folder", "step_metadata", "step_number"]

#: Name of the manager's own facts in the metadata of a step.
_METADATA = "manager"
_PIN = ".bytecheckpoint-pinned"
_OWNER = ".bytecheckpoint-manager"
_SUPERSEDED = ".bytecheckpoint-superseded"

_log = logging.getLogger("bytecheckpoint")


def _number(name: str) -> int:
    return int(name.removeprefix("step_"))


def step_folder(root: str, step: int) -> str:
    """Return the path of a step."""
    return f"{root}/step_{step:08d}"


def step_number(path: str, root: str | None = None) -> int | None:
    """Return the step number of a path, or None if the path is no step, or no step of the run in `root`."""
    folder, _, name = path.rstrip("/").rpartition("/")
    found = STEP_FOLDER.fullmatch(name) if root in (None, folder) else None
    return int(found[1]) if found else None


def step_metadata(
    step: int, metrics: Mapping[str, Any], metadata: Mapping[str, Any], since_full: int = 0
) -> dict[str, Any]:
    """Return the metadata for the catalog of a step; the arguments are fields of `StepInfo`."""
    facts = {"step": step, "metrics": finite_metrics(metrics, step)}
    return {**metadata, _METADATA: {**facts, "since_full": since_full} if since_full else facts}


class _Owner(msgspec.Struct, frozen=True):
    """The manager of a folder."""

    id: str
    host: str
    pid: int
    begun: float


class RunFolder:
    """The folder of a run. Everything in it that has no name of a step is left alone.

    Args:
        root: path or URL of the folder.
        manager: id of the manager, the same on all its ranks.

    Attributes:
        url: address of the folder.
        machine_only: True if other machines may see other steps.
    """

    def __init__(self, root: str | os.PathLike[str], manager: str = "") -> None:
        self.url = resolve(root).url
        self._folder = with_time_limits(resolve(root))
        self.machine_only = self._folder.capabilities.machine_only
        # folder -> version of its catalog, its step, the other folders that hold files of it, and bytes of its own files
        self._known: dict[str, tuple[str, StepInfo, set[str], int]] = {}
        self._step_bytes = 0  # of the newest step
        self._foreign: set[int] = set()  # steps of another run, which stay
        self._retired: dict[tuple[str, str], float] = {}  # folder and tombstone -> time of the retirement
        self._me = _Owner(manager or secrets.token_hex(8), socket.gethostname(), os.getpid(), time.time())

    # --- steps --------------------------------------------------------------------------------------------------

    def steps(self) -> list[StepInfo]:
        """Return the committed steps with an intact catalog, ascending.

        Raises:
            StorageError: the storage fails.
        """
        superseded = self._superseded()

        def describe(name: str) -> StepInfo | None:
            if (info := self._describe(name)) is None:
                return None
            pinned = bool(_durable(info.path).version(_PIN))
            return replace(info, pinned=pinned, superseded=superseded.get(info.step) == info.created)

        found = parallel_map(describe, self._names(), self._folder.capabilities.parallel_reads, "bytecheckpoint-steps")
        return sorted((info for info in found if info is not None), key=lambda info: info.step)

    def newest(self) -> StepInfo | None:
        """Return the newest committed step, or None."""
        return next(reversed(by_age(self.steps())), None)

    def find(self, step: int) -> StepInfo | None:
        """Return a step, or None if it is not committed."""
        return self._describe(os.path.basename(step_folder(self.url, step)))

    def committed(self) -> list[tuple[bool, int]]:
        """Return (is not superseded, step number) of all steps that have a catalog, damaged or not."""
        superseded = self._superseded()

        def look(name: str) -> tuple[bool, int] | None:
            number = _number(name)
            if number in superseded:
                info = self._describe(name)
                return None if info is None else (superseded[number] != info.created, number)
            return (True, number) if with_time_limits(resolve(f"{self.url}/{name}")).version(CATALOG_NAME) else None

        found = parallel_map(look, self._names(), self._folder.capabilities.parallel_reads, "bytecheckpoint-steps")
        return [place for place in found if place is not None]

    def _names(self) -> list[str]:
        return [name for name in self._folder.folders() if STEP_FOLDER.fullmatch(name)]

    def _describe(self, name: str) -> StepInfo | None:
        """Return the step in a folder, or None without an intact catalog. Each version of a catalog is read once."""
        step = with_time_limits(resolve(f"{self.url}/{name}"))
        version = step.version(CATALOG_NAME)
        if not version:
            return None
        known = self._known.get(name)
        if known is None or version != known[0]:
            try:
                catalog = read_outline(step)
            except CheckpointNotFoundError:  # deleted meanwhile
                return None
            except CorruptCheckpointError as error:
                _log.warning("%s", error)
                return None
            metadata: Any = catalog.info.get("metadata", {})
            own = metadata.get(_METADATA, {})
            number = _number(name) if STEP_FOLDER.fullmatch(name) else -1
            created = float(catalog.info.get("created", 0.0))
            committed = 0.0
            with contextlib.suppress(FileNotFoundError):  # not flushed yet
                committed = _durable(step.url).stat(CATALOG_NAME).modified or created
            info = StepInfo(
                number,
                step.url,
                created,
                own.get("metrics", {}),
                committed=committed,
                since_full=own.get("since_full", 0),
                metadata={name: value for name, value in metadata.items() if name != _METADATA},
            )
            own_bytes = sum(file.stored_bytes for file in catalog.files if not is_uri(file.name))
            known = self._known[name] = version, info, other_folders(catalog), own_bytes
        return copy.deepcopy(known[1])  # functions and rules of the program may change its dicts

    # --- a run that goes back ---------------------------------------------------------------------------------------

    def continue_from(self, step: int) -> None:
        """Mark the steps behind a step as superseded, because the run continues from there.

        Raises:
            StorageError: the storage fails.
        """
        before = self._superseded()
        after = {**before, **{info.step: info.created for info in self._beyond(step)}}
        if before != after:
            _durable(self.url).publish(_SUPERSEDED, msgspec.json.encode(after))

    def leave_alone(self, step: int) -> list[int]:
        """Return the steps behind a step, which are of another run, and never delete them.

        Raises:
            StorageError: the storage fails.
        """
        self._foreign = {info.step for info in self._beyond(step)}
        return sorted(self._foreign)

    def note_own(self, step: int) -> None:
        """Count a step to this run from now on."""
        self._foreign.discard(step)

    def _beyond(self, step: int) -> list[StepInfo]:
        found = (self._describe(name) for name in self._names() if _number(name) > step)
        return [info for info in found if info is not None]

    def _superseded(self) -> dict[int, float]:
        """Return the superseded steps with their times of creation. A step that is saved anew has another time."""
        try:
            return msgspec.json.decode(_durable(self.url).read(_SUPERSEDED), type=dict[int, float])
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as error:
            raise CorruptCheckpointError(
                f"{self.url}/{_SUPERSEDED}, which lists the steps that the run left behind, is damaged: {error}; remove it "
                "and the steps that are not to count as the newest ones"
            ) from error

    def pin(self, step: int, pinned: bool) -> None:
        """Keep a step from being deleted by any manager, or allow it again.

        Raises:
            CheckpointNotFoundError: there is no such step.
        """
        path = step_folder(self.url, step)
        if not pinned:
            _durable(path).delete([_PIN])
            return
        place = with_time_limits(resolve(path))
        if place.version(CATALOG_NAME):
            _durable(path).publish(_PIN, b"")
            if place.version(CATALOG_NAME):  # not retired meanwhile
                return
            _durable(path).delete([_PIN])
        raise CheckpointNotFoundError(f"{path} holds no committed checkpoint: only those can be pinned")

    # --- one manager at a time ------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Make this process the manager of the folder. The manager before it fails at its next save."""
        _durable(self.url).publish(_OWNER, msgspec.json.encode(self._me))

    def check_owner(self) -> None:
        """Check that no other manager has taken over.

        Raises:
            StorageConflictError: another manager has taken over.
        """
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            owner = msgspec.json.decode(_durable(self.url).read(_OWNER), type=_Owner)
            if owner.id != self._me.id:
                begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner.begun))
                raise StorageConflictError(
                    f"another job manages {self.url}: process {owner.pid} on {owner.host}, begun {begun}; end one of the "
                    "two, or give it a folder of its own"
                )

    # --- removal --------------------------------------------------------------------------------------------------

    def clean(self, rules: Sequence[KeepRule], grace: float, most: int = 2, held: Collection[int] = ()) -> list[int]:
        """Begin the removal of steps that no rule keeps, and end removals that began `grace` seconds ago.

        The newest step always stays. Nothing is removed unless a step that stays is whole.

        Args:
            rules: rules of which one suffices to keep a step.
            grace: seconds for which readers may still read.
            most: most removals that wait for readers.
            held: further steps to keep for now.

        Returns:
            The steps whose removal began.

        Raises:
            StorageConflictError: another manager has taken over.
            StorageError: the storage fails.
        """
        self.check_owner()
        self.finish_removals(grace, most)
        steps = by_age(info for info in self.steps() if info.step not in self._foreign)
        kept = {step for rule in rules for step in rule.keep(steps)} | {*held, *(s.step for s in steps[-1:])}
        doomed = [info for info in steps if info.step not in kept and not info.pinned]
        if doomed and not any(self._is_whole(info) for info in reversed(steps) if info not in doomed):
            _log.warning("no step of %s that would stay is whole: none is deleted", self.url)
            return []
        users = users_in(self._folder, self._other_folders_of) if doomed else {}
        for name, link in links_in(_durable(self.url)).items() if doomed else ():
            users[_uri(_durable(f"{self.url}/{name}"))] = link
        gone = []
        for info in doomed:
            self.check_owner()  # a deletion takes a while, and the new owner may save these steps anew
            if self._retire(info, users):
                gone.append(info.step)
        self.finish_removals(grace, most)
        self._step_bytes = max((self._known[info.path.rpartition("/")[2]][3] for info in steps[-1:]), default=0)
        return gone

    def collect_leftovers(self, older_than: float, *, but: Callable[[], int]) -> None:
        """Remove files that killed saves and unfinished deletions have left in the folders of steps.

        Younger deletions are ended later, as those of this process.

        Args:
            older_than: least age of the files, in seconds.
            but: function that returns the step that is being saved.
        """
        for name, place in self._own_folders():
            if _number(name) == but():
                continue
            for removal in collect_garbage(f"{self.url}/{name}", older_than=older_than):
                _log.info("%s: %s, %d files, %s", removal.path, removal.what, removal.files, removal.kept or "removed")
                if removal.what == "retired" and removal.kept:
                    self._note_removals(name, place)

    def lacking_room(self) -> str:
        """Return why two steps like the newest one, of which one is being written, do not fit; "" if they do or may."""
        return lacking_room(self.url, 2 * self._step_bytes) if self._step_bytes else ""

    def free_room(self) -> None:
        """End all removals that were begun, by this job or earlier ones, because free space counts more than readers.

        Raises:
            StorageError: the storage fails.
        """
        for name, place in self._own_folders():
            self._note_removals(name, place)
        self.finish_removals(0.0)

    def _own_folders(self) -> Iterator[tuple[str, Storage]]:
        """Yield the folders of steps that are no symbolic links, with their names."""
        for name in self._names():
            if not is_link(place := _durable(f"{self.url}/{name}")):
                yield name, place

    def _note_removals(self, name: str, place: Storage) -> None:
        """Note the removals that were begun in a folder."""
        for stone in tombstones(place):
            self._retired.setdefault((name, stone), time.monotonic())

    def _is_whole(self, info: StepInfo) -> bool:
        """Return whether all files of a step exist with their sizes."""
        storage = with_time_limits(resolve(info.path))
        try:
            for file in read_catalog(storage)[0].files:
                reader = open_stored(storage, file)
                try:
                    if not reader.match_size(file.size):
                        raise CorruptCheckpointError(f"{file.name} has {reader.size} bytes, not {file.size}")
                finally:
                    reader.close()
        except (FileNotFoundError, CheckpointError) as error:
            _log.warning("%s does not count as whole: %s", info.path, error)
            return False
        return True

    def _other_folders_of(self, name: str) -> Collection[str]:
        return self._known[name][2] if self._describe(name) is not None else ()

    def _retire(self, info: StepInfo, users: dict[str, str]) -> bool:
        place = _durable(info.path)
        try:
            user = f"{users[_uri(place)]} uses its files" if _uri(place) in users else ""
            # Another job may have pinned it since it was listed.
            why = user or ("it is pinned" if place.version(_PIN) else retire(place, info.created))
            if not why:
                _remove_hot_copy(info.path)
        except CheckpointNotFoundError as error:  # a manager on another machine has deleted it
            why = str(error)
            _remove_hot_copy(info.path, flushed=True)
        except StorageConflictError as error:
            why = str(error)
        if why:
            _log.info("%s stays: %s", info.path, why)
            return False
        self._note_removals(info.path.rpartition("/")[2], place)
        return True

    def finish_removals(self, grace: float, most: int = 2) -> None:
        """End removals that this process noted at least `grace` seconds ago, and the oldest ones beyond `most`."""
        noted = sorted(self._retired.items(), key=lambda item: item[1])
        for number, ((name, stone), begun) in enumerate(noted, 1):
            if time.monotonic() - begun >= grace or number <= len(noted) - most:
                finish_retirement(_durable(f"{self.url}/{name}"), stone)
                del self._retired[name, stone]


def by_age(steps: Iterable[StepInfo]) -> list[StepInfo]:
    """Return steps from the oldest to the newest: the superseded ones first, then by number."""
    return sorted(steps, key=lambda info: (not info.superseded, info.step))


def _durable(path: str) -> Storage:
    """Return the storage at a path, without the tier in front of it."""
    storage = resolve(path)
    return with_time_limits(storage.durable if isinstance(storage, TierStorage) else storage)


def _uri(storage: Storage) -> str:
    return file_uri(storage, "").removesuffix("/")


def _remove_hot_copy(path: str, *, flushed: bool = False) -> None:
    """Remove the copy of a step in this machine's memory; with `flushed`, only a copy that was durable."""
    storage = resolve(path)
    if not isinstance(storage, TierStorage) or (catalog := storage.hot_folder.catalog()) is None:
        return
    record = storage.hot_folder.record(catalog)
    if not flushed or (record is not None and record.flushed):
        with contextlib.suppress(StorageConflictError), flush_lock(storage, exclusive=True, timeout=0.0):
            storage.hot_folder.remove_step(catalog)
