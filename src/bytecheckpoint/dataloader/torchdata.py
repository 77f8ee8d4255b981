"""Carry the state of torchdata's StatefulDataLoader: exact at the same degree, or at any degree with a suitable sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytecheckpoint.dataloader.checks import check_in_order, check_shared, share
from bytecheckpoint.dataloader.per_rank import PerRankLoader
from bytecheckpoint.dataloader.sources.facts import changed_facts, data_facts
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError

__all__ = ["TorchdataLoader"]


class TorchdataLoader(PerRankLoader):
    """Carries the state of a `StatefulDataLoader` (torchdata 0.11); implements `SupportsStreams`.

    If the data set is map-style and the sampler a `StatefulDistributedSampler`, any number of ranks and workers resumes
    exactly: that sampler holds how many samples a rank has fed, and the order of an epoch is the same for all numbers of
    ranks, up to the samples that fill the last batches. The global batch must stay the same: choose `batch_size` for it.
    The epoch of the sampler is restored too.

    Otherwise torchdata's own states resume at the same number of ranks and workers, and another number is refused. The
    states of an iterable data set belong to a rank and a worker of it, and those of other samplers to an order of one
    rank. For any number of ranks, pass `batch_sampler=ResumableSampler(...)` to the `StatefulDataLoader` and wrap it in a
    `ResumableLoader`; for iterable data, there are `HuggingFaceLoader` and `TokenBufferLoader`; or pass `merge` and `split`
    (see `PerRankLoader`).
    """

    def __init__(self, loader: Any, **options: Any) -> None:
        super().__init__(loader, **options)
        self._sampler = self._divisible_sampler()
        self._facts = data_facts(loader.dataset) if self._fingerprint is None else {}
        sampler = self._sampler
        if sampler and (sampler.rank, sampler.num_replicas) != (self._rank, self._ranks):
            raise UsageError(
                f"the sampler feeds rank {sampler.rank} of {sampler.num_replicas}, and the loader rank {self._rank} of "
                f"{self._ranks}; pass both the data-parallel ones"
            )

    def _divisible_sampler(self) -> Any:
        """Return the sampler if its positions can be divided anew among ranks, else None."""
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        if not isinstance(self.loader, StatefulDataLoader):
            raise UsageError(f"a TorchdataLoader wraps a StatefulDataLoader, not a {type(self.loader).__name__}")
        check_in_order(self.loader)
        found = type(self.loader.sampler) is StatefulDistributedSampler and self.loader.batch_size is not None
        # A data set with a state is changed by being read, in another way by each rank and worker.
        return self.loader.sampler if found and not hasattr(self.loader.dataset, "state_dict") else None

    # --- state ----------------------------------------------------------------------------------------------------

    def shared_state(self) -> Any:
        """Return the kind of the loader, the numbers of ranks and workers, and the position of all ranks together."""
        own = {"workers": self.loader.num_workers, "order": None, "data": self._facts}  # type: ignore[attr-defined]
        shared = super().shared_state() | own
        if self._sampler:
            taken = _taken(self.loader.state_dict(), self.loader.batch_size)  # type: ignore[attr-defined]
            # With the samples that fill up the last batch, whose number depends on the number of ranks.
            whole = taken >= self._sampler.num_samples
            position = {"epoch": self._sampler.epoch, "taken": None if whole else taken * self._ranks}
            shared |= {"order": self._order()} | position
        return shared

    def _order(self) -> dict[str, Any] | None:
        """Return the facts that decide the global batches, if these do not depend on the number of ranks."""
        return self._sampler and {
            "loader": type(self).__name__,
            "dataset_length": len(self._sampler.dataset),
            "global_batch": self.loader.batch_size * self._ranks,  # type: ignore[attr-defined]
            "seed": self._sampler.seed,
            "shuffle": self._sampler.shuffle,
            "drop_last": self._sampler.drop_last,
        }

    def stream_states(self) -> Mapping[int, Any]:
        """Return torchdata's state of this rank, or nothing where the shared state has the position."""
        return {self._rank: {}} if self._sampler else super().stream_states()

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Return this rank's stream, or a share of them where only the shared position matters.

        Raises:
            IncompatibleCheckpointError: another number of ranks or workers saved it, and its positions cannot be divided
                anew; or it has other data.
        """
        own = self._identity() | {"data": self._facts}
        check_shared(shared, own, compare={"data": changed_facts})
        order = self._order()
        if order is not None and shared["order"] is not None:
            check_shared(shared["order"], order)
            if (shared["taken"] or 0) % self._ranks:
                raise IncompatibleCheckpointError(
                    f"{shared['taken']} samples of the epoch were fed, which {self._ranks} ranks cannot have fed equally"
                )
            return [saved[i] for i in share(len(saved), self._rank, self._ranks)]
        if order is not None or shared["order"] is not None:
            raise IncompatibleCheckpointError(
                "only one of the StatefulDataLoaders, that of the checkpoint and this one, has a map-style data set "
                "without a state and a StatefulDistributedSampler: use the same kind"
            )
        if shared["workers"] != self.loader.num_workers:  # type: ignore[attr-defined]
            raise IncompatibleCheckpointError(
                f"{shared['workers']} workers of each rank saved the states of their StatefulDataLoader, and "
                f"{self.loader.num_workers} cannot share them: set num_workers as it was"  # type: ignore[attr-defined]
            )
        return super().choose_streams(shared, saved)

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Continue from this rank's state, or behind the samples that all ranks together have fed."""
        if not self._sampler:
            super().load_streams(shared, states)
            return
        # torchdata's own way would lose the position in a save that comes before the next batch.
        taken = self._sampler.num_samples if shared["taken"] is None else shared["taken"] // self._ranks
        self.loader.load_state_dict({})  # forgets an iterator that has begun
        self._sampler.set_epoch(shared["epoch"])
        self._sampler.load_state_dict({"yielded": taken})
        self._sampler.yielded = taken


def _taken(state: Mapping[str, Any], batch_size: int) -> int:
    """Return the number of samples of its epoch that a rank has fed, by the state of its `StatefulDistributedSampler`."""
    if state["_iterator_finished"]:
        return 0  # the next iteration feeds another epoch
    since = 0
    if "_snapshot" in state:  # of workers: the state of some batch, and the batches since
        since, state = state["_steps_since_snapshot"], state["_snapshot"]["_main_snapshot"]
    taken: int = state["_sampler_iter_state"]["sampler_state"]["yielded"]
    return taken + since * batch_size
