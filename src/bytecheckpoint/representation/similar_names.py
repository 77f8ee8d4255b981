"""Find the names that are most like a misspelled one, for messages, at a cost that stays small for 100,000 names."""

from __future__ import annotations

import difflib
import heapq
import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.lazy import lazy

__all__ = ["SimilarNames"]

_WORD = re.compile(r"[^\W_]+")
_BETWEEN_WORDS = re.compile(r"(?:[^\w\n]|_)+")
#: difflib compares at most so many words, and so many names: about 10 us each.
_MAX_WORDS = 2000
_MAX_NAMES = 200
_MAX_LENGTH = 1000  # of a name: difflib takes a time that grows with the square
_VERY_LIKE = 0.7


class SimilarNames:
    """The names among which to look. They are indexed at the first question.

    Args:
        names: the names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(dict.fromkeys(name if len(name) <= _MAX_LENGTH else name[:_MAX_LENGTH] for name in names))

    @lazy
    def _words(self) -> list[str]:
        return list(dict.fromkeys(" ".join(self._spaced).split()))

    @lazy
    def _spaced(self) -> list[str]:
        """The names with one space around each word."""
        # All at once: one at a time costs a microsecond each.
        lines = "\n".join(name.replace("\n", " ") for name in self._names)
        return [f" {line} " for line in _BETWEEN_WORDS.sub(" ", lines).split("\n")]

    @lazy
    def _lengths(self) -> NDArray[np.int64]:
        return np.array(list(map(len, self._names)), np.int64)

    def of(self, text: str, count: int = 1, cutoff: float = 0.6) -> list[str]:
        """Return the names most like `text`, the likest first.

        Names that share the most words with `text`, misspelled words corrected, come before others. A name that shares
        none is returned only if it is very like `text`.

        Args:
            text: a name, or a pattern.
            count: how many names to return at most.
            cutoff: how alike, from 0 to 1, a name must be as a whole; 0 for a pattern, which stands for longer names.
        """
        text = text[:_MAX_LENGTH]
        known = set(self._words)
        words = {w if w in known else self._corrected(w) for w in _WORD.findall(text)} - {""}
        common = np.zeros(len(self._names), np.int64)
        for word in words:
            spaced = f" {word} "
            common += np.fromiter((spaced in name for name in self._spaced), np.int64, len(self._names))
        order = np.lexsort((np.abs(self._lengths - len(text)), -common))
        matcher = difflib.SequenceMatcher(b=text)
        rated: list[tuple[int, float, str]] = []
        for number in order[:_MAX_NAMES].tolist():
            name = self._names[number]
            matcher.set_seq1(name)
            ratio = matcher.ratio()
            if ratio >= (cutoff if common[number] else max(cutoff, _VERY_LIKE)):
                rated.append((int(common[number]), ratio, name))
        return [name for _, _, name in heapq.nlargest(count, rated, key=lambda item: item[:2])]

    def _corrected(self, word: str) -> str:
        near = heapq.nsmallest(_MAX_WORDS, self._words, key=lambda known: abs(len(known) - len(word)))
        return next(iter(difflib.get_close_matches(word, near, 1)), "")
