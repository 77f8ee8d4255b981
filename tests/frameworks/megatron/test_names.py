"""Names and boxes from the sharded tensors of Megatron; needs no Megatron."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks import registry
from bytecheckpoint.frameworks.megatron.adapter import MegatronFramework
from bytecheckpoint.frameworks.megatron.layouts import (
    ParameterLayout,
    ShardCollector,
    TensorBox,
    boxes_of_factory,
    checkpoint_names,
    clip_to_saved_shape,
    sharded_tensor_box,
)
from bytecheckpoint.representation.shards import LiveShard, TensorKey

#: Key of the state dict, key in the checkpoint, prepended dimensions, names; "@" stands for "decoder.layers.".
NAMES = [
    ("@1.mlp.linear_fc2.weight", "@3.mlp.linear_fc2.weight", (), ["@3.mlp.linear_fc2.weight"]),
    (
        "@0.input_layernorm.weight",
        "@2.self_attention.linear_qkv.layer_norm_weight",
        (),
        ["@2.input_layernorm.weight", "@2.self_attention.linear_qkv.layer_norm_weight"],
    ),
    (
        "@1.mlp.experts.local_experts.0.linear_fc1.weight",
        "@3.mlp.experts.experts.linear_fc1.weight",
        (2,),
        ["@3.mlp.experts.local_experts.2.linear_fc1.weight"],
    ),
    (
        "@1.mlp.experts.linear_fc1.weight0",
        "@3.mlp.experts.experts.linear_fc1.weight",
        (12,),
        ["@3.mlp.experts.linear_fc1.weight12", "@3.mlp.experts.local_experts.12.linear_fc1.weight"],
    ),
    ("output_layer.weight", "embedding.word_embeddings.weight", (), ["embedding.word_embeddings.weight"]),
    ("output_layer.weight", "output_layer.weight", (), ["output_layer.weight"]),
    ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight", (), ["decoder.final_layernorm.weight"]),
    # A key that stacks layers along a prepended dimension.
    ("@0.mlp.linear_fc1.weight", "@mlp.linear_fc1.weight", (5,), ["@mlp.linear_fc1.weight"]),
    (
        "mtp.layers.0.mtp_model_layer.mlp.linear_fc1.weight",
        "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight",
        (),
        ["mtp.layers.0.mtp_model_layer.mlp.linear_fc1.weight", "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight"],
    ),
]


@pytest.mark.parametrize(("state_key", "key", "prepended", "names"), NAMES)
def test_names(state_key: str, key: str, prepended: tuple[int, ...], names: list[str]) -> None:
    state_key, key, *names = (name.replace("@", "decoder.layers.") for name in (state_key, key, *names))
    found, dims_in_name = checkpoint_names(state_key, key, prepended)
    assert list(found) == names
    assert dims_in_name == (1 if ".experts.experts." in key else 0)


def shards_of(box: TensorBox, values: torch.Tensor, start: int | None = None) -> list[LiveShard]:
    collector = ShardCollector()
    collector.add(box, box.key("optimizer", "exp_avg"), values, start)
    return collector.shards()


def sharded_tensor(
    key: str, shape: tuple[int, ...], global_shape: tuple[int, ...], offset: tuple[int, ...], **attributes: Any
) -> Any:
    return SimpleNamespace(
        key=key,
        local_shape=shape,
        global_shape=global_shape,
        global_offset=offset,
        prepend_axis_num=len(global_shape) - len(shape),
        allow_shape_mismatch=False,
        **attributes,
    )


def test_an_expert_is_a_tensor_of_its_own() -> None:
    key = "decoder.layers.3.mlp.experts.experts.linear_fc2.weight"
    box = sharded_tensor_box(
        "x",
        "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight",
        sharded_tensor(key, (4, 3), (8, 4, 6), (5, 0, 3)),
    )
    assert box.names == ("decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.weight",)
    assert (box.global_shape, box.offsets, box.lengths) == ((4, 6), (0, 3), (4, 3))


def test_dimensions_that_stack_layers_stay() -> None:
    box = sharded_tensor_box(
        "x", "decoder.layers.0.w", sharded_tensor("decoder.layers.w", (4, 3), (8, 4, 6), (5, 0, 3))
    )
    assert box.names == ("decoder.layers.w",)
    assert (box.global_shape, box.offsets, box.lengths) == ((8, 4, 6), (5, 0, 3), (1, 4, 3))
    values = torch.arange(12.0).reshape(4, 3)
    (shard,) = shards_of(box, values)
    assert torch.equal(shard.data, values[None])
    found = [s for start, end in ((0, 5), (5, 12)) for s in shards_of(box, values.view(-1)[start:end], start)]
    seen = torch.full((8, 4, 6), -1.0)
    for s in found:
        seen[tuple(slice(o, o + n) for o, n in zip(s.offsets, s.lengths, strict=True))] = s.data
    assert torch.equal(seen[5, :, 3:], values)
    assert (seen == -1).sum() == 8 * 24 - 12


def test_a_box_outside_its_tensor_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"^model/a\.b: its sharded state dict puts a tensor of shape \(4,\) at \(5,\)"
    ):
        sharded_tensor_box("model/a.b", "a.b", sharded_tensor("a.b", (4,), (8,), (5,)))


def gate(t: torch.Tensor, rank: int = 1, size: int = 2) -> list[Any]:
    """Split a fused gate as Megatron's factory does: each half over the ranks."""
    halves = torch.chunk(t, 2)
    n = halves[0].shape[0]
    return [
        sharded_tensor("m.fc1.weight", tuple(h.shape), (2 * n * size, t.shape[1]), (n * (rank + size * i), 0), data=h)
        for i, h in enumerate(halves)
    ]


