"""Random runs of a token loader, checked against an oracle that is written from docs/how-to/data-loaders.md alone.

Each token says which token of which document of which source it is. So the oracle reads from the batches which documents
each stream has fed, and compares that with what the documentation promises. Jobs of other sizes must feed the same.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import pytest

from tests.dataloader.oracle_runs import BATCHES, END, Batch, Data, Run, draw, feed, steps_of
from tests.support.variants import quick

#: Number of a pass over some documents, the documents, and a place in their order.
Place = tuple[int, range, int]


def passes(counts: list[int], added: tuple[int, ...]) -> Iterator[range]:
    """Return the documents of the epochs of a source, among them those of additions, at the end of the running epoch.

    Args:
        counts: number of documents before each addition, and at the end.
        added: number of the pass over the documents of each addition; 0: nothing was fed before it.
    """
    count = counts[0]
    for number in itertools.count():
        if number in added:
            last = max(after for at, after in zip(added, counts[1:], strict=True) if at == number)
            if number:
                yield range(count, last)
            count = last
            if not number:
                yield range(count)
        else:
            yield range(count)


def places(counts: list[int], added: tuple[int, ...]) -> Iterator[Place]:
    """Return the pass, its documents, and the place in it, of each place of the order of a source."""
    for number, documents in enumerate(passes(counts, added)):
        yield from ((number, documents, place) for place in range(len(documents)))


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

    def check(self, batches: list[Batch], steps: list[int], skipped: Counter[str]) -> None:
        """Check a whole run.

        Args:
            batches: global batches.
            steps: number of batches before each addition to the data.
            skipped: number of bad documents that were left out of each source.
        """
        context, streams, first = self.run.recipe["context_length"], self.run.streams, 0
        of_stream = [list[int]() for _ in range(streams)]
        sizes = []  # tokens of a stream up to the end of each batch
        for number, batch in enumerate(batches):
            size = self.run.size(number)
            assert {*map(len, batch.values())} == {size}
            assert sorted(batch["rows"]) == [*range(first, first + size)]
            first += size
            for place, row in enumerate(batch["tokens"]):
                assert len(row) == context
                pieces = [*self.pieces(row)]
                assert batch["documents"][place] == [n for n, piece in enumerate(pieces) for _ in piece]
                assert batch["positions"][place] == [n for piece in pieces for n in range(len(piece))]
                of_stream[place // (size // streams)] += row
            sizes.append(len(of_stream[0]))
        fed = Counter(chain(*of_stream))
        assert not any(self.is_bad(token) for token in fed)
        if self.run.recipe["epochs"] is not None:
            self.check_whole(fed, len(batches), skipped)
        else:
            assert len(batches) == BATCHES
            self.check_shares(batches)
            self.check_streams(of_stream, [sizes[step - 1] if step else 0 for step in steps])

    def is_bad(self, token: int) -> bool:
        """Return whether a token is of a bad document."""
        if token == END:
            return False
        s, d, _ = self.places[token]
        return d in self.run.data[s].bad

    def check_whole(self, fed: Counter[int], batches: int, skipped: Counter[str]) -> None:
        """Check that everything is fed in all epochs from its first one on, but for less than one global batch."""
        recipe = self.run.recipe
        lost = ends = 0
        for data, documents in zip(self.run.data, self.documents, strict=True):
            times, after, most = recipe["epochs"], data.counts[0], recipe["epochs"] * len(data.bad)
            for d, tokens in enumerate(documents):
                if d >= after:  # of the next addition, in an epoch that is not known
                    after = next(count for count in data.counts if count > d)
                    times = max([1, *(fed[token] for token in chain(*documents[d:after]))])
                    assert times <= recipe["epochs"]
                if d in data.bad:
                    continue
                assert all(fed[token] <= times for token in tokens)
                lost += sum(times - fed[token] for token in tokens)
                ends += times
            assert most // 3 - self.run.size(batches) * recipe["context_length"] <= skipped[data.name] <= most
        if recipe["document_end"] is not None:
            assert fed[END] <= ends
            lost += ends - fed[END]
        assert lost < self.run.size(batches) * recipe["context_length"]

    def check_shares(self, batches: list[Batch]) -> None:
        """Check that the tokens are mixed by the shares of the sources, up to a few rows and documents of each stream."""
        run, recipe = self.run, self.run.recipe
        longest = max(max(data.lengths) for data in run.data) + 1
        slack = 2 * run.streams * (5 * recipe["context_length"] + (2 + recipe["shuffle_buffer"]) * longest)
        for begin, end in itertools.pairwise([*sorted({0}.union(*(data.share for data in run.data))), BATCHES]):
            of_source = Counter[int]()
            for token in chain(*(row for batch in batches[begin:end] for row in batch["tokens"])):
                of_source[self.places[token][0] if token != END else -1] += 1
            ends = of_source[-1]
            whole = sum(data.share_in(begin) for data in run.data)
            for s, data in enumerate(run.data):
                wanted = data.share_in(begin) / whole * of_source.total()
                assert wanted - ends - slack < of_source[s] < wanted + slack

    def check_streams(self, of_stream: list[list[int]], sizes: list[int]) -> None:
        """Check that stream s of S feeds the places s, s + S, ... of the epochs of each source, one after the other.

        Args:
            of_stream: tokens of each stream.
            sizes: tokens of a stream before each addition.
        """
        found: list[list[list[tuple[int, int]]]] = [[[] for _ in of_stream] for _ in self.run.data]
        for stream, tokens in enumerate(of_stream):
            position = 0
            for piece in self.pieces(tokens):
                s, d, i = self.places.get(piece[0], (-1, 0, 0))
                assert i == 0 and (
                    s < 0 or position + len(piece) == len(tokens) or piece[-1] in (self.documents[s][d][-1], END)
                )
                if s >= 0:
                    found[s][stream].append((d, position))
                position += len(piece)
        for s, data in enumerate(self.run.data):
            grown = [number for number, (a, b) in enumerate(itertools.pairwise(data.counts)) if a < b]
            counts = [*(data.counts[number] for number in grown), data.counts[-1]]
            documents = [[d for d, _ in of_one] for of_one in found[s]]
            begun = [[sum(at < sizes[n] for _, at in of_one) for of_one in found[s]] for n in grown]
            if not (data.shuffle and data.bad):  # else nobody knows which documents of an order were left out
                assert any(
                    self.is_fed(data, counts, documents, added) for added in self.additions(data, counts, begun, ())
                )

    def visible(self, data: Data, counts: list[int], added: tuple[int, ...], stream: int) -> Iterator[Place]:
        """Return the places of a stream whose documents can be seen in batches."""
        for number, documents, place in islice(places(counts, added), stream, None, self.run.streams):
            if data.shuffle or (data.lengths[documents[place]] and documents[place] not in data.bad):
                yield number, documents, place

    def additions(
        self, data: Data, counts: list[int], begun: list[list[int]], added: tuple[int, ...]
    ) -> Iterator[tuple[int, ...]]:
        """Return which passes over added documents there may be, since documents in shuffle buffers cannot be seen.

        Args:
            data: the source.
            counts: number of its documents before each addition, and at the end.
            begun: documents that each stream had begun before each of the following additions.
            added: passes of the additions before.
        """
        if not begun:
            yield added
            return
        least, most = [-1], [-1]
        for stream, count in enumerate(begun[0]):
            seen = self.visible(data, counts[: len(added) + 1], added, stream)
            numbers = [number for number, *_ in islice(seen, count + self.run.recipe["shuffle_buffer"] + 1)]
            least += numbers[count - 1 : count] if count else []
            most.append(numbers[-1])
        for number in range(max(least) + 1, max(most) + 2):
            yield from self.additions(data, counts, begun[1:], (*added, number))

    def is_fed(self, data: Data, counts: list[int], found: list[list[int]], added: tuple[int, ...]) -> bool:
        """Return whether streams have fed the documents at their places, if documents were added in these passes."""
        size, shuffled = self.run.recipe["shuffle_buffer"], dict[int, dict[int, int]]()
        for stream, documents in enumerate(found):
            order = [*islice(self.visible(data, counts, added, stream), len(documents) + size)]
            own = [of_pass[place] for _, of_pass, place in order]
            if not data.shuffle:
                if Counter(documents) - Counter(own) or (not size and documents != own):
                    return False
            elif not size:
                for (number, of_pass, place), document in zip(order, documents, strict=True):
                    known = shuffled.setdefault(number, {})
                    if place in known or document in known.values() or document not in of_pass:
                        return False
                    known[place] = document
        return True


def check(seed: int, folder: Path, most_workers: int) -> None:
    run = draw(seed, most_workers)
    found, _ = feed(run, run.jobs, folder / "jobs")
    steps = steps_of(run, found)
    parts, skipped = feed(run, run.whole(steps), folder / "whole")
    wanted, batches = [*chain(*parts)], [*chain(*found)]
    assert batches == wanted[: len(batches)], f"seed {seed}: {run}"
    Oracle(run).check(wanted, steps, skipped)
    shutil.rmtree(folder, ignore_errors=True)  # metrics are written behind a save


@pytest.mark.parametrize("seed", quick(range(20), every=2))
def test_random_runs_are_as_documented(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(20))
def test_many_random_runs_are_as_documented(block: int, tmp_path: Path) -> None:
    for seed in range(100 + 25 * block, 125 + 25 * block):
        (tmp_path / str(seed)).mkdir()
        check(seed, tmp_path / str(seed), 3)
