"""Map-style data sets go on exactly, at any data-parallel degree and with any number of workers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.dataloader.map_style import ResumableLoader, ResumableSampler
from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError, UsageError
from tests.dataloader.map_loaders import Numbers, hand_over, loader_of, take
from tests.dataloader.segments import Part, Reference, Segment, play, segments


def expected(length: int, batch: int, epoch: int, seed: int, shuffle: bool, drop_last: bool) -> list[list[int]]:
    order = list(DistributedSampler(Numbers(length), 1, 0, shuffle=shuffle, seed=seed + epoch))
    batches = [order[i : i + batch] for i in range(0, length, batch)]
    return [b for b in batches if len(b) == batch or not drop_last]


@st.composite
def runs(draw: st.DrawFn) -> tuple[dict[str, Any], list[Segment]]:
    """Draw the arguments of a loader, and segments."""
    ranks_most = draw(st.integers(1, 5))
    batch = draw(st.integers(ranks_most, 12))
    length = draw(st.integers(batch, 60))
    drop_last = 0 < length % batch < ranks_most or draw(st.booleans())
    options = {"shuffle": draw(st.booleans()), "drop_last": drop_last, "seed": draw(st.integers(0, 9))}
    run = draw(st.lists(segments(ranks_most), min_size=2, max_size=5))
    return {"length": length, "batch": batch, **options}, run


@settings(max_examples=15)
@given(runs())
def test_any_sequence_of_jobs_goes_on_exactly(case: tuple[dict[str, Any], list[Segment]]) -> None:
    """The reference is what a DistributedSampler feeds, epoch by epoch."""
    options, run = case

    def make(segment: Segment, data: int, other: int, collective: Collective) -> tuple[Any, Iterator[Part]]:
        loader = loader_of(rank=data, ranks=segment.ranks, **options)
        return loader, chain.from_iterable(repeat(loader))

    reference = chain.from_iterable(expected(epoch=epoch, **options) for epoch in count())
    with tempfile.TemporaryDirectory() as folder:
        play(run, Path(folder), make, Reference(reference))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # torch's own choice
@pytest.mark.parametrize(("workers", "persistent"), [(1, False), (2, True)])
def test_workers_that_are_ahead_lose_nothing(workers: int, persistent: bool) -> None:
    reference = [*take([loader_of(20, 6)], 9)]
    first = loader_of(20, 6, workers=workers, persistent=persistent)
    fed = [*take([first], 2)]  # the workers hold more
    hand_over([first], [second := loader_of(20, 6, workers=workers, persistent=persistent)])
    fed += take([second], 1)  # broken off within an epoch, and gone on in the same loader
    fed += take([second], 3)
    hand_over([second], pair := [loader_of(20, 6, rank=rank, ranks=2) for rank in range(2)])
    fed += take(pair, 3)
    assert fed == reference


def test_global_batches_are_those_of_a_distributed_sampler() -> None:
    loader = loader_of(24, 8, seed=3)
    loader.set_epoch(2)
    samplers = [DistributedSampler(Numbers(24), 4, rank, seed=3) for rank in range(4)]
    for sampler in samplers:
        sampler.set_epoch(2)
    theirs = [list(sampler) for sampler in samplers]
    for number, batch in enumerate(loader):
        assert sorted(batch) == sorted(i for ids in theirs for i in ids[2 * number : 2 * number + 2])


def test_epochs_are_counted() -> None:
    loader = loader_of(10, 4)
    assert len(loader) == 3
    epochs = []
    for epoch in range(3):
        loader.set_epoch(epoch)  # as with DistributedSampler: no harm
        epochs.append(list(loader))
    assert loader.epoch == 3 and epochs[0] != epochs[1]
    loader.set_epoch(1)
    assert list(loader) == epochs[1]
    loader.set_epoch(0)
    iterator = iter(loader)
    next(iterator)
    loader.set_epoch(1)
    with pytest.raises(UsageError, match="begin another one"):
        next(iterator)


def test_a_loop_that_forgets_the_loaded_epoch_is_refused() -> None:
    old, new = loader_of(10, 4), loader_of(10, 4)
    list(take([old], 5))
    hand_over([old], [new])
    with pytest.raises(UsageError, match="continues in epoch 1"):
        new.set_epoch(0)
    new.set_epoch(1)
    assert new.sampler.taken == 8


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"length": 21}, "dataset_length was 20 and is 21"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"fingerprint": "b"}, "dataset_fingerprint was 'a' and is 'b'"),
        ({"batch": 4}, r'global_batch was 5 and is 4 here \(allow=\("global_batch",\)'),
    ],
)
def test_other_data_is_refused(other: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"length": 20, "batch": 5, "fingerprint": "a"}
    with pytest.raises(IncompatibleCheckpointError, match=message):
        hand_over([loader_of(**arguments)], [loader_of(**(arguments | other))])


def test_another_global_batch_goes_on_behind_the_last_sample() -> None:
    old = loader_of(20, 6)
    fed = [*take([old], 2)]
    hand_over([old], new := [loader_of(20, 4, rank=rank, ranks=2, allow=("global_batch",)) for rank in range(2)])
    assert [*chain(*fed, *take(new, 2))] == [*chain(*expected(20, 20, 0, 0, True, False))]
    hand_over([loader_of(20, 6)], [loader_of(20, 4, allow=("global_batch",))])
    wide = loader_of(20, 4, rank=0, ranks=4, allow=("global_batch",))
    old.set_epoch(5)
    [*take([old], 1)]
    with pytest.raises(IncompatibleCheckpointError, match="last global batch of the epoch has 2 samples"):
        hand_over([old], [wide])


def test_bad_arguments_are_named() -> None:
    with pytest.raises(UsageError, match="global_batch is 3"):
        loader_of(20, 3, rank=0, ranks=4)
    with pytest.raises(UsageError, match="has 2 samples, which is none for some of 3 ranks"):
        loader_of(20, 6, rank=0, ranks=3)
    with pytest.raises(UsageError, match="no global batch of 30"):
        loader_of(20, 30, drop_last=True)
    with pytest.raises(UsageError, match="allow= does not know seed"):
        loader_of(20, 5, allow=("seed",))
    with pytest.raises(UsageError, match="rank 4 of 4"):
        loader_of(20, 5, rank=4, ranks=4)
    with pytest.raises(UsageError, match="has a BatchSampler"):
        ResumableLoader(DataLoader(Numbers(3)))
    sampler = ResumableSampler(Numbers(4), 2)
    with pytest.raises(UsageError, match="5 samples in the DataLoader, and 4 in its sampler"):
        ResumableLoader(DataLoader(Numbers(5), batch_sampler=sampler))
    with pytest.raises(UsageError, match="in_order=False"):
        ResumableLoader(DataLoader(Numbers(4), batch_sampler=sampler, num_workers=1, in_order=False))


def test_ranks_out_of_step_fail_the_save(tmp_path: Path) -> None:
    def save(collective: Collective) -> str:
        loader = loader_of(30, 8, rank=collective.rank, ranks=2)
        [*take([loader], 1 + collective.rank)]
        with pytest.raises(CheckpointError) as caught:
            bytecheckpoint.save(tmp_path / "c", {"dataloader": loader})
        return str(caught.value)

    for message in ThreadWorld(2).run(save, timeout=60):
        assert "ranks 0 and 1 hold different states under dataloader" in message


def test_ranks_are_needed_in_a_job_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(UsageError, match="these 4 processes do not know their part"):
        loader_of(20, 5)
    assert len(loader_of(20, 5, rank=1, ranks=2)) == 4