def gated(rank: int) -> tuple[torch.Tensor, ParameterLayout]:
    like = torch.empty(6, 5, device="meta")
    factory = SimpleNamespace(key="m.fc1.weight")
    boxes = boxes_of_factory("x", "m.fc1.weight", factory, gate(like, rank), like)
    whole = torch.arange(60.0).reshape(12, 5)
    local = torch.cat([whole[3 * rank : 3 * rank + 3], whole[6 + 3 * rank : 9 + 3 * rank]])
    return local, ParameterLayout(("m.fc1.weight",), local, boxes)


def test_flat_ranges_of_a_fused_gate() -> None:
    whole = torch.arange(60.0).reshape(12, 5)
    for cuts in ([0, 30], [0, 7, 30], [0, 13, 17, 30], [0, 15, 30], [0, 1, 2, 29, 30]):
        seen = torch.full((12, 5), -1.0)
        for rank in range(2):
            local, layout = gated(rank)
            for start, end in pairwise(cuts):
                for box in layout.boxes:
                    for s in shards_of(box, local.view(-1)[start:end], start):
                        assert str(s.key) == "optimizer/state/m.fc1.weight/exp_avg"
                        place = tuple(slice(o, o + n) for o, n in zip(s.offsets, s.lengths, strict=True))
                        assert (seen[place] == -1).all()
                        seen[place] = s.data
        assert torch.equal(seen, whole)


def test_a_fused_gate_of_any_stride() -> None:
    local, layout = gated(1)
    turned = local.t().contiguous().t()
    for box in layout.boxes:
        (shard,) = shards_of(box, turned)
        place = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.lengths, strict=True))
        assert torch.equal(shard.data, torch.arange(60.0).reshape(12, 5)[place])
        assert shard.data.untyped_storage().data_ptr() == turned.untyped_storage().data_ptr()


def test_parts_with_names_of_their_own() -> None:
    like = torch.empty(6, 5, device="meta")
    made = [
        sharded_tensor(f"l.3.in_proj.{n}", (2, 5), (4, 5), (2, 0), data=p)
        for n, p in zip("zxB", like.chunk(3), strict=True)
    ]
    boxes = boxes_of_factory("x", "l.0.in_proj", SimpleNamespace(key="l.3.in_proj"), made, like)
    assert [p.names for p in boxes] == [("l.3.in_proj.z",), ("l.3.in_proj.x",), ("l.3.in_proj.B",)]
    assert [p.start for p in boxes] == [0, 10, 20]


