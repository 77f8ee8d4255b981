"""`TokenBufferLoader`: a pre-training loader that goes on exactly at any data-parallel degree and any number of workers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch

from bytecheckpoint.dataloader.checks import check_allow, check_rank, check_shared, share
from bytecheckpoint.dataloader.recipe import ALLOWED, Recipe, changed_sources
from bytecheckpoint.dataloader.rows import Rows
from bytecheckpoint.dataloader.sources.base import Source
from bytecheckpoint.dataloader.workers import LocalMaker, Worker
from bytecheckpoint.errors import CheckpointError, UsageError
from bytecheckpoint.representation.values.equality import equal

__all__ = ["TokenBufferLoader"]

_log = logging.getLogger("bytecheckpoint")


class TokenBufferLoader:
    """Feeds packed rows of tokens; implements `SupportsStreams`.

    Documents of several sources are mixed, shuffled, tokenized and packed into rows of `context_length` tokens by a fixed
    number of *streams*. Each global batch takes equally many rows from every stream, in the order of the streams. A
    rank feeds a run of streams that follow each other, and its workers share them. So the global batch, as the ranks
    hold it one after the other, is the same for every number of ranks and workers (ByteCheckpoint, section 3.3).

    Iterate over the loader for this rank's part of one global batch after the other. The iteration goes on where it was,
    also in a second `for`: a loader has one position. An item is a dict of tensors, a row for each row of the batch:

    - "tokens": int64 [rows, context_length];
    - "documents": number of the token's document within the row, int32, for attention masks;
    - "positions": position within the part of the document that is in the row, int32;
    - "rows": number of the row in the run, int64 [rows].

    Pass the loader as `states["dataloader"]` to save and load.

    Args:
        sources: one source, several of equal share, or source -> share of the tokens.
        context_length: tokens in a row.
        global_batch: rows of a global batch.
        tokenizer: document -> token ids (a list, an array, or a dict with "input_ids"). None: documents are tokens.
        document_end: token to put behind each document.
        streams: number of streams, the largest number of ranks times workers that helps. It divides `global_batch`, and
            never changes during a run. By default, one for each row of a global batch.
        seed: of all choices.
        shuffle_buffer: documents among which each stream chooses the next one, beside the shuffling of the sources. They
            are a part of the state.
        epochs: how often each source is fed; None: without end. The rows that would not fill a global batch are dropped.
        rank: number of this rank among those that feed different data (the data-parallel rank).
        ranks: how many these are, at most `streams`. If they do not divide it, the first ranks feed a stream more.
        saves: whether this rank saves its streams. False where the tensor or pipeline coordinate is not 0.
        workers: processes that make the rows; 0: the caller's.
        ahead: batches that a worker makes before they are asked for.
        state_every: batches between two saves: workers hand over their states as soon as they have made the batch before
            (state prefetching, ByteCheckpoint, section 4.5). `prefetch_state` does that once.
        pin_memory: put batches into pinned memory, if there is an accelerator.
        agree: for `epochs` with several ranks, which end at different batches: called on every rank with whether this rank
            has ended, it returns whether any rank has.
        allow: what may have changed since the checkpoint: "ratios", "sources", "global_batch", "context_length",
            "shuffle_buffer", "epochs".
        start_method: of the workers, as in `multiprocessing`. "forkserver" and "spawn" pickle the sources and the
            tokenizer; "fork" does not, but may hang, since a training process has threads.
        timeout: seconds to wait for a worker.

    Attributes:
        batches: global batches that were taken so far.

    Raises:
        UsageError: an argument is out of its range; the message names it.
    """

    def __init__(
        self,
        sources: Source | Sequence[Source] | Mapping[Source, float],
        context_length: int,
        global_batch: int,
        *,
        tokenizer: Callable[[Any], Any] | None = None,
        document_end: int | None = None,
        streams: int | None = None,
        seed: int = 0,
        shuffle_buffer: int = 0,
        epochs: int | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        saves: bool = True,
        workers: int = 0,
        ahead: int = 2,
        state_every: int | None = None,
        pin_memory: bool = False,
        agree: Callable[[bool], bool] | None = None,
        allow: Collection[str] = (),
        start_method: str = "forkserver",
        timeout: float = 600.0,
    ) -> None:
        self._recipe = Recipe.of(
            sources,
            streams=streams,
            global_batch=global_batch,
            context_length=context_length,
            tokenizer=tokenizer,
            document_end=document_end,
            seed=seed,
            shuffle_buffer=shuffle_buffer,
            epochs=epochs,
        )
        rank, ranks = check_rank(rank, ranks)
        if ranks > self._recipe.streams:
            raise UsageError(f"{ranks} ranks cannot share {self._recipe.streams} streams: choose more streams")
        if epochs is not None and ranks > 1 and agree is None:
            raise UsageError(
                "with epochs= and several ranks, some end a batch before the others: pass agree=, which tells all of them "
                "(a MAX all-reduce), or leave epochs away and count steps"
            )
        check_allow(allow, ALLOWED)
        if workers < 0 or ahead < 1 or (state_every is not None and state_every < 1) or timeout <= 0:
            raise UsageError("workers must be at least 0; ahead, state_every and timeout more than 0")
        self.batches = 0
        self._numbers = [*share(self._recipe.streams, rank, ranks)]
        self._saves, self._agree, self._allow = saves, agree, {*allow}
        self._worker_options = (min(workers, len(self._numbers)), start_method, ahead, timeout)
        self._state_every = state_every
        self._pin = pin_memory and torch.accelerator.is_available()
        self._states: Mapping[int, Any] = {}
        self._shared: dict[str, Any] | None = None
        self._makers: list[tuple[LocalMaker | Worker, int]] = []
        self._ended = self._lost = False

    # --- batches ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the next global batch.

        Raises:
            PeerLostError: a worker died; the message names it.
            CheckpointTimeoutError: a worker does not answer.
        """
        if self._ended:
            raise StopIteration
        rows = Rows.empty(self._recipe.rows * len(self._numbers), self._recipe.context_length, pinned=self._pin)
        ended = False
        first = 0
        makers = self._start()
        if self._state_every:  # now, so that workers that are ahead have the longest time for it
            self._ask(self.batches + self._state_every - self.batches % self._state_every)
        for maker, count in makers:
            # Every maker, so that all are at the same batch.
            ended |= not maker.make(rows.part(first, first + count), self.batches)
            first += count
        self._ended = ended if self._agree is None else self._agree(ended)
        if self._ended:
            raise StopIteration
        self.batches += 1
        for maker, _ in self._makers:
            maker.taken(self.batches)
        return {"tokens": rows.tokens, "documents": rows.documents, "positions": rows.positions, "rows": rows.numbers}

    def _start(self) -> list[tuple[LocalMaker | Worker, int]]:
        """Return what makes the rows, in the order of the streams, and how many rows of a batch each makes."""
        if self._lost:
            raise UsageError(
                "an error ended the work of this loader, so its position is lost: load a checkpoint into it"
            )
        if not self._makers:
            count, start_method, ahead, timeout = self._worker_options
            states, self._states = self._states, {}
            for i in range(max(count, 1)):
                part = share(len(self._numbers), i, max(count, 1))
                numbers = self._numbers[part.start : part.stop]
                arguments = (self._recipe, numbers, self.batches, {n: states[n] for n in numbers if n in states})
                fed = f"streams {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"stream {numbers[0]}"
                name = f"data loader worker {i} of {count}, which feeds {fed},"
                maker = Worker(name, start_method, ahead, timeout, arguments) if count else LocalMaker(*arguments)
                self._makers.append((maker, self._recipe.rows * len(numbers)))
        return self._makers

    def close(self) -> None:
        """End the workers. The position stays: the loader can be saved, and another batch starts workers again.

        The position of a worker that has died, or gave no answer before, is lost; a load sets another one.
        """
        try:
            if not any(maker.late for maker, _ in self._makers):
                self._states = self._states_of(self._makers) or self._states
                self._end()
        except CheckpointError as error:
            _log.warning("the position of a data loader is lost: %s", error)
        self._abandon()

    def _abandon(self) -> None:
        self._lost = self._lost or bool(self._makers)
        self._end()

    def _end(self) -> None:
        for maker, _ in self._makers:
            maker.close()
        self._makers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # perhaps of a worker that hangs
            self._abandon()

    def for_ranks(self, rank: int, ranks: int) -> Self:
        """Return a loader of the same data at its beginning, for one of other ranks, which makes its rows itself.

        Args:
            rank: of these; beyond the number of streams it feeds what another one feeds, and saves nothing.
            ranks: how many there are.
        """
        other = copy.copy(self)
        sharing = min(ranks, self._recipe.streams)
        other._numbers = [*share(self._recipe.streams, rank % sharing, sharing)]
        other._saves, other._agree = rank < sharing, None
        other._worker_options = (0, *self._worker_options[1:])
        other.batches, other._states, other._makers = 0, {}, []
        other._ended = other._lost = False
        return other

    # --- state ----------------------------------------------------------------------------------------------------

    def prefetch_state(self) -> None:
        """Let the workers hand over their states after the next batch, because a save follows it.

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
        if self._shared is None:
            self._shared = self._recipe.shared()
        return {**self._shared, "batches": self.batches}

    def stream_states(self) -> dict[int, Any]:
        """Return the states of this rank's streams, after the batches that were taken; see `SupportsStreams`."""
        if not self._saves:
            return {}
        if self._states:  # loaded, and no batch was made since
            return dict(self._states)
        return self._states_of(self._start())

    def _states_of(self, makers: Sequence[tuple[LocalMaker | Worker, int]]) -> dict[int, Any]:
        for maker, _ in makers:
            maker.ask(self.batches)
        return {number: state for maker, _ in makers for number, state in maker.states(self.batches).items()}

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Check that this loader feeds the data of a checkpoint, and choose its streams; see `SupportsStreams`."""
        own = {name: value for name, value in self.shared_state().items() if name != "batches"}
        compare = {"sources": partial(changed_sources, allow="sources" in self._allow)}
        check_shared(shared, own, allow=self._allow, allowed=ALLOWED, compare=compare)
        return self._numbers

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Go on from these states; see `SupportsStreams`."""
        self._end()
        self.batches = shared["batches"]
        if not equal(shared["ratios"], self.shared_state()["ratios"]):
            # The sources are owed nothing for what the old ratios gave them.
            states = {number: _without_debts(state) for number, state in states.items()}
        self._states, self._ended, self._lost = states, False, False


def _without_debts(state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "sources": {name: {**source, "tokens": 0} for name, source in state["sources"].items()}}
