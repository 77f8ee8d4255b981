"""Publish versions of the weights of a training."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from bytecheckpoint.errors import CheckpointError, StorageConflictError, UsageError
from bytecheckpoint.handles import SaveHandle
from bytecheckpoint.manager.run_folder import RunFolder, step_folder, step_metadata
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.publishing.versions import LastChains
from bytecheckpoint.representation.catalog import PUBLISHED
from bytecheckpoint.saving import save
from bytecheckpoint.saving.steps import check_step
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.deltas.coding import LONGEST_CHAIN
from bytecheckpoint.storage.deltas.writing import DeltaStorage, KeptFiles
from bytecheckpoint.threads import try_start
from bytecheckpoint.tools.ranks import tool_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Publisher"]

#: Versions whose removal may wait for their readers: `grace` decides, not their number.
_MOST_WAITING = 1 << 20
_log = logging.getLogger("bytecheckpoint")


class _Cleaner:
    """Deletes versions that are not kept, in the background, on rank 0.

    Args:
        folder: folder of the versions.
        rule: rule of those to keep.
        grace: seconds for which readers may still read the others.

    Attributes:
        deletes: True on rank 0.
        usurped: error that says so, once another publisher has taken over the folder.
    """

    def __init__(self, folder: RunFolder, rule: LastChains, grace: float) -> None:
        self._folder, self._rule, self._grace = folder, rule, grace
        self._thread: threading.Thread | None = None
        self.deletes = False
        self.usurped: StorageConflictError | None = None

    def begin(self) -> None:
        """Begin, unless it is still at it."""
        if self.deletes and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="bytecheckpoint-versions", daemon=True)
            try_start(self._thread)

    def _run(self) -> None:
        try:
            self._folder.clean([self._rule], self._grace, _MOST_WAITING)
        except StorageConflictError as error:
            self.usurped = error
        except CheckpointError as error:
            _log.warning("old versions in %s stay for now: %s", self._folder.url, error)

    def end(self) -> None:
        """Wait for it."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()


