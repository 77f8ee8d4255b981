"""Alike objects of a pickle that are read as columns are those that the interpreter reads one by one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError
from bytecheckpoint.formats.inert import AlikeObjects, CallRecord
from bytecheckpoint.formats.meanings import CONSTANTS, MEANINGS
from bytecheckpoint.formats.unpickling import read_pickle

texts = st.sampled_from(["layers.0.weight", "ä", "", "x" * 70, "h)K"])
numbers = st.sampled_from([0, 1, 255, 256, 70_000, -1, 1 << 31, 1 << 40])


def fresh(text: str) -> str:
    """Return an equal text that is another object, as it comes from another rank."""
    return text.encode().decode()


def read(data: bytes, *, alike: bool) -> Any:
    return read_pickle(data, file="f", meanings=MEANINGS, constants=CONSTANTS, alike=alike)[0]


def plain(value: Any) -> Any:
    """Return a value in which runs are the objects that they stand for."""
    if isinstance(value, CallRecord):
        return value.target.name, value.args, plain(value.state)
    if isinstance(value, AlikeObjects):
        rows = [zip(value.columns, row, strict=True) for row in zip(*value.columns.values(), strict=True)]
        return [(value.target.name, (), {repr(k): plain(v) for k, v in row}) for row in rows]
    if isinstance(value, list):
        return [one for item in value for one in (plain(item) if isinstance(item, AlikeObjects) else [plain(item)])]
    if isinstance(value, dict):
        pairs: list[Any] = []
        for key, item in value.items():
            keys, items = plain(key), plain(item)
            pairs += zip(keys, items, strict=True) if isinstance(key, AlikeObjects) else [(keys, items)]
        return {repr(key): item for key, item in pairs}
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def has_alike(value: Any) -> bool:
    return any(isinstance(item, AlikeObjects) for item in value)


def tensor(size: torch.Size, chunks: list[ChunkStorageMetadata], **properties: Any) -> TensorStorageMetadata:
    return TensorStorageMetadata(properties=TensorProperties(**properties), size=size, chunks=chunks)


def outcome(act: Callable[[], Any]) -> Any:
    try:
        return repr(act())
    except CorruptCheckpointError:  # where a file ends early is found at different places
        return CorruptCheckpointError
    except (CheckpointError, RecursionError) as error:  # the latter of `plain`: an object that holds itself
        return type(error)


@given(st.data())
def test_lists_and_dicts_of_alike_objects(data):
    """Equal and other shapes, negative and large numbers, texts of their own and shared ones, shared sizes."""
    name = st.tuples(texts, st.booleans()).map(lambda found: fresh(found[0]) if found[1] else found[0])
    size = st.lists(numbers.filter(lambda n: n >= 0), max_size=3).map(torch.Size)
    sizes = st.one_of(size, st.just(torch.Size((3, 300))))
    count = data.draw(st.integers(1, 60))
    pairs = [
        (
            MetadataIndex(data.draw(name), data.draw(sizes), data.draw(st.none() | numbers)),
            _StorageInfo(
                data.draw(name), data.draw(numbers), data.draw(numbers), data.draw(st.none() | st.just(["z"]))
            ),
        )
        for _ in range(count)
    ]
    chunks = [ChunkStorageMetadata(offsets=data.draw(sizes), sizes=data.draw(sizes)) for _ in range(count)]
    dtypes, flags = st.sampled_from([torch.float32, torch.bfloat16]), st.booleans()
    tensors = {
        data.draw(name) + str(k): tensor(
            data.draw(sizes),
            chunks[k : k + data.draw(st.integers(0, 2))],
            dtype=data.draw(dtypes),
            requires_grad=data.draw(flags),
        )
        for k in range(count)
    }
    saved = pickle.dumps([chunks, dict(pairs), chunks[0], [key for key, _ in pairs]], 4)
    assert plain(read(saved, alike=True)) == plain(read(saved, alike=False))
    saved = pickle.dumps([tensors, dict(pairs), tensors], 4)
    assert plain(read(saved, alike=True)) == plain(read(saved, alike=False))


def alike(count: int = 300) -> bytes:
    chunks = [ChunkStorageMetadata(offsets=torch.Size((k * 8, 0)), sizes=torch.Size((8, 4))) for k in range(count)]
    stored = {
        MetadataIndex(fresh(f"layers.{k % 40}"), torch.Size((k,)), k): _StorageInfo(fresh(f"__{k % 5}"), k * 100, 99)
        for k in range(count)
    }
    tensors = {
        f"layers.{k}.bias": tensor(torch.Size((k,)), [ChunkStorageMetadata(torch.Size((k,)), torch.Size((3,)))])
        for k in range(count)
    }
    return pickle.dumps([chunks, stored, tensors], 4)


def test_alike_objects_are_columns():
    chunks, stored, tensors = read(alike(), alike=True)
    assert len(chunks) < 10 and has_alike(chunks) and has_alike(stored) and len(stored) < 20
    assert len(plain(chunks)) == len(plain(stored)) == 300
    flags = [one.state["properties"] for one in tensors.values()]
    assert len(tensors) == 300 and len({id(one) for one in flags}) < 10, "not interpreted: equal ones are one object"


@pytest.mark.parametrize(
    "element", [b"h\x00)\x81}b", b"h\x00K\x01\x85\x81}(h\x01K\x02ub", b"h\x00)\x81}(h\x01K\x02ub}(h\x01K\x02ub"]
)
def test_objects_without_attributes_with_arguments_and_with_two_states(element):
    """They are no runs: columns would lose what they are."""
    saved = b"\x80\x04](\x8c\x01a\x8c\x01B\x93\x94\x8c\x01x\x940" + 20 * element + b"e."
    assert outcome(lambda: plain(read(saved, alike=True))) == outcome(lambda: plain(read(saved, alike=False)))


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_found_with_and_without_columns(seed):
    """A changed byte leads to the same value or the same kind of error; so does a file that ends early."""
    saved, random = alike(40), torch.Generator().manual_seed(seed)

    def drawn(below: int) -> int:
        return int(torch.randint(below, (1,), generator=random))

    for _ in range(300):
        other = bytearray(saved)
        other[drawn(len(saved))] = drawn(256)
        damaged = bytes(other[: drawn(len(saved)) if drawn(4) == 0 else None])
        expected = outcome(lambda data=damaged: plain(read(data, alike=False)))
        assert outcome(lambda data=damaged: plain(read(data, alike=True))) == expected
