"""The interpreter of pickles reads what pickle writes, at every protocol."""

from __future__ import annotations

import math
import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from bytecheckpoint.formats.inert import CallRecord, GlobalName
from bytecheckpoint.formats.meanings import CONSTANTS, MEANINGS
from bytecheckpoint.formats.trees import Tree, decode_containers
from bytecheckpoint.formats.unpickling import read_pickle
from bytecheckpoint.representation.values.tree import TensorRef

keys = st.one_of(
    st.text(), st.binary(), st.booleans(), st.integers(-(2**59), 2**59), st.tuples(st.integers(0, 9), st.text())
)
leaves = st.one_of(keys, st.none(), st.floats(allow_nan=False), st.integers(), st.complex_numbers(allow_nan=False))
values = st.recursive(
    leaves | st.binary().map(bytearray) | st.frozensets(keys) | st.sets(keys),
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.tuples(inner, inner, inner, inner), st.dictionaries(keys, inner)
    ),
    max_leaves=30,
)


def read(data: bytes) -> Any:
    value, end = read_pickle(data, file="f", meanings=MEANINGS, constants=CONSTANTS)
    assert end == len(data)
    return value


@given(values, st.sampled_from(range(pickle.HIGHEST_PROTOCOL + 1)), st.booleans())
def test_plain_values(value, protocol, optimized):
    data = pickle.dumps(value, protocol)
    assert read(pickletools.optimize(data) if optimized else data) == value


@given(values)
def test_containers_are_decoded_without_their_values(value):
    blob = Tree("f").encode(value)
    assert Tree("f").encode(decode_containers(blob)) == blob


def test_containers_of_references():
    value = {
        "ü": [TensorRef("x", parameter=True), 1],
        "b": (OrderedDict(c=TensorRef("y", requires_grad=True)), {2: None}),
    }
    assert decode_containers(Tree("f").encode(value)) == value
    named = CallRecord(GlobalName("torch", "Tensor"), (), state=[1])
    instances = Tree("f").encode([named, {"a": named}])
    assert Tree("f").encode(decode_containers(instances)) == instances


def test_long_containers_and_shared_objects():
    shared = ["x"]
    value = [list(range(5000)), {str(k): shared for k in range(3000)}, tuple(range(2000)), OrderedDict(a=shared)]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        found = read(pickle.dumps(value, protocol))
        assert found == value and found[1]["7"] is found[3]["a"]


def chunks() -> list[Any]:
    """Objects of the forms of DCP's metadata: equal and different shapes, shared sizes, one and several dimensions."""
    shared = torch.Size((8, 70_000))
    made: list[Any] = []
    for k in range(3000):
        offsets = torch.Size((k * 8, 0)) if k % 5 else torch.Size((k * 100_000,) * (k % 4))
        made.append(ChunkStorageMetadata(offsets=offsets, sizes=shared if k % 3 else torch.Size((k,))))
        made.append(MetadataIndex(f"layers.{k % 7}", offsets, None if k % 11 == 0 else k))
    return made


def plain(value: Any) -> Any:
    if isinstance(value, CallRecord):
        return value.target.name, {key: plain(item) for key, item in value.state.items()}
    if isinstance(value, ChunkStorageMetadata | MetadataIndex):
        return type(value).__name__, {key: plain(item) for key, item in value.__getstate__().items()}
    return tuple(value) if isinstance(value, tuple) else value


def fields(value: Any) -> Any:
    state = getattr(value, "__getstate__", None)
    return plain(value) if isinstance(value, CallRecord) else (type(value).__name__, dict(state() or vars(value)))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_runs_of_objects(protocol):
    theirs = chunks()
    ours = read(pickle.dumps(theirs, protocol))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        name, state = fields(other)
        assert plain(mine) == (name, {key: plain(item) for key, item in state.items()})


def test_objects_of_one_memo_are_one_object():
    size = torch.Size((3, 300))
    theirs = [ChunkStorageMetadata(offsets=size, sizes=size) for _ in range(50)]
    ours = read(pickle.dumps([theirs, theirs[7], size], 4))
    assert ours[0][7] is ours[1] and ours[0][20].state["sizes"] is ours[2]


def test_special_floats():
    found = read(pickle.dumps([math.inf, -math.inf, math.nan, -0.0]))
    assert found[:2] == [math.inf, -math.inf] and math.isnan(found[2]) and math.copysign(1, found[3]) == -1
