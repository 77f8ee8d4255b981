"""Large numpy arrays among plain values: stored as tensors, and loaded as the arrays that were saved."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import UsageError, register
from bytecheckpoint.cli.main import run
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.representation.values.codec import equal
from bytecheckpoint.representation.values.numpy_values import TENSOR_DTYPES
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import compare, export, repair
from bytecheckpoint.tuning import tuned
from tests.support.extra_states import LinearWithExtraState
from tests.support.streams import Loader

LARGE = 1 << 14
"""Elements of 4 bytes that are just large enough."""


def numbers(*shape: int, dtype: Any = "<f4", first: int = 0) -> np.ndarray[Any, Any]:
    return (np.arange(int(np.prod(shape))) + first).reshape(shape).astype(dtype)


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def extra(value: Any) -> dict[str, Any]:
    return {"extra_states": {"value": value}}


def loaded(path: Path, live: Any = None) -> Any:
    """Load the value into a state that holds `live` in its place."""
    states = extra(live)
    bytecheckpoint.load(path, states)
    return states["extra_states"]["value"]


@dataclasses.dataclass
class Buffer:
    """A class with code that looks at its array."""

    data: np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        assert self.data[3] == 3


class Copying:
    """A class that copies the array from which it is made."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = data.copy()


register(Copying, name="tests.Copying", encode=vars, decode=lambda saved: Copying(**saved))

