"""Global batches whose size changes within a run."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.dataloader import TokenRecipe
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from tests.dataloader.token_loaders import Long, Numbers, gather_over, loader, rows_of, tokens_of

SIZES = {0: 6, 4: 18, 9: 12, 12: 6, 15: 24}
OPTIONS: dict[str, Any] = {"global_batch": SIZES, "sources": [Long(), Numbers("b", 9, 100)], "shuffle_buffer": 4}


def test_each_batch_has_its_size_and_rows_are_those_of_any_batch() -> None:
    wanted = {row[0]: row for batch in islice(loader(**OPTIONS | {"global_batch": 6}), 80) for row in rows_of(batch)}
    assert wanted.keys() == {*range(480)}
    begin = 0
    for number, batch in enumerate(islice(loader(**OPTIONS), 20)):
        rows = rows_of(batch)
        assert len(rows) == SIZES[max(first for first in SIZES if first <= number)]
        assert sorted(row[0] for row in rows) == [*range(begin, begin + len(rows))]
        assert all(row == wanted[row[0]] for row in rows)
        begin += len(rows)


@pytest.mark.parametrize("epochs", [None, 4])
def test_ranks_workers_and_resumes_feed_the_same(tmp_path: Path, epochs: int | None) -> None:
    """In the middle of a stage, on its border, and in the rest of a run that ends."""
    options = OPTIONS | {"epochs": epochs}
    wanted = [tokens_of(batch) for batch in islice(loader(**options), 60)]
    assert epochs is None or 20 < len(wanted) < 60

    def job(collective: Collective, begin: int, end: int, workers: int) -> list[list[list[int]]]:
        own = loader(collective.rank, collective.world_size, gather=gather_over(collective), workers=workers, **options)
        with own:
            if begin:
                bytecheckpoint.load(tmp_path / str(begin), {"dataloader": own})
            found = [tokens_of(batch) for batch in islice(own, end - begin + 1)]
            own.trained(begin + len(found[: end - begin]))  # one was taken ahead
            bytecheckpoint.save(tmp_path / str(end), {"dataloader": own})
            assert own.batches == begin + len(found)
            return found[: end - begin]

    begin = 0
    for ranks, end, workers in ((2, 4, 1), (3, 6, 0), (1, 12, 2), (6, 14, 0), (4, 60, 0)):
        parts = ThreadWorld(ranks).run(job, begin, end, workers, timeout=100)
        assert [[*chain(*rows)] for rows in zip(*parts, strict=True)] == wanted[begin:end]
        begin = end


def test_the_streams_of_all_sizes() -> None:
    assert TokenRecipe(Numbers(), 8, {0: 48, 10: 64}).streams == 16
    assert TokenRecipe(Numbers(), 8, {0: 48, 10: 48}).shared() == TokenRecipe(Numbers(), 8, 48).shared()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({0: 12, 5: 15}, "a global batch of 15 rows cannot take equally many from 6 streams"),
        ({1: 12}, "begins with batch 0"),
        ({}, "begins with batch 0"),
        ({0: 6, 5: 0}, "global_batch must be an int of at least 1"),
        ({0: 6, -5: 6}, "the batch of a global batch must be an int of at least 0"),
        ({0: 6, 5: 6.0}, "global_batch must be an int"),
    ],
)
def test_wrong_sizes(sizes: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loader(global_batch=sizes)


@pytest.mark.parametrize(
    ("before", "now", "batches", "refusal"),
    [
        (6, 12, 7, None),
        (6, {0: 6, 9: 12}, 7, None),
        (6, {0: 6, 9: 12}, 9, None),
        (6, {0: 6, 9: 12}, 10, "also in the 10 batches before"),
        (6, {0: 12, 9: 6}, 7, "also in the 7 batches before"),
        (6, {0: 12, 9: 6}, 0, None),
        ({0: 6, 9: 12}, {0: 6, 20: 18}, 9, None),
        ({0: 6, 9: 12}, {0: 6, 20: 18}, 10, "also in the 10 batches before"),
        ({0: 6, 9: 12}, {0: 6, 9: 12, 20: 18}, 12, None),
        ({0: 6, 9: 12}, 12, 12, None),
    ],
)
def test_stages_that_were_trained_cannot_change(before: Any, now: Any, batches: int, refusal: str | None) -> None:
    shared = loader(global_batch=before).shared_state() | {"batches": batches}
    with pytest.raises(IncompatibleCheckpointError, match=refusal or r"global_batch was .* \(allow="):
        loader(global_batch=now).choose_streams(shared, range(6))
    other = loader(global_batch=now, allow="global_batch")
    if refusal is None:
        assert [*other.choose_streams(shared, range(6))] == [*range(6)]
    else:
        with pytest.raises(IncompatibleCheckpointError, match=refusal):
            other.choose_streams(shared, range(6))
