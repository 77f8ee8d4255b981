"""The contenders of the loader benchmark feed the same documents in rows of the same shape."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.bench import Bench, Options
from benchmarks.cases import CASES
from benchmarks.loaders.contenders import CONTENDERS, MosaicProcess
from benchmarks.loaders.data import LENGTH, ROWS, Corpus, WordTokenizer, write_corpus
from benchmarks.measure import Result, World
from tests.support.processes import ROOT, environment, python


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


@pytest.mark.slow
def test_the_case_of_states(tmp_path: Path) -> None:
    options = Options(1 << 20, 40, 1, 0.0, 2000, {"tmpfs": str(tmp_path)})
    bench = Bench(options, World(), [], place="tmpfs")
    CASES["loader-state"].run(bench)
    assert [result.arm for result in bench.results] == [
        "memcpy",
        "bytecheckpoint",
        "bytecheckpoint, asked at the save",
    ]
    for result in bench.results:
        assert not result.error
        assert result.wall[0] >= sum(values[0] for values in result.extra.values()) > 0 or result.arm == "memcpy"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_case_of_several_ranks(tmp_path: Path) -> None:
    command = python("-m", "benchmarks", "--short", "--size", 2, "--rounds", 1, "--worlds", 4, "--places", "tmpfs")
    command += ["--only", "loader-upload", "--out", str(tmp_path)]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [Result(**r) for r in json.loads((tmp_path / "results.json").read_text())["results"]]
    assert len(results) == 2 * 3
    for result in results:
        assert not result.error
        assert result.wall[0] > 0 and result.extra["write"][0] >= result.extra["write_least"][0] > 0


@pytest.mark.slow
def test_the_case(tmp_path: Path) -> None:
    (tmp_path / "tmpfs").mkdir()
    options = Options(1 << 20, 40, 1, 0.0, 2000, {"tmpfs": str(tmp_path / "tmpfs")}, peers=("torch", "torchdata"))
    bench = Bench(options, World(), [], place="tmpfs")
    CASES["loader"].run(bench)
    assert {result.arm for result in bench.results} == {
        "bytecheckpoint",
        "torch DataLoader",
        "torchdata StatefulDataLoader",
    }
    assert len(bench.results) == 2 * 2 * 3
    for result in bench.results:
        assert not result.error and result.wall[0] > 0 and result.extra["main_core_ms"][0] > 0
        assert ("wait" in result.case) == ("Mtokens_per_s" not in result.extra)
