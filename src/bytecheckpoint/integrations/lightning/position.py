"""Save and restore the position of a fit in its data and its random numbers.

Lightning's loops continue in the middle of an epoch, but they neither advance data loaders without a state of their own nor
restore random numbers. Their states are complete at two places, and steps are saved only there: when a batch that is not
the last one of its epoch is done, with its validation; and when an epoch is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.base import SupportsStreams
from bytecheckpoint.frameworks.rng import rng_state
from bytecheckpoint.integrations.attaching import check_has, patch
from bytecheckpoint.integrations.generators import DelayedGenerators
from bytecheckpoint.integrations.lightning.package import pl
from bytecheckpoint.integrations.loaders import generators_of, length_of, sampler_of
from bytecheckpoint.step_fence import fence

__all__ = ["TrainingPosition"]

_FIXED = "that of the data set"


class TrainingPosition:
    """Position of a fit.

    The order of an epoch is drawn when its iterator is made or when its first batch is fetched. So a checkpoint of the
    middle of an epoch holds the generators of both moments, and a resume makes the iterator and draws from it again.

    Args:
        trainer: trainer of the fit.
        generators: generators of the process, with the states of a loaded checkpoint, if any.
        reach: function to call at each place where the state is complete; with ends=True at the end of the training.
        load_streams: function that loads `streams`.
        stack: stack that leaves the loops as they were.
        skip_batches: True to continue behind the done batches of an epoch, False to begin with its first ones.

    Attributes:
        streams: data loaders that hold their position in streams, by the names of their states.
        cut: state of the loops when an epoch ended early, behind a batch that was not its last one.
    """

    def __init__(
        self,
        trainer: Any,
        generators: DelayedGenerators,
        reach: Callable[..., object],
        load_streams: Callable[[], object],
        stack: ExitStack,
        *,
        skip_batches: bool,
    ) -> None:
        self._fit, self._epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self._skip, self._reach, self._load_streams = skip_batches, reach, load_streams
        self._generators = generators
        self._rng = rng_state()  # with those of the data loaders
        self.streams: dict[str, Any] = {}
        self.cut: Any = None
        self._middle, self._data = False, list[Any]()
        # Generators when the iterator of the epoch was "made", and first "fetched" from.
        self._begun: dict[str, Any] = {}
        self._resumed: Any = None  # the position of the checkpoint, until its epoch begins
        self._skipped: Any = None  # the same position, behind the done batches, until the next batch is fetched
        self._patch(stack)

    def _patch(self, stack: ExitStack) -> None:
        """Monkey-patch the loops, because Lightning has no hooks at these places."""
        of_fit = "_load_combined_loader_states", "on_advance_start", "on_advance_end", "on_run_end"
        for owner, names in (self._fit, of_fit), (self._epoch, ("on_advance_end", "_on_before_fetch")):
            check_has(owner, names, pl.__name__, "use 2.6")
        before_epoch, after_epoch = self._fit.on_advance_start, self._fit.on_advance_end
        after_batch, before_fetch = self._epoch.on_advance_end, self._epoch._on_before_fetch
        end_run = self._fit.on_run_end

        def on_epoch_begins() -> None:
            resumed, self._resumed = self._resumed, None
            if resumed is not None:
                self._fit._last_train_dl_reload_epoch = resumed["reloaded"]
                if not resumed["middle"]:  # let Lightning begin as it would have in the process that saved
                    self._fit._resuming_from_checkpoint = False
                    self._restore_generators(resumed)
            before_epoch()

        def on_epoch_done() -> None:
            after_epoch()
            self._middle = self.cut is not None
            self._reach()

        def on_batch_done(fetcher: Any) -> None:
            if self._epoch._skip_next_val:  # nothing was trained: the loop notices that a validation is done
                self._epoch._skip_next_val = False
                return
            after_batch(fetcher)
            if self._epoch._num_ready_batches_reached() or self._epoch._should_accumulate():
                return  # the epoch's own end follows; or gradients are there that no checkpoint holds
            self._middle = True
            self._reach()
            self.cut = self._fit.state_dict() if self._epoch.done else None

        def on_before_fetch() -> None:
            skipped, self._skipped = self._skipped, None
            if skipped is not None:
                self._restore_generators(skipped)
                self._epoch._batches_that_stepped = skipped["stepped"]  # which Lightning corrects where it need not
            before_fetch()

        def on_run_end() -> None:
            self._reach(ends=True)
            fence()  # callbacks may change the weights now, which may still be copied in the background
            end_run()

        for name, function in zip(
            of_fit, (self._before_iteration, on_epoch_begins, on_epoch_done, on_run_end), strict=True
        ):
            patch(stack, self._fit, name, function)
        patch(stack, self._epoch, "on_advance_end", on_batch_done)
        patch(stack, self._epoch, "_on_before_fetch", on_before_fetch)

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the position, for a checkpoint."""
        return {
            "middle": self._middle,
            "ranks": self._ranks,
            "data": self._data,
            "stepped": self._epoch._batches_that_stepped,
            "reloaded": self._fit._last_train_dl_reload_epoch,
            "generators": {"now": self._rng.state_dict(), **(self._begun if self._middle else {})},
        }

    def resume(self, state: Any) -> None:
        """Continue from a checkpoint, whose `state` a call of the method `state` returned."""
        self._resumed = state

    def _restore_generators(self, state: Any) -> None:
        if state["ranks"] == self._ranks:
            self._rng.load_state_dict(state["generators"]["now"])
        else:  # the generators of data loaders draw no order then: that was refused
            self._generators.restore()

    # --- the iterators of epochs ------------------------------------------------------------------------------------

    def _before_iteration(self) -> None:
        """Track new data loaders, before they are iterated over for the first time.

        Raises:
            IncompatibleCheckpointError: the checkpoint is of the middle of an epoch of other data.
            UsageError: a data loader is not supported.
        """
        combined = self._fit._combined_loader
        loaders = combined.flattened
        own = {f"{i}.{name}": value for i, one in enumerate(loaders) for name, value in _own_generators(one).items()}
        self._rng = rng_state(generators=own)
        streams = [one for one in loaders if isinstance(one, SupportsStreams)]
        self.streams = {f"dataloader_{i}" if i else "dataloader": one for i, one in enumerate(streams)}
        self._data = [_describe(one, combined.limits[i], self._ranks) for i, one in enumerate(loaders)]
        if len({_holds_position(one) for one in loaders}) > 1:
            raise UsageError("some data loaders hold their position, and others do not: let all or none do so")
        kind: Any = type(combined)
        combined.__class__ = _tracked(kind)
        combined.position = self
        if self._resumed is None:
            return
        middle, states = self._resumed["middle"], self._fit._combined_loader_states_to_load
        self._fit._combined_loader_states_to_load = []
        if middle and self._skip:
            self._refuse_other_data(combined)
        if not middle:
            # Lightning takes every run with max_steps for one that continues in the middle of an epoch.
            pl.loops.loop._Loop.restarting.fset(self._fit, False)
        if self._skip and self._resumed["data"] == self._data:
            combined._load_state_dicts(states)
            if self.streams:
                self._load_streams()

    def _refuse_other_data(self, combined: Any) -> None:
        if self._resumed["data"] != self._data:
            raise IncompatibleCheckpointError(
                f"the checkpoint is of the middle of an epoch of other data: {self._resumed['data']}, now "
                f"{self._data}. Keep the batch size times the ranks, and the order of the data; skip_batches=False "
                "begins with the first samples of the epoch"
            )
        done, several = self._epoch.batch_progress.current.completed, len(self._data) > 1
        for one, facts in zip(combined.flattened, self._data, strict=True):
            if several and not _holds_position(one) and facts["random"] and (length_of(one) or 0) < done:
                raise IncompatibleCheckpointError(
                    f"one of the data loaders, of {length_of(one)} batches, has begun again before batch {done} of the "
                    "epoch, in an order that no checkpoint holds: give it a DistributedSampler, or pass skip_batches=False"
                )

    def iterate(self, combined: Any, begin: Callable[[], object]) -> None:
        """Make the iterator of an epoch, or of the rest of one."""
        resumed = self._resumed
        self._begun = {"made": self._rng.state_dict()}
        if resumed is None or not resumed["middle"] or not self._skip:
            begin()
        else:
            holds = any(map(_holds_position, combined.flattened))
            epoch = self._fit.epoch_progress.current.processed
            for one in combined.flattened:  # Lightning does so before the first batch, which is fetched here
                pl.loops.fit_loop._set_sampler_epoch(one, epoch)
                if epoch and not holds and getattr(one, "persistent_workers", False):
                    iter(one)  # it draws less at a second time
            # Where the number of ranks differs, no order depends on the generators: that was refused.
            begun = resumed["generators"] if resumed["ranks"] == self._ranks else None
            if begun:
                self._rng.load_state_dict(begun["made"])
            begin()
            if begun:
                self._rng.load_state_dict(begun["fetched"])
                self._begun = {name: begun[name] for name in ("made", "fetched")}
            for _ in range(0 if holds else self._epoch.batch_progress.current.completed):
                next(combined)
        if resumed is not None and resumed["middle"]:
            self._skipped = resumed

    def before_fetch(self) -> None:
        """Note the generators before the first batch is fetched."""
        if "fetched" not in self._begun:
            self._begun["fetched"] = self._rng.state_dict()


