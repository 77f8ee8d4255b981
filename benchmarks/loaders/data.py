"""The documents that every loader reads: token ids or text in one file, with the offsets of the documents.

Needs numpy alone, so that a loader in another environment reads the same files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LENGTH", "ROWS", "Corpus", "WordTokenizer", "write_corpus"]

LENGTH = 2048  # tokens of a row
ROWS = 32  # of a global batch
_WORDS = 20_000
_MEAN = 500  # tokens of a document


class WordTokenizer:
    """Cuts text into words by a regular expression and looks them up: all in Python, some million tokens per second."""

    def __init__(self) -> None:
        self._ids = {_word(number): number for number in range(_WORDS)}
        self._pattern = re.compile(r"\w+|[^\w\s]")

    def __call__(self, text: str) -> list[int]:
        ids = self._ids
        return [ids.get(word, 0) for word in self._pattern.findall(text)]


def _word(number: int) -> str:
    """Return a word of four letters, another one for every number."""
    return "".join(chr(ord("a") + number // 26**place % 26) for place in range(4))


@dataclass(frozen=True)
class Corpus:
    """Documents under numbers; picklable.

    Attributes:
        path: the file.
        offsets: begins of the documents, and the end of the last one: a .npy file, in tokens or bytes, int64 [n + 1].
        text: True for a file of text, a document a line; else token ids, uint16.
    """

    path: str
    offsets: str
    text: bool

    def reader(self) -> tuple[int, Callable[[int], NDArray[Any]]]:
        """Return the number of documents, and a function that returns the tokens of one, from a mapping of the file."""
        bounds = np.load(self.offsets)
        if not self.text:
            tokens = np.memmap(self.path, np.uint16, "r")
            return len(bounds) - 1, lambda i: tokens[bounds[i] : bounds[i + 1]]
        data, tokenizer = memoryview(np.memmap(self.path, np.uint8, "r")), WordTokenizer()  # type: ignore[arg-type]
        return len(bounds) - 1, lambda i: np.array(tokenizer(str(data[bounds[i] : bounds[i + 1]], "utf-8")), np.uint16)


def write_corpus(folder: Path, tokens: int, *, text: bool) -> Corpus:
    """Write about as many tokens of random documents, geometrically distributed in length."""
    random = np.random.default_rng(0)
    lengths = random.geometric(1 / _MEAN, max(tokens // _MEAN, 64))
    ids = random.integers(0, _WORDS, int(lengths.sum())).astype(np.uint16)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    corpus = Corpus(str(folder / ("text" if text else "tokens")), str(folder / f"{text}.npy"), text)
    if not text:
        ids.tofile(corpus.path)
        np.save(corpus.offsets, bounds)
        return corpus
    words = [_word(number) for number in range(_WORDS)]
    with open(corpus.path, "wb") as file:
        ends = [0]
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            file.write(" ".join(words[i] for i in ids[start:stop].tolist()).encode() + b"\n")
            ends.append(file.tell())
    np.save(corpus.offsets, np.array(ends))
    return corpus
