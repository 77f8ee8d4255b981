"""What a token loader feeds: everything that must be equal on all ranks and stay so for a whole run."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.dataloader.checks import remedy, short
from bytecheckpoint.dataloader.sources.base import Document, Source
from bytecheckpoint.errors import UsageError
from bytecheckpoint.representation.values.equality import equal

__all__ = ["ALLOWED", "Recipe", "Tokens", "changed_sources"]

Tokens = NDArray[np.int32]

#: Types of which every value may be a token id.
_SAFE = frozenset(map(np.dtype, (np.uint8, np.uint16)))
#: What a tokenizer is recognised by: the tokens that it makes of this.
_PROBE = "The 3 quick brown foxes,\n\tjumped over 1234 lazy dogs; naïve – 日本語 🙂 <|endoftext|>"

#: What may change between a save and a load where the caller allows it, and why one would.
ALLOWED = {
    "ratios": "the next documents are drawn by the new ratios",
    "sources": "a new source begins at its first document, and one that is gone is forgotten",
    "global_batch": "each batch takes another number of rows from every stream",
    "context_length": "the tokens that are buffered go into rows of the new length",
    "shuffle_buffer": "the buffer grows or shrinks from where it is",
    "epochs": "the run ends elsewhere",
}


@dataclass(frozen=True)
class Recipe:
    """What a loader feeds.

    Attributes:
        sources: where documents come from.
        ratios: share of each source in the tokens; positive, their sum is 1.
        tokenizer: document -> token ids; None if the documents are tokens.
        document_end: token to put behind each document, or None.
        context_length: tokens in a row.
        streams: number of streams of all ranks.
        rows: rows that a stream gives to each global batch.
        seed: of all choices.
        shuffle_buffer: documents among which a stream chooses the next one; 0 or 1: none.
        epochs: how often a source is fed, or None for without end.
    """

    sources: tuple[Source, ...]
    ratios: tuple[float, ...]
    tokenizer: Callable[[Any], Any] | None
    document_end: int | None
    context_length: int
    streams: int
    rows: int
    seed: int
    shuffle_buffer: int = 0
    epochs: int | None = None

    @staticmethod
    def of(
        sources: Source | Sequence[Source] | Mapping[Source, float],
        *,
        streams: int | None,
        global_batch: int,
        **options: Any,
    ) -> Recipe:
        """Check the arguments of a loader, and make its recipe.

        Args:
            sources: one, several of equal share, or source -> ratio.
            streams: number of streams; by default one for each row of a global batch.
            global_batch: rows of a global batch.
            **options: the other attributes.

        Raises:
            UsageError: an argument is out of its range; the message names it.
        """
        ratios = dict(sources) if isinstance(sources, Mapping) else None
        given = [sources] if isinstance(sources, Source) else [*sources]
        if not given or not all(isinstance(source, Source) for source in given):
            raise UsageError(f"sources must be one or more Sources, not {sources!r}; SequenceSource takes a list")
        names = [source.name for source in given]
        if len({*names}) < len(names):
            raise UsageError(f"two sources have one name: {', '.join(sorted(names))}; pass name= to one of them")
        shares = [float(ratios[source]) if ratios is not None else 1.0 for source in given]
        if not all(math.isfinite(share) and share > 0 for share in shares):
            raise UsageError(f"ratios must be positive numbers, not {dict(zip(names, shares, strict=True))}")
        streams = global_batch if streams is None else streams
        for name, value in {"global_batch": global_batch, "streams": streams, **options}.items():
            least = {"seed": None, "shuffle_buffer": 0, "tokenizer": None, "document_end": None}.get(name, 1)
            if least is None or (name == "epochs" and value is None):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"{name} must be an int of at least {least}, not {value!r}")
        end = options["document_end"]
        if end is not None and (not isinstance(end, int) or isinstance(end, bool) or not 0 <= end < 2**31):
            raise UsageError(f"document_end must be a token id, an int from 0 to 2**31 - 1, not {end!r}")
        if not isinstance(options["seed"], int) or not -(2**63) <= options["seed"] < 2**63:
            raise UsageError(f"seed must be an int of 64 bits, not {options['seed']!r}")
        if global_batch % streams:
            raise UsageError(
                f"a global batch of {global_batch} rows cannot take equally many from {streams} streams: "
                "choose a number of streams that divides it"
            )
        share = math.fsum(shares)
        return Recipe(
            tuple(given), tuple(s / share for s in shares), streams=streams, rows=global_batch // streams, **options
        )

    def tokens_of(self, document: Document) -> Tokens:
        """Return the tokens of a document, with the token that ends it.

        Raises:
            UsageError: the tokenizer returns something else than token ids, or there is none and the document is text.
        """
        tokens: Any = document
        if self.tokenizer is not None and not isinstance(document, np.ndarray):
            tokens = self.tokenizer(document)
            if isinstance(tokens, Mapping) and "input_ids" in tokens:  # of transformers
                tokens = tokens["input_ids"]
        if isinstance(tokens, str | bytes) or (array := np.asarray(tokens)).ndim != 1:
            raise UsageError(
                f"a document is {type(tokens).__name__} and not a list of token ids: pass tokenizer=, which returns one"
            )
        if array.size and array.dtype not in _SAFE and not _are_ids(array):
            raise UsageError(f"token ids must be integers from 0 to 2**31 - 1, not {array.dtype} up to {array.max()}")
        if self.document_end is None:
            return array.astype(np.int32)  # a copy: the tokenizer may use its array again
        found = np.empty(len(array) + 1, np.int32)
        found[:-1] = array
        found[-1] = self.document_end
        return found

    def random(self, purpose: int, stream: int, number: int) -> int:
        """Return 64 random bits, the same ones for the same seed and arguments in every run and version."""
        return xxhash.xxh3_64_intdigest(struct.pack("<4q", self.seed, purpose, stream, number))

    def shared(self) -> dict[str, Any]:
        """Describe the recipe: equal recipes of equal data, and no others, have equal descriptions."""
        return {
            "loader": "TokenBufferLoader",
            "sources": {source.name: source.describe() for source in self.sources},
            "ratios": {source.name: ratio for source, ratio in zip(self.sources, self.ratios, strict=True)},
            "tokenizer": self._fingerprint(),
            "document_end": self.document_end,
            "context_length": self.context_length,
            "streams": self.streams,
            "global_batch": self.rows * self.streams,
            "seed": self.seed,
            "shuffle_buffer": self.shuffle_buffer,
            "epochs": self.epochs,
        }

    def _fingerprint(self) -> str | None:
        if self.tokenizer is None:
            return None
        try:
            return xxhash.xxh3_128_hexdigest(self.tokens_of(_PROBE).tobytes())
        except Exception:  # noqa: BLE001  a tokenizer of other documents than text may raise anything
            return "of other documents than text"


def _are_ids(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "iu" and int(array.max()) < 2**31 and int(array.min()) >= 0


def changed_sources(saved: Any, own: Any, *, allow: bool) -> list[str]:
    """Compare descriptions of sources by name; return the differences in words.

    Args:
        saved: those of the checkpoint.
        own: those here.
        allow: whether sources may be new or gone.
    """
    saved = saved if isinstance(saved, dict) else {}
    found = []
    if not allow:
        if lost := sorted(saved.keys() - own.keys()):
            found.append(f"it lacks the source{'s' * (len(lost) > 1)} {', '.join(lost)}{remedy('sources', ALLOWED)}")
        if new := sorted(own.keys() - saved.keys()):
            names = f"source{'s' * (len(new) > 1)} {', '.join(new)}"
            found.append(f"the checkpoint does not know the {names}{remedy('sources', ALLOWED)}")
    for name in sorted(saved.keys() & own.keys()):
        was, now = saved[name], own[name]
        changed = [key for key in sorted({*was, *now}) if not equal(was.get(key), now.get(key))]
        if changed:
            text = ", ".join(f"{key} was {short(was.get(key))} and is {short(now.get(key))}" for key in changed)
            found.append(f"the data of source {name} has changed ({text}): bring back the data that the run began with")
    return found
