"""One stream of a token loader: draws documents, mixes and shuffles them, and packs their tokens into rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bytecheckpoint.dataloader.recipe import Recipe, Tokens
from bytecheckpoint.dataloader.rows import shared_tensor
from bytecheckpoint.dataloader.sources.base import Cursor
from bytecheckpoint.errors import UsageError

__all__ = ["PackedStates", "Snapshot", "Stream"]

_SOURCE, _SHUFFLE = range(2)  # purposes of random numbers
#: Rows of tokens by which a source may run ahead of its ratio: the draws are random within that.
_SLACK_ROWS = 4


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a stream at one moment. It shares the tokens, which never change, so that it costs little.

    Attributes:
        counters: plain values.
        sources: of each source by name, plain values.
        buffers: pieces of tokens: "shuffle_buffer", the documents in it, and "token_buffer", what is in no row yet.
    """

    counters: dict[str, int]
    sources: dict[str, dict[str, Any]]
    buffers: dict[str, tuple[Tokens, ...]]


@dataclass(frozen=True, slots=True)
class PackedStates:
    """The states of streams with all tokens in one piece of shared memory: processes map it by one descriptor.

    Attributes:
        streams: plain values by stream, and the lengths of the pieces in each of its buffers, int64.
        tokens: of all streams, buffer after buffer, int32.
    """

    streams: dict[int, tuple[dict[str, Any], dict[str, NDArray[np.int64]]]]
    tokens: torch.Tensor

    @staticmethod
    def of(snapshots: Mapping[int, Snapshot]) -> PackedStates:
        """Pack the snapshots of streams, by number."""
        streams, pieces = {}, []
        for number, snapshot in snapshots.items():
            lengths = {name: np.array([len(p) for p in kept], np.int64) for name, kept in snapshot.buffers.items()}
            streams[number] = {**snapshot.counters, "sources": snapshot.sources}, lengths
            pieces += [piece for kept in snapshot.buffers.values() for piece in kept]
        tokens = shared_tensor((sum(map(len, pieces)),), torch.int32)
        if pieces:
            np.concatenate(pieces, out=tokens.numpy())
        return PackedStates(streams, tokens)

    def unpack(self) -> dict[int, dict[str, Any]]:
        """Return the states by stream, as plain values and tensors: the tokens of each buffer, and their lengths."""
        found = {}
        offset = 0
        for number, (plain, buffers) in self.streams.items():
            found[number] = dict(plain)
            for name, lengths in buffers.items():
                count = int(lengths.sum())
                tokens = self.tokens[offset : offset + count]
                found[number][name] = {"tokens": tokens, "lengths": torch.from_numpy(lengths)}
                offset += count
        return found


class _Feed:
    """One source as one stream reads it: cursors, epoch by epoch."""

    def __init__(self, recipe: Recipe, index: int, stream: int, state: dict[str, Any] | None) -> None:
        state = state or {}
        self.source = recipe.sources[index]
        self.epoch: int = state.get("epoch", 0)
        self.tokens: int = state.get("tokens", 0)
        self._empty: bool = state.get("empty", False)
        self._recipe, self._stream = recipe, stream
        self._cursor: Cursor | None = None
        self._begin: Any = state.get("cursor")
        self._taken = self._begin is not None

    @property
    def ended(self) -> bool:
        """Whether all epochs are fed, or the stream has no document of this source."""
        return self._empty or (self._recipe.epochs is not None and self.epoch >= self._recipe.epochs)

    def state(self) -> dict[str, Any]:
        cursor = self._begin if self._cursor is None else self._cursor.state()
        return {"epoch": self.epoch, "tokens": self.tokens, "empty": self._empty, "cursor": cursor}

    def next(self) -> Tokens | None:
        """Return the tokens of the next document, or None after the last epoch."""
        recipe = self._recipe
        while not self.ended:
            if self._cursor is None:
                self._cursor = self.source.cursor(self._stream, recipe.streams, self.epoch, recipe.seed, self._begin)
            try:
                document = next(self._cursor)
            except StopIteration:
                # A source of few documents has none for some streams, in any epoch.
                self._empty = not self._taken
                self._cursor, self._begin, self._taken = None, None, False
                self.epoch += 1
                continue
            self._taken = True
            tokens = recipe.tokens_of(document)
            self.tokens += len(tokens)
            return tokens
        return None


