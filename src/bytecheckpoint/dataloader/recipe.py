"""Describe the data of a token loader, and compare descriptions."""

from __future__ import annotations

import copy
import itertools
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.dataloader.checks import remedy, short
from bytecheckpoint.dataloader.passes import Additions, with_addition
from bytecheckpoint.dataloader.sources.base import Document, Source
from bytecheckpoint.dataloader.sources.facts import changed_facts
from bytecheckpoint.errors import UsageError
from bytecheckpoint.representation.values.equality import equal

__all__ = ["ALLOWED", "DEALT_BY_PLACE", "FIXED_PARTS", "TokenRecipe", "Tokens", "comparisons"]

Tokens = NDArray[np.int32]
#: Share of a source in the tokens, or batch -> share from there on.
Share = float | Mapping[int, float]

#: Types of which every value may be a token id.
_SAFE = frozenset(map(np.dtype, (np.uint8, np.uint16)))
#: Text whose tokens are the fingerprint of a tokenizer.
_PROBE = "The 3 quick brown foxes,\n\tjumped over 1234 lazy dogs; naïve – 日本語 🙂 <|endoftext|>"

#: Rules by which documents are dealt to streams; see decision 0075. By the older one, a stream that has no document of a
#: source in its first epoch gets none in any. Runs that began with it keep to it.
FIXED_PARTS: Final = 1
DEALT_BY_PLACE: Final = 2

#: Names of changes between a save and a load that a caller may allow -> their effect.
ALLOWED = {
    "ratios": "the next documents are drawn by the new ratios",
    "sources": "a new source begins at its first document, and one that is gone is forgotten",
    "global_batch": "each batch from here on takes another number of rows from every stream",
    "context_length": "the tokens that are buffered go into rows of the new length",
    "shuffle_buffer": "the buffer grows or shrinks from where it is",
    "epochs": "the run ends elsewhere",
    "schedule": "the ratios change at other batches from here on",
    "appended": "the running epoch of the source ends with the new documents, and the next ones have all of them",
}


