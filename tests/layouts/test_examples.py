"""The examples of the design: whole layouts against numpy, written by hand."""

import numpy as np
import pytest

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.layouts import Layout, Rule
from bytecheckpoint.layouts.binding import bind
from bytecheckpoint.layouts.matching import Side
from tests.layouts.models import move

RNG = np.random.default_rng(3)


def arrays(shapes):
    return {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def side(tensors):
    return Side(list(tensors), [tensor.shape for tensor in tensors.values()])


def assert_moves(layout, left, right, config=None, one_way=False):
    """Check both ways, with the names of both sides and of one."""
    for there in (side(right), None):
        binding = bind(layout, side(left), there, config)
        same(move(binding.left, binding.right, left), right)
    if not one_way:
        for there in (side(left), None):
            binding = bind(layout, there, side(right), config)
            same(move(binding.right, binding.left, right), left)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, name)


def test_rope_of_torchtitan():
    names = {"mlp.gate_proj.weight": "feed_forward.w1.weight", "input_layernorm.weight": "attention_norm.weight"}
    q, k = "self_attn.q_proj.weight", "self_attn.k_proj.weight"
    mine = Layout(
        "mine",
        "hf",
        "torchtitan",
        dims={"n": "hf.num_attention_heads", "m": "hf.num_key_value_heads"},
        rules=[
            Rule({f"model.layers.{{l}}.{q}": "(n t d) h"}, {"layers.{l}.attention.wq.weight": "(n d t) h"}, t=2),
            Rule({f"model.layers.{{l}}.{k}": "(m t d) h"}, {"layers.{l}.attention.wk.weight": "(m d t) h"}, t=2),
            Rule({"model.layers.{l}.<x>": "..."}, {"layers.{l}.<x>": "..."}, names=names),
        ],
    )
    shapes = {"self_attn.q_proj.weight": (16, 6), "self_attn.k_proj.weight": (8, 6), "mlp.gate_proj.weight": (5, 6)}
    shapes["input_layernorm.weight"] = (6,)
    left = arrays({f"model.layers.{n}.{name}": shape for n in range(2) for name, shape in shapes.items()})
    right = {}
    for n in range(2):
        of = {name: left[f"model.layers.{n}.{name}"] for name in shapes}
        for name, target in (("self_attn.q_proj.weight", "wq"), ("self_attn.k_proj.weight", "wk")):
            turned = of[name].reshape(-1, 2, 2, 6).swapaxes(1, 2).reshape(-1, 6)
            right[f"layers.{n}.attention.{target}.weight"] = turned
        right |= {f"layers.{n}.{target}": of[name] for name, target in names.items()}
    assert_moves(mine, left, right, {"hf.num_attention_heads": 4, "hf.num_key_value_heads": 2})


RANKS = Layout.from_text(r"""
layout mp_ranks  files <-> megatron
rules
mp_rank_{t:02}/model_optim_rng.pt:model.<x>linear_fc1.weight   : [gate: f | up: f] h
    <-> <x>linear_fc1.weight                                : [gate: (t f) | up: (t f)] h
mp_rank_{t:02}/model_optim_rng.pt:model.<x>linear_(fc2|proj).weight : h f
    <-> <x>linear_(fc2|proj).weight                         : h (t f)
mp_rank_{t:02}/model_optim_rng.pt:model.<x>layernorm.weight    : h
    <-> <x>layernorm.weight                                 : h
    same t
""", "ranks.layout")  # fmt: skip


def test_files_of_tensor_parallel_ranks():
    right = arrays(
        {"a.0.mlp.linear_fc1.weight": (12, 4), "a.0.mlp.linear_fc2.weight": (4, 6), "a.0.linear_proj.weight": (4, 8)}
    )
    right |= arrays({"a.0.input_layernorm.weight": (4,), "a.final_layernorm.weight": (4,)})
    left = {}
    for t in range(2):
        for name, array in right.items():
            if "fc1" in name:
                gate, up = np.split(array, 2)
                array = np.concatenate([np.split(gate, 2)[t], np.split(up, 2)[t]])
            elif "linear" in name:
                array = np.split(array, 2, axis=1)[t]
            left[f"mp_rank_{t:02}/model_optim_rng.pt:model.{name}"] = np.ascontiguousarray(array)
    assert_moves(RANKS, left, right, one_way=True)
    binding = bind(RANKS, side(left), side(right))
    same(move(binding.right, binding.left, right), left)
    with pytest.raises(
        CheckpointError, match=r"the sizes of 'f', 't' do not follow from the shapes: give some of them under 'dims'"
    ):
        bind(RANKS, None, side(right))


def test_prediction_layers_and_scales():
    layout = Layout.from_text(
        r"""
layout deepseek  hf <-> megatron
dims
    main = hf.num_hidden_layers
    l = hf.num_hidden_layers
scales hf <w>_scale_inv : o i of <w> : (o a) (i b) with a = 128, b = 128 -> blocks
rules
model.layers.{[~main: main | mtp: m]}.eh_proj.weight     : h k
    <-> mtp.layers.{m}.eh_proj.weight                    : mtp = h k
model.layers.{[main: l | mtp: m]}.norm.weight            : h
    <-> decoder.layers.{l}.norm.weight                   : main = h
    <-> mtp.layers.{m}.norm.weight                       : mtp = h
model.layers.{l}.mlp.experts.{e}.gate_proj.weight        : gate = f h
model.layers.{l}.mlp.experts.{e}.up_proj.weight          : up = f h
    <-> decoder.layers.{l}.mlp.experts.linear_fc1.weight{e} : [gate: f | up: f] h
"""
    )
    left = arrays({f"model.layers.{k}.norm.weight": (4,) for k in range(5)})
    left |= arrays({"model.layers.3.eh_proj.weight": (4, 8), "model.layers.4.eh_proj.weight": (4, 8)})
    right = {f"mtp.layers.{m}.eh_proj.weight": left[f"model.layers.{m + 3}.eh_proj.weight"] for m in range(2)}
    right |= {f"decoder.layers.{k}.norm.weight": left[f"model.layers.{k}.norm.weight"] for k in range(3)}
    right |= {f"mtp.layers.{m}.norm.weight": left[f"model.layers.{m + 3}.norm.weight"] for m in range(2)}
    for k in (1, 2):  # the first layer is dense
        for e in range(2):
            parts = arrays({f"model.layers.{k}.mlp.experts.{e}.{name}_proj.weight": (3, 4) for name in ("gate", "up")})
            left |= parts
            right[f"decoder.layers.{k}.mlp.experts.linear_fc1.weight{e}"] = np.concatenate(list(parts.values()))
    config = {"hf.num_hidden_layers": 3}
    assert_moves(layout, left, right, config)
    wrong = left | {"model.layers.2.eh_proj.weight": left["model.layers.3.eh_proj.weight"]}
    with pytest.raises(CheckpointError, match=r"no rule fits model.layers.2.eh_proj.weight of the hf side"):
        bind(layout, side(wrong), side(right), config)
    with pytest.raises(CheckpointError, match=r"the size of 'main' in {.*} does not follow from the names"):
        bind(layout, side(left))
