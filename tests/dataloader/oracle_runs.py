"""Random runs of a token loader: their data, which may grow, their recipe, and the jobs that feed them."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
import struct
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.dataloader import (
    JsonLinesSource,
    MegatronSource,
    SequenceSource,
    TokenBufferLoader,
    TokenFileSource,
    TokenRecipe,
    WorkerOptions,
)
from tests.dataloader.token_loaders import gather_over

__all__ = ["BATCHES", "END", "Batch", "Data", "Job", "Run", "draw", "feed", "steps_of"]

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
        share: its share of the tokens, by batch.
        counts: number of documents before the first addition, before the second one, and so on, and at the end.
        cuts: numbers of the documents with which files of JSON lines begin, besides the first file.
        bad: numbers of the documents that cannot be decoded or tokenized.
        ending: of the files' names; ".gz" compresses them.
        cached: whether the source has a cache.
    """

    name: str
    kind: str
    first: int
    lengths: list[int]
    shuffle: bool
    share: dict[int, float]
    counts: list[int]
    cuts: list[int] = field(default_factory=list)
    bad: set[int] = field(default_factory=set)
    ending: str = ""
    cached: bool = False

    def documents(self) -> list[list[int]]:
        starts = np.cumsum([self.first, *self.lengths])
        return [[*range(a, b)] for a, b in zip(starts.tolist(), starts[1:].tolist(), strict=False)]

    def share_in(self, batch: int) -> float:
        """Return the share in a batch."""
        return self.share[max(begin for begin in self.share if begin <= batch)]

    def source(self, folder: Path, grown: int, *, write: bool = False) -> Any:
        """Return the source after so many additions; write its files before."""
        count, documents = self.counts[grown], self.documents()
        compress = gzip.compress if self.ending else bytes
        options: dict[str, Any] = {"shuffle": self.shuffle}
        if self.ending or self.cached:
            options["cache"] = folder.parent / "cache"
        if self.kind == "jsonl":
            lines = [json.dumps({"text": d}) if i not in self.bad else '{"text": [3' for i, d in enumerate(documents)]
            ends = [*(cut for cut in self.cuts if cut < count), count]
            for number, (a, b) in enumerate(itertools.pairwise([0, *ends]) if write else ()):
                data = "".join(f"{line}\n" for line in lines[a:b]).encode()
                (folder / f"{self.name}-{number}.jsonl{self.ending}").write_bytes(compress(data))
            return JsonLinesSource(folder / f"{self.name}-*.jsonl{self.ending}", self.name, **options)
        if self.kind == "tokens":
            path = folder / f"{self.name}{self.ending}"
            offsets = np.cumsum([0, *self.lengths[:count]])
            if write:
                path.write_bytes(compress(np.arange(self.first, self.first + offsets[-1], dtype=np.uint32).tobytes()))
            return TokenFileSource(path, self.name, dtype="uint32", offsets=offsets, **options)
        if self.kind == "megatron":
            path = folder / self.name
            if write:
                lengths = np.array(self.lengths[:count], "<i4")
                tokens = np.arange(self.first, self.first + lengths.sum(), dtype="<i4")
                places = (np.cumsum(lengths) - lengths).astype("<i8") * 4
                begins = np.arange(count + 1, dtype="<i8")
                head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, count, count + 1)
                path.with_suffix(".bin").write_bytes(tokens.tobytes())
                path.with_suffix(".idx").write_bytes(b"".join(map(bytes, (head, lengths, places, begins))))
            return MegatronSource(path, self.name, **options)
        items = [document if i not in self.bad else ["bad"] for i, document in enumerate(documents[:count])]
        return SequenceSource(items, self.name, shuffle=self.shuffle)


@dataclass
class Job:
    """One job of a run.

    Attributes:
        ranks: number of ranks.
        workers: of each rank.
        batches: batches that are trained.
        ahead: batches that are taken ahead.
        grown: additions to the data before this job.
    """

    ranks: int
    workers: int
    batches: int
    ahead: int
    grown: int = 0


@dataclass
class Run:
    """A run: its data, its recipe, and its jobs.

    Attributes:
        data: the sources.
        recipe: arguments of the recipe.
        jobs: the jobs.
    """

    data: list[Data]
    recipe: dict[str, Any]
    jobs: list[Job] = field(default_factory=list)

    @property
    def streams(self) -> int:
        return int(self.recipe["streams"])

    def size(self, batch: int) -> int:
        """Return the number of rows of a global batch."""
        sizes = self.recipe["global_batch"]
        return int(sizes[max(begin for begin in sizes if begin <= batch)])

    def whole(self, steps: list[int]) -> list[Job]:
        """Return jobs of one process that feed the same data, if additions came after so many batches."""
        last = BATCHES if self.recipe["epochs"] is None else 10_000
        ends = [*steps, last]
        return [Job(1, 0, end - begin, 0, grown) for grown, (begin, end) in enumerate(itertools.pairwise([0, *ends]))]


