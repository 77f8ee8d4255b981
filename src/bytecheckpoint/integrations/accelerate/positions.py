"""Positions of the data loaders that accelerate prepares: accelerate itself saves none of loaders without a state.

A position is the epoch, the batches that were taken, and the generators as they were when the epoch began. From these
the order of the epoch is drawn again, and the batches that are done are skipped.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from bytecheckpoint.dataloader.hugging_face import check_exact
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.rng.sources import RandomSource, own_source, process_sources

__all__ = ["LoaderPosition", "process_generators"]

#: Generators of the process from which an order may be drawn.
_OF_PROCESS = ("python", "numpy", "torch")

States = Mapping[str, torch.Tensor]


def process_generators() -> dict[str, RandomSource]:
    """Return the generators of the process from which an order may be drawn."""
    return {name: source for name, source in process_sources().items() if name in _OF_PROCESS}


def _set_generators(sources: Mapping[str, RandomSource], states: States) -> None:
    """Let the generators go on from these states; those that have none stay."""
    for name in sources.keys() & states.keys():
        sources[name].set(states[name])


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
        accelerator: that has prepared it.
    """

    def __init__(self, loader: Any, accelerator: Any) -> None:
        from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler

        self._loader, self._accelerator = loader, accelerator
        self._dispatches = isinstance(loader, DataLoaderDispatcher)
        self._number = 0  # of the iteration that counts
        self.running = False
        self._left_in_training = False  # by a `break`
        self._taken = 0
        self._start: States = {}  # the generators when the epoch began
        self._was_ready = False
        self._resume: _Resume | None = None  # from a load until the next iteration
        sampler = _sampler_of(loader)
        self._seeded = sampler if isinstance(sampler, SeedableRandomSampler) else None
        if isinstance(sampler, RandomSampler) and sampler.generator is None and self._seeded is None:
            # As accelerate does for several ranks. So the order is the same at any number of ranks.
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))

    def _own(self) -> dict[str, RandomSource]:
        """Return the generators of the loader itself."""
        candidates = {
            "sampler": None if self._seeded else getattr(_sampler_of(self._loader), "generator", None),
            "loader": getattr(self._loader.base_dataloader, "generator", None),
            "dataset": getattr(_dataset_of(self._loader), "generator", None),
        }
        return {
            f"own.{name}": own_source(name, value)
            for name, value in candidates.items()
            if isinstance(value, torch.Generator)
        }

    # --- iterate --------------------------------------------------------------------------------------------------

    def iterate(self, whole: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterate over the batches from the position on, and count them.

        Args:
            whole: begins accelerate's own iteration.
        """
        sources = {**process_generators(), **self._own()}
        resume, self._resume = self._resume, None
        skipped = 0 if resume is None else resume.batches
        after = resume.after if resume else {}
        if resume is not None and resume.start:
            _set_generators(sources, resume.start)
        self._start = {name: source.get() for name, source in sources.items()}
        self._was_ready = self._is_ready if resume is None else resume.ready
        self._number += 1
        number, self._taken, self.running = self._number, skipped, True
        try:
            for batch in whole() if resume is None else self._resumed(resume, whole):
                # What was drawn for the batches that are done is no part of what goes on.
                _set_generators(sources, after)
                after = {}
                if number == self._number:
                    self._taken += 1
                    self._left_in_training = any(model.training for model in self._accelerator._models)
                yield batch
            _set_generators(sources, after)
            if number == self._number:
                self._taken, self._left_in_training = 0, False
        finally:
            self.running &= number != self._number

    def _resumed(self, resume: _Resume, whole: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterate over what follows the batches that are done, without reading them where a sampler names them."""
        base, count = self._loader.base_dataloader, 0 if resume.state else resume.batches
        name = "sampler" if base.batch_sampler is None else "batch_sampler"
        sampler = getattr(base, name)
        by_sampler = not self._dispatches and not isinstance(base.dataset, IterableDataset)
        if resume.state:
            base.load_state_dict(resume.state)

        def begin() -> Iterator[Any]:
            del base.__dict__["__iter__"]
            base._iterator = None  # of workers that stay, which have a sampler already
            base.__dict__["_initial_iter_for_state_dict"] = False  # of torchdata
            before = {name: source.get() for name, source in process_generators().items()} if resume.ready else {}
            if by_sampler:
                base.__dict__[name] = _SkipOnce(sampler, count)  # torch allows no assignment
            try:
                return iter(base)
            finally:
                base.__dict__[name] = sampler
                _set_generators(process_generators(), before)

        base.__dict__["__iter__"] = begin  # accelerate calls it after `set_epoch`
        batches = whole()
        # The last batch of an epoch may be filled up with the first ones, so these are read.
        if not by_sampler and sum(1 for _ in itertools.islice(batches, count)) < count:
            raise IncompatibleCheckpointError(f"the data ends before batch {count} of the epoch, where the run goes on")
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
            "samples": self._samples(),
            "length": _length(_dataset_of(loader)),
            "seed": self._seeded.initial_seed if self._seeded else None,
            "stateful": self._is_stateful,
        }

    def state(self) -> dict[str, Any]:
        """Return this rank's generators, and the state of the loader if its data set has one."""
        batches = self.describe()["batches"]
        now = {name: source.get() for name, source in self._own().items()}
        start = self._start if self._resume is None else self._resume.start
        own = self._loader.dl_state_dict if self._is_stateful else None
        state = own if self._resume is None else self._resume.state
        return {"now": now, "start": start if batches else {}, "state": state if batches else None}

    @property
    def _is_stateful(self) -> bool:
        """Whether torchdata's state says more than the number of batches."""
        loader = self._loader
        if self._dispatches or not loader.use_stateful_dataloader or not hasattr(loader.dataset, "state_dict"):
            return False
        try:
            check_exact(loader.dataset, "")
        except UsageError:  # it leaves something out, so the batches are read again
            return False
        return True

    def _samples(self) -> int | None:
        """Return how many samples all ranks take in a batch, of one order; None where each rank has an order of its own."""
        from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

        base, ranks = self._loader.base_dataloader, self._accelerator.num_processes
        sampler = base.sampler if base.batch_sampler is None else base.batch_sampler
        size = getattr(sampler, "batch_size", None)
        if self._dispatches:
            ranks = 1 if self._loader.split_batches else ranks
        elif isinstance(sampler, BatchSamplerShard):
            ranks = 1 if sampler.split_batches else sampler.num_processes
        elif isinstance(base.dataset, IterableDatasetShard):
            ranks = base.dataset.num_processes
        elif ranks > 1:  # each rank has a part of the data, as of a sharded data set of Hugging Face
            return None
        return None if size is None else int(size) * ranks

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
        _set_generators(self._own(), {**state["now"], **state["start"]})
        after = generators if batches else {}
        self._resume = _Resume(batches, saved["ready"], state["start"], after, state["state"])


def _sampler_of(loader: Any) -> Any:
    found = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while isinstance(found, BatchSampler):
        found = getattr(found, "batch_sampler", None) or getattr(found, "sampler", None)
    return found


def _dataset_of(loader: Any) -> Any:
    from accelerate.data_loader import IterableDatasetShard

    return loader.dataset.dataset if isinstance(loader.dataset, IterableDatasetShard) else loader.dataset


def _length(dataset: Any) -> int | None:
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(dataset)
    return None


class _SkipOnce(BatchSampler):
    """A sampler without its first batches, at the first iteration: workers that stay keep it for all epochs."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count

    def __iter__(self) -> Iterator[Any]:
        count, self._count = self._count, 0  # when the first batch is asked for: torch makes iterators that it drops
        yield from itertools.islice(self._sampler, count, None)

    def __len__(self) -> int:
        return len(self._sampler)
