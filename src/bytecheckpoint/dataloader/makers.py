"""Make the rows of some streams in this process, and know their states after each of the last batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.dataloader.handover import ALIGN, States, StateSender, StreamSnapshot
from bytecheckpoint.dataloader.recipe import TokenRecipe
from bytecheckpoint.dataloader.rows import PackedRows
from bytecheckpoint.dataloader.stream import Snapshot, TokenStream
from bytecheckpoint.dataloader.trained import TrainedBatches

__all__ = ["LocalMaker", "RestMaker"]


class LocalMaker:
    """Makes the rows of some streams, and knows their states after each of the last batches.

    Args:
        recipe: data of the loader.
        numbers: numbers of the streams.
        begin: number of batches that were made before.
        states: states of the streams at that moment. A stream without a state begins.

    Attributes:
        made: number of batches that were made so far.
        late: False, because this object answers at once.
    """

    late = False

    # An error in the middle of a batch, or in another maker of the same batch, must not let streams drift apart: until a
    # batch is taken, it can be made again.

    def __init__(self, recipe: TokenRecipe, numbers: Sequence[int], begin: int, states: States) -> None:
        self.made = begin
        self._recipe = recipe
        self._ended = self._broken_off = False
        self._numbers = numbers
        self._streams = self._streams_of(states)
        self._snapshots: dict[int, list[Snapshot]] = {begin: self._snapshot()}

    def count(self, batch: int) -> int:
        """Return the number of rows of a batch."""
        return self._recipe.rows_in(batch) * len(self._numbers)

    def make(self, rows: PackedRows, batch: int) -> bool:
        """Make the rows of a batch, ordered by stream; return False when a stream has ended.

        Args:
            rows: memory for the rows.
            batch: number of the batch: the next one, or one that was made and is not taken yet.
        """
        if self._broken_off or batch != self.made:
            self._rebuild(batch)
            self.made = batch
        self._broken_off = True
        phase = self._recipe.phase(batch)
        for stream in self._streams:
            stream.begin_phase(phase)
        if self._ended or not self._fill(rows):
            self._ended = True
            return False
        self.made += 1
        self._snapshots[self.made] = self._snapshot()
        self._broken_off = False
        return True

    def _rebuild(self, batch: int) -> None:
        """Set the streams to what they were after that many batches."""
        self._streams = self._streams_of(self.states(batch))

    def _streams_of(self, states: States) -> list[TokenStream]:
        return [TokenStream(self._recipe, number, states.get(number)) for number in self._numbers]

    def _fill(self, rows: PackedRows) -> bool:
        """Make the rows of the next batch; return False if a stream has ended."""
        begins = np.zeros(rows.tokens.shape, np.bool_)
        self._number(rows)
        count = len(self._streams)
        parts = zip(self._streams, rows.tokens.numpy().reshape(count, -1), begins.reshape(count, -1), strict=True)
        for stream, tokens, flags in parts:
            if not stream.fill(tokens, flags):
                return False
        rows.mark(begins)
        return True

    def _number(self, rows: PackedRows) -> None:
        """Write the numbers of the next rows of all streams."""
        first = np.array([[stream.row * self._recipe.streams + stream.number] for stream in self._streams])
        steps = np.arange(self._recipe.rows_in(self.made)) * self._recipe.streams
        rows.numbers.numpy()[:] = (first + steps).reshape(-1)

    def taken(self, counts: TrainedBatches) -> None:
        """Forget the positions that are not kept any more."""
        self.forget(counts.oldest)

    def forget(self, oldest: int) -> None:
        """Forget the states before that many batches. They share the tokens, so some more cost little."""
        for old in [number for number in self._snapshots if number < oldest]:
            del self._snapshots[old]

    def knows(self, batches: int) -> bool:
        """Return True if `states` can answer."""
        return batches in self._snapshots

    def ask(self, batches: int) -> None:
        """Do nothing: `states` needs no request in advance."""

    def states(self, batches: int) -> dict[int, Any]:
        """Return the states of the streams after that many batches."""
        return {number: snapshot.to_state() for number, snapshot in self._after(batches).items()}

    def snapshots(self, batches: int) -> dict[int, StreamSnapshot]:
        """Return the same states, each with a function that fills its tensors; see `SupportsStreams`."""
        return {number: kept.to_empty_state() for number, kept in self._after(batches).items()}

    def send_states(self, batches: int, sender: StateSender) -> Any:
        """Return a message with the states after that many batches, for a `StateReceiver`."""
        found = self._after(batches).items()
        nbytes = self.state_bytes(batches)
        return sender.send(nbytes, lambda allocate: {number: kept.to_state(allocate) for number, kept in found})

    def state_bytes(self, batches: int) -> int:
        """Return the bytes that the tensors of the states after that many batches take."""
        found = self._after(batches).values()
        return sum(-(-size // ALIGN) * ALIGN for snapshot in found for size in snapshot.sizes)

    def _after(self, batches: int) -> dict[int, Snapshot]:
        return {stream.number: kept for stream, kept in zip(self._streams, self._snapshots[batches], strict=True)}

    def close(self) -> None:
        """Do nothing: there is nothing to end."""

    def _snapshot(self) -> list[Snapshot]:
        return [stream.snapshot() for stream in self._streams]


class RestMaker(LocalMaker):
    """Makes the last rows of some streams, from the documents that all streams have left when the first one ends.

    Streams end at different batches, because documents have different lengths. So a rank must know all of them then.
    Each global batch is filled row by row by the streams in turn, those that have a row. A stream that has none any more
    hands its tokens to the next one. So less than one global batch is dropped, and the states between two batches are those
    of streams that read on by themselves.

    Args:
        recipe: data of the loader.
        numbers: numbers of the streams whose rows are made; they follow each other.
        begin: number of batches that were made before.
        states: states of all streams at that moment.
    """

    def __init__(self, recipe: TokenRecipe, numbers: Sequence[int], begin: int, states: States) -> None:
        super().__init__(recipe, range(recipe.streams), begin, states)
        self._own = numbers
        self._memory = PackedRows.empty(recipe.rows * recipe.streams, recipe.context_length)

    def states(self, batches: int) -> dict[int, Any]:
        """Return the states of the own streams after that many batches."""
        return self._of_own(super().states(batches))

    def snapshots(self, batches: int) -> dict[int, StreamSnapshot]:
        """Return the same, each with a function that fills its tensors."""
        return self._of_own(super().snapshots(batches))

    def _of_own(self, states: dict[int, Any]) -> dict[int, Any]:
        return {number: states[number] for number in self._own}

    def _rebuild(self, batch: int) -> None:
        self._streams = self._streams_of(super().states(batch))

    def _fill(self, rows: PackedRows) -> bool:
        each = self._recipe.rows_in(self.made)
        whole = self._memory.part(0, self.count(self.made))
        begins = np.zeros(whole.tokens.shape, np.bool_)
        if not self._deal(whole.tokens.numpy(), begins):
            return False
        whole.mark(begins)
        self._number(whole)
        for stream in self._streams:
            stream.count_rows(each)
        rows.copy_from(whole.part(self._own[0] * each, (self._own[-1] + 1) * each))
        return True

    def _deal(self, tokens: NDArray[np.int64], begins: NDArray[np.bool_]) -> bool:
        """Fill all rows of a batch; return False if the documents do not fill them."""
        live, turn = [*self._streams], 0
        for row, flags in zip(tokens, begins, strict=True):
            while not live[turn].fill_some(row, flags):
                ended = live.pop(turn)
                if not live:
                    return False
                turn %= len(live)
                ended.hand_rest_to(live[turn])
            turn = (turn + 1) % len(live)
        return True