class TokenRecipe:
    """Data of a token loader: everything that must be equal on all ranks and stay so for a whole run.

    Args:
        sources: one source, several of equal share, or source -> share of the tokens. A share may change within a run:
            {0: 0.9, 20_000: 0.5} is 0.9 from batch 0 of the run on, and 0.5 from batch 20,000 on. 0, for a source that is
            not fed then, needs `epochs=None`. Documents that are in buffers at a change are fed still.
        context_length: number of tokens in a row.
        global_batch: number of rows of a global batch. It may change within a run: {0: 64, 20_000: 128} is 64 from batch 0
            of the run on, and 128 from batch 20,000 on.
        tokenizer: function document -> token ids (a list, an array, or a dict with "input_ids"). None: documents are
            tokens.
        document_end: token to put behind each document.
        streams: number of streams, the largest number of ranks times workers that helps. It divides every `global_batch`,
            and never changes during a run. None: the largest such number, one for each row if `global_batch` is one number.
        seed: seed of all random choices.
        shuffle_buffer: number of documents among which each stream chooses the next one, beside the shuffling of the
            sources. They are a part of the state.
        epochs: number of times that each source is fed; None: without end. Rows that would not fill a global batch are
            dropped.
        skip_bad: True to leave out documents that cannot be decoded or tokenized, with a warning; their number is in
            `TokenBufferLoader.progress`. False: they are errors.

    Attributes:
        sources: sources in the order of the argument.
        ratios: share of each source in the tokens, from batch 0 on; their sum is 1.
        schedule: batch -> share of each source from there on, by its name.
        sizes: batch -> number of rows of a global batch from there on.
        rows: largest number of rows that a stream gives to a global batch.
        dealing: number of the rule by which documents are dealt to streams.
        additions: documents that were added to sources during the run, by their name.

    Raises:
        UsageError: an argument is out of its range; the message names it.
    """

    def __init__(
        self,
        sources: Source | Sequence[Source] | Mapping[Source, Share],
        context_length: int,
        global_batch: int | Mapping[int, int],
        *,
        tokenizer: Callable[[Any], Any] | None = None,
        document_end: int | None = None,
        streams: int | None = None,
        seed: int = 0,
        shuffle_buffer: int = 0,
        epochs: int | None = None,
        skip_bad: bool = False,
    ) -> None:
        self.sizes = _checked_sizes(global_batch)
        streams = math.gcd(*self.sizes.values()) if streams is None else streams
        self.sources, phases = _checked_sources(sources, zero=epochs is None)
        self.ratios = tuple(phases.pop(0).values())
        self.schedule = phases
        _check_int("streams", streams, 1)
        _check_int("context_length", context_length, 1)
        _check_int("shuffle_buffer", shuffle_buffer, 0)
        if epochs is not None:
            _check_int("epochs", epochs, 1)
        if document_end is not None and (type(document_end) is not int or not 0 <= document_end < 2**31):
            raise UsageError(f"document_end must be a token id, an int from 0 to 2**31 - 1, not {document_end!r}")
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise UsageError(f"seed must be an int of 64 bits, not {seed!r}")
        if uneven := [size for size in self.sizes.values() if size % streams]:
            raise UsageError(
                f"a global batch of {uneven[0]} rows cannot take equally many from {streams} streams: "
                "choose a number of streams that divides it"
            )
        self.context_length, self.streams, self.rows = context_length, streams, max(self.sizes.values()) // streams
        self.tokenizer, self.document_end = tokenizer, document_end
        self.seed, self.shuffle_buffer, self.epochs = seed, shuffle_buffer, epochs
        self.dealing, self.skip_bad = DEALT_BY_PLACE, skip_bad
        self.additions: dict[str, Additions] = {}

    def continued(self, shared: Mapping[str, Any], states: Iterable[Mapping[str, Any]] = ()) -> Self:
        """Return this recipe with what decides the batches of a run besides its arguments, as that run began.

        That is the order in which a choice goes through sources, the rounding of ratios, rule of dealing, and additions.

        Args:
            shared: description of the run's recipe, which fits this one but for allowed changes.
            states: states of all streams, if documents were added to a source since.
        """
        other = copy.copy(self)
        order = {name: place for place, name in enumerate(shared["sources"])}
        ratios = dict(zip(self.sources, self.ratios, strict=True))
        if not _changed_shares("ratios", shared["ratios"], self.shares, allow=False):
            ratios = {source: shared["ratios"][source.name] for source in ratios}
        other.sources = tuple(sorted(ratios, key=lambda source: order.get(source.name, len(order))))
        other.ratios = tuple(ratios[source] for source in other.sources)
        schedule = {int(batch): shares for batch, shares in (shared.get("schedule") or {}).items()}
        if not _changed_shares("schedule", schedule, self.schedule, allow=False):
            other.schedule = schedule
        other.dealing = shared.get("dealing", FIXED_PARTS)
        known = {name: found for name, found in (shared.get("additions") or {}).items() if name in self.shares}
        for name, before in self.added(shared).items():
            of_source = (state["sources"][name] for state in states if name in state["sources"])
            known[name] = with_addition(known.get(name, ()), before, of_source)
        other.additions = {name: found for name, found in known.items() if found}
        return other

    def added(self, shared: Mapping[str, Any]) -> dict[str, int]:
        """Return the number of documents that sources had in a run, of those that have more now, by name."""
        both = [(source, shared["sources"].get(source.name, {})) for source in self.sources]
        both = [
            (source, saved) for source, saved in both if saved.get("documents") != source.describe().get("documents")
        ]
        return {source.name: saved["documents"] for source, saved in both if saved}

    def phase(self, batch: int) -> int:
        """Return the batch from which the ratios of a batch hold."""
        return max((begin for begin in self.schedule if begin <= batch), default=0)

    def rows_in(self, batch: int) -> int:
        """Return the number of rows that a stream gives to a global batch."""
        return self.sizes[max(begin for begin in self.sizes if begin <= batch)] // self.streams

    def ratios_in(self, phase: int) -> Sequence[float]:
        """Return the share of each source in a phase."""
        shares = self.schedule.get(phase)
        return self.ratios if shares is None else [shares[source.name] for source in self.sources]

    @property
    def shares(self) -> dict[str, float]:
        """Ratio of each source, by name."""
        return {source.name: ratio for source, ratio in zip(self.sources, self.ratios, strict=True)}

    def tokens_of(self, document: Document) -> Tokens:
        """Return the tokens of a document, with the token that ends it.

        Raises:
            UsageError: the tokenizer returns no token ids, or there is no tokenizer and the document is text.
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
        if array.size and array.dtype not in _SAFE:
            least, most = (array.min(), array.max()) if array.dtype.kind in "iuf" else (-1, -1)
            if array.dtype.kind == "f" or least < 0 or most >= 2**31:
                bounds = f" from {least} to {most}" if array.dtype.kind in "iuf" else ""
                raise UsageError(f"token ids must be integers from 0 to 2**31 - 1, not {array.dtype}{bounds}")
        if self.document_end is None:
            return array.astype(np.int32)  # a copy: the tokenizer may use its array again
        found = np.empty(len(array) + 1, np.int32)
        found[:-1] = array
        found[-1] = self.document_end
        return found

    def random(self, purpose: int, stream: int, number: int) -> int:
        """Return 64 random bits, equal for equal seeds and arguments in every run and version."""
        return xxhash.xxh3_64_intdigest(struct.pack("<4q", self.seed, purpose, stream, number))

    def shared(self) -> dict[str, Any]:
        """Describe the recipe: equal recipes of equal data, and no others, have equal descriptions."""
        sizes = {str(batch): size for batch, size in self.sizes.items()}
        return {
            "loader": "TokenBufferLoader",
            "sources": {source.name: source.describe() for source in self.sources},
            "ratios": self.shares,
            "tokenizer": self._fingerprint(),
            "document_end": self.document_end,
            "context_length": self.context_length,
            "streams": self.streams,
            "global_batch": sizes if len(sizes) > 1 else self.sizes[0],
            "seed": self.seed,
            "shuffle_buffer": self.shuffle_buffer,
            "epochs": self.epochs,
            "schedule": {str(batch): shares for batch, shares in self.schedule.items()} or None,
            "dealing": self.dealing,
            "additions": self.additions or None,
        }

    def _fingerprint(self) -> str | None:
        if self.tokenizer is None:
            return None
        try:
            return xxhash.xxh3_128_hexdigest(self.tokens_of(_PROBE).tobytes())
        except Exception:  # noqa: BLE001  a tokenizer of other documents than text may raise anything
            return "of other documents than text"


def _checked_sources(
    sources: Source | Sequence[Source] | Mapping[Source, Share], *, zero: bool
) -> tuple[tuple[Source, ...], dict[int, dict[str, float]]]:
    """Return the sources, and batch -> share of each from there on, whose sum is 1; batch 0 is among them."""
    given = [sources] if isinstance(sources, Source) else [*sources]
    if not given or not all(isinstance(source, Source) for source in given):
        raise UsageError(f"sources must be one or more Sources, not {short(sources)}; SequenceSource takes a list")
    names = [source.name for source in given]
    if len({*names}) < len(names):
        raise UsageError(f"two sources have one name: {', '.join(sorted(names))}; pass name= to one of them")
    shares = [sources[source] if isinstance(sources, Mapping) else 1.0 for source in given]
    steps = [dict(share) if isinstance(share, Mapping) else {0: share} for share in shares]
    batches = {0}.union(*steps)
    for batch in batches:
        _check_int("the batch of a share", batch, 0)
    if not all(0 in share for share in steps):
        raise UsageError(f"a share by batches begins with batch 0, as in {{0: 0.9, 20_000: 0.5}}, not {short(shares)}")
    zero = zero and len(batches) > 1
    phases: dict[int, dict[str, float]] = {}
    for batch in sorted(batches):
        places = [max(begin for begin in share if begin <= batch) for share in steps]
        found = {name: float(share[place]) for name, share, place in zip(names, steps, places, strict=True)}
        whole = math.fsum(found.values())
        if not (all(share > 0 or (zero and share == 0) for share in found.values()) and 0 < whole < math.inf):
            rule = "numbers from 0 on, one of them above 0" if zero else "positive numbers"
            raise UsageError(f"ratios must be {rule}, not {found}" + (f" from batch {batch} on" if batch else ""))
        phases[batch] = {name: share / whole for name, share in found.items()}
    return tuple(given), phases


def _checked_sizes(given: int | Mapping[int, int]) -> dict[int, int]:
    """Return batch -> number of rows from there on, ascending, without batches at which nothing changes."""
    sizes = dict(given) if isinstance(given, Mapping) else {0: given}
    for batch, size in sizes.items():
        _check_int("the batch of a global batch", batch, 0)
        _check_int("global_batch", size, 1)
    if 0 not in sizes:
        raise UsageError(f"a global batch by batches begins with batch 0, as in {{0: 64, 20_000: 128}}, not {sizes}")
    return {0: sizes[0]} | {b: sizes[b] for a, b in itertools.pairwise(sorted(sizes)) if sizes[a] != sizes[b]}


def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} must be an int of at least {least}, not {value!r}")


def comparisons(
    sources: Sequence[Source], allow: Collection[str], saved: Any
) -> dict[str, Callable[[Any, Any], list[str]]]:
    """Return what compares entries of a shared state (`saved`) with own ones by more than equality, in words."""
    return {
        "sources": partial(_changed_sources, allow=allow, sources=sources),
        "ratios": partial(_changed_shares, "ratios", allow="ratios" in allow),
        "schedule": partial(_changed_shares, "schedule", allow="schedule" in allow),
        "global_batch": lambda was, now: _changed_sizes(
            was, now, allow="global_batch" in allow, batches=saved["batches"]
        ),
    }


def _changed_sources(saved: Any, own: Any, *, allow: Collection[str], sources: Sequence[Source]) -> list[str]:
    """Compare descriptions of sources by name; return the differences in words."""
    saved = saved if isinstance(saved, dict) else {}
    found = []
    if "sources" not in allow:
        lost, new = sorted(saved.keys() - own.keys()), sorted(own.keys() - saved.keys())
        for before in [*lost]:
            if now := [name for name in new if not _changes(saved[before], own[name])]:
                found.append(f"the source {before} of the checkpoint is {now[0]} here: pass name={before!r} to it")
                lost.remove(before)
                new.remove(now[0])
        if lost:
            found.append(f"it lacks the source{'s' * (len(lost) > 1)} {', '.join(lost)}{remedy('sources', ALLOWED)}")
        if new:
            names = f"source{'s' * (len(new) > 1)} {', '.join(new)}"
            found.append(f"the checkpoint does not know the {names}{remedy('sources', ALLOWED)}")
    for name in sorted(saved.keys() & own.keys()):
        if changes := _changes(saved[name], own[name]):
            source = next(source for source in sources if source.name == name)
            if _has_grown(source, saved[name], own[name]):
                if "appended" not in allow:
                    count = own[name]["documents"] - saved[name]["documents"]
                    found.append(f"{count} documents were added to source {name}{remedy('appended', ALLOWED)}")
                continue
            files: dict[str, str] = getattr(source, "sampled_files", dict)()
            pairs = zip(saved[name].get("files", ()), files.items(), strict=False)
            text = ", ".join(changes + [f"{path} differs" for was, (path, now) in pairs if was != now][:3])
            found.append(f"the data of source {name} has changed ({text}): bring back the data that the run began with")
    return found


def _has_grown(source: Source, saved: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Return whether a source has the documents of a description, and others behind them."""
    before, now = saved.get("documents"), own.get("documents")
    if type(before) is not int or type(now) is not int or not 0 < before < now:
        return False
    first = source.describe_first(saved)
    return first is not None and not _changes(saved, first)


