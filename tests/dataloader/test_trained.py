"""Programs that take batches before they train them lose none at a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint.dataloader import HuggingFaceLoader
from bytecheckpoint.errors import UsageError
from tests.dataloader.map_loaders import loader_of
from tests.dataloader.token_loaders import Long, loader, rows_of


def ahead(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Take `count` batches ahead."""
    queue = [batch for _ in range(count) if (batch := next(batches, None)) is not None]
    for batch in batches:
        yield queue.pop(0) if queue else batch
        queue += [batch] if count else []
    yield from queue


def endless(one: Any) -> Iterator[Any]:
    taken = -1
    while taken < one.batches:
        taken = one.batches
        yield from one


def tokens(**options: Any) -> tuple[Any, Any]:
    return loader(shuffle_buffer=3, **options), rows_of


def numbers(**_: Any) -> tuple[Any, Any]:
    return loader_of(20, 6, allow=()), list


def examples(**_: Any) -> tuple[Any, Any]:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"n": range(40)}).to_iterable_dataset(num_shards=4)
    return HuggingFaceLoader(rows, 4, streams=2, kept=4), list


KINDS = {
    "tokens": (tokens, {}),
    "workers": (tokens, {"workers": 2, "state_every": 3}),
    "rest": (tokens, {"epochs": 1, "sources": Long()}),
    "numbers": (numbers, {}),
    "examples": (examples, {}),
}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("make", "options"), KINDS.values(), ids=KINDS)
def test_a_prefetcher_loses_no_batch(tmp_path: Path, make: Any, options: dict[str, Any], depth: int) -> None:
    plain, read = make(**options | {"workers": 0})
    source = endless(plain)
    wanted = [read(next(source)) for _ in range(17)]
    fed: list[Any] = []
    for _ in range(5):  # runs of three trained steps, with a step that is lost
        one, _ = make(**options)
        if fed:
            bytecheckpoint.load(tmp_path / str(len(fed)), {"dataloader": one})
        batches = ahead(endless(one), depth)
        for step in range(len(fed) + 1, len(fed) + 4):
            fed.append(read(next(batches)))
            one.trained(step)
        if hasattr(one, "close") and len(fed) % 2:
            one.close()  # a closed loader keeps the position too
        bytecheckpoint.save(tmp_path / str(len(fed)), {"dataloader": one})
        if hasattr(one, "close"):
            one.close()
    assert fed == wanted[:15]


@pytest.mark.parametrize(("make", "options"), KINDS.values(), ids=KINDS)
def test_zip_loses_no_batch(tmp_path: Path, make: Any, options: dict[str, Any]) -> None:
    (one, read), (two, _) = make(**options), make(**options)
    fed = []
    for batch, step in zip(one, range(2), strict=False):
        fed.append(read(batch))
        one.trained(step + 1)
    assert one.batches == 3
    bytecheckpoint.save(tmp_path, {"dataloader": one})
    bytecheckpoint.load(tmp_path, {"dataloader": two})
    three, _ = make(**options)
    source = endless(three)
    assert [*fed, read(next(iter(two)))] == [read(next(source)) for _ in range(3)]
    for each in (one, two, three):
        getattr(each, "close", list)()


@pytest.mark.parametrize("make", [tokens, numbers, examples])
def test_gaps_are_named(make: Any) -> None:
    one, _ = make()
    batches = endless(one)
    for _ in range(6):  # without a word about training, all that was taken counts
        next(batches)
    with pytest.raises(
        UsageError, match=r"trained\(1\): 6 batches were taken, and positions behind 2 and more are kept"
    ):
        one.trained(1)
    with pytest.raises(UsageError, match=r"trained\(7\): 6 batches were taken"):
        one.trained(7)
    one.trained(4)
    with pytest.raises(UsageError, match=r"trained\(3\): 6 batches were taken, and positions behind 4"):
        one.trained(3)
    next(batches), next(batches)
    with pytest.raises(UsageError, match=r"8 batches were taken, and trained\(\) was called for 4 of them"):
        next(batches)
    assert one.shared_state()["batches"] == 4 and one.batches == 8


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("closed", [False, True])
def test_the_first_step_may_be_trained_in_the_rest_of_a_run(tmp_path: Path, workers: int, closed: bool) -> None:
    plain = loader(epochs=1, sources=Long(count=120))
    wanted = [rows_of(batch) for batch in plain]
    for lag in (0, 1, 2, 3):
        one = loader(epochs=1, sources=Long(count=120), workers=workers)
        assert [rows_of(next(one)) for _ in range(4)] == wanted[:4]
        assert one._rest == 3
        one.trained(4 - lag)
        if closed:
            one.close()
        bytecheckpoint.save(tmp_path / str(lag), {"dataloader": one})
        two = loader(epochs=1, sources=Long(count=120))
        bytecheckpoint.load(tmp_path / str(lag), {"dataloader": two})
        assert rows_of(next(one)) == wanted[4]
        assert [rows_of(batch) for batch in two] == wanted[4 - lag :]
        one.close()


def test_a_closed_loader_keeps_one_position() -> None:
    one = loader(workers=1)
    [next(one) for _ in range(3)]
    one.close()
    with pytest.raises(UsageError, match="positions behind 3 and more are kept"):
        one.trained(2)


def test_a_loader_that_keeps_no_positions_says_so() -> None:
    one, _ = examples()
    one = HuggingFaceLoader(next(iter(one._streams.values()))._dataset, 4, streams=2)
    next(iter(one))
    with pytest.raises(UsageError, match="pass kept= to the loader"):
        one.trained(1)


def test_states_without_a_number_of_batches_are_taken() -> None:
    one, two = loader_of(20, 6), loader_of(20, 6)
    next(iter(one))
    old = one.shared_state()
    del old["batches"]
    two.load_streams(old | {"epoch": 2}, {})
    assert two.batches == 9
