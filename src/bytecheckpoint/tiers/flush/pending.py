"""One save on its way from the hot commit to the durable one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.handles import SaveHandle, SaveReport, fail_handle
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_file import decode
from bytecheckpoint.settings import Settings
from bytecheckpoint.tiers.flush.job import transfer_limit
from bytecheckpoint.tiers.hot_folder import HotStep
from bytecheckpoint.tiers.storage import TierStorage
from bytecheckpoint.tracing.operation import Operation

__all__ = ["PendingFlush", "Stage"]


class Stage(StrEnum):
    """The stage of a flush. The values appear in errors, and two of them are phases of the save."""

    REPLICATE = "replicate"  # all machines get the catalog, and partners the files; then the step is restorable
    FLUSH = "flush"  # the files go to the durable storage
    COMMITTED = "committed"  # the durable storage has the step
    FAILED = "failed"


@dataclass(slots=True)
class PendingFlush:
    """One save that is committed in the hot tier, on one rank.

    Attributes:
        number: of the save, equal on all ranks.
        storage: where the step is.
        handle: whose `restorable` and `committed` are set.
        report: of the save so far.
        settings: of the save.
        on_failure: called with the error if the step never became restorable.
        operation: this rank's part of the save.
        stage: how far the flush is.
        step: the step, once the ranks have agreed upon it.
    """

    number: int
    storage: TierStorage
    handle: SaveHandle
    report: SaveReport
    settings: Settings
    on_failure: Callable[[CheckpointError], None]
    operation: Operation
    stage: Stage = Stage.REPLICATE
    step: HotStep | None = None
    _catalog: Catalog | None = field(default=None, repr=False)

    @property
    def agreed_step(self) -> HotStep:
        """The step; only after the ranks have agreed upon it."""
        assert self.step is not None
        return self.step

    @property
    def catalog(self) -> Catalog:
        """The catalog of the step; only after the ranks have agreed upon it."""
        if self._catalog is None:
            self._catalog = decode(self.agreed_step.catalog)
        return self._catalog

    @property
    def timeout(self) -> float:
        """Seconds that one stage may take."""
        return self.settings.timeout + transfer_limit(self.catalog)

    def set_restorable(self) -> None:
        """Report that the loss of a machine does not lose the step any more."""
        if not self.handle.restorable.done():
            self.handle.restorable.set_result(None)

    def set_committed(self) -> None:
        """Report that the durable storage has the step."""
        self.stage = Stage.COMMITTED
        self.set_restorable()
        operation = self.operation
        report = replace(
            self.report,
            phases=operation.seconds_by_phase(),
            total_seconds=operation.seconds(),
            retries=operation.retries,
            retry_seconds=operation.retry_seconds,
        )
        self.handle.committed.set_result(report)

    def describe(self, rank: int, error: BaseException) -> CheckpointError:
        """Return the error to report when this stage has failed on this rank."""
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
        cause = error if isinstance(error, CheckpointError) else repr(error)
        return kind(f"rank {rank}, {self.stage} of {self.storage.url}: {cause}")

    def set_failed(self, failure: CheckpointError) -> None:
        """Report that the flush has failed. Later saves go on if a restart can use the step."""
        self.stage = Stage.FAILED
        if not self.handle.restorable.done():
            self.on_failure(failure)
        fail_handle(self.handle, failure)