class Publisher:
    """Publishes the weights of a training, each version as its difference from the one before.

    A version is an ordinary checkpoint: `load`, `open`, `diff`, `verify` and engines read it. Each rank keeps a copy of
    what it has published last in host memory, and writes the elements that changed. Use it as a context manager, or call
    `close`.

    Args:
        root: folder or URL of the versions.
        full_every: number n: each n-th version is whole, so that a version builds on n - 1 others at most; at most, and for
            None, 100. A version is also whole once those since the last whole one are as long together. Its difference from
            the version before is kept beside it, for followers that have that one.
        keep: number of whole versions to keep, with all that builds on them. Older ones go once nobody has read them for
            `grace` seconds.
        grace: seconds for which readers may still read a version that is not kept.
        options: options of the saves. `incremental` and `view` are not for versions.
        process_group: ranks that publish together; by default all.

    Examples:
        >>> import tempfile, torch
        >>> from bytecheckpoint.publishing import Follower, Publisher
        >>> root, trained, engine = tempfile.mkdtemp(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        >>> with Publisher(root) as publisher:
        ...     for step in (1, 2):
        ...         _ = trained.weight.data[step].add_(1.0)
        ...         handle = publisher.publish(trained, step)
        >>> Follower(root).update(engine).step
        2
        >>> torch.equal(trained.weight, engine.weight)
        True
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        full_every: int | None = 20,
        keep: int = 2,
        grace: float = 600.0,
        options: SaveOptions | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        for name, value in (("full_every", full_every), ("keep", keep)):
            if (value is not None or name == "keep") and (type(value) is not int or value < 1):
                raise UsageError(f"{name}={value!r}: give a whole number from 1 on")
        self._options = options or SaveOptions()
        if self._options.incremental:
            raise UsageError("incremental=True is for checkpoints: versions are differences by themselves")
        if self._options.view is not None:
            raise UsageError("view= is for checkpoints: no other program reads files that are kept as differences")
        self._root, self._group = resolve(root).url, process_group
        self._every = min(full_every or LONGEST_CHAIN, LONGEST_CHAIN)
        self._folder = RunFolder(self._root)
        self._cleaner = _Cleaner(self._folder, LastChains(keep), grace)
        self._kept = KeptFiles()
        self._last: SaveHandle | None = None
        self._step, self._since_full = -1, 0
        self._id = ""  # of the version before, on rank 0
        self._builds = False  # True if there is one, on all ranks
        self._written = [0, 0]  # bytes of this rank: of the last whole version, and of those since

    def publish(
        self, states: torch.nn.Module | Mapping[str, object], step: int, *, metadata: Mapping[str, Any] | None = None
    ) -> SaveHandle:
        """Publish a version. Every rank calls it; it waits for the version before, and returns when the state is copied.

        Args:
            states: a module, or live objects by name as for `save`.
            step: training step, higher than that of the version before.
            metadata: facts of the caller (plain JSON), stored in the catalog.

        Returns:
            A handle, as of `save`. Until it is done, followers see the version before.

        Raises:
            UsageError: the step is not behind those in the folder.
            StorageConflictError: another publisher has taken over the folder.
            CheckpointError: as `save`; or the version before failed, and nobody was told. The next version is then whole.
        """
        number = check_step(step)
        whole = self._plan(number)
        before, self._id = self._id if self._builds else "", secrets.token_hex(12)
        facts = {**(metadata or {}), PUBLISHED: {"id": self._id, "base": "" if whole else before, "before": before}}
        target = DeltaStorage(resolve(step_folder(self._root, number)), self._kept, whole=whole)
        arguments = {**self._options.arguments(), "metadata": step_metadata(number, {}, facts)}
        self._builds = False
        if isinstance(states, torch.nn.Module):
            states = {"model": states}
        try:
            self._last = save(target, states, step=number, process_group=self._group, **arguments)
        except BaseException:
            self._kept.forget()
            raise
        self._step, self._since_full = number, 0 if whole else self._since_full + 1
        return self._last

    def _plan(self, step: int) -> bool:
        """Agree with the other ranks on whether the version is whole, when the one before has ended on all of them.

        Raises:
            CheckpointError: as `publish`.
        """
        first = self._step < 0

        def report() -> list[int]:
            self.wait()
            if self._cleaner.usurped is not None:
                raise self._cleaner.usurped
            if step <= self._step:
                raise UsageError(f"step {step} comes after step {self._step}: the versions of a publisher ascend")
            self._cleaner.deletes = ranks.rank == 0
            newest = -1
            if first and ranks.rank == 0:
                newest = max((number for _, number in self._folder.committed()), default=-1)
            wanted = not self._builds or self._since_full + 1 == self._every
            return [newest, int(wanted), *self._written]

        def decide(found: list[list[int]]) -> bool:
            if (newest := max(each[0] for each in found)) >= step:
                raise UsageError(
                    f"{self._root} has versions up to step {newest}, and step {step} is not behind them: a publisher that "
                    "went back needs a folder of its own, or those versions removed"
                )
            if first:
                self._folder.take_over()
            # Reading the versions since the last whole one takes as long as that one, once they are as long together.
            return any(each[1] for each in found) or sum(each[3] for each in found) > sum(each[2] for each in found)

        with tool_ranks("publish", self._group, self._root, alone=False) as ranks:
            return ranks.agree("plan", report, decide)

    def wait(self) -> None:
        """Wait for the version in flight.

        Raises:
            CheckpointError: it failed, and nobody was told.
        """
        last, self._last = self._last, None
        if last is None:
            return
        error = Future.exception(last.committed)
        if error is None:
            self._kept.commit()
            self._builds = True
            nbytes = last.result().bytes_written
            self._written = [self._written[0], self._written[1] + nbytes] if self._since_full else [nbytes, 0]
            self._cleaner.begin()
            return
        self._kept.forget()
        if not last.failure_retrieved:
            last.result()

    def close(self) -> None:
        """Wait for the version in flight, and free the memory. Raises as `wait`."""
        try:
            self.wait()
        finally:
            self._kept.forget()
            self._builds = False
            self._cleaner.end()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
