"""Bring a model to the newest version, in place."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UsageError,
)
from bytecheckpoint.handles import LoadReport
from bytecheckpoint.layouts import LayoutArgument
from bytecheckpoint.loading import load_by
from bytecheckpoint.loading.changes import CONVERTED, NeedsWholeLoad, ProvenLoad, VersionLoad, fingerprints_by_key
from bytecheckpoint.loading.steps import Load
from bytecheckpoint.manager.run_folder import RunFolder
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.publishing.versions import PublishedVersion, path_to
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools.ranks import tool_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FollowReport", "Follower"]

_log = logging.getLogger("bytecheckpoint")


@dataclass(frozen=True)
class FollowReport:
    """The work of one rank in one update.

    Attributes:
        step: step of the version that the model has now.
        path: address of its checkpoint.
        versions: number of versions whose changes were applied one after the other; 0 if the version was loaded whole.
        bytes_read: bytes that this rank read.
        changed: number of elements that were replaced on this rank; 0 for a version loaded whole.
        unproven: keys of tensors of which the ranks do not hold each element equally often, so that only the files'
            checksums prove their changes.
        seconds: length of the update.
    """

    step: int
    path: str
    versions: int
    bytes_read: int
    changed: int
    unproven: tuple[str, ...]
    seconds: float


class Follower:
    """Keeps a model at the versions that a `Publisher` writes, in any other layout of the same tensors.

    The first update loads the version whole. Later ones read only what changed since, prove by the version's fingerprints
    that the result will be what was published, and then replace the changed elements in place.

    Args:
        root: folder or URL of the versions.
        layout: layout by which the model sees the versions, as for `load`.
        options: options of the loads.
        process_group: ranks that hold the model together; by default all.

    Attributes:
        version: version that the model has; None before the first update.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        layout: LayoutArgument | None = None,
        options: LoadOptions | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._root, self._layout, self._group = resolve(root).url, layout, process_group
        self._options = replace(options or LoadOptions(), prepare_save=False)
        self._folder = RunFolder(self._root)
        self._fingerprints: Mapping[str, tuple[int, int]] = {}  # of the version, on rank 0
        self._rank = 0
        self._converts = False  # True if each version has to be loaded whole
        self.version: PublishedVersion | None = None

    def update(
        self, states: torch.nn.Module | MutableMapping[str, Any], *, step: int | None = None
    ) -> FollowReport | None:
        """Bring the model to the newest version. Every rank calls it.

        Args:
            states: a module, or live objects by name as for `load`; the same ones in every call. Nobody else may change
                them between updates: a change is found only where it meets one that was published.
            step: step of the version to go to instead of the newest one, also an older one.

        Returns:
            A report; None if there is nothing newer.

        Raises:
            CheckpointNotFoundError: there is no version, or none of that step.
            CorruptCheckpointError: the version is damaged, or the model does not hold the version before any more; the
                model is unchanged, but for earlier versions that were applied on the way.
            IncompatibleCheckpointError: the model does not fit, or the newest version is older than the model's.
        """
        begun = time.monotonic()
        if isinstance(states, torch.nn.Module):
            states = {"model": states}
        if not isinstance(states, MutableMapping) or not states:
            raise UsageError("give a module, or a dict of name -> object, such as {'model': model}")
        target, path = self._choose(step)
        if target == self.version:
            return None
        reports: list[tuple[LoadReport, int, list[str]]] = []
        try:
            for version in path:
                reports.append(self._apply(version, states))
                self.version = version
        except (NeedsWholeLoad, IncompatibleCheckpointError, CheckpointNotFoundError) as reason:
            # A version on the way may not fit, or be gone by now; a target that does not fit is refused below.
            _log.info("%s is loaded whole: %s", target.path, reason)
            self._converts = self._converts or CONVERTED in str(reason)  # the same on all ranks
            path = []
        if not path:
            kind = Load if self.version is None else ProvenLoad
            reports.append((self._load(kind, target, states), 0, []))
            self._remember(target)
        self.version = target
        return FollowReport(
            target.step,
            target.path,
            len(path),
            sum(report.bytes_read for report, _, _ in reports),
            sum(changed for _, changed, _ in reports),
            tuple(dict.fromkeys(name for _, _, names in reports for name in names)),
            time.monotonic() - begun,
        )

    def _choose(self, step: int | None) -> tuple[PublishedVersion, list[PublishedVersion]]:
        """Return the version to go to, and those to apply on the way, none to load it whole; rank 0 chooses."""
        held = self.version

        def choose(_: list[None]) -> list[list[Any]]:
            versions = [PublishedVersion.of(info) for info in self._folder.steps()]
            if step is not None:
                versions = [version for version in versions if version.step <= step]
            if not versions or step not in (None, versions[-1].step):
                what = "no version" if step is None else f"no version of step {step}"
                raise CheckpointNotFoundError(f"{self._root} holds {what}")
            newest = versions[-1]
            if step is None and held is not None and newest.step < held.step:
                raise IncompatibleCheckpointError(
                    f"{self._root} holds versions up to step {newest.step}, and the model is at step {held.step}: its "
                    f"publisher went back; go there with step={newest.step}"
                )
            path = path_to(versions, held.id) if held is not None and held.id and not self._converts else []
            return [[*vars(version).values()] for version in (newest, *path)]

        with tool_ranks("follow", self._group, self._root, alone=False) as ranks:
            self._rank = ranks.rank
            found = ranks.agree("choose", lambda: None, choose)
        target, *path = (PublishedVersion(*fields) for fields in found)
        return target, path

    def _load(
        self, kind: Callable[..., Load], version: PublishedVersion, states: MutableMapping[str, Any]
    ) -> LoadReport:
        return load_by(kind, version.path, states, self._options, self._layout, self._group, None)

    def _apply(self, version: PublishedVersion, states: MutableMapping[str, Any]) -> tuple[LoadReport, int, list[str]]:
        made: list[VersionLoad] = []

        def make(*args: Any) -> VersionLoad:
            made.append(VersionLoad(*args))
            made[-1].base, made[-1].reached = self._fingerprints, {}
            return made[-1]

        try:
            report = self._load(make, version, states)
        except CorruptCheckpointError as error:
            if version.base:
                raise
            raise NeedsWholeLoad(str(error)) from error  # its files are whole, and prove themselves
        self._fingerprints = made[-1].reached
        return report, *made[-1].outcome

    def _remember(self, version: PublishedVersion) -> None:
        """Remember the fingerprints of the version that was loaded, by which rank 0 proves the next one's changes."""
        self._fingerprints = {}
        if self._rank == 0:
            with contextlib.suppress(CheckpointError):  # the next report says that nothing is proven
                self._fingerprints = fingerprints_by_key(read_catalog(resolve(version.path))[0])