#: Arrays that are stored as tensors.
HELD: dict[str, np.ndarray[Any, Any]] = {
    **{dtype.name: numbers(LARGE * 4 // dtype.itemsize, dtype=dtype) for dtype in sorted(TENSOR_DTYPES, key=str)},
    "longlong": numbers(2, LARGE // 4, dtype="q"), "cut": numbers(4, 3, LARGE)[::-2, 1:, ::3],
    "columns": np.asfortranarray(numbers(4, LARGE)), "read only": read_only(numbers(LARGE)),
    "of bytes": np.frombuffer(bytes(range(256)) * 256, np.uint8), "unaligned": np.frombuffer(bytes(65537), "<f8", 8192, 1),
    "repeated": np.broadcast_to(numbers(8), (LARGE, 8)), "nan": np.full(LARGE, np.nan, np.float32),
}  # fmt: skip
#: Arrays that the tree holds.
PLAIN: dict[str, np.ndarray[Any, Any]] = {
    "small": numbers(LARGE - 1), "empty": numbers(0, LARGE), "swapped": numbers(LARGE, dtype=">i4"),
    "dates": numbers(LARGE).astype("M8[s]"), "texts": np.array(["a", "b" * LARGE]), "scalar": np.array("b" * LARGE),
    "structure": np.zeros(LARGE, [("a", "<f4"), ("b", ">i2")]),
}  # fmt: skip


@pytest.mark.parametrize("name", [*HELD, *PLAIN])
def test_an_array_comes_back(tmp_path: Path, name: str) -> None:
    array = (HELD | PLAIN)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bytecheckpoint.save(tmp_path, extra([array, {"x": array}, 1]))
        found = loaded(tmp_path)
    assert equal(found, [array, {"x": array}, 1])
    assert found[0].flags.writeable and found[0].flags.c_contiguous
    assert not np.shares_memory(found[0], found[1]["x"]) and not np.shares_memory(found[0], array)
    with bytecheckpoint.open(tmp_path) as checkpoint:
        shown = checkpoint["extra_states/value.0"]
        assert isinstance(shown, np.ndarray) == (name in PLAIN)
        assert equal(
            shown if name in PLAIN else shown[...].numpy(), np.ascontiguousarray(array) if array.ndim else array
        )


@pytest.mark.parametrize(
    "live", [None, numbers(LARGE), np.zeros(3), torch.zeros(LARGE), [torch.zeros(LARGE)], {"x": 1}]
)
def test_any_live_value_is_replaced(tmp_path: Path, live: Any) -> None:
    before = live.copy() if isinstance(live, np.ndarray) else None
    bytecheckpoint.save(tmp_path, extra(numbers(LARGE, first=5)))
    assert equal(loaded(tmp_path, live), numbers(LARGE, first=5))
    assert before is None or equal(live, before)
    bytecheckpoint.save(tmp_path, extra([numbers(LARGE, first=5)]))
    assert equal(loaded(tmp_path, [live]), [numbers(LARGE, first=5)])


def test_containers_and_classes(tmp_path: Path) -> None:
    """Code of a class sees the elements, not memory that the load has still to fill."""
    value = {
        "deque": collections.deque([numbers(LARGE)]), "default": collections.defaultdict(list, a=numbers(LARGE, first=1)),
        "space": argparse.Namespace(a=[numbers(LARGE, first=2)]), 3: (numbers(LARGE, first=3),),
        "class": Buffer(numbers(LARGE)),
        "a.b": numbers(LARGE, first=4), "a": {"b": numbers(LARGE, first=5), "t": torch.ones(3)},
    }  # fmt: skip
    bytecheckpoint.save(tmp_path, extra(value))
    assert equal(loaded(tmp_path, {"class": Buffer(numbers(4))}), value)
    bytecheckpoint.save(tmp_path, extra(Copying(numbers(LARGE))))
    assert equal(loaded(tmp_path).data, numbers(LARGE))


class Holder:
    """An object that saves itself."""

    def __init__(self, first: int) -> None:
        self.rows = numbers(LARGE, first=first)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "at": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state.keys() == {"rows", "at"}
        self.rows = state["rows"].copy()


@pytest.mark.parametrize("state", ["extra_states", "model", "optimizer"])
def test_states_of_several_ranks(tmp_path: Path, state: str) -> None:
    """Arrays may differ between ranks in any state, as plain values do."""

    def states(rank: int) -> dict[str, Any]:
        return {
            state: {
                "own": numbers(LARGE, first=rank),
                "all": numbers(LARGE),
                "object": Holder(rank),
                "w": torch.ones(2),
            }
        }

    ThreadWorld(2).run(lambda ranks: bytecheckpoint.save(tmp_path, states(ranks.rank)))

    def load(collective: Collective) -> int:
        live = states(7)
        live[state]["all"][:] = 0
        bytecheckpoint.load(tmp_path, live)
        own = int(live[state]["own"][0])
        assert equal(live[state]["own"], numbers(LARGE, first=own)) and equal(live[state]["all"], numbers(LARGE))
        assert equal(live[state]["object"].rows, numbers(LARGE, first=own))
        return own

    assert ThreadWorld(3).run(load) == [0, 1, 0]
    empty: dict[str, Any] = {state: {}}
    bytecheckpoint.load(tmp_path, empty)
    assert equal(empty[state]["own"], numbers(LARGE)) and torch.equal(empty[state]["w"], torch.ones(2))


def test_extra_states_of_modules(tmp_path: Path) -> None:
    source, live = LinearWithExtraState(2, 2), LinearWithExtraState(2, 2)
    source.extra = {"rows": numbers(LARGE), "n": 3}
    live.extra = {"rows": numbers(3)}
    bytecheckpoint.save(tmp_path, {"model": source})
    bytecheckpoint.load(tmp_path, {"model": live})
    assert equal(live.extra, source.extra)
    with pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match="_extra_state"):
        bytecheckpoint.load(tmp_path, {"model": torch.nn.Linear(2, 2)})
    bytecheckpoint.load(tmp_path, {"model": torch.nn.Linear(2, 2)}, exclude=["model/_extra_state*"])
    bytecheckpoint.save(tmp_path, {"model": source}, exclude=["model/_extra_state*"])
    with bytecheckpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint) == {"model/weight", "model/bias"}


def test_streams(tmp_path: Path) -> None:
    """The states of streams hold arrays as tensors, the shared state as plain values: it is read before any tensor."""

    class Arrays(Loader):
        def shared_state(self) -> Any:
            return {"seed": 0, "table": numbers(LARGE)}

    def save(collective: Collective) -> None:
        loader = Arrays(5, collective.rank, 2)
        loader.states = {n: {"rows": numbers(LARGE, first=n)} for n in loader.own}
        bytecheckpoint.save(tmp_path, {"dataloader": loader})

    def load(collective: Collective) -> dict[int, Any]:
        loader = Arrays(5, collective.rank, 3)
        bytecheckpoint.load(tmp_path, {"dataloader": loader})
        return loader.states

    ThreadWorld(2).run(save)
    for rank, states in enumerate(ThreadWorld(3).run(load)):
        assert equal(states, {n: {"rows": numbers(LARGE, first=n)} for n in range(rank, 5, 3)})
    with bytecheckpoint.open(tmp_path) as checkpoint:
        assert checkpoint["dataloader/streams.3.rows"].shape == (LARGE,)


@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_the_call_copies_arrays(tmp_path: Path, staging: Any) -> None:
    for state in ("extra_states", "optimizer"):
        array = numbers(LARGE)
        handle = bytecheckpoint.save(tmp_path, {state: {"value": array}}, async_checkpoint=True, staging=staging)
        array[:] = -1
        handle.result(60)
        live: dict[str, Any] = {state: {}}
        bytecheckpoint.load(tmp_path, live)
        assert equal(live[state]["value"], numbers(LARGE))


def test_no_limit_of_plain_values(tmp_path: Path) -> None:
    with tuned(max_value_bytes=1 << 17):
        bytecheckpoint.save(tmp_path, extra(numbers(LARGE * 4)))
        with pytest.raises(UsageError, match=r"value.* more than one value may have"):
            bytecheckpoint.save(tmp_path / "b", extra(numbers(LARGE * 4, dtype=">f4")))
    assert equal(loaded(tmp_path), numbers(LARGE * 4))


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """A checkpoint of two ranks with arrays that are tensors, in folder "held", and in "plain" one of an older writer."""

    def save(collective: Collective, name: str) -> None:
        model = {"w": torch.ones(3), "table": numbers(LARGE)}
        values = {"all": numbers(LARGE, 2), "own": [numbers(LARGE, first=collective.rank)]}
        bytecheckpoint.save(tmp_path / name, {"model": model, "extra_states": values})

    for name, smallest in (("held", 64 << 10), ("plain", 1 << 30)):
        with tuned(array_tensor_bytes=smallest):
            ThreadWorld(2).run(partial(save, name=name))
    return tmp_path


def test_tools(held: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = held / "held"
    assert run(["verify", str(path)]) == 0 and run(["ls", str(path)]) == 0 and run(["ls", str(path), "--json"]) == 0
    capsys.readouterr()
    report = compare(path, path)
    assert report.equal and not report.notes
    assert compare(path, held / "plain").equal and compare(held / "plain", path).equal
    export(path, held / "hf")
    (path / "metadata.parquet").unlink()
    assert repair(resolve(path)).written
    assert compare(path, held / "plain").equal
    with bytecheckpoint.open(path, rank=1) as checkpoint:
        assert torch.equal(checkpoint["extra_states/all"][3:5, 1], torch.tensor([7.0, 9.0]))
        assert checkpoint["extra_states/own.0"][0] == 1


def test_a_difference_is_found(held: Path) -> None:
    array = numbers(LARGE, 2)
    array[7, 1] = np.nan
    bytecheckpoint.save(held / "other", {"extra_states": {"all": array, "own": [numbers(LARGE)]}})
    for side in ("held", "plain"):
        differences = compare(held / side, held / "other").differences
        assert "extra_states/all" in {found.key for found in differences}


def test_selected_parts(held: Path) -> None:
    live: dict[str, Any] = {"model": {"w": torch.zeros(3), "table": None}}
    bytecheckpoint.load(held / "held", live, include=["model/w"])
    assert live["model"]["table"] is None and live["model"]["w"].sum() == 3
    bytecheckpoint.save(
        held / "part", {"model": {"w": torch.ones(3), "table": numbers(LARGE)}}, exclude=["model/table"]
    )
    with bytecheckpoint.open(held / "part") as checkpoint:
        assert set(checkpoint) == {"model/w"}
