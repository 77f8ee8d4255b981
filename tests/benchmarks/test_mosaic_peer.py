"""MosaicML Streaming in the benchmark of loaders: its process, in its own environment (`make test-mosaic`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.loaders.contenders import MosaicProcess
from benchmarks.loaders.data import LENGTH, ROWS, write_corpus

pytestmark = pytest.mark.skipif(
    not os.environ.get("BYTECHECKPOINT_REQUIRE_MOSAIC"), reason="NOT TESTED HERE: needs `make test-mosaic`"
)


def test_it_feeds_whole_batches_of_files_and_text(tmp_path: Path) -> None:
    # Both at once: most of their time goes into imports.
    loaders = []
    for text in (False, True):
        (tmp_path / str(text)).mkdir()
        loaders.append(MosaicProcess(write_corpus(tmp_path / str(text), 300_000, text=text), 1))
    for loader in loaders:
        assert loader.take(2, 0.0)["tokens"] == 2 * ROWS * LENGTH
        loader.close()