@functools.cache
def _tracked(kind: Any) -> Any:
    class Tracked(kind):  # type: ignore[misc]
        position: TrainingPosition

        def __iter__(self) -> Any:
            self.position.iterate(self, super().__iter__)
            return self

        def __next__(self) -> Any:
            self.position.before_fetch()
            return super().__next__()

    return Tracked


def _holds_position(loader: Any) -> bool:
    return isinstance(loader, SupportsStreams) or (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"))


def _describe(loader: Any, limit: Any, ranks: int) -> Any:
    """Return the facts on which the position of a data loader depends.

    Raises:
        UsageError: Lightning would fetch one batch ahead of a loader that holds its position.
    """
    if _holds_position(loader) and length_of(loader) is None and limit == float("inf"):
        raise UsageError(
            f"{type(loader).__name__} has no length, and Lightning would save it one batch too far on: pass "
            "Trainer(limit_train_batches=<number of batches>)"
        )
    if isinstance(loader, SupportsStreams):
        return None  # it compares for itself
    if not isinstance(loader, DataLoader):
        return {"order": f"{type(loader).__name__} of {ranks} ranks", "random": False}
    sampler = sampler_of(loader)
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    order, copies, random = f"{type(sampler).__name__} of {ranks} ranks", 1, True
    if _holds_position(loader):
        order = f"{type(loader).__name__} of {ranks} ranks"
    elif isinstance(sampler, DistributedSampler):
        order, copies, random = _FIXED, sampler.num_replicas, False
        if sampler.shuffle:
            order = f"shuffled by DistributedSampler with seed {sampler.seed}"
    elif isinstance(sampler, SequentialSampler):
        order, random = (_FIXED if ranks == 1 else order), False
    samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    return {"order": order, "random": random, "samples": samples, "samples per batch": size and size * copies}


def _own_generators(loader: Any) -> dict[str, torch.Generator]:
    return generators_of(loader, getattr(loader, "dataset", None))