def draw(seed: int, most_workers: int) -> Run:
    chance = random.Random(seed)
    end, first = chance.choice([None, END]), 10
    epochs, additions = chance.choice([None, 1, 2, 3]), chance.choice([0, 0, 1, 2])
    streams = chance.choice([1, 2, 3, 6, 12])
    changes = sorted(chance.sample(range(1, 40), chance.choice([0, 0, 1, 2])))
    skip_bad = chance.random() < 0.4
    data = []
    for number in range(chance.choice([1, 1, 2, 3])):
        counts = [chance.choice([1, 2, 5, 17, 60, 200])]
        for _ in range(additions):
            counts.append(counts[-1] + chance.choice([0, 1, 4, 30]))
        count = counts[-1]
        shuffle = chance.random() < 0.6
        kind = chance.choice(["list", "jsonl", "tokens", "megatron"])
        bad = {i for i in range(1, count) if kind in ("list", "jsonl") and skip_bad and chance.random() < 0.1}
        least = 0 if kind in ("list", "jsonl") and not shuffle and end is None and count > 4 else 1
        most = chance.choice([1.0, 1.3])
        lengths = [max(least, int(chance.lognormvariate(most, most))) for _ in range(count)]
        lengths[0] = lengths[0] or 3
        zero = [0.0] if number and changes and epochs is None else []
        seen = {i for i in range(count) if lengths[i] and i not in bad}
        for n in counts if not shuffle else ():
            if len({i % math.gcd(n, streams) for i in seen if i < n}) < math.gcd(n, streams):
                bad, lengths = set(), [max(1, length) for length in lengths]  # else a stream would find no token
        share = {begin: chance.choice([1.0, 2.0, 3.0, *zero]) for begin in [0, *changes]}
        cuts = sorted({cut for cut in [*counts, chance.randrange(count)] if 0 < cut < count and chance.random() < 0.5})
        ending = chance.choice(["", "", ".gz"]) if kind in ("jsonl", "tokens") else ""
        of_files = {"cuts": cuts, "bad": bad, "ending": ending, "cached": chance.random() < 0.3}
        data.append(Data(f"source-{number}", kind, first, lengths, shuffle, share, counts, **of_files))
        first += sum(lengths)
    begins = [0, *sorted(chance.sample(range(1, 40), chance.choice([0, 0, 1, 3])))]
    recipe = {
        "context_length": chance.choice([4, 8, 21]),
        "global_batch": {begin: streams * chance.choice([1, 1, 2, 3]) for begin in begins},
        "streams": streams,
        "document_end": end,
        "shuffle_buffer": chance.choice([0, 0, 4]),
        "epochs": epochs,
        "seed": chance.randrange(100),
        "skip_bad": skip_bad,
    }
    run = Run(data, recipe)
    grown = 0
    for number in range(chance.randint(2, 4) + additions):
        ranks = chance.randint(1, min(streams, 4))
        grown += number > 0 and grown < additions and chance.random() < 0.6
        workers, batches = chance.randint(0, most_workers), chance.randint(1, 9)
        run.jobs.append(Job(ranks, workers, batches, chance.choice([0, 0, 1, 3]), grown))
    for one in run.data:
        one.counts = one.counts[: grown + 1]
        one.lengths = one.lengths[: one.counts[-1]]
        one.bad = {i for i in one.bad if i < one.counts[-1]}
    return run


def steps_of(run: Run, found: list[list[Batch]]) -> list[int]:
    """Return the number of batches before each addition."""
    begins = [0, *itertools.accumulate(map(len, found))]
    grown = [job.grown for job in run.jobs]
    return [begins[grown.index(number)] for number in range(1, grown[-1] + 1)]


def feed(run: Run, jobs: list[Job], folder: Path) -> tuple[list[list[Batch]], Counter[str]]:
    """Feed jobs one after the other, each from the checkpoint of the one before.

    Returns:
        The batches of each job, and the bad documents of each source that were left out.
    """
    found: list[list[Batch]] = []
    skipped: Counter[str] = Counter()
    for number, job in enumerate(jobs):
        has_grown = number > 0 and job.grown > jobs[number - 1].grown
        feeding = _Feeding(run, job, folder, number, sum(map(len, found)), ["appended"] if has_grown else [])
        parts = ThreadWorld(job.ranks).run(feeding.rank, timeout=100)
        batches = zip(*(fed for fed, _ in parts), strict=True)
        found.append([{name: [*chain(*(part[name] for part in batch))] for name in batch[0]} for batch in batches])
        skipped = sum((Counter(of_rank) for _, of_rank in parts), Counter())
    return found, skipped


class _Feeding:
    """One job, from the checkpoint of number - 1 to that of its number."""

    def __init__(self, run: Run, job: Job, folder: Path, number: int, step: int, allow: list[str]) -> None:
        self.run, self.job, self.folder, self.number, self.step, self.allow = run, job, folder, number, step, allow
        self.where, chance = folder / f"data-{number}", random.Random(number)
        self.where.mkdir(parents=True)
        for data in run.data:
            data.source(self.where, job.grown, write=True)  # data may move
        self.order = chance.sample(run.data, len(run.data)) if number else run.data  # sources in any order
        self.scale = chance.choice([1.0, 0.1, 7.0])  # ratios in any scale

    def rank(self, collective: Collective) -> tuple[list[Batch], dict[str, int]]:
        shares = [{begin: share * self.scale for begin, share in data.share.items()} for data in self.order]
        sources = [data.source(self.where, self.job.grown) for data in self.order]
        loader = TokenBufferLoader(
            TokenRecipe(dict(zip(sources, shares, strict=True)), **self.run.recipe),
            rank=collective.rank,
            ranks=collective.world_size,
            workers=WorkerOptions(self.job.workers, ahead=1 + self.number % 3),
            gather=gather_over(collective),
            allow=self.allow,
        )
        with loader:
            if self.number:
                bytecheckpoint.load(self.folder / str(self.number - 1), {"dataloader": loader})
            queue: list[Batch] = []
            fed: list[Batch] = []
            for batch in loader if self.job.batches else ():
                queue.append({name: values.tolist() for name, values in batch.items()})
                if len(queue) > self.job.ahead:
                    fed.append(queue.pop(0))
                    loader.trained(self.step + len(fed))
                if len(fed) == self.job.batches:
                    break
            else:
                fed += queue
                loader.trained(self.step + len(fed))
            bytecheckpoint.save(self.folder / str(self.number), {"dataloader": loader})
            return fed, {name: progress.skipped for name, progress in loader.progress().items()}
