"""Tensors that list their own shards: by this package's protocol, ragged ones, and by torch's checkpointable protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.native import NativeFramework
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.representation.shards import LiveShard, TensorKey, boxes_of, each_box
from tests.frameworks.fsdp1_worlds import as_rank
from tests.frameworks.memory import MemoryCheckpoint, detached
from tests.support.layouts import Declared
from tests.support.ragged import CUTS, SHAPE, WHOLE, Ragged, ragged


class RaggedModel(nn.Module):
    def __init__(self, rank: int, *, zero: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(ragged(rank, zero=zero))
        self.bias = nn.Parameter(torch.full((2,), 0.0 if zero else 7.0))


def states_of(rank: int, *, fresh: bool = False) -> dict[str, Any]:
    model = RaggedModel(rank, zero=fresh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0 if fresh else 0.5, foreach=False)
    if not fresh:
        for p in model.parameters():
            like = p.detach()
            optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": like * 2, "exp_avg_sq": like + 1}
    return {"model": model, "optimizer": optimizer, "extra_states": {"ema": ragged(rank, zero=fresh)}}


def saved_by_ranks() -> MemoryCheckpoint:
    return MemoryCheckpoint([detached(NativeFramework().capture(states_of(rank))) for rank in range(4)])


def test_ragged_tensors_of_all_ranks_make_whole_tensors() -> None:
    saved = saved_by_ranks()
    assert torch.equal(saved.whole[TensorKey("model", "weight")], WHOLE)
    assert torch.equal(saved.whole[TensorKey("optimizer", "weight", "exp_avg")], WHOLE * 2)
    assert torch.equal(saved.whole[TensorKey("extra_states", "ema")], WHOLE)
    boxes = [s.offsets for s in saved.ranks[2]["model"].shards if s.key.fqn == "weight"]
    assert boxes == [(1, 1), (2, 0), (4, 0)]
    plain = nn.Module()
    plain.weight, plain.bias = nn.Parameter(torch.zeros(SHAPE)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW(plain.parameters())
    saved.load({"model": plain, "optimizer": optimizer})
    assert torch.equal(plain.weight, WHOLE)
    assert torch.equal(optimizer.state[plain.weight]["exp_avg_sq"], WHOLE + 1)


def test_ragged_tensors_load_into_fresh_ones_of_any_rank() -> None:
    saved = saved_by_ranks()
    for rank in range(4):
        states = states_of(rank, fresh=True)
        saved.load(states)
        run = WHOLE.flatten()[CUTS[rank] : CUTS[rank + 1]]
        weight = states["model"].weight
        assert torch.equal(weight.run, run)
        state = states["optimizer"].state[weight]
        assert type(state["exp_avg"]) is Ragged
        assert torch.equal(state["exp_avg"].run, run * 2)
        assert state["step"] == 3
        assert states["optimizer"].param_groups[0]["lr"] == 0.5
        assert torch.equal(states["extra_states"]["ema"].run, run)


@pytest.mark.parametrize(
    ("shard", "match"),
    [
        (((4, 4), (3, 0), torch.zeros(2, 4)), r"shape \(2, 4\) at \(3, 0\) does not lie inside"),
        (((4, 4), (0,), torch.zeros(2, 4)), "does not lie inside"),
        (((4, 4), 10, torch.zeros(7)), "model/w: 7 elements from number 10"),
        (((4, 4), 0, torch.zeros(2, 4)), "plain 1-D tensor"),
        (((5, 3), (0, 0), ragged(0)), "a shard is a Ragged, which is sharded itself"),
        (((4,), (0,), torch.zeros(4, device="meta")), "meta"),
        (((4, 4), (0, 0), [[1.0] * 4]), r"Declared does not list its parts as \(global shape.*list is no tensor"),
        (((4, 4), (0, 0)), "does not list its parts.*not enough values"),
        (((4, 4), (0.5, 0), torch.zeros(1, 4)), "does not list its parts.*float"),
        (((4.0, 4), (0, 0), torch.zeros(1, 4)), "does not list its parts.*float"),
        (((4, 4), None, torch.zeros(1, 4)), "does not list its parts.*NoneType"),
    ],
)
def test_invalid_shards_are_refused_by_name(shard: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        NativeFramework().capture({"model": {"w": Declared(shard)}})


def test_a_list_of_shards_must_be_iterable() -> None:
    declared = Declared()
    declared.shards = None  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"model/w: Declared does not list its parts.*NoneType"):
        NativeFramework().capture({"model": {"w": declared}})


def test_parts_that_contradict_each_other_are_refused() -> None:
    one = ((4, 4), (0, 0), torch.zeros(2, 4))
    for two, match in (
        (((5, 4), (2, 0), torch.zeros(3, 4)), r"shape \(4, 4\) and dtype float32, and of shape \(5, 4\)"),
        (((4, 4), (2, 0), torch.zeros(2, 4, dtype=torch.int32)), "dtype int32"),
        (((4, 4), (0, 0), torch.ones(2, 4)), r"the box of shape \(2, 4\) at \(0, 0\) twice"),
        (((4, 4), 0, torch.ones(8)), "twice"),
    ):
        with pytest.raises(UsageError, match=match):
            NativeFramework().capture({"model": {"w": Declared(one, two)}})


def test_numbers_of_numpy_and_torch_are_accepted() -> None:
    shape, place = torch.Size((4, 4)), torch.tensor([1, 0])
    (box,) = shards_of(Declared((np.array([4, 4]), place, torch.ones(2, 4))))
    (run,) = shards_of(Declared((shape, np.int64(4), torch.ones(8))))
    for shard in (box, run):
        assert (shard.global_shape, shard.offsets, shard.lengths) == ((4, 4), (1, 0), (2, 4))
        assert all(type(n) is int for part in (shard.global_shape, shard.offsets, shard.lengths) for n in part)


def test_parts_without_elements_are_not_stored() -> None:
    (state,) = NativeFramework().capture({"model": {"w": Declared(((4, 4), (0, 0), torch.zeros(0, 4)))}})
    assert state.shards == []
    (state,) = NativeFramework().capture({"model": {"w": Declared(((4, 0), (0, 0), torch.zeros(4, 0)))}})
    assert [s.lengths for s in state.shards] == [(4, 0)]


def test_unknown_tensor_types_are_refused_with_advice() -> None:
    class Other(torch.Tensor):
        __torch_dispatch__ = classmethod(lambda cls, func, types, args=(), kwargs=None: None)  # type: ignore[assignment]

    made = torch.Tensor._make_wrapper_subclass(Other, (2,))
    with pytest.raises(UsageError, match="Other, which is not supported: give the type a __bytecheckpoint_shards__"):
        NativeFramework().capture({"model": {"w": made}})


class WithoutEmptyLike(Ragged):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "empty_like" in func._schema.name:
            raise NotImplementedError("no empty_like here")
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_new_state_needs_another_tensor_of_the_type() -> None:
    saved = saved_by_ranks()
    model = nn.Module()
    model.weight, model.bias = nn.Parameter(WithoutEmptyLike(0, torch.zeros(4))), nn.Parameter(torch.zeros(2))
    with pytest.raises(UsageError, match=r"makes no new WithoutEmptyLike.*no empty_like here"):
        saved.load({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


# --- torch's own protocol -------------------------------------------------------------------------------------


def shards_of(value: Any) -> list[LiveShard]:
    out: list[LiveShard] = []
    add_shards(out, TensorKey("model", "w"), value, aliases=("v",))
    return out


def test_torch_shards_wrapper_alone() -> None:
    one, two = torch.ones(4, 2), torch.full((4, 3), 2.0)
    found = shards_of(LocalShardsWrapper([one, two], [(0, 0), (0, 2)]))
    assert [(s.global_shape, s.offsets, s.lengths) for s in found] == [
        ((4, 5), (0, 0), (4, 2)),
        ((4, 5), (0, 2), (4, 3)),
    ]
    assert found[0].data.data_ptr() == one.data_ptr()
    assert found[1].aliases == ("v",)


def test_a_dtensor_over_a_shards_wrapper() -> None:
    """Row-wise sharded embedding tables of torchrec: the wrapper lists the local rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    rows = torch.arange(6.0).reshape(2, 3)
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        wrapper = LocalShardsWrapper([rows], [(2, 0)])
        table = DTensor.from_local(wrapper, mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 3)), stride=(3, 1))
        found = shards_of(table)
    assert [(s.global_shape, s.offsets, s.lengths) for s in found] == [((4, 3), (2, 0), (2, 3))]
    assert torch.equal(found[0].data, rows)
    found[0].data.zero_()
    assert not rows.any()


