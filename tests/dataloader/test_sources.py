"""Sources: every document once per epoch, exact restarts, and data that is told from other data."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.dataloader import TokenBufferLoader, TokenRecipe
from bytecheckpoint.dataloader.sources.iterable import IterableSource
from bytecheckpoint.dataloader.sources.sequence import SequenceSource
from bytecheckpoint.errors import UsageError
from tests.dataloader.reading import assert_exact_restarts, drain, epoch_of


@given(st.integers(1, 3000), st.integers(1, 40), st.integers(0, 5), st.booleans())
def test_every_document_is_in_one_stream(count: int, streams: int, epoch: int, shuffle: bool) -> None:
    source = SequenceSource(range(count), "numbers", shuffle=shuffle)
    assert sorted(epoch_of(source, streams, epoch)) == list(range(count))


@given(st.integers(1, 3000), st.integers(1, 40), st.booleans(), st.data())
def test_cursors_go_on_exactly(count: int, streams: int, shuffle: bool, data: st.DataObject) -> None:
    source = SequenceSource(range(count), "numbers", shuffle=shuffle)
    stream = data.draw(st.integers(0, streams - 1))
    whole = drain(source.cursor(stream, streams, 3, 7))
    cursor = source.cursor(stream, streams, 3, 7)
    taken = data.draw(st.integers(0, len(whole)))
    assert drain(cursor, taken) == whole[:taken]
    again = pickle.loads(pickle.dumps(source)).cursor(stream, streams, 3, 7, cursor.state())
    assert again.state() == cursor.state()
    assert drain(again) == whole[taken:] and drain(cursor) == whole[taken:]


def test_orders() -> None:
    source = SequenceSource(range(100), "a")
    assert drain(source.cursor(0, 1, 0, 0)) != drain(source.cursor(0, 1, 1, 0)) != list(range(100))
    assert drain(source.cursor(0, 1, 0, 0)) != drain(SequenceSource(range(100), "b").cursor(0, 1, 0, 0))
    assert drain(SequenceSource(range(10), "a", shuffle=False).cursor(1, 3, 4, 0)) == [1, 4, 7]


def test_a_state_of_a_longer_stream_is_refused() -> None:
    source = SequenceSource(range(10), "a")
    with pytest.raises(UsageError, match="read 6 documents of a stream of 'a', which now has 5"):
        source.cursor(0, 2, 0, 0, 6)


class Dataset(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, count: int, changed: int = -1) -> None:
        self.count, self.changed = count, changed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        shift = index == self.changed
        return {"text": f"document {index + shift}", "tokens": torch.arange(index), "array": np.arange(3) + shift}


def test_columns_of_a_dataset() -> None:
    source = SequenceSource(Dataset(5), "d", column="text", shuffle=False)
    assert epoch_of(source, 1) == [f"document {i}" for i in range(5)] and source.positions
    assert drain(SequenceSource(Dataset(5), "d").cursor(0, 1, 0, 0), 1)[0].keys() == {"text", "tokens", "array"}


def test_descriptions_of_sequences() -> None:
    def describe(dataset: Any = None, **options: Any) -> dict[str, Any]:
        return SequenceSource(dataset or Dataset(40), "d", **options).describe()

    assert describe() == describe()
    others = [
        describe(Dataset(41)),
        describe(Dataset(40, changed=0)),
        describe(Dataset(40, changed=39)),
        describe(column="text"),
        describe(shuffle=False),
        describe([{"text": "x"}] * 40),
        describe([bytearray()] * 40),
        describe([[1]] * 40),
        describe([1] * 40),
        describe([1.0] * 40),
        describe([torch.ones(1, dtype=torch.bfloat16)] * 40),
        describe([torch.ones(())] * 40),
    ]
    assert len({repr(other) for other in [describe(), *others]}) == len(others) + 1
    assert describe(fingerprint="v1") == describe(Dataset(40, changed=0), fingerprint="v1") != describe()


def test_no_documents() -> None:
    with pytest.raises(UsageError, match="'d' has no documents"):
        SequenceSource([], "d")


class Stateful:
    """Counts from `stream` on in steps of `streams`; its state is where it is."""

    made = 0

    def __init__(self, stream: int, streams: int, epoch: int) -> None:
        self.next, self.step, self.end = stream, streams, 50 + epoch

    def __iter__(self) -> Stateful:
        return self

    def __next__(self) -> int:
        if self.next >= self.end:
            raise StopIteration
        Stateful.made += 1
        self.next += self.step
        return self.next - self.step

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class StatefulIterator:
    """The same, where only the iterator has a state."""

    def __init__(self, *place: int) -> None:
        self.place = place

    def __iter__(self) -> Stateful:
        return Stateful(*self.place)


def plain(stream: int, streams: int, epoch: int) -> range:
    return range(stream, 50 + epoch, streams)


@pytest.mark.parametrize("make", [Stateful, StatefulIterator, plain])
@pytest.mark.parametrize("streams", [1, 3])
def test_iterables(make: Callable[[int, int, int], Any], streams: int) -> None:
    source = IterableSource(make, "counts")
    assert assert_exact_restarts(source, streams) == [list(range(s, 51, streams)) for s in range(streams)]
    assert not source.positions and source.describe() != IterableSource(make, "counts", fingerprint="1").describe()


@pytest.mark.parametrize("make", [Stateful, StatefulIterator])
def test_an_iterable_with_a_state_is_not_read_again(make: Callable[[int, int, int], Any]) -> None:
    cursor = IterableSource(make, "counts").cursor(0, 1, 0, 0)
    assert drain(cursor, 40) == list(range(40))
    Stateful.made = 0
    assert drain(IterableSource(make, "counts").cursor(0, 1, 0, 0, cursor.state())) == list(range(40, 50))
    assert Stateful.made == 10


def test_an_iterable_that_does_not_fit_its_state() -> None:
    with pytest.raises(UsageError, match="has read 60 documents of a stream of 'counts', which ends after 50"):
        IterableSource(plain, "counts").cursor(0, 1, 0, 0, {"taken": 60, "iterable": None})
    cursor = IterableSource(plain, "counts").cursor(0, 1, 0, 0, {"taken": 7, "iterable": {"next": 1}})
    assert drain(cursor) == list(range(7, 50))  # without a way to load the state, what was taken is read again


def test_a_list_that_grows_in_the_middle_of_a_job() -> None:
    items = [[i] for i in range(6)]
    source = SequenceSource(items, "x", shuffle=False)
    loader = TokenBufferLoader(TokenRecipe(source, 1, 6))
    described = loader.shared_state()
    items += [[i] for i in range(6, 10)]
    assert [next(loader)["tokens"].flatten().tolist() for _ in range(2)] == [[*range(6)]] * 2
    assert loader.shared_state() | {"batches": 0} == described and source.describe() == described["sources"]["x"]


def test_a_document_that_raises_stop_iteration() -> None:
    """Which is no end of the epoch."""

    class Items(list[list[int]]):
        def __getitem__(self, index: Any) -> Any:
            return next(iter([[1]] if index < 3 else []))

    with pytest.raises(RuntimeError, match="document 3 raised StopIteration"):
        [
            *TokenBufferLoader(
                TokenRecipe(SequenceSource(Items([[]] * 5), "x", shuffle=False, fingerprint="1"), 1, 1, epochs=1)
            )
        ]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (["one"], "not <U3"),
        ([1.5], "not float64 from 1.5 to 1.5"),
        ([-1, 2], "not int64 from -1 to 2"),
        ([2**31], "not int64 from 2147483648"),
        ([2**80], "not object"),
        ([True], "not bool"),
    ],
)
def test_documents_without_token_ids(document: list[Any], message: str) -> None:
    source = SequenceSource([document], "x")
    with pytest.raises(UsageError, match=f"document 0 of source 'x': token ids must be integers .* {message}"):
        next(TokenBufferLoader(TokenRecipe(source, 2, 1)))