@pytest.mark.parametrize("split", [lambda t: t.chunk(2, dim=1), lambda t: (t + 1).chunk(2), lambda t: t.chunk(2)[:1]])
def test_parts_that_are_not_consecutive_are_refused(split: Any) -> None:
    like = torch.empty(6, 4, device="meta")
    made = [sharded_tensor("w", tuple(p.shape), (6, 4), (0, 0), data=p) for p in split(like)]
    with pytest.raises(UsageError, match=r"^model/w: "):
        boxes_of_factory("model/w", "w", SimpleNamespace(key="w"), made, like)


@pytest.mark.parametrize(
    ("saved", "lengths"), [((10, 3), (2, 3)), ((8, 3), None), ((14, 3), (4, 3)), ((12, 3), (4, 3))]
)
def test_a_padded_vocabulary(saved: tuple[int, ...], lengths: tuple[int, ...] | None) -> None:
    data = torch.arange(12.0).reshape(4, 3)
    shard = LiveShard(TensorKey("model", "w"), "float32", (12, 3), (8, 0), (4, 3), data)
    found = clip_to_saved_shape([shard], saved)
    if lengths is None:
        assert found == []
        return
    assert found[0].global_shape == saved
    assert found[0].lengths == lengths
    assert torch.equal(found[0].data, data[: lengths[0]])


# --- detection of Megatron ---------------------------------------------------------------------------------------


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for Megatron with a version and one class."""
    for name in [n for n in sys.modules if n == "megatron" or n.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    made = ModuleType("megatron.core")
    made.__version__ = "0.19.2"  # type: ignore[attr-defined]
    module = ModuleType("megatron.core.transformer.module")
    module.MegatronModule = type("MegatronModule", (nn.Module,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    for place in (made, module):
        monkeypatch.setitem(sys.modules, place.__name__, place)
    return made


@pytest.mark.parametrize("version", ["0.15.3", "0.20.0", "0.20.0rc1", "1.0", "main"])
def test_other_versions_are_refused(core: Any, version: str) -> None:
    core.__version__ = version
    model = sys.modules["megatron.core.transformer.module"].MegatronModule()
    with pytest.raises(UsageError, match=rf"^Megatron-Core {version} is not supported: versions from 0\.16 up to"):
        registry.resolve("auto", {"model": model}).capture({"model": model})


@pytest.mark.parametrize("version", ["0.16.0", "0.16.1", "0.17.0", "0.19.2", "0.19.3rc0"])
def test_supported_versions(core: Any, version: str) -> None:
    core.__version__ = version
    adapter = registry.resolve("auto", {"model": nn.Linear(1, 1)})
    assert adapter.name == "native"
    model = nn.Sequential(sys.modules["megatron.core.transformer.module"].MegatronModule())
    adapter = registry.resolve("auto", {"model": model})
    assert adapter.name == "megatron"
    with pytest.raises(
        UsageError, match=r"^model: Sequential holds modules of Megatron, but has no sharded_state_dict"
    ):
        adapter.capture({"model": model})


def test_modules_of_megatron_inside_a_container_are_refused(core: Any) -> None:
    model = sys.modules["megatron.core.transformer.module"].MegatronModule()
    with pytest.raises(UsageError, match=r"^extra_states: MegatronModule is inside a container"):
        registry.resolve("auto", {"extra_states": {"ema": model}}).capture({"extra_states": {"ema": model}})


def test_without_megatron_states_are_ordinary() -> None:
    net = nn.Linear(2, 2)
    states = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=1.0), "extra_states": {"step": 1}}
    found = MegatronFramework().capture(states)
    assert [state.name for state in found] == ["model", "optimizer", "extra_states"]
    assert found[0].layout()["layouts"] == {"plain": 2}