def test_an_object_with_torch_protocol_alone() -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    class Table:
        """Two bands of rows of a table of 6 by 2."""

        def __init__(self) -> None:
            self.bands = {0: torch.zeros(2, 2), 4: torch.ones(2, 2)}

        def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
            def item(row: int) -> WriteItem:
                chunk = ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((2, 2)))
                data = TensorWriteData(chunk, TensorProperties(), torch.Size((6, 2)))
                return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

            return [item(row) for row in self.bands]

        def __create_chunk_list__(self) -> list[Any]:
            raise AssertionError("the write items say the same, and the whole shape too")

        def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
            assert index.offset is not None
            return self.bands[index.offset[0]]

    one, other = Table(), Table()
    other.bands = {2: torch.full((2, 2), 5.0)}
    saved = MemoryCheckpoint([detached(NativeFramework().capture({"model": {"t": t}})) for t in (one, other)])
    assert saved.whole[TensorKey("model", "t")][:, 0].tolist() == [0, 0, 5, 5, 1, 1]
    target = Table()
    target.bands = {2: torch.zeros(2, 2)}
    saved.load({"model": {"t": target}})
    assert target.bands[2].tolist() == [[5, 5], [5, 5]]


@pytest.mark.parametrize("make", [lambda: torch.zeros(3), lambda: nn.Parameter(torch.zeros(3))])
def test_plain_tensors_are_one_shard(make: Callable[[], torch.Tensor]) -> None:
    (shard,) = shards_of(make())
    assert shard.lengths == (3,)


