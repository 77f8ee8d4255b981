"""Read one source for one stream, epoch by epoch.

The epochs of a source follow each other without end, and stream s of S has the places s, s + S, ... of this order. So every
stream gets documents of every source, however few there are, and a source keeps its share of the tokens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

from bytecheckpoint.dataloader.passes import Passes
from bytecheckpoint.dataloader.recipe import FIXED_PARTS, TokenRecipe, Tokens
from bytecheckpoint.dataloader.sources.base import Cursor, Document
from bytecheckpoint.errors import UsageError

__all__ = ["Feed"]

_log = logging.getLogger("bytecheckpoint")
#: Bad documents of a source that a stream names in the log.
_MOST_NAMED: Final = 10
#: Epochs without a document, one after the other, after which a stream of an endless run waits no longer.
_MOST_EMPTY_EPOCHS: Final = 100
#: Documents without a token, one after the other, after which it waits no longer, if these are two epochs of it.
_MOST_EMPTY_DOCUMENTS: Final = 10_000


@dataclass(slots=True)
class _Counts:
    """Tokens and documents of one source in one stream.

    Attributes:
        tokens: tokens that were fed under the present ratios.
        fed: tokens that were fed in the run.
        skipped: documents that could not be decoded or tokenized.
    """

    tokens: int
    fed: int
    skipped: int


class Feed:
    """Documents of one source for one stream.

    Args:
        recipe: data of the loader.
        index: number of the source in it.
        stream: number of the stream.
        state: state to continue from, as `state` returns it.

    Attributes:
        source: the source.
        epoch: number of the pass, which is the epoch until documents are added (`passes`).
        counts: tokens and documents so far.
    """

    def __init__(self, recipe: TokenRecipe, index: int, stream: int, state: dict[str, Any] | None) -> None:
        state = state or {}
        self.source = recipe.sources[index]
        self.epoch: int = state.get("epoch", 0)
        tokens = state.get("tokens", 0)
        self.counts = _Counts(tokens, state.get("fed", tokens), state.get("skipped", 0))
        self._empty: bool = state.get("empty", False)
        self._recipe, self._stream = recipe, stream
        self._passes = Passes(self.source, recipe.additions, recipe.epochs)
        self._cursor: Cursor | None = None
        self._begin: Any = state.get("cursor")
        self._taken = self._begin is not None
        self._empty_epochs, self._empty_documents = 0, 0

    @property
    def ended(self) -> bool:
        """True if all epochs are fed, or, by the old rule, if the stream has no document of this source."""
        if self._empty or self._passes.end is None:
            return self._empty
        between = self._cursor is None and self._begin is None
        return self.epoch >= self._passes.end or (between and self._part() is None)

    def state(self) -> dict[str, Any]:
        """Return the position as plain values."""
        cursor = self._begin if self._cursor is None else self._cursor.state()
        counts = self.counts  # not by `asdict`, which is slow, and this is called for every batch
        return {
            "epoch": self.epoch, "tokens": counts.tokens, "fed": counts.fed, "skipped": counts.skipped,
            "empty": self._empty, "cursor": cursor,
        }  # fmt: skip

    def next(self) -> Tokens | None:
        """Return the tokens of the next document, or None after the last epoch.

        Raises:
            UsageError: the tokenizer failed, or a stream of an endless run finds no document, or no token.
        """
        while not self.ended:
            if self._cursor is None:
                if (part := self._part()) is None:
                    return None
                self.epoch, number, parts = part
                first, stop, _ = self._passes.part(self.epoch)
                fed = self.source if stop - first == self._passes.documents else self.source.section(first, stop)
                self._cursor = fed.cursor(number, parts, self.epoch, self._recipe.seed, self._begin)
            try:
                document = next(self._cursor)
            except StopIteration:
                self._end_epoch()
                continue
            except Exception as error:
                error.add_note(f"It was raised by the source {self.source.name!r}, {self._place()}.")
                # A bad document does not keep the next ones from being read; a storage that fails does.
                skip = getattr(self._cursor, "skip", None)
                if skip is None or not isinstance(error, UsageError | ValueError) or not self._skip(error):
                    raise
                skip()
                continue
            self._taken = True
            try:
                return self._tokens_of(document)
            except UsageError as error:
                if not self._skip(error):
                    raise
        return None

    def _skip(self, error: Exception) -> bool:
        """Return whether to leave a bad document out, and count it."""
        if not self._recipe.skip_bad:
            return False
        self.counts.skipped += 1
        self._taken = True
        if self.counts.skipped <= _MOST_NAMED:
            _log.warning("%s of source %r is left out: %s", self._place(), self.source.name, error)
        self._count_empty()
        return True

    def _part(self) -> tuple[int, int, int] | None:
        """Return the next pass with a part for this stream, the number of the part and that of all; None: the end."""
        stream, streams, number = self._stream, self._recipe.streams, self.epoch
        if not self._passes.documents or self._recipe.dealing == FIXED_PARTS:
            return number, stream, streams
        # The place in this pass of the stream's first document from here on, which may lie in a later pass.
        place = (stream - self._passes.places_before(number)) % streams
        while self._passes.end is None or number < self._passes.end:
            first, stop, end = self._passes.part(number)
            count = stop - first
            if not (over := place // count):
                return number, place, min(streams, count)
            over = over if end is None else min(over, end - number)
            place -= over * count
            number += over
        return None

    def _end_epoch(self) -> None:
        if self._recipe.dealing == FIXED_PARTS:
            self._empty = not self._taken
        self._empty_epochs = 0 if self._taken else self._empty_epochs + 1
        self._cursor, self._begin, self._taken = None, None, False
        self.epoch += 1
        if self._recipe.epochs is None and self._empty_epochs == _MOST_EMPTY_EPOCHS:
            raise UsageError(
                f"the source {self.source.name!r} had no document for stream {self._stream} of {self._recipe.streams} in "
                f"{_MOST_EMPTY_EPOCHS} epochs, so it cannot have its share of the tokens: choose fewer streams than it has "
                "documents, or a source with a length"
            )

    def _tokens_of(self, document: Document) -> Tokens:
        try:
            tokens = self._recipe.tokens_of(document)
        except UsageError as error:
            raise UsageError(f"{self._place()} of source {self.source.name!r}: {error}") from error
        except Exception as error:
            raise UsageError(
                f"{self._place()} of source {self.source.name!r}: the tokenizer raised {type(error).__name__}: {error}"
            ) from error
        self.counts.tokens += len(tokens)
        self.counts.fed += len(tokens)
        if len(tokens):
            self._empty_documents = 0
        else:
            self._count_empty()
        return tokens

    def _count_empty(self) -> None:
        """Count a document without tokens.

        Raises:
            UsageError: there are too many of them, one after the other.
        """
        self._empty_documents += 1
        if self._recipe.epochs is None:
            most = max(_MOST_EMPTY_DOCUMENTS, 2 * self._passes.documents // self._recipe.streams)
            if self._empty_documents >= most:
                raise UsageError(
                    f"{self._empty_documents} documents one after the other of source {self.source.name!r} have no tokens "
                    f"in stream {self._stream} of {self._recipe.streams}, the last of them {self._place()}: look at the "
                    "tokenizer, or leave such documents out"
                )

    def _place(self) -> str:
        """Return which document was read last, in words."""
        place = getattr(self._cursor, "place", None)
        return place() if place else f"a document of stream {self._stream} in epoch {self.epoch}"
