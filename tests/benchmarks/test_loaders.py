"""The contenders of the loader benchmark feed the same documents in rows of the same shape."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.loaders.contenders import CONTENDERS, MosaicProcess
from benchmarks.loaders.data import LENGTH, ROWS, Corpus, WordTokenizer, write_corpus


def _tokens(corpus: Corpus) -> Counter[int]:
    count, document = corpus.reader()
    return Counter(token for number in range(count) for token in document(number).tolist())


def test_both_corpora_hold_the_same_documents(tmp_path: Path) -> None:
    files, text = (write_corpus(tmp_path, 40_000, text=text) for text in (False, True))
    tokens = _tokens(files)
    assert tokens == _tokens(text) and 20_000 < tokens.total() < 80_000
    assert Path(text.path).read_text().count("\n") == files.reader()[0]
    assert WordTokenizer()("aaaa, baaa") == [0, 0, 1]


@pytest.mark.parametrize("name", [name for name, make in CONTENDERS.items() if make is not MosaicProcess])
@pytest.mark.parametrize("text", [False, True], ids=["files", "text"])
def test_every_loader_feeds_whole_batches(name: str, text: bool, tmp_path: Path) -> None:
    loader = CONTENDERS[name](write_corpus(tmp_path, 40_000, text=text), 0)
    try:
        figures = loader.take(2, 0.001)
        assert figures["tokens"] == 2 * ROWS * LENGTH
        assert figures["wait"] > 0 and figures["main_core"] > 0
    finally:
        loader.close()
