"""The folder of a run: its steps, which of them are pinned, and their removal. One rank works on it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageConflictError,
    StorageUnavailableError,
)
from bytecheckpoint.manager.rules import KeepRule, StepInfo
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage, open_named, resolve
from bytecheckpoint.storage.threads import parallel_map
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.tiers.flush.lock import flush_lock
from bytecheckpoint.tiers.storage import TierStorage
from bytecheckpoint.tools.removal import collect_garbage, users
from bytecheckpoint.tools.retirement import finish_retirement, retire, tombstones

__all__ = ["METADATA", "RunFolder", "step_folder"]

#: Under this name the metadata of a checkpoint hold what the manager knows of a step.
METADATA = "manager"
_STEP = re.compile(r"step_([0-9]{8,})")
_PIN = ".bytecheckpoint-pinned"
_OWNER = ".bytecheckpoint-manager"

_log = logging.getLogger("bytecheckpoint")


def _number(name: str) -> int:
    return int(name.removeprefix("step_"))


def step_folder(root: str, step: int) -> str:
    """Return the path of a step."""
    return f"{root}/step_{step:08d}"


class RunFolder:
    """The folder of a run. Only folders whose names are those of steps are looked at.

    Args:
        root: path or URL.

    Attributes:
        url: of the folder.
        machine_only: other machines may see other steps.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.url = resolve(root).url
        self._folder = with_time_limits(resolve(root))
        self.machine_only = self._folder.capabilities.machine_only
        self._known: dict[str, tuple[str, StepInfo]] = {}  # folder -> version of its catalog, and what it says
        self._retired: dict[tuple[str, str], float] = {}  # folder and tombstone -> when
        self._me = {"id": secrets.token_hex(8), "host": socket.gethostname(), "pid": os.getpid(), "begun": time.time()}

    # --- steps --------------------------------------------------------------------------------------------------

    def steps(self) -> list[StepInfo]:
        """Return the committed steps, ascending. One whose catalog is damaged is left out.

        Raises:
            StorageError: the storage fails.
        """
        found = parallel_map(self._describe, self._names(), self._folder.parallel_reads, "bytecheckpoint-steps")
        return sorted((info for info in found if info is not None), key=lambda info: info.step)

    def committed(self) -> list[int]:
        """Return the numbers of all steps that have a catalog, damaged or not, ascending."""
        names = self._names()
        versions = parallel_map(
            lambda name: with_time_limits(resolve(f"{self.url}/{name}")).version(CATALOG_NAME),
            names, self._folder.parallel_reads, "bytecheckpoint-steps",
        )  # fmt: skip
        return sorted(_number(name) for name, version in zip(names, versions, strict=True) if version)

    def _names(self) -> list[str]:
        return [name for name in self._folder.folders() if _STEP.fullmatch(name)]

    def _describe(self, name: str) -> StepInfo | None:
        step = with_time_limits(resolve(f"{self.url}/{name}"))
        version = step.version(CATALOG_NAME)
        if not version:
            return None
        known_version, info = self._known.get(name, ("", None))
        if info is None or version != known_version:
            try:
                facts = read_catalog(step)[0].info
            except StorageUnavailableError:
                raise
            except (CheckpointNotFoundError, CorruptCheckpointError) as error:
                _log.warning("%s", error)
                return None
            own: Any = facts.get("metadata", {}).get(METADATA, {})
            info = StepInfo(_number(name), step.url, float(facts.get("created", 0.0)), own.get("metrics", {}))
            self._known[name] = version, info
        return replace(info, pinned=bool(_durable(step.url).version(_PIN)))

    def pin(self, step: int, pinned: bool) -> None:
        """Keep a step from being deleted by any manager, or allow it again.

        Raises:
            CheckpointNotFoundError: there is no such step.
        """
        path = step_folder(self.url, step)
        if not pinned:
            _durable(path).delete([_PIN])
            return
        if not with_time_limits(resolve(path)).version(CATALOG_NAME):
            raise CheckpointNotFoundError(f"{path} holds no committed checkpoint: only those can be pinned")
        _durable(path).publish(_PIN, b"")

    # --- one manager at a time ------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Make this process the manager of the folder. The one before it fails at its next save."""
        _durable(self.url).publish(_OWNER, json.dumps(self._me).encode())

    def check_owner(self) -> None:
        """Refuse to go on after another manager has taken over.

        Raises:
            StorageConflictError: one has.
        """
        with contextlib.suppress(FileNotFoundError, ValueError):
            owner = json.loads(_durable(self.url).read(_OWNER))
            if owner["id"] != self._me["id"]:
                begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner["begun"]))
                raise StorageConflictError(
                    f"another job manages {self.url}: process {owner['pid']} on {owner['host']}, begun {begun}; end one of "
                    "the two, or give it a folder of its own"
                )

    # --- removal --------------------------------------------------------------------------------------------------

    def clean(self, rules: Sequence[KeepRule], grace: float) -> list[int]:
        """Begin the removal of the steps that no rule keeps, and end those that were begun `grace` seconds ago.

        The newest step stays in any case, and nothing goes unless one of those that stay is whole.

        Args:
            rules: which to keep.
            grace: seconds for which readers may still read.

        Returns:
            The steps whose removal was begun.

        Raises:
            StorageConflictError: another manager has taken over.
            StorageError: the storage fails.
        """
        self.check_owner()
        self.finish_removals(grace)
        steps = self.steps()
        kept = {step for rule in rules for step in rule.keep(steps)} | {s.step for s in steps[-1:]}
        doomed = [info for info in steps if info.step not in kept and not info.pinned]
        if doomed and not any(self._is_whole(info) for info in reversed(steps) if info not in doomed):
            _log.warning("no step of %s that would stay is whole: none is deleted", self.url)
            return []
        gone = [info.step for info in doomed if self._retire(info)]
        self.finish_removals(grace)
        return gone

    def collect_leftovers(self, older_than: float, *, but: int) -> None:
        """Remove what killed saves, and deletions that were not ended, have left in the folders of steps.

        Args:
            older_than: seconds since it was written.
            but: a step that is being saved.
        """
        for name in self._names():
            if _number(name) != but:
                for removal in collect_garbage(f"{self.url}/{name}", older_than=older_than):
                    _log.info(
                        "%s: %s, %d files, %s", removal.path, removal.what, removal.files, removal.kept or "removed"
                    )

    def _is_whole(self, info: StepInfo) -> bool:
        """Return whether all files of a step are there, with their sizes."""
        storage = with_time_limits(resolve(info.path))
        try:
            for file in read_catalog(storage)[0].files:
                reader = open_named(storage, file.name)
                try:
                    if not reader.match_size(file.size):
                        raise CorruptCheckpointError(f"{file.name} has {reader.size} bytes, not {file.size}")
                finally:
                    reader.close()
        except (FileNotFoundError, CheckpointError) as error:
            _log.warning("%s does not count as whole: %s", info.path, error)
            return False
        return True

    def _retire(self, info: StepInfo) -> bool:
        place = _durable(info.path)
        try:
            why = f"{user} uses its files" if (user := next(users(place), "")) else retire(place)
            if not why:
                _remove_hot_copy(info.path)
        except (CheckpointNotFoundError, StorageConflictError) as error:
            why = str(error)
        if why:
            _log.info("%s stays: %s", info.path, why)
            return False
        name = info.path.rpartition("/")[2]
        self._retired |= {(name, stone): time.monotonic() for stone in tombstones(place)}
        return True

    def finish_removals(self, grace: float) -> None:
        """End the removals that this process began at least `grace` seconds ago."""
        for (name, stone), begun in list(self._retired.items()):
            if time.monotonic() - begun >= grace:
                finish_retirement(_durable(f"{self.url}/{name}"), stone)
                del self._retired[name, stone]


def _durable(path: str) -> Storage:
    """Return the storage at a path, without the tier in front of it."""
    storage = resolve(path)
    return with_time_limits(storage.durable if isinstance(storage, TierStorage) else storage)


def _remove_hot_copy(path: str) -> None:
    """Remove the copy of a step in this machine's memory."""
    storage = resolve(path)
    if isinstance(storage, TierStorage) and (catalog := storage.hot_folder.catalog()) is not None:
        with flush_lock(storage, exclusive=True, timeout=0.0):
            storage.hot_folder.remove_step(catalog)