def _changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compare two descriptions of a source; return the differences in words."""
    keys = [key for key in sorted({*was, *now} - {"data", "files"}) if not equal(was.get(key), now.get(key))]
    changes = [f"{key} was {short(was.get(key))} and is {short(now.get(key))}" for key in keys]
    return changes + changed_facts(was.get("data"), now.get("data", {}))


def _changed_shares(entry: str, saved: Any, own: Any, *, allow: bool) -> list[str]:
    """Compare ratios, of a schedule by batch, up to their rounding; return the difference in words."""
    was, now = (_flat(shares) for shares in (saved, own))
    if allow or (was.keys() == now.keys() and all(math.isclose(was[key], now[key], rel_tol=1e-9) for key in now)):
        return []
    return [f"{entry} was {short(saved)} and is {short(own)} here{remedy(entry, ALLOWED)}"]


def _flat(shares: Any) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for name, share in (shares or {}).items():
        found |= (
            {(name, *key): part for key, part in _flat(share).items()} if isinstance(share, dict) else {(name,): share}
        )
    return found


def _changed_sizes(saved: Any, own: Any, *, allow: bool, batches: int) -> list[str]:
    """Compare sizes of global batches, which may differ behind a number of batches; return the difference in words."""
    if equal(saved, own):
        return []
    # A number alone says nothing of batches before.
    was, now = (
        {int(b): n for b, n in sizes.items() if int(b) < batches} if isinstance(sizes, dict) else {0: sizes}
        for sizes in (saved, own)
    )
    text = f"global_batch was {short(saved)} and is {short(own)} here"
    if isinstance(own, dict) and batches and was != now:
        return [f"{text}, also in the {batches} batches before the checkpoint: keep what they had"]
    return [] if allow else [text + remedy("global_batch", ALLOWED)]
