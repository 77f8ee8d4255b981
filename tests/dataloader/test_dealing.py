"""How documents are dealt to streams: ratios whatever the counts, whole epochs, and runs that began by the older rule."""

from __future__ import annotations

import json
import pickle
from collections import deque
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.dataloader import IterableSource, SequenceSource
from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError, UsageError
from tests.dataloader.old_rule import FED, FOLDER, old_loader
from tests.dataloader.token_loaders import Long, Numbers, gather_over, loader, tokens_of
from tests.support.variants import crossed


def fed(batches: int, **options: Any) -> torch.Tensor:
    one = loader(**options)
    return torch.cat([next(one)["tokens"].flatten() for _ in range(batches)])


# --- runs that began before --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("many", "few", "two"), ("two", "many", "few"), ("few", "two", "many")])
def test_a_run_of_the_older_rule_goes_on_by_it(tmp_path: Path, order: tuple[str, ...]) -> None:
    wanted = json.loads(FED.read_text())
    path = FOLDER / "step"
    for begin in (0, 10, 20):
        one = old_loader(order)
        bytecheckpoint.load(path, {"dataloader": one})
        assert [tokens_of(next(one)) for _ in range(10)] == wanted[begin : begin + 10]
        path = tmp_path / str(begin)
        bytecheckpoint.save(path, {"dataloader": one})


# --- the order and the ratios of sources -------------------------------------------------------------------------------


def mixture(shares: dict[str, float], **options: Any) -> Any:
    firsts = {"a": 100, "b": 200, "c": 300, "d": 400}
    sources = {Numbers(name, 17, firsts[name]): share for name, share in shares.items()}
    return loader(sources=sources, **options)


@pytest.mark.parametrize(
    "other",
    [{"c": 3.0, "b": 2.0, "a": 1.0}, {"b": 0.2, "a": 0.1, "c": 0.3}, {"a": 10, "c": 30, "b": 20}],
    ids=["order", "rounding", "scale"],
)
def test_sources_in_another_order_are_those_of_the_run(tmp_path: Path, other: dict[str, float]) -> None:
    one = mixture({"a": 1.0, "b": 2.0, "c": 3.0})
    for _ in range(3):
        next(one)
    bytecheckpoint.save(tmp_path, {"dataloader": one})
    wanted = [tokens_of(next(one)) for _ in range(20)]
    two = mixture(other)
    bytecheckpoint.load(tmp_path, {"dataloader": two})
    for begin in (0, 10):  # and again, from a checkpoint of the second
        assert [tokens_of(next(two)) for _ in range(10)] == wanted[begin : begin + 10]
        bytecheckpoint.save(tmp_path / "again", {"dataloader": two})
        two = mixture(other)
        bytecheckpoint.load(tmp_path / "again", {"dataloader": two})


