"""Save and restore positions of data loaders that accelerate prepares. Accelerate itself saves only loaders with a state.

A position is the epoch, the number of taken batches, and the states of the generators at the beginning of the epoch. The
order of the epoch is drawn from them again, and the batches that are done are skipped.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from bytecheckpoint.dataloader.checks import check_in_order
from bytecheckpoint.dataloader.hugging_face import check_exact
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.rng.sources import RandomSource, own_source, process_sources
from bytecheckpoint.integrations.loaders import generators_of, length_of, sampler_of

__all__ = ["LoaderPosition"]

#: States of generators, by name: uint8 [n].
_States = Mapping[str, torch.Tensor]


def _process_generators() -> dict[str, RandomSource]:
    """Return the generators of the process that may draw an order."""
    sources = process_sources()
    return {name: sources[name] for name in ("python", "numpy", "torch")}


def _states_of(sources: Mapping[str, RandomSource]) -> _States:
    return {name: source.get() for name, source in sources.items()}


def _set(sources: Mapping[str, RandomSource], states: _States) -> None:
    for name in sources.keys() & states.keys():
        sources[name].set(states[name])


@dataclass(frozen=True)
class _Resume:
    """Position at which the next iteration begins.

    Attributes:
        batches: number of batches of the epoch that are done.
        start: generators at the beginning of the epoch.
        after: generators of the process once the done batches are skipped.
        state: state of the loader, if its data set has a state.
    """

    batches: int
    start: _States
    after: _States = field(default_factory=dict)
    state: Any = None


class LoaderPosition:
    """Position of a prepared loader; implements `SupportsStreams`, with a stream for each rank.

    Args:
        loader: data loader of accelerate.
        accelerator: weak proxy of the accelerator that has prepared the loader.

    Attributes:
        running: True while the program iterates over the loader.

    Raises:
        UsageError: the loader yields batches out of their order.
    """

    takes_all_streams = False

    def __init__(self, loader: Any, accelerator: Any) -> None:
        from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard, SeedableRandomSampler

        # Workers of a loader in a reference cycle end seconds later: their queue is closed before they are told.
        self._loader_ref, self._accelerator = weakref.ref(loader), accelerator
        self._dispatches = isinstance(loader, DataLoaderDispatcher)  # rank 0 reads for all
        sharded = isinstance(loader.dataset, IterableDatasetShard)
        self._dataset = loader.dataset.dataset if sharded else loader.dataset
        self._number = 0  # of the iteration that counts
        self.running = False
        self._left_in_training = False  # by a `break`
        self._taken = 0
        self._start: _States = {}  # the generators when the epoch began
        self._resume: _Resume | None = None  # from a load until the next iteration
        sampler, base = sampler_of(loader), loader.base_dataloader
        self._seeded = sampler if isinstance(sampler, SeedableRandomSampler) else None
        check_in_order(loader)
        if getattr(base, "_initial_iter_for_state_dict", False):
            # Workers of torchdata have begun already, in the order of a sampler that accelerate has replaced since.
            base._iterator, base._initial_iter_for_state_dict = None, False
        if self._seeded is None and getattr(sampler, "generator", self) is None:
            # As accelerate does for several ranks. So the order is the same at any number of ranks.
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))

    @property
    def _loader(self) -> Any:
        return self._loader_ref()

    def _own_generators(self) -> dict[str, RandomSource]:
        found = generators_of(self._loader.base_dataloader, self._dataset)
        if self._seeded is not None:  # accelerate seeds it anew for each epoch
            found.pop("sampler", None)
        return {f"own.{name}": own_source(name, generator) for name, generator in found.items()}

    # --- iterate --------------------------------------------------------------------------------------------------

    def iterate(self, whole: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterate over the batches from the position on, and count them.

        Args:
            whole: function that begins accelerate's own iteration.
        """
        sources = {**_process_generators(), **self._own_generators()}
        resume, self._resume = self._resume, None
        if resume is not None:
            _set(sources, resume.start)
        self._start = _states_of(sources)
        self._number += 1
        number, self.running = self._number, True
        self._taken = self._loaded_by_accelerate() if resume is None else resume.batches
        try:
            for batch in whole() if resume is None else self._resumed(resume, whole, sources):
                if number == self._number:
                    self._taken += 1
                    self._left_in_training = any(model.training for model in self._accelerator._models)
                yield batch
            if number == self._number:
                self._taken, self._left_in_training = 0, False
        finally:
            if number == self._number:
                self.running = False

    def _loaded_by_accelerate(self) -> int:
        """Return the number of done batches in a state that accelerate itself has loaded into torchdata's loader, or 0."""
        state = getattr(self._loader.base_dataloader, "next_iter_state", None) or {"_iterator_finished": True}
        if state["_iterator_finished"]:
            return 0
        before = state.get("_snapshot", {}).get("_snapshot_step", 0)  # of workers
        return int(before + state.get("_steps_since_snapshot", state.get("_num_yielded", 0)))

    def _resumed(
        self, resume: _Resume, whole: Callable[[], Iterator[Any]], sources: Mapping[str, RandomSource]
    ) -> Iterator[Any]:
        """Iterate over the batches after the done ones, which are not read if a sampler names their samples.

        Monkey-patches `__iter__` and the sampler of the loader below accelerate's, for one iteration.
        """
        base, count = self._loader.base_dataloader, resume.batches
        name = "sampler" if base.batch_sampler is None else "batch_sampler"
        sampler = getattr(base, name)
        by_sampler = not self._dispatches and not isinstance(base.dataset, IterableDataset)
        by_reading = count > 0 and not by_sampler and not resume.state
        # Workers that stay were there already when this epoch began, so that making them drew no numbers.
        kept = base.persistent_workers and self._loader.iteration > 0
        if resume.state:
            base.load_state_dict(resume.state)

        def begin() -> Iterator[Any]:
            del base.__dict__["__iter__"]
            base._iterator = None  # of workers that stay, which have a sampler already
            base.__dict__["_initial_iter_for_state_dict"] = False  # of torchdata
            before = _states_of(sources) if kept else {}
            if by_sampler and not resume.state:
                base.__dict__[name] = _SkipOnce(sampler, count)  # torch allows no assignment
            try:
                found = iter(base)
            finally:
                base.__dict__[name] = sampler
                _set(sources, before)
            return found if by_reading else ahead(found)

        def ahead(found: Iterator[Any]) -> Iterator[Any]:
            # When the checkpoint was saved, one batch had been fetched ahead.
            first = list(itertools.islice(found, 1))
            _set(sources, resume.after)
            yield from itertools.chain(first, found)

        base.__dict__["__iter__"] = begin  # accelerate calls it after `set_epoch`
        batches = whole()
        if by_reading:  # also because the last batch of an epoch may be filled up with the first ones
            if sum(1 for _ in itertools.islice(batches, count)) < count:
                raise IncompatibleCheckpointError(
                    f"the data ends before batch {count} of the epoch, where the run continues"
                )
            _set(sources, resume.after)
        return batches

    def skip(self, count: int) -> None:
        """Let the next iteration leave out the first batches.

        Raises:
            UsageError: a checkpoint continues at another batch.
        """
        if self._resume is None:
            self._resume = _Resume(count, _states_of(self._own_generators()))
        elif count != self._resume.batches:
            raise UsageError(
                f"the checkpoint continues behind {self._resume.batches} batches of epoch {self._loader.iteration}, and "
                f"skip_first_batches is to skip {count}: iterate over the loader itself, which continues there"
            )

    def check_epoch(self, epoch: int) -> None:
        """Refuse another epoch than the one in the middle of which a checkpoint continues.

        Raises:
            UsageError: the epoch is another one.
        """
        if self._resume is not None and self._resume.batches and epoch != self._loader.iteration:
            raise UsageError(
                f"the checkpoint continues in epoch {self._loader.iteration}, and set_epoch({epoch}) would lose its "
                "position: begin the loop over epochs there: range(loader.iteration, ...)"
            )

    # --- save and load --------------------------------------------------------------------------------------------

    @property
    def stream_count(self) -> int:
        """Number of ranks."""
        return int(self._accelerator.num_processes)

    def shared_state(self) -> dict[str, Any]:
        """Return the part of the position that is equal on all ranks; see `SupportsStreams`."""
        loader, resume = self._loader, self._resume
        epoch, batches = loader.iteration, 0
        if resume is not None:
            batches = resume.batches
        elif self.running or self._left_in_training:
            batches = self._taken
            if batches and loader.end_of_dataloader:
                epoch, batches = epoch + 1, 0
        return {
            "epoch": epoch,
            "batches": batches,
            "samples": self._samples_in_batch(),
            "accumulation": self._accelerator.gradient_accumulation_steps,
            "ranks": self.stream_count,
            "length": length_of(self._dataset),
            "seed": self._seeded.initial_seed if self._seeded else None,
            "stateful": self._has_exact_state(),
        }

    def stream_states(self) -> dict[int, Any]:
        """Return this rank's generators, and the state of the loader if its data set has one; see `SupportsStreams`."""
        if self._resume is not None:
            generators, state = self._resume.start, self._resume.state
        elif self.shared_state()["batches"]:
            generators, state = self._start, self._loader.dl_state_dict if self._has_exact_state() else None
        else:
            generators, state = _states_of(self._own_generators()), None
        return {int(self._accelerator.process_index): {"generators": generators, "state": state}}

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Return this rank's number, or that of rank 0 at another number of ranks; see `SupportsStreams`."""
        self._batches_from(shared)  # refuses
        return [int(self._accelerator.process_index) if shared["ranks"] == self.stream_count else saved[0]]

    def _batches_from(self, saved: Mapping[str, Any]) -> int:
        """Return the number of batches that are done, in batches of this loader.

        Raises:
            IncompatibleCheckpointError: this loader cannot continue there.
        """
        own = self.shared_state()
        if saved["length"] != own["length"]:
            raise IncompatibleCheckpointError(
                f"the run began with {saved['length']} samples, and the data set has {own['length']} now"
            )
        same = saved["ranks"] == own["ranks"] and saved["samples"] == own["samples"]
        if not saved["batches"] or same:
            return int(saved["batches"])
        known = saved["samples"] and own["samples"] and not saved["stateful"]
        if not known or saved["samples"] * saved["batches"] % own["samples"]:
            raise IncompatibleCheckpointError(
                f"the run was stopped behind {saved['batches']} batches of {saved['samples']} samples of an epoch"
                + (", in states that belong to the ranks" if saved["stateful"] else "")
                + f", which is no place between batches of {own['samples']} samples; keep the number of ranks and the "
                "batch size, or continue from a step at the end of an epoch"
            )
        return int(saved["samples"] * saved["batches"] // own["samples"])

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> list[str]:
        """Let the next iteration continue from a position; see `SupportsStreams`."""
        if self.running:
            return ["the loader is being iterated over: that iteration continues where it is"]
        (state,) = states.values()
        self._loader.iteration = shared["epoch"]
        self._taken, self._left_in_training = 0, False
        if self._seeded is not None and shared["seed"] is not None:
            self._seeded.initial_seed = shared["seed"]
        self._resume = _Resume(self._batches_from(shared), state["generators"], state=state["state"])
        before, now = ((s["samples"] or 0) * s["accumulation"] for s in (shared, self.shared_state()))
        if before == now:
            return []
        return [f"an optimizer step took {before} samples, and takes {now} now"]

    def note_generators(self) -> None:
        """Note the generators with which the training continues. Called when everything is loaded."""
        if self._resume is not None and self._resume.batches:
            self._resume = replace(self._resume, after=_states_of(_process_generators()))

    # --- the loader -----------------------------------------------------------------------------------------------

    def _has_exact_state(self) -> bool:
        """Return True if torchdata's state of the loader is exact, and holds more than the number of batches."""
        loader = self._loader
        if self._dispatches or not loader.use_stateful_dataloader or not hasattr(loader.dataset, "state_dict"):
            return False
        try:
            check_exact(loader.dataset, "")
        except UsageError:
            return False
        return True

    def _samples_in_batch(self) -> int | None:
        """Return the number of samples in a batch of all ranks, or None if each rank has an order of its own."""
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


class _SkipOnce(BatchSampler):
    """Leaves out the first batches of a sampler, at its first iteration. Persistent workers keep it for all epochs."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count

    def __iter__(self) -> Iterator[Any]:
        count, self._count = self._count, 0  # when the first batch is asked for: torch makes iterators that it drops
        yield from itertools.islice(self._sampler, count, None)

    def __len__(self) -> int:
        return len(self._sampler)
