"""Positions of the data loaders that accelerate prepares: accelerate itself saves none of loaders without a state.

A position is the epoch, the batches that were taken, and the generators as they were when the epoch began. From these
the order of the epoch is drawn again, and the batches that are done are skipped.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import IterableDataset

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.rng.sources import RandomSource
from bytecheckpoint.integrations.accelerate.prepared import (
    SkipOnce,
    States,
    dataset_of,
    dispatches,
    has_exact_state,
    length_of,
    own_generators,
    process_generators,
    sampler_of,
    samples_in_batch,
    set_generators,
)

__all__ = ["LoaderPosition"]


@dataclass(frozen=True)
class _Resume:
    """Where a checkpoint goes on.

    Attributes:
        batches: of the epoch, which are done.
        ready: torch's iterator was there already when the epoch began, so that making it drew no numbers.
        start: the generators when the epoch began.
        after: those of the process, once the batches that are done are skipped.
        state: of the loader, if its data set has one.
    """

    batches: int
    ready: bool = False
    start: States = field(default_factory=dict)
    after: States = field(default_factory=dict)
    state: Any = None


class LoaderPosition:
    """Where a prepared loader is.

    Args:
        loader: of accelerate.
        accelerator: a weak proxy of the one that has prepared it.

    Attributes:
        running: the program iterates over it.

    Raises:
        UsageError: it yields batches out of their order.
    """

    def __init__(self, loader: Any, accelerator: Any) -> None:
        from accelerate.data_loader import SeedableRandomSampler

        # Workers of a loader in a reference cycle end seconds later: their queue is closed before they are told.
        self._loader_ref, self._accelerator = weakref.ref(loader), accelerator
        self._number = 0  # of the iteration that counts
        self.running = False
        self._left_in_training = False  # by a `break`
        self._taken = 0
        self._start: States = {}  # the generators when the epoch began
        self._was_ready = False
        self._resume: _Resume | None = None  # from a load until the next iteration
        sampler = sampler_of(loader)
        self._seeded = sampler if isinstance(sampler, SeedableRandomSampler) else None
        if not getattr(loader, "in_order", True):
            raise UsageError(
                "in_order=False lets workers yield batches out of their order, so that no position is exact"
            )
        if getattr(loader.base_dataloader, "_initial_iter_for_state_dict", False):
            # Workers of torchdata have begun already, in the order of a sampler that accelerate has replaced since.
            loader.base_dataloader._iterator = None
            loader.base_dataloader._initial_iter_for_state_dict = False
        if self._seeded is None and getattr(sampler, "generator", self) is None:
            # As accelerate does for several ranks. So the order is the same at any number of ranks.
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))

    @property
    def _loader(self) -> Any:
        return self._loader_ref()

    # --- iterate --------------------------------------------------------------------------------------------------

    def iterate(self, whole: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterate over the batches from the position on, and count them.

        Args:
            whole: begins accelerate's own iteration.
        """
        sources = {**process_generators(), **own_generators(self._loader)}
        resume, self._resume = self._resume, None
        skipped = 0 if resume is None else resume.batches
        if resume is not None:
            set_generators(sources, resume.start)
        self._start = {name: source.get() for name, source in sources.items()}
        self._was_ready = self._is_ready if resume is None else resume.ready
        self._number += 1
        number, self._taken, self.running = self._number, skipped, True
        try:
            for batch in whole() if resume is None else self._resumed(resume, whole, sources):
                if number == self._number:
                    self._taken += 1
                    self._left_in_training = any(model.training for model in self._accelerator._models)
                yield batch
            if number == self._number:
                self._taken, self._left_in_training = 0, False
        finally:
            self.running &= number != self._number

    def _resumed(
        self, resume: _Resume, whole: Callable[[], Iterator[Any]], sources: Mapping[str, RandomSource]
    ) -> Iterator[Any]:
        """Iterate over what follows the batches that are done, without reading them where a sampler names them."""
        base, count = self._loader.base_dataloader, resume.batches
        name = "sampler" if base.batch_sampler is None else "batch_sampler"
        sampler = getattr(base, name)
        by_sampler = not dispatches(self._loader) and not isinstance(base.dataset, IterableDataset)
        by_reading = count > 0 and not by_sampler and not resume.state
        if resume.state:
            base.load_state_dict(resume.state)

        def begin() -> Iterator[Any]:
            del base.__dict__["__iter__"]
            base._iterator = None  # of workers that stay, which have a sampler already
            base.__dict__["_initial_iter_for_state_dict"] = False  # of torchdata
            before = {key: source.get() for key, source in sources.items()} if resume.ready else {}
            if by_sampler and not resume.state:
                base.__dict__[name] = SkipOnce(sampler, count)  # torch allows no assignment
            try:
                found = iter(base)
            finally:
                base.__dict__[name] = sampler
                set_generators(sources, before)
            return found if by_reading else ahead(found)

        def ahead(found: Iterator[Any]) -> Iterator[Any]:
            # When the checkpoint was saved, one batch had been fetched ahead.
            first = list(itertools.islice(found, 1))
            set_generators(sources, resume.after)
            yield from itertools.chain(first, found)

        base.__dict__["__iter__"] = begin  # accelerate calls it after `set_epoch`
        batches = whole()
        if by_reading:  # also because the last batch of an epoch may be filled up with the first ones
            if sum(1 for _ in itertools.islice(batches, count)) < count:
                raise IncompatibleCheckpointError(
                    f"the data ends before batch {count} of the epoch, where the run goes on"
                )
            set_generators(sources, resume.after)
        return batches

    @property
    def _is_ready(self) -> bool:
        base = self._loader.base_dataloader
        kept = base.persistent_workers or getattr(base, "_initial_iter_for_state_dict", False)
        return bool(kept) and base._iterator is not None

    def skip(self, count: int) -> None:
        """Let the next iteration leave out the first batches.

        Raises:
            UsageError: a checkpoint goes on at another batch.
        """
        if self._resume is None:
            self._resume = _Resume(count)
        elif count != self._resume.batches:
            raise UsageError(
                f"the checkpoint goes on behind {self._resume.batches} batches of epoch {self._loader.iteration}, and "
                f"skip_first_batches is to skip {count}: iterate over the loader itself, which goes on there"
            )

    def check_epoch(self, epoch: int) -> None:
        """Refuse to leave the epoch in the middle of which a checkpoint goes on.

        Raises:
            UsageError: it is another one.
        """
        if self._resume is not None and self._resume.batches and epoch != self._loader.iteration:
            raise UsageError(
                f"the checkpoint goes on in epoch {self._loader.iteration}, and set_epoch({epoch}) would lose its "
                "position: begin the loop over epochs there: range(loader.iteration, ...)"
            )

    # --- save and load --------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the position as all ranks have it."""
        loader = self._loader
        batches = self._taken if self.running or self._left_in_training else 0
        epoch, ready = loader.iteration, self._is_ready
        if self._resume is not None:
            batches, ready = self._resume.batches, self._resume.ready
        elif batches and loader.end_of_dataloader:
            epoch, batches = epoch + 1, 0
        elif batches:
            ready = self._was_ready
        return {
            "epoch": epoch,
            "batches": batches,
            "ready": ready,
            "samples": samples_in_batch(self._loader, self._accelerator.num_processes),
            "length": length_of(dataset_of(loader)),
            "seed": self._seeded.initial_seed if self._seeded else None,
            "stateful": has_exact_state(self._loader),
        }

    def state(self) -> dict[str, Any]:
        """Return this rank's generators, and the state of the loader if its data set has one."""
        batches = self.describe()["batches"]
        now = {name: source.get() for name, source in own_generators(self._loader).items()}
        start = self._start if self._resume is None else self._resume.start
        own = self._loader.dl_state_dict if has_exact_state(self._loader) else None
        state = own if self._resume is None else self._resume.state
        return {"now": now, "start": start if batches else {}, "state": state if batches else None}

    def batches_from(self, saved: Mapping[str, Any], same_ranks: bool) -> int:
        """Return how many batches are done here, at the position of a checkpoint.

        Raises:
            IncompatibleCheckpointError: this loader cannot go on there.
        """
        own = self.describe()
        if saved["length"] != own["length"]:
            raise IncompatibleCheckpointError(
                f"the run began with {saved['length']} samples, and the data set has {own['length']} now"
            )
        if not saved["batches"] or (same_ranks and saved["samples"] == own["samples"]):
            return int(saved["batches"])
        known = saved["samples"] and own["samples"] and not saved["stateful"]
        if not known or saved["samples"] * saved["batches"] % own["samples"]:
            raise IncompatibleCheckpointError(
                f"the run was stopped behind {saved['batches']} batches of {saved['samples']} samples of an epoch"
                + (", in states that belong to the ranks" if saved["stateful"] else "")
                + f", which is no place between batches of {own['samples']} samples; keep the number of ranks and the "
                "batch size, or go on from a step at the end of an epoch"
            )
        return int(saved["samples"] * saved["batches"] // own["samples"])

    def go_to(self, saved: Mapping[str, Any], batches: int, state: Mapping[str, Any], generators: States) -> None:
        """Go on at the position of a checkpoint.

        Args:
            saved: what `describe` returned.
            batches: that are done.
            state: what `state` returned.
            generators: of the process, once the batches that are done are skipped.
        """
        self._loader.iteration = saved["epoch"]
        self._taken, self._left_in_training = 0, False
        if self._seeded is not None and saved["seed"] is not None:
            self._seeded.initial_seed = saved["seed"]
        set_generators(own_generators(self._loader), {**state["now"], **state["start"]})
        after = generators if batches else {}
        self._resume = _Resume(batches, saved["ready"], state["start"], after, state["state"])