@pytest.mark.parametrize("table", [False, True])
def test_many_flat_ranges_of_one_memory_are_one_shard(table: bool) -> None:
    """An object, and a view of torch, for each of a million fragments would take most of a save and of a load."""
    count = 100
    memory = torch.arange(3.0 * count)
    shape = (count + 1, 3)
    flat: list[Any] = [(shape, 3 * i, memory[3 * (i - 1) % len(memory) :][:3]) for i in range(count)]
    if table:
        first = np.arange(count) * 3
        flat = [(shape, np.stack([first, (first - 3) % len(memory), np.full(count, 3)], axis=1), memory)]
    value = Declared(*flat, (shape, (count, 0), torch.ones(1, 3)))
    many, last = shards_of(value)
    assert (many.rows, last.rows) == (count, 1)
    assert many.data.data_ptr() == memory.data_ptr()
    boxes = list(each_box([many, last]))
    assert [s.offsets for s in boxes] == [(i, 0) for i in range(count + 1)]
    assert torch.equal(torch.cat([s.data for s in boxes[:-1]]).flatten(), memory.roll(3))
    assert boxes_of([many, last], [5, 6]).tensor.tolist() == [5] * count + [6]


@pytest.mark.parametrize("table", [False, True])
def test_a_flat_range_among_many_that_lies_outside_or_comes_twice(table: bool) -> None:
    memory = torch.zeros(300)

    def listed(*starts: int) -> Declared:
        if table:
            return Declared(((100, 3), np.array([(s, 0, 3) for s in starts]), memory))
        return Declared(*(((100, 3), s, memory[:3]) for s in starts))

    with pytest.raises(UsageError, match=r"3 elements from number 298.*do not lie inside"):
        shards_of(listed(*range(0, 297, 3), 298))
    with pytest.raises(UsageError, match=r"lists the box of shape \(1, 3\) at \(4, 0\) twice"):
        shards_of(listed(*range(0, 300, 3), 12))


@pytest.mark.parametrize("change", ["stride", "dtype", "other memory", "replaced memory", "lazy", "long"])
def test_flat_ranges_that_are_no_runs_of_one_memory_are_shards_of_their_own(change: str) -> None:
    kind = torch.complex64 if change == "lazy" else torch.float32
    size = 1 << 17 if change == "long" else 4
    memory = torch.arange(1 if change == "long" else 2000).expand(2000).to(kind)
    parts = [memory[:1].expand(size) if change == "long" else memory[4 * i : 4 * i + 4] for i in range(100)]
    if change == "stride":
        parts[7] = memory[800:808:2]
    if change == "other memory":
        parts[7] = memory[28:32].clone()
    if change == "replaced memory":
        parts[7].data = memory[28:32].clone()
    if change == "lazy":
        parts = [part.conj() for part in parts]
    if change == "long":
        parts = list(torch.zeros(size).expand(1, size).repeat(100, 1))
    if change == "dtype":
        parts = [part.view(torch.int32) for part in parts[:50]] + parts[50:]
    value = Declared(*(((100, size), size * i, part) for i, part in enumerate(parts)))
    if change == "dtype":
        with pytest.raises(UsageError, match="one tensor has one shape and one dtype"):
            shards_of(value)
        return
    shards = shards_of(value)
    assert [shard.rows for shard in shards] == [1] * 100
    assert all(torch.equal(shard.data[0], part) for shard, part in zip(shards, parts, strict=True))
