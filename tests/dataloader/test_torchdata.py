"""torchdata's StatefulDataLoader through a checkpoint: exact, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from bytecheckpoint.dataloader.map_style import ResumableLoader, ResumableSampler
from bytecheckpoint.dataloader.per_rank import PerRankLoader
from bytecheckpoint.dataloader.torchdata import TorchdataLoader
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.representation.values.codec import decode, encode
from tests.dataloader.map_loaders import Numbers, hand_over, loader_of, take

torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="NOT TESTED HERE: needs torchdata")
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # torch's own choice


class Counting(IterableDataset[int]):
    """The numbers of a rank, with a state."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.position = rank, ranks, 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 20:
            self.position += 1
            yield self.rank + self.ranks * (self.position - 1)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Remembering(Numbers):
    """A map-style data set with a state."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def map_loader(
    rank: int, ranks: int, *, workers: int = 0, batch: int = 6, length: int = 48, data: Any = None, **options: Any
) -> TorchdataLoader:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    data = data or Numbers(length)
    sampler = StatefulDistributedSampler(data, ranks, rank, seed=5)
    loader = torchdata.StatefulDataLoader(
        data, batch // ranks, sampler=sampler, num_workers=workers, collate_fn=list, **options
    )
    return TorchdataLoader(loader, rank=rank, ranks=ranks)


def iterable_loader(rank: int, ranks: int, workers: int = 0, **options: Any) -> TorchdataLoader:
    loader = torchdata.StatefulDataLoader(
        Counting(rank, ranks),
        2,
        num_workers=workers,
        collate_fn=list,
        multiprocessing_context="fork" if workers else None,
    )
    return TorchdataLoader(loader, rank=rank, ranks=ranks, **options)


def through_checkpoint(old: Sequence[TorchdataLoader], new: Sequence[TorchdataLoader]) -> None:
    """Load as a checkpoint does: each stream is loaded by somebody, and everything is encoded and decoded."""
    shared = old[0].shared_state()
    assert all(loader.shared_state() == shared for loader in old)
    states: dict[int, Any] = {}
    for loader in old:
        states |= loader.stream_states()
    loaded = []
    for loader in new:
        chosen = loader.choose_streams(shared, sorted(states))
        copies = {n: decode(encode(states[n], on_tensor=pytest.fail), on_tensor=pytest.fail) for n in chosen}
        loader.load_streams(shared, copies)
        loaded += chosen
    assert {*loaded} == {*states}


def global_batches(loaders: Sequence[Any], count: int) -> list[list[int]]:
    return [sorted(batch) for batch in take(loaders, count)]


@pytest.mark.parametrize("every", [1, 3])
def test_distributed_samplers_go_on_at_any_number_of_ranks_and_workers(every: int) -> None:
    reference = global_batches([map_loader(0, 1)], 8)
    fed: list[list[int]] = []
    old: list[TorchdataLoader] = []
    for ranks, workers in ((2, 1), (1, 0), (3, 0), (2, 0)):
        options = {"snapshot_every_n_steps": every} if workers else {}
        new = [map_loader(rank, ranks, workers=workers, **options) for rank in range(ranks)]
        if old:
            through_checkpoint(old, new)
            again = [map_loader(rank, ranks) for rank in range(ranks)]
            through_checkpoint(new, again)  # a save before the first batch keeps the position
            assert new[0].shared_state()["taken"] == again[0].shared_state()["taken"] == 6 * len(fed)
        fed += global_batches(new, 2)
        old = new
    assert fed == reference


def test_the_epoch_of_a_sampler_goes_on() -> None:
    old, new = [map_loader(0, 1)], [map_loader(rank, 2) for rank in range(2)]
    old[0].loader.sampler.set_epoch(4)  # type: ignore[attr-defined]
    fed = global_batches(old, 3)
    through_checkpoint(old, new)
    fed += global_batches(new, 5)
    reference = map_loader(0, 1)
    reference.loader.sampler.set_epoch(4)  # type: ignore[attr-defined]
    assert fed == global_batches([reference], 8)
    through_checkpoint(new, [last := map_loader(0, 1)])
    assert [*last] == [] and last.shared_state()["taken"] == 0  # the whole epoch was fed, and now it has ended


def test_iterable_data_sets_go_on_at_the_same_degree_only() -> None:
    for workers in (0, 1):
        old = [iterable_loader(rank, 2, workers) for rank in range(2)]
        fed = [*take(old, 3)]
        through_checkpoint(old, again := [iterable_loader(rank, 2, workers) for rank in range(2)])
        through_checkpoint(again, new := [iterable_loader(rank, 2, workers) for rank in range(2)])  # before a batch
        assert [*fed, *take(new, 3)] == [*take([iterable_loader(rank, 2) for rank in range(2)], 6)]
    with pytest.raises(
        IncompatibleCheckpointError, match="2 ranks saved the states of their StatefulDataLoader, and 1"
    ):
        through_checkpoint(old, [iterable_loader(0, 1, 1)])
    with pytest.raises(IncompatibleCheckpointError, match="set num_workers as it was"):
        through_checkpoint(old, [iterable_loader(rank, 2, 2) for rank in range(2)])


def test_states_that_cannot_be_divided_are_refused() -> None:
    def shuffled() -> TorchdataLoader:
        return TorchdataLoader(torchdata.StatefulDataLoader(Numbers(9), 3, shuffle=True))

    old = shuffled()
    fed = [next(iter(old)).tolist()]
    with pytest.raises(IncompatibleCheckpointError, match="and 2 cannot share them"):
        TorchdataLoader(old.loader, rank=0, ranks=2).choose_streams(old.shared_state(), [0])
    again, new = shuffled(), shuffled()
    again.load_streams(old.shared_state(), old.stream_states())
    new.load_streams(again.shared_state(), again.stream_states())  # before a batch
    fed += [batch.tolist() for batch in new]
    assert sorted(sum(fed, [])) == [*range(9)]  # noqa: RUF017
    stateful = map_loader(0, 1, data=Remembering(48))
    with pytest.raises(IncompatibleCheckpointError, match="and 2 cannot share them"):
        through_checkpoint([stateful], [map_loader(0, 2, data=Remembering(48))])
    with pytest.raises(IncompatibleCheckpointError, match="only one of the StatefulDataLoaders"):
        through_checkpoint([stateful], [map_loader(0, 1)])
    with pytest.raises(IncompatibleCheckpointError, match="global_batch was 6 and is 8"):
        through_checkpoint([map_loader(0, 1)], [map_loader(rank, 2, batch=8) for rank in range(2)])
    with pytest.raises(IncompatibleCheckpointError, match="dataset_length was 48 and is 54"):
        through_checkpoint([map_loader(0, 1)], [map_loader(0, 1, length=54)])


def test_a_stateful_loader_takes_a_resumable_sampler() -> None:
    def loader(rank: int, ranks: int, workers: int = 0) -> ResumableLoader:
        data: Dataset[int] = Numbers(30)
        sampler = ResumableSampler(data, 8, rank=rank, ranks=ranks)  # type: ignore[arg-type]
        return ResumableLoader(
            torchdata.StatefulDataLoader(data, batch_sampler=sampler, num_workers=workers, collate_fn=list)
        )

    old = loader(0, 1, workers=1)
    fed = [*take([old], 2)]
    hand_over([old], new := [loader(rank, 3) for rank in range(3)])
    assert [*fed, *take(new, 6)] == [*take([loader_of(30, 8)], 8)]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(UsageError, match="use TorchdataLoader"):
        PerRankLoader(map_loader(0, 1).loader)
    with pytest.raises(UsageError, match="wraps a StatefulDataLoader, not a Counting"):
        TorchdataLoader(Counting(0, 1))
    with pytest.raises(UsageError, match="feeds rank 0 of 2, and the loader rank 0 of 1"):
        TorchdataLoader(map_loader(0, 2).loader)
