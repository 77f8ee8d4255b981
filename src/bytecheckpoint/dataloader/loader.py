"""Feed packed rows of tokens, and resume exactly at any data-parallel degree and number of workers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from bytecheckpoint.dataloader.checks import check_allow, check_rank, check_shared, share
from bytecheckpoint.dataloader.handover import StreamSnapshot, filled, on_tensors
from bytecheckpoint.dataloader.makers import LocalMaker, RestMaker
from bytecheckpoint.dataloader.recipe import ALLOWED, FIXED_PARTS, TokenRecipe, comparisons
from bytecheckpoint.dataloader.rows import PackedRows
from bytecheckpoint.dataloader.stream import SourceProgress, progress_of
from bytecheckpoint.dataloader.trained import TrainedBatches
from bytecheckpoint.dataloader.workers import Worker
from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.representation.values.equality import equal

__all__ = ["TokenBufferLoader", "WorkerOptions"]

_log = logging.getLogger("bytecheckpoint")
#: A maker, and its number of streams.
_Share = tuple[LocalMaker | Worker, int]


@dataclass(frozen=True)
class WorkerOptions:
    """Processes that make the rows of a loader.

    Attributes:
        count: number of processes; 0: the caller's process makes the rows.
        ahead: number of batches that a worker makes before they are wanted.
        state_every: number of batches between two saves. Workers hand their states over as soon as they have made the batch
            before a save (state prefetching, ByteCheckpoint, section 4.5). `prefetch_state` does that once.
        start_method: start method of `multiprocessing`. "forkserver" and "spawn" pickle the sources and the tokenizer;
            "fork" does not, but may hang, since a training process has threads.
        timeout: seconds to wait for a worker.
        kept: number of batches before the last one behind which `TokenBufferLoader.trained` can still set the position.
    """

    count: int = 0
    ahead: int = 2
    state_every: int | None = None
    start_method: str = "forkserver"
    timeout: float = 600.0
    kept: int = 4

    def __post_init__(self) -> None:
        bad_state = self.state_every is not None and self.state_every < 1
        if self.count < 0 or self.ahead < 1 or bad_state or self.timeout <= 0:
            raise UsageError("workers must be at least 0; ahead, state_every and timeout more than 0")


class TokenBufferLoader:
    """Feeds packed rows of tokens; implements `SupportsStreams`.

    Documents of several sources are mixed, shuffled, tokenized and packed into rows of `context_length` tokens by a fixed
    number of *streams*. Each global batch takes equally many rows from every stream, in the order of the streams. A
    rank feeds a run of streams that follow each other, and its workers share them. So the global batch, as the ranks
    hold it one after the other, is the same for every number of ranks and workers (ByteCheckpoint, section 3.3).

    Iterate over the loader for this rank's part of one global batch after the other. A loader has one position, so a second
    `for` continues where the first one ended. An item is a dict of tensors, a row for each row of the batch:

    - "tokens": int64 [rows, context_length];
    - "documents": number of the token's document within the row, int32, for attention masks;
    - "positions": position within the part of the document that is in the row, int32;
    - "rows": number of the row in the run, int64 [rows].

    Pass the loader as `states["dataloader"]` to save and load.

    Args:
        recipe: data to feed, equal on all ranks.
        rank: number of this rank among those that feed different data (the data-parallel rank).
        ranks: number of these ranks, at most the number of streams. If they do not divide it, the first ranks feed a stream
            more.
        saves: True if this rank saves its streams; False where the tensor or pipeline coordinate is not 0.
        workers: number of processes that make the rows, or `WorkerOptions`.
        pin_memory: True to put batches into pinned memory, if there is an accelerator.
        gather: function that is needed for `epochs` with several ranks: from a value to those of all these ranks, in their
            order, such as one around `torch.distributed.all_gather_object`. When the first stream has ended, every rank
            calls it with the states of its streams, to make rows of the documents that are left.
        agree: function for `epochs` with several ranks, called for every batch until then, on every rank, with True if one
            of its streams has ended; it returns True if any rank's has. None: by `gather`.
        allow: changes since the checkpoint that are accepted: "ratios", "sources", "global_batch", "context_length",
            "shuffle_buffer", "epochs", "schedule", "appended" (documents behind those that a source had).

    Raises:
        UsageError: an argument is out of its range; the message names it.
    """

    def __init__(
        self,
        recipe: TokenRecipe,
        *,
        rank: int | None = None,
        ranks: int | None = None,
        saves: bool = True,
        workers: int | WorkerOptions = 0,
        pin_memory: bool = False,
        gather: Callable[[Any], Sequence[Any]] | None = None,
        agree: Callable[[bool], bool] | None = None,
        allow: Collection[str] = (),
    ) -> None:
        if not isinstance(recipe, TokenRecipe):
            raise UsageError(f"a TokenBufferLoader takes a TokenRecipe(sources, ...), not a {type(recipe).__name__}")
        rank, ranks = check_rank(rank, ranks)
        if ranks > recipe.streams:
            raise UsageError(f"{ranks} ranks cannot share {recipe.streams} streams: choose more streams")
        if recipe.epochs is not None and ranks > 1 and gather is None:
            raise UsageError(
                f"with epochs={recipe.epochs}, {recipe.streams} streams end at different batches, and what is left then is "
                f"dealt to all {ranks} ranks: pass gather=, a function from a value to those of all these ranks "
                "(all_gather_object), or leave epochs away and count steps"
            )
        if gather is not None and agree is None:

            def agree(ended: bool) -> bool:
                return any(gather(ended))

        self._recipe = recipe
        self._described: dict[str, Any] | None = None
        self._numbers = [*share(recipe.streams, rank, ranks)]
        self._saves, self._gather, self._agree, self._allow = saves, gather, agree, check_allow(allow, ALLOWED)
        self._workers = workers if isinstance(workers, WorkerOptions) else WorkerOptions(workers)
        self._pin = pin_memory and torch.accelerator.is_available()
        self._counts = TrainedBatches(self._workers.kept)
        self._held: dict[int, Mapping[int, Any]] = {}  # by number of batches: states that no maker has
        self._makers, self._before_rest = list[_Share](), list[_Share]()
        self._ended, self._lost = False, False
        self._rest: int | None = None  # number of batches before the rest of the run

    # --- batches ------------------------------------------------------------------------------------------------

    @property
    def batches(self) -> int:
        """Number of global batches that were taken so far."""
        return self._counts.taken

    def progress(self) -> dict[str, SourceProgress]:
        """Return what the streams of this rank have taken from each source so far, by its name.

        With workers, this waits for their states, as a save does.
        """
        return progress_of(self._recipe, self._states_after(self.batches).values())

    def trained(self, batches: int) -> None:
        """Set how many batches of the run were trained, if something takes batches before they are trained.

        That may be a wrapper that takes the next batch ahead, or `zip(loader, range(n))`. A save holds the position behind
        the trained batches then. Call this after every step.

        Args:
            batches: number of global batches since the run began.

        Raises:
            UsageError: so many were not taken, or the position behind them is not kept any more (`WorkerOptions.kept`).
        """
        self._counts.train(batches)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the next global batch.

        Raises:
            UsageError: more batches were taken than `trained` can keep positions of.
            PeerLostError: a worker died; the message names it.
            CheckpointTimeoutError: a worker does not answer.
        """
        if self._ended:
            raise StopIteration
        self._counts.check_next()
        count = self._recipe.rows_in(self.batches) * len(self._numbers)
        rows = PackedRows.empty(count, self._recipe.context_length, pinned=self._pin)
        made = self._make(rows)
        if not made and self._rest is None:
            self._begin_rest()
            made = self._make(rows)
        self._ended = not made
        if self._ended:
            raise StopIteration
        self._counts.taken += 1
        for maker, _ in self._makers:
            maker.taken(self._counts)
        if self._rest is not None and self._counts.oldest >= self._rest:
            self._end_before_rest()
        self._held = {n: states for n, states in self._held.items() if n >= self._counts.position}
        return {"tokens": rows.tokens, "documents": rows.documents, "positions": rows.positions, "rows": rows.numbers}

    def _make(self, rows: PackedRows) -> bool:
        """Make the next batch; return False if a stream of any rank has ended, or all have in the rest of the run."""
        ended = False
        first, each = 0, self._recipe.rows_in(self.batches)
        makers = self._start()
        every = self._workers.state_every
        if every:  # now, so that workers that are ahead have the longest time for it
            self._ask(self.batches + every - self.batches % every)
        for maker, streams in makers:
            made = maker.make(rows.part(first, first + streams * each), self.batches)
            ended = ended or not made  # but all makers make it, so that they are at the same batch
            first += streams * each
        if self._agree is not None and self._rest is None:  # in the rest, every rank makes all rows
            ended = self._agree(ended)
        return not ended

    def _begin_rest(self) -> None:
        """Make rows by the states of all streams from here on, because the first stream has ended."""
        states = self._states_after(self.batches)
        if len(states) < self._recipe.streams:
            if self._gather is None:
                raise UsageError("a stream has ended, and this loader cannot get the streams of others without gather=")
            own = on_tensors(states, torch.clone)  # a tensor is sent with all the memory of which it is a part
            states = {number: state for of_rank in self._gather(own) for number, state in of_rank.items()}
        rest = RestMaker(self._recipe, self._numbers, self.batches, states)
        self._before_rest, self._makers = self._makers, [(rest, len(self._numbers))]
        self._rest = self.batches

    def _end_before_rest(self) -> None:
        """End the makers that knew the positions before the rest of the run."""
        for maker, _ in self._before_rest:
            maker.close()
        self._before_rest = []

    def _start(self) -> list[_Share]:
        """Return the makers in the order of the streams, each with its number of rows in a batch."""
        if self._lost:
            raise UsageError(
                "an error ended the work of this loader, so its position is lost: load a checkpoint into it"
            )
        if not self._makers:
            options, count = self._workers, min(self._workers.count, len(self._numbers))
            states = self._held.get(self.batches, {})
            for i in range(max(count, 1)):
                part = share(len(self._numbers), i, max(count, 1))
                numbers = self._numbers[part.start : part.stop]
                arguments = (self._recipe, numbers, self.batches, {n: states[n] for n in numbers if n in states})
                fed = f"streams {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"stream {numbers[0]}"
                name = f"data loader worker {i} of {count}, which feeds {fed},"
                maker: LocalMaker | Worker
                if count:
                    maker = Worker(name, options.start_method, options.ahead, options.timeout, arguments)
                else:
                    maker = LocalMaker(*arguments)
                self._makers.append((maker, len(numbers)))
        return self._makers

    def close(self) -> None:
        """End the workers and keep the position: the loader can be saved, and another batch starts workers again.

        The position of a worker that has died or does not answer is lost; a load sets another one.
        """
        try:
            if self._rest is not None:  # its maker stays: it has no process, and the other ranks would not gather again
                self._hold(self._rest)
                self._end_before_rest()
                return
            if self._makers and not any(maker.late for maker, _ in self._makers):
                self._hold(self.batches + 1)
                self._end()
        except CheckpointError as error:
            _log.warning("the position of a data loader is lost: %s", error)
        self._abandon()

    def _abandon(self) -> None:
        self._lost = self._lost or bool(self._makers)
        self._end()

    def _end(self) -> None:
        for maker, _ in [*self._makers, *self._before_rest]:
            maker.close()
        self._makers, self._before_rest, self._rest = [], [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # perhaps of a worker that hangs
            self._abandon()

    def for_ranks(self, rank: int, ranks: int) -> Self:
        """Return a loader of the same data at its beginning, for one rank of another number of ranks, without workers.

        Args:
            rank: number of the rank. Ranks beyond the number of streams feed the streams of others, and save nothing.
            ranks: number of ranks.
        """
        other = copy.copy(self)
        sharing = min(ranks, self._recipe.streams)
        other._numbers = [*share(self._recipe.streams, rank % sharing, sharing)]
        other._saves, other._agree, other._gather = rank < sharing, None, None
        other._workers = replace(self._workers, count=0)
        other._counts, other._held, other._makers = TrainedBatches(self._workers.kept), {}, []
        other._before_rest, other._rest = [], None
        other._ended = other._lost = False
        return other

    # --- state ----------------------------------------------------------------------------------------------------

    def prefetch_state(self) -> None:
        """Let the workers hand over their states after the next batch, before a save.

        A save at another batch is as exact; it waits while the workers copy their buffers.
        """
        self._ask(self.batches + 1)

    def _ask(self, batches: int) -> None:
        for maker, _ in self._makers:
            if self._saves:
                maker.ask(batches)

    @property
    def stream_count(self) -> int:
        """Number of streams of all ranks."""
        return self._recipe.streams

    def shared_state(self) -> dict[str, Any]:
        """Describe the data and its mixture, and the position; see `SupportsStreams`."""
        if self._described is None:
            self._described = self._recipe.shared()
        return {**self._described, "batches": self._counts.position}

    def stream_states(self) -> dict[int, Any]:
        """Return the states of this rank's streams, after the batches that were taken; see `SupportsStreams`."""
        if not self._saves:
            return {}
        return self._states_after(self._counts.position)

    def stream_snapshots(self) -> dict[int, StreamSnapshot]:
        """Return the same in memory of its own, which is filled behind the call; see `SupportsStreams`."""
        if not self._saves:
            return {}
        batches = self._counts.position
        if batches in self._held:
            return filled(self._held[batches])
        makers = self._asked(batches)
        return {number: found for maker in makers for number, found in maker.snapshots(batches).items()}

    def _states_after(self, batches: int) -> dict[int, Any]:
        if batches in self._held:
            return {**self._held[batches]}
        return {number: state for maker in self._asked(batches) for number, state in maker.states(batches).items()}

    def _asked(self, batches: int) -> list[LocalMaker | Worker]:
        """Request the states after that many batches; return the makers that know them."""
        makers = self._start()
        if self._rest is not None and batches < self._rest:
            makers = self._before_rest
        for maker, _ in makers:
            maker.ask(batches)
        return [maker for maker, _ in makers]

    def _hold(self, stop: int) -> None:
        """Hold the states from the position on, before that of `stop` batches, whose makers end."""
        self._held |= {n: self._states_after(n) for n in range(self._counts.position, stop)}
        self._counts.forget()

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Check that this loader feeds the data of a checkpoint; return its streams; see `SupportsStreams`."""
        own = {k: v for k, v in self.shared_state().items() if k not in ("batches", "dealing", "additions")}
        compare = comparisons(self._recipe.sources, self._allow, shared)
        check_shared(shared, own, allow=self._allow, allowed=ALLOWED, compare=compare)
        added = self._recipe.added(shared)
        if added and shared.get("dealing", FIXED_PARTS) == FIXED_PARTS:
            raise IncompatibleCheckpointError(
                f"documents were added to source {min(added)}, but this run deals documents out by an older rule, which "
                "knows no additions: bring back the data that the run began with, or start a new run"
            )
        # New documents come behind the epoch to which any stream has come.
        return range(self.stream_count) if added else self._numbers

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Continue from the states of a checkpoint; see `SupportsStreams`."""
        if self._recipe.added(shared) and len(states) < self.stream_count:
            raise UsageError("documents were added to a source: pass the states of all streams, as choose_streams asks")
        self._end()
        self._counts.begin(shared["batches"])
        self._recipe, self._described = self._recipe.continued(shared, states.values()), None
        states = {number: states[number] for number in self._numbers if number in states}
        if not equal(shared["ratios"], self._recipe.shares):
            # The sources are owed nothing for what the old ratios gave them.
            states = {number: _without_debts(state) for number, state in states.items()}
        self._held, self._ended, self._lost = {self.batches: states}, False, False


def _without_debts(state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "sources": {name: {**source, "tokens": 0} for name, source in state["sources"].items()}}
