"""MosaicML Streaming over the same documents, in an environment of its own (.venv-mosaic).

`python -m benchmarks.loaders.mosaic CORPUS WORKERS` reads pairs of a `Feeding.take` as JSON lines, and writes its answers.
Token ids are packed into rows before the run and stored as those, as its users do; text is tokenized and packed in the run.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from benchmarks.loaders.data import LENGTH, ROWS, Corpus, WordTokenizer
from benchmarks.loaders.feeding import Feeding


def _write(corpus: Corpus) -> Path:
    """Write the documents as shards, once."""
    folder = Path(f"{corpus.path}.mds")
    if (folder / "index.json").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    with MDSWriter(out=str(folder), columns={"item": "str" if corpus.text else "bytes"}) as out:
        if corpus.text:
            for line in Path(corpus.path).read_text().splitlines():
                out.write({"item": line})
        else:
            tokens = np.fromfile(corpus.path, np.uint16)
            for row in tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH):
                out.write({"item": row.tobytes()})
    return folder


class _Rows(StreamingDataset):  # type: ignore[misc]
    def __getitem__(self, at: int) -> torch.Tensor:
        item: Any = super().__getitem__(at)["item"]
        return torch.from_numpy(np.frombuffer(item, np.uint16).astype(np.int64))


class _Text(StreamingDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[torch.Tensor]:
        tokenizer = WordTokenizer()
        pieces: list[Any] = []
        size = 0
        for sample in super().__iter__():
            pieces.append(np.array(tokenizer(sample["item"]), np.uint16))
            size += len(pieces[-1])
            if size < LENGTH:
                continue
            joined = np.concatenate(pieces)
            whole = size // LENGTH * LENGTH
            yield from torch.from_numpy(joined[:whole].astype(np.int64)).view(-1, LENGTH)
            pieces, size = [joined[whole:]], size - whole


def main() -> None:
    corpus, workers = Corpus(**json.loads(sys.argv[1])), int(sys.argv[2])
    kind = _Text if corpus.text else _Rows
    data = kind(local=str(_write(corpus)), batch_size=ROWS, shuffle=True)
    feeding = Feeding(
        StreamingDataLoader(data, batch_size=ROWS, num_workers=workers, drop_last=True, persistent_workers=workers > 0)
    )
    for line in sys.stdin:
        print(json.dumps(feeding.take(*json.loads(line))), flush=True)
    del feeding  # ends its workers, before the folder that they use is removed


if __name__ == "__main__":
    main()