class Stream:
    """One stream. Its rows depend on the recipe and on its number only, whichever rank and worker make them.

    Args:
        recipe: what to feed.
        number: of the stream.
        state: what `PackedStates.unpack` returned for it, to go on from there.
    """

    def __init__(self, recipe: Recipe, number: int, state: dict[str, Any] | None = None) -> None:
        state = state or {"rows": 0, "draws": 0, "picks": 0, "sources": {}}
        self.number = number
        self._recipe = recipe
        self._rows: int = state["rows"]
        self._draws: int = state["draws"]
        self._picks: int = state["picks"]
        self._feeds = [
            _Feed(recipe, i, number, state["sources"].get(source.name)) for i, source in enumerate(recipe.sources)
        ]
        self._shuffled = _split(state.get("shuffle_buffer"))
        self._pending = deque(_split(state.get("token_buffer")))
        self._count = sum(map(len, self._pending))

    @property
    def row(self) -> int:
        """Rows that were made so far."""
        return self._rows

    def snapshot(self) -> Snapshot:
        """Return the state as of the rows that were made so far."""
        return Snapshot(
            {"rows": self._rows, "draws": self._draws, "picks": self._picks},
            {feed.source.name: feed.state() for feed in self._feeds},
            {"shuffle_buffer": tuple(self._shuffled), "token_buffer": tuple(self._pending)},
        )

    def fill(self, tokens: NDArray[np.int64], begins: NDArray[np.bool_]) -> bool:
        """Make the rows of the next global batch; return False if the documents do not fill them.

        Args:
            tokens: receives the tokens of the rows, one row after the other.
            begins: receives True at the first token of each piece of a document; False elsewhere already.
        """
        wanted = len(tokens)
        while self._count < wanted:
            document = self._next_shuffled()
            if document is None:
                return False
            if len(document):
                self._pending.append(document)
                self._count += len(document)
        filled = 0
        while filled < wanted:
            piece = self._pending.popleft()
            if len(piece) > wanted - filled:
                self._pending.appendleft(piece[wanted - filled :])
                piece = piece[: wanted - filled]
            tokens[filled : filled + len(piece)] = piece
            begins[filled] = True
            filled += len(piece)
        self._count -= wanted
        self._rows += self._recipe.rows
        return True

    def _next_shuffled(self) -> Tokens | None:
        size = self._recipe.shuffle_buffer
        if size < 2 and not self._shuffled:
            return self._next_document()
        while len(self._shuffled) < size and (document := self._next_document()) is not None:
            self._shuffled.append(document)
        if not self._shuffled:
            return None
        place = self._recipe.random(_SHUFFLE, self.number, self._picks) % len(self._shuffled)
        self._picks += 1
        chosen = self._shuffled[place]
        last = self._shuffled.pop()
        if place < len(self._shuffled):
            self._shuffled[place] = last
        return chosen

    def _next_document(self) -> Tokens | None:
        while live := [i for i, feed in enumerate(self._feeds) if not feed.ended]:
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
        fed = sum(self._feeds[i].tokens for i in live) + _SLACK_ROWS * self._recipe.context_length
        share = sum(self._recipe.ratios[i] for i in live)
        owed = [max(self._recipe.ratios[i] / share * fed - self._feeds[i].tokens, 0.0) for i in live]
        point = self._recipe.random(_SOURCE, self.number, self._draws) / 2**64 * sum(owed)
        self._draws += 1
        for i, weight in zip(live, owed, strict=True):
            point -= weight
            if point < 0:
                return i
        return live[int(np.argmax(owed))]


def _split(joined: dict[str, torch.Tensor] | None) -> list[Tokens]:
    if joined is None or not len(joined["lengths"]):
        return []
    return np.split(joined["tokens"].numpy(), np.cumsum(joined["lengths"].numpy())[:-1])
