"""Draw documents, mix and shuffle them, and pack their tokens into rows, for one stream of a token loader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bytecheckpoint.dataloader.feed import Feed
from bytecheckpoint.dataloader.passes import Passes
from bytecheckpoint.dataloader.recipe import TokenRecipe, Tokens
from bytecheckpoint.errors import UsageError

__all__ = ["BUFFERS", "Snapshot", "SourceProgress", "TokenStream", "progress_of"]

#: Names of a state's tokens: each is a dict of two tensors, "tokens" (int32) and "lengths" of their pieces (int64).
BUFFERS = ("shuffle_buffer", "token_buffer")

_SOURCE, _SHUFFLE = range(2)  # purposes of random numbers
#: Rows of tokens by which a source may run ahead of its ratio. Draws are random within this bound.
_SLACK_ROWS = 4


def _empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a stream at one moment. It shares the tokens, which never change, so that it costs little.

    Attributes:
        counters: plain values of the stream.
        sources: plain values of each source, by name.
        shuffled: documents in the shuffle buffer.
        pending: tokens that are drawn and in no row yet.
    """

    counters: dict[str, int]
    sources: dict[str, dict[str, Any]]
    shuffled: tuple[Tokens, ...]
    pending: tuple[Tokens, ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of the tensors of `to_state`."""
        return [n for pieces in (self.shuffled, self.pending) for n in (4 * sum(map(len, pieces)), 8 * len(pieces))]

    def to_state(self, allocate: Callable[[int, torch.dtype], torch.Tensor] = _empty) -> dict[str, Any]:
        """Return the state as plain values and tensors, in memory that `allocate` returns by length and dtype."""
        state, fill = self.to_empty_state(allocate)
        fill()
        return state

    def to_empty_state(
        self, allocate: Callable[[int, torch.dtype], torch.Tensor] = _empty
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        """Return the state with tensors that are not filled yet, and a function that fills them, in any thread."""
        pairs = dict(zip(BUFFERS, (self.shuffled, self.pending), strict=True))
        buffers = {
            name: {
                "tokens": allocate(sum(map(len, pieces)), torch.int32),
                "lengths": allocate(len(pieces), torch.int64),
            }
            for name, pieces in pairs.items()
        }

        def fill() -> None:
            for name, pieces in pairs.items():
                if pieces:
                    np.concatenate(pieces, out=buffers[name]["tokens"].numpy())
                    buffers[name]["lengths"].numpy()[:] = [len(piece) for piece in pieces]

        return {**self.counters, "sources": self.sources, **buffers}, fill


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """Documents and tokens that some streams have taken from a source in a run.

    Attributes:
        tokens: number of tokens, those in buffers among them.
        epoch: number of the epoch of the stream that is farthest behind, from 0 on.
        skipped: number of documents that were left out because they are bad.
    """

    tokens: int
    epoch: int
    skipped: int


def progress_of(recipe: TokenRecipe, states: Iterable[Mapping[str, Any]]) -> dict[str, SourceProgress]:
    """Return what streams with some states have taken from each source of a recipe, by its name."""
    found: dict[str, SourceProgress] = {}
    passes = {source.name: Passes(source, recipe.additions) for source in recipe.sources}
    for name, source in ((name, source) for state in states for name, source in state["sources"].items()):
        if name in passes:
            epoch = passes[name].epoch(source["epoch"])
            before = found.get(name, SourceProgress(0, epoch, 0))
            found[name] = SourceProgress(
                before.tokens + source.get("fed", source["tokens"]),
                min(before.epoch, epoch),
                before.skipped + source.get("skipped", 0),
            )
    return found


class TokenStream:
    """One stream. Its rows depend only on the recipe and on its number, not on the rank and worker that make them.

    Args:
        recipe: data of the loader.
        number: number of the stream.
        state: state to continue from, as `Snapshot.to_state` returns it.
    """

    def __init__(self, recipe: TokenRecipe, number: int, state: dict[str, Any] | None = None) -> None:
        state = state or {"sources": {}}
        self.number = number
        self._recipe = recipe
        # Rows that were made, draws of a source and picks from the buffer, and the batch from which the ratios hold.
        self._counters: dict[str, int] = {name: state.get(name, 0) for name in ("rows", "draws", "picks", "phase")}
        self._ratios = recipe.ratios_in(self._counters["phase"])
        self._feeds = [
            Feed(recipe, i, number, state["sources"].get(source.name)) for i, source in enumerate(recipe.sources)
        ]
        self._shuffled = _split(state.get("shuffle_buffer"))
        self._pending = deque(_split(state.get("token_buffer")))
        self._count = sum(map(len, self._pending))

    @property
    def row(self) -> int:
        """Number of rows that were made so far."""
        return self._counters["rows"]

    def snapshot(self) -> Snapshot:
        """Return the state as of the rows that were made so far."""
        return Snapshot(
            {**self._counters},
            {feed.source.name: feed.state() for feed in self._feeds},
            tuple(self._shuffled),
            tuple(self._pending),
        )

    def begin_phase(self, phase: int) -> None:
        """Take the ratios of a phase, as `TokenRecipe.phase` returns it. Debts by the ones before are forgotten."""
        if phase != self._counters["phase"]:
            self._counters["phase"], self._ratios = phase, self._recipe.ratios_in(phase)
            for feed in self._feeds:
                feed.counts.tokens = 0

    def fill(self, tokens: NDArray[np.int64], begins: NDArray[np.bool_]) -> bool:
        """Make the rows of the next global batch; return False if the documents do not fill them.

        Args:
            tokens: receives the tokens of the rows, one row after the other.
            begins: receives True at the first token of each piece of a document; False elsewhere already.
        """
        filled = self.fill_some(tokens, begins)
        if filled:
            self.count_rows(len(tokens) // self._recipe.context_length)
        return filled

    def fill_some(self, tokens: NDArray[np.int64], begins: NDArray[np.bool_]) -> bool:
        """Fill `tokens` as `fill` does, but count no rows."""
        wanted = len(tokens)
        while self._count < wanted:
            document = self._next_shuffled()
            if document is None:
                return False
            self._append(document)
        filled = 0
        while filled < wanted:
            piece = self._pending.popleft()
            end = filled + len(piece)
            if end > wanted:
                self._pending.appendleft(piece[wanted - filled :])
                piece, end = piece[: wanted - filled], wanted
            tokens[filled:end] = piece
            begins[filled] = True
            filled = end
        self._count -= wanted
        return True

    def count_rows(self, rows: int) -> None:
        """Count rows that were made."""
        self._counters["rows"] += rows

    def hand_rest_to(self, other: TokenStream) -> None:
        """Give the tokens that fill no row to another stream."""
        for piece in self._pending:
            other._append(piece)
        self._pending.clear()
        self._count = 0

    def _append(self, document: Tokens) -> None:
        if size := len(document):
            self._pending.append(document)
            self._count += size

    def _next_shuffled(self) -> Tokens | None:
        size = self._recipe.shuffle_buffer
        if size < 2 and not self._shuffled:
            return self._next_document()
        while len(self._shuffled) < size and (document := self._next_document()) is not None:
            self._shuffled.append(document)
        if not self._shuffled:
            return None
        place = self._recipe.random(_SHUFFLE, self.number, self._counters["picks"]) % len(self._shuffled)
        self._counters["picks"] += 1
        chosen = self._shuffled[place]
        last = self._shuffled.pop()
        if place < len(self._shuffled):
            self._shuffled[place] = last
        return chosen

    def _next_document(self) -> Tokens | None:
        while live := [i for i, feed in enumerate(self._feeds) if not feed.ended and self._ratios[i]]:
            feed = self._feeds[live[0] if len(live) == 1 else self._choose(live)]
            if (document := feed.next()) is not None:
                return document
        if self._recipe.epochs is None:
            raise UsageError(
                f"no document is left for stream {self.number} of {self._recipe.streams}: the sources have fewer documents "
                "than there are streams; use fewer streams"
            )
        return None

    def _choose(self, live: list[int]) -> int:
        """Choose a source at random, so that the tokens of the sources keep to their ratios."""
        fed = sum(self._feeds[i].counts.tokens for i in live) + _SLACK_ROWS * self._recipe.context_length
        share = sum(self._ratios[i] for i in live)
        owed = [max(self._ratios[i] / share * fed - self._feeds[i].counts.tokens, 0.0) for i in live]
        point = self._recipe.random(_SOURCE, self.number, self._counters["draws"]) / 2**64 * sum(owed)
        self._counters["draws"] += 1
        for i, weight in zip(live, owed, strict=True):
            point -= weight
            if point < 0:
                return i
        return live[int(np.argmax(owed))]


def _split(joined: dict[str, torch.Tensor] | None) -> list[Tokens]:
    if joined is None or not len(joined["lengths"]):
        return []
    return np.split(joined["tokens"].numpy(), np.cumsum(joined["lengths"].numpy())[:-1])
