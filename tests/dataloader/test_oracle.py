"""Random runs of a token loader, checked against an oracle that is written from docs/how-to/data-loaders.md alone.

Each token says which token of which document of which source it is. So the oracle reads from the batches which documents
each stream has fed, and compares that with what the documentation promises. Jobs of other sizes must feed the same.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.dataloader import (
    JsonLinesSource,
    SequenceSource,
    TokenBufferLoader,
    TokenFileSource,
    TokenRecipe,
    WorkerOptions,
)
from tests.dataloader.token_loaders import gather_over

END = 1  # the document_end of runs that have one
BATCHES = 60  # of a run without epochs

Batch = dict[str, list[Any]]


@dataclass
class Data:
    """One source of a run.

    Attributes:
        name: name of the source.
        kind: class that reads it.
        first: token of the first document.
        lengths: tokens of each document.
        shuffle: argument of the source.
        share: its share of the tokens.
    """

    name: str
    kind: str
    first: int
    lengths: list[int]
    shuffle: bool
    share: float

    def documents(self) -> list[list[int]]:
        starts = np.cumsum([self.first, *self.lengths])
        return [[*range(a, b)] for a, b in zip(starts.tolist(), starts[1:].tolist(), strict=False)]

    def write(self, folder: Path) -> None:
        if self.kind == "jsonl":
            (folder / self.name).write_text("".join(json.dumps({"text": d}) + "\n" for d in self.documents()))
        if self.kind == "tokens":
            np.arange(self.first, self.first + sum(self.lengths), dtype=np.uint32).tofile(folder / self.name)

    def source(self, folder: Path) -> Any:
        if self.kind == "jsonl":
            return JsonLinesSource(folder / self.name, shuffle=self.shuffle)
        if self.kind == "tokens":
            offsets = np.cumsum([0, *self.lengths])
            return TokenFileSource(folder / self.name, dtype="uint32", offsets=offsets, shuffle=self.shuffle)
        return SequenceSource(self.documents(), self.name, shuffle=self.shuffle)


@dataclass
class Run:
    """A run: its data, its recipe, and its jobs.

    Attributes:
        data: the sources.
        recipe: arguments of the recipe.
        jobs: ranks, workers, batches, batches ahead of each job.
    """

    data: list[Data]
    recipe: dict[str, Any]
    jobs: list[tuple[int, int, int, int]] = field(default_factory=list)

    @property
    def streams(self) -> int:
        return int(self.recipe["streams"])

    @property
    def tokens(self) -> int:
        """Tokens of a global batch."""
        return int(self.recipe["global_batch"] * self.recipe["context_length"])


def draw(seed: int, most_workers: int) -> Run:
    chance = random.Random(seed)
    end, first = chance.choice([None, END]), 10
    data = []
    for number in range(chance.choice([1, 1, 2, 3])):
        count = chance.choice([1, 2, 5, 17, 60, 200])
        shuffle = chance.random() < 0.6
        kind = chance.choice(["list", "jsonl", "tokens"])
        least = 0 if kind != "tokens" and not shuffle and end is None and count > 4 else 1
        most = chance.choice([1.0, 1.3])
        lengths = [max(least, int(chance.lognormvariate(most, most))) for _ in range(count)]
        if not any(lengths):
            lengths[0] = 3
        data.append(Data(f"source-{number}", kind, first, lengths, shuffle, chance.choice([1.0, 2.0, 3.0])))
        first += sum(lengths)
    streams = chance.choice([1, 2, 3, 6, 12])
    recipe = {
        "context_length": chance.choice([4, 8, 21]),
        "global_batch": streams * chance.choice([1, 1, 2]),
        "streams": streams,
        "document_end": end,
        "shuffle_buffer": chance.choice([0, 0, 4]),
        "epochs": chance.choice([None, 1, 2, 3]),
        "seed": chance.randrange(100),
    }
    run = Run(data, recipe)
    for _ in range(chance.randint(2, 4)):
        ranks = chance.randint(1, min(streams, 4))
        run.jobs.append((ranks, chance.randint(0, most_workers), chance.randint(1, 12), chance.choice([0, 0, 1, 3])))
    return run


# --- the jobs ----------------------------------------------------------------------------------------------------------


def feed(run: Run, folder: Path, number: int) -> list[Batch]:
    """Feed one job from the newest checkpoint, and save the next one. Number -1: feed the whole run in one process."""
    whole = (1, 0, BATCHES if run.recipe["epochs"] is None else -1, 0)
    ranks, workers, count, ahead = run.jobs[number] if number >= 0 else whole
    where, chance = folder / f"data-{number}", random.Random(number)
    where.mkdir()
    for data in run.data:
        data.write(where)  # data may move
    order = chance.sample(run.data, len(run.data))  # sources in any order
    scale = chance.choice([1.0, 0.1, 7.0])  # ratios in any scale
    steps = max((int(path.name) for path in folder.glob("[0-9]*")), default=0) if number >= 0 else 0

    def job(collective: Collective) -> list[Batch]:
        sources = {data.source(where): data.share * scale for data in (order if number > 0 else run.data)}
        loader = TokenBufferLoader(
            TokenRecipe(sources, **run.recipe),
            rank=collective.rank,
            ranks=collective.world_size,
            workers=WorkerOptions(workers, ahead=1 + number % 3),
            gather=gather_over(collective),
        )
        with loader:
            if steps:
                bytecheckpoint.load(folder / str(steps), {"dataloader": loader})
            queue: list[Batch] = []
            fed: list[Batch] = []
            for batch in loader:
                queue.append({name: values.tolist() for name, values in batch.items()})
                if len(queue) > ahead:
                    fed.append(queue.pop(0))
                    loader.trained(steps + len(fed))
                if len(fed) == count:
                    break
            else:
                fed += queue
                loader.trained(steps + len(fed))
            if number >= 0:
                bytecheckpoint.save(folder / str(steps + len(fed)), {"dataloader": loader})
            return fed

    parts = ThreadWorld(ranks).run(job, timeout=100)
    return [
        {name: [*chain(*(part[name] for part in batch))] for name in batch[0]} for batch in zip(*parts, strict=True)
    ]


# --- the oracle --------------------------------------------------------------------------------------------------------


class Oracle:
    """What the documentation says of the batches of a run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.places: dict[int, tuple[int, int, int]] = {}  # token -> source, document, place in the document
        self.documents = [data.documents() for data in run.data]
        for s, documents in enumerate(self.documents):
            self.places |= {token: (s, d, i) for d, tokens in enumerate(documents) for i, token in enumerate(tokens)}

    def pieces(self, tokens: list[int]) -> Iterator[list[int]]:
        """Cut tokens into pieces of documents."""
        piece: list[int] = []
        for token in tokens:
            if piece and not self.follows(piece[-1], token):
                yield piece
                piece = []
            piece.append(token)
        if piece:
            yield piece

    def follows(self, before: int, token: int) -> bool:
        """Return whether a token is the next one of a document."""
        if before == END:
            return False
        s, d, i = self.places[before]
        document = self.documents[s][d]
        return token == END if i + 1 == len(document) else token == document[i + 1]

    def check(self, batches: list[Batch]) -> None:
        recipe, streams, fed = self.run.recipe, self.run.streams, Counter[int]()
        each, of_stream = recipe["global_batch"] // streams, [list[int]() for _ in range(streams)]
        for number, batch in enumerate(batches):
            assert {*map(len, batch.values())} == {recipe["global_batch"]}
            assert sorted(batch["rows"]) == [*range(number * len(batch["rows"]), (number + 1) * len(batch["rows"]))]
            for place, row in enumerate(batch["tokens"]):
                assert len(row) == recipe["context_length"]
                pieces = [*self.pieces(row)]
                assert batch["documents"][place] == [n for n, piece in enumerate(pieces) for _ in piece]
                assert batch["positions"][place] == [n for piece in pieces for n in range(len(piece))]
                of_stream[place // each] += row
                fed.update(row)
        if recipe["epochs"] is not None:
            self.check_whole(fed)
        else:
            assert len(batches) == BATCHES
            self.check_shares(fed)
            self.check_streams(of_stream)

    def check_whole(self, fed: Counter[int]) -> None:
        """Check that everything is fed in all epochs, but for less than one global batch."""
        recipe = self.run.recipe
        wanted = Counter(dict.fromkeys(self.places, recipe["epochs"]))
        if recipe["document_end"] is not None:
            wanted[END] = recipe["epochs"] * sum(map(len, self.documents))
        assert fed <= wanted
        assert (wanted - fed).total() < self.run.tokens

    def check_shares(self, fed: Counter[int]) -> None:
        """Check that the tokens are mixed by the shares of the sources, up to a few rows and documents of each stream."""
        of_source = Counter[int]()
        for token, times in fed.items():
            of_source[self.places[token][0] if token != END else -1] += times
        ends = of_source.pop(-1, 0)
        longest = max(max(data.lengths) for data in self.run.data) + 1
        slack = 5 * self.run.recipe["context_length"] + (2 + self.run.recipe["shuffle_buffer"]) * longest
        whole = sum(data.share for data in self.run.data)
        for s, data in enumerate(self.run.data):
            wanted = data.share / whole * (of_source.total() + ends)
            assert wanted - ends - self.run.streams * slack < of_source[s] < wanted + self.run.streams * slack

    def check_streams(self, of_stream: list[list[int]]) -> None:
        """Check that stream s of S feeds the places s, s + S, ... of the epochs of each source, one after the other."""
        size, streams = self.run.recipe["shuffle_buffer"], self.run.streams
        shuffled: dict[tuple[int, int], dict[int, int]] = {}  # source, epoch -> document at each place
        for stream, tokens in enumerate(of_stream):
            pieces = [piece for piece in self.pieces(tokens) if piece != [END]]
            assert all(self.places[piece[0]][2] == 0 for piece in pieces)
            for before in pieces[:-1]:  # whole documents
                s, d, i = self.places[before[-1] if before[-1] != END else before[-2]]
                assert i + 1 == len(self.documents[s][d])
            for s, data in enumerate(self.run.data):
                count, lengths = len(data.lengths), data.lengths
                found = [self.places[piece[0]][1] for piece in pieces if self.places[piece[0]][0] == s]
                visible = (n for n in itertools.count(stream, streams) if data.shuffle or lengths[n % count])
                order = [*islice(visible, len(found) + size)]
                if not data.shuffle and not size:
                    assert found == [place % count for place in order]
                elif not data.shuffle:
                    assert Counter(found) <= Counter(place % count for place in order)
                elif not size:
                    for place, document in zip(order, found, strict=True):
                        epoch = shuffled.setdefault((s, place // count), {})
                        assert place % count not in epoch and document not in epoch.values()
                        epoch[place % count] = document


def check(seed: int, folder: Path, most_workers: int) -> None:
    run = draw(seed, most_workers)
    wanted = feed(run, folder, -1)
    Oracle(run).check(wanted)
    found: list[Batch] = []
    for number in range(len(run.jobs)):
        found += feed(run, folder, number)
    assert found == wanted[: len(found)], f"seed {seed}: {run}"
    shutil.rmtree(folder)


@pytest.mark.parametrize("seed", range(20))
def test_random_runs_are_as_documented(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(20))
def test_many_random_runs_are_as_documented(block: int, tmp_path: Path) -> None:
    for seed in range(100 + 25 * block, 125 + 25 * block):
        (tmp_path / str(seed)).mkdir()
        check(seed, tmp_path / str(seed), 3)