def test_other_ratios_are_refused(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path, {"dataloader": mixture({"a": 1.0, "b": 2.0})})
    for other in ({"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 2.00001}):
        with pytest.raises(IncompatibleCheckpointError, match=r"ratios was .* and is .* here"):
            bytecheckpoint.load(tmp_path, {"dataloader": mixture(other)})
    bytecheckpoint.load(tmp_path, {"dataloader": mixture({"a": 2.0, "b": 1.0}, allow="ratios")})


def test_ranks_with_sources_in_different_orders_fail_the_save(tmp_path: Path) -> None:
    def save(collective: Collective) -> None:
        shares = {"a": 1.0, "b": 1.0} if collective.rank else {"b": 1.0, "a": 1.0}
        with pytest.raises(CheckpointError, match="hold different states"):
            bytecheckpoint.save(tmp_path, {"dataloader": mixture(shares, rank=collective.rank, ranks=2)})

    ThreadWorld(2).run(save, timeout=60)


# --- small sources -----------------------------------------------------------------------------------------------------


class Even(Numbers):
    """Documents of four tokens."""

    def __getitem__(self, index: int) -> Any:
        return np.full(4, self.first + index)


@pytest.mark.parametrize(("count", "shuffle"), crossed([1, 5, 40, 100], [True, False]))
def test_a_source_of_few_documents_keeps_its_share(count: int, shuffle: bool) -> None:
    sources = {Even("few", count, shuffle=shuffle): 1.0, Even("many", 10_000, first=1000): 1.0}
    tokens = fed(80, sources=sources, streams=64, global_batch=64, context_length=16)
    assert abs((tokens < 1000).double().mean().item() - 0.5) < 0.02
    counts = torch.bincount(tokens[tokens < 1000], minlength=count).double()
    assert len(counts) == count and counts.max() < 1.5 * counts.mean() and counts.min() > 0.5 * counts.mean()


def test_the_epochs_of_a_source_follow_each_other_without_end() -> None:
    one = loader(sources=Even(count=5, shuffle=False), context_length=4)
    for batch in range(20):  # 6 streams of one document each
        assert [row[0] for row in tokens_of(next(one))] == [(6 * batch + stream) % 5 for stream in range(6)]


def to_one_stream(stream: int, streams: int, epoch: int) -> list[list[int]]:
    return [[7]] if stream == 1 else []


def test_a_stream_that_an_iterable_leaves_out_is_named() -> None:
    sources = [Numbers(), IterableSource(to_one_stream, "sparse")]
    with pytest.raises(UsageError, match="'sparse' had no document for stream 0 of 6 in 100 epochs"):
        fed(9, sources=sources)


# --- documents without tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "workers"),
    crossed([SequenceSource([[]] * 50, "blank"), [Numbers(), SequenceSource([[]] * 3, "blank")]], [0, 1]),
)
def test_documents_without_tokens_end_in_an_error(sources: Any, workers: int) -> None:
    match = "of source 'blank' have no tokens in stream 0 of 6, the last of them document"
    with loader(sources=sources, workers=workers, context_length=2) as one, pytest.raises(UsageError, match=match):
        deque(one, 0)


def test_some_documents_without_tokens_are_passed_over() -> None:
    source = SequenceSource([*[[]] * 999, [1, 2, 3]], "nearly blank", shuffle=False)
    assert {*fed(5, sources=source, streams=1, global_batch=6).tolist()} == {1, 2, 3}
    assert [*loader(sources=SequenceSource([[]] * 50, "blank"), epochs=3)] == []


# --- whole epochs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"shuffle_buffer": 9}, {"streams": 3}, {"count": 4}, {"count": 70, "epochs": 3}]
)
def test_whole_epochs_are_fed(options: dict[str, Any]) -> None:
    options = {"epochs": 1, **options}
    source = Long(count=options.pop("count", 50))
    found = torch.cat([batch["tokens"].flatten() for batch in loader(sources=source, **options)])
    sizes = torch.tensor([options["epochs"] * len(source[i]) for i in range(len(source))])
    lost = sizes - torch.bincount(found, minlength=len(source))
    assert lost.min() >= 0 and lost.sum() < 6 * 8


def test_ranks_and_resumes_feed_the_same_rest(tmp_path: Path) -> None:
    options = {"sources": [Long(), Numbers("b", 9, 100)], "epochs": 2, "shuffle_buffer": 4, "global_batch": 12}
    wanted = [tokens_of(batch) for batch in loader(**options)]
    first_end = next(i for i in range(99) if i > 6 and _ends(options, i))

    def feed(collective: Collective, begin: int, end: int | None, workers: int) -> list[list[list[int]]]:
        gather = gather_over(collective)
        with loader(collective.rank, collective.world_size, gather=gather, workers=workers, **options) as own:
            if begin:
                bytecheckpoint.load(tmp_path / str(begin), {"dataloader": own})
            found = [tokens_of(next(own)) for _ in range(begin, end)] if end else [*map(tokens_of, own)]
            if end:
                bytecheckpoint.save(tmp_path / str(end), {"dataloader": own})
            return found

    places = [0, first_end - 1, first_end + 1, first_end + 9, len(wanted) - 1, None]
    for ranks, workers, (begin, end) in zip((2, 3, 1, 4, 5), (1, 0, 2, 0, 0), pairwise(places), strict=True):
        assert begin is not None
        parts = ThreadWorld(ranks).run(feed, begin, end, workers, timeout=100)
        assert [[*chain(*rows)] for rows in zip(*parts, strict=True)] == wanted[begin:end]


def test_states_of_workers_are_sent_without_the_memory_around_them() -> None:
    def gather(value: Any) -> Any:
        if isinstance(value, dict):
            sizes.append(len(pickle.dumps(value)))
            raise LookupError
        return [value, False]

    sizes: list[int] = []
    for workers in (0, 1):
        options = {"epochs": 1, "sources": Long(), "shuffle_buffer": 9, "workers": workers, "gather": gather}
        with loader(0, 2, **options) as one, pytest.raises(LookupError):
            deque(one, 0)
    assert sizes[1] <= sizes[0]


def _ends(options: dict[str, Any], batches: int) -> bool:
    one = loader(**options)
    for _ in range(batches):
        next(one)
    return one._rest is not None
