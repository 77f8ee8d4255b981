"""The loaders that are compared: ours, and what others do with the same documents."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.loaders.data import LENGTH, ROWS, Corpus, WordTokenizer
from benchmarks.loaders.feeding import Feeding
from bytecheckpoint.dataloader import TextSource, TokenBufferLoader, TokenFileSource, TokenRecipe

__all__ = ["CONTENDERS", "MOSAIC_MISSING", "Contender", "MosaicProcess", "PackedRows"]

_ROOT = Path(__file__).resolve().parents[2]
_MOSAIC_PYTHON = _ROOT / ".venv-mosaic" / "bin" / "python"
MOSAIC_MISSING = """\
  NOT MEASURED: MosaicML Streaming, which wants an older numpy; `make test-mosaic` makes an environment with it,
  .venv-mosaic, where the next run finds it."""


class Contender:
    """A loader that is running; `take` is that of a `Feeding`."""

    def __init__(self, feeding: Feeding, close: Callable[[], object] = lambda: None) -> None:
        self.take = feeding.take
        self.close = close


class PackedRows(IterableDataset[torch.Tensor]):
    """The least that one would write: documents in a random order, concatenated and cut into rows."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._epoch = self._place = 0
        self._buffer = np.zeros(0, np.uint16)

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        count, document = self._corpus.reader()
        pieces, size = [self._buffer], len(self._buffer)
        while True:
            order = np.random.default_rng(self._epoch).permutation(count)[worker::workers]
            for number in order[self._place :].tolist():
                pieces.append(document(number))
                size += len(pieces[-1])
                self._place += 1
                if size < LENGTH:
                    continue
                joined = np.concatenate(pieces)
                for start in range(0, size - LENGTH + 1, LENGTH):
                    row = torch.from_numpy(joined[start : start + LENGTH].astype(np.int64))
                    self._buffer = joined[start + LENGTH :]
                    yield row
                pieces, size = [self._buffer], len(self._buffer)
            self._epoch, self._place = self._epoch + 1, 0


class PositionedRows(PackedRows):
    """The same with a state, for torchdata: where it is, and the tokens that are drawn and in no row yet."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "place": self._place, "buffer": torch.from_numpy(self._buffer.astype(np.int32))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._place = state["epoch"], state["place"]
        self._buffer = state["buffer"].numpy().astype(np.uint16)


def ours(corpus: Corpus, workers: int) -> Contender:
    if corpus.text:
        source: Any = TextSource(corpus.path)
    else:
        source = TokenFileSource(corpus.path, offsets=corpus.offsets)
    tokenizer = WordTokenizer() if corpus.text else None
    loader = TokenBufferLoader(TokenRecipe(source, LENGTH, ROWS, tokenizer=tokenizer), workers=workers)
    return Contender(Feeding(loader), loader.close)


def plain_torch(corpus: Corpus, workers: int) -> Contender:
    return Contender(Feeding(DataLoader(PackedRows(corpus), batch_size=ROWS, num_workers=workers)))


def torchdata(corpus: Corpus, workers: int) -> Contender:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return Contender(Feeding(StatefulDataLoader(PositionedRows(corpus), batch_size=ROWS, num_workers=workers)))


class MosaicProcess:
    """MosaicML Streaming, in its own environment: `benchmarks.loaders.mosaic` runs there."""

    @staticmethod
    def available() -> bool:
        return _MOSAIC_PYTHON.exists()

    def __init__(self, corpus: Corpus, workers: int) -> None:
        # What it leaves in the folder for temporary files is removed with ours.
        environment = os.environ | {"PYTHONPATH": str(_ROOT), "TMPDIR": str(Path(corpus.path).parent)}
        arguments = json.dumps({"path": corpus.path, "offsets": corpus.offsets, "text": corpus.text})
        self._process = subprocess.Popen(
            [_MOSAIC_PYTHON, "-m", "benchmarks.loaders.mosaic", arguments, str(workers)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def take(self, batches: int, step_seconds: float = 0.0) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([batches, step_seconds]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"MosaicML Streaming ended with status {self._process.wait(10)}")
        figures: dict[str, float] = json.loads(answer)
        return figures

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


CONTENDERS: dict[str, Callable[[Corpus, int], Any]] = {
    "bytecheckpoint": ours,
    "torch DataLoader": plain_torch,
    "torchdata StatefulDataLoader": torchdata,
    "MosaicML Streaming": MosaicProcess,
}
