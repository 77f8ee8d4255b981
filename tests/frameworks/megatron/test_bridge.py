"""The layouts that are built in give each element the place that functions of Megatron-Bridge give it.

Megatron-Bridge itself needs packages for GPUs. Its functions need torch only: they are taken out of its source.
"""

import __future__

import ast
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bytecheckpoint.layouts.binding import bind
from bytecheckpoint.layouts.layout import builtin_names, find
from bytecheckpoint.layouts.matching import Side
from tests.layouts.models import FAMILIES, Family, move, weights

SOURCE = Path(sys.prefix, "megatron-bridge/megatron/bridge/models/conversion/param_mapping.py")
pytestmark = [
    pytest.mark.short,
    pytest.mark.skipif(
        not SOURCE.exists() and not os.environ.get("BYTECHECKPOINT_REQUIRE_FRAMEWORKS"),
        reason="NOT TESTED HERE: needs the source of Megatron-Bridge, which `make test-frameworks` installs",
    ),
]
#: Names of a layer's queries, keys and values.
ATTENTION = (
    ("model.layers.{}.self_attn.{}_proj.", "decoder.layers.{}.self_attention.linear_qkv."),
    ("encoder.block.{}.layer.0.SelfAttention.{}.", "encoder.layers.{}.self_attention.linear_qkv."),
    ("decoder.block.{}.layer.0.SelfAttention.{}.", "decoder.layers.{}.self_attention.linear_qkv."),
    ("bert.encoder.layer.{}.attention.self.{}.", "encoder.layers.{}.self_attention.linear_qkv."),
)
WORDS = {"bert": ("query", "key", "value"), "megatron_bert": ("query", "key", "value")}
MLPS = (
    ("model.layers.{}.mlp.{}_proj.", "decoder.layers.{}.mlp.linear_fc1."),
    ("model.layers.{}.mlp.shared_expert.{}_proj.", "decoder.layers.{}.mlp.shared_experts.linear_fc1."),
    ("model.layers.{}.mlp.shared_experts.{}_proj.", "decoder.layers.{}.mlp.shared_experts.linear_fc1."),
    ("model.layers.{}.mlp.experts.0.{}_proj.", "decoder.layers.{}.mlp.experts.local_experts.0.linear_fc1."),
    ("model.layers.{}.mlp.experts.2.{}_proj.", "decoder.layers.{}.mlp.experts.local_experts.2.linear_fc1."),
)


@pytest.fixture(scope="module")
def bridge():
    """The module's functions, and its classes without bases."""
    tree = ast.parse(SOURCE.read_text(), str(SOURCE))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            node.bases = []
    names = {"torch": torch, "abstractmethod": lambda method: method}
    exec(compile(tree, str(SOURCE), "exec", __future__.annotations.compiler_flag), names)
    return SimpleNamespace(**names)


def moved(name, family, arrays, config):
    """Return the weights of a file as tensors, and those in Megatron-Core, moved by the layout."""
    layout = next(x for x in map(find, builtin_names()) if x.right == "megatron" and x.is_for(family.keys()))
    binding = bind(layout, Side(list(arrays), [a.shape for a in arrays.values()]), config=config)
    found = move(binding.left, binding.right, arrays, binding)
    return *({key: torch.from_numpy(array) for key, array in x.items()} for x in (arrays, found)), binding


def compared(name, config, left, right, bridge):
    """Compare queries, keys and values, and MLPs; return the number of fused tensors."""
    count = 0
    for layer in range(4):
        for kind in ("weight", "bias"):
            for source, target in ATTENTION:
                parts = [f"{source}{kind}".format(layer, word) for word in WORDS.get(name, ("q", "k", "v"))]
                if parts[0] in left:
                    fused, parts = right[f"{target}{kind}".format(layer)], [left[part] for part in parts]
                    assert torch.equal(fused, bridge.merge_qkv_weights(config, *parts))
                    assert all(map(torch.equal, bridge.split_qkv_weights(config, fused), parts))
                    if kind == "bias":
                        assert torch.equal(fused, bridge.merge_qkv_biases(config, *parts))
                    count += 1
            for source, target in MLPS:
                gate, up = (f"{source}{kind}".format(layer, word) for word in ("gate", "up"))
                if gate in left:
                    mapping = SimpleNamespace(tp_size=1)
                    halves = {"gate": left[gate], "up": left[up]}
                    fused = bridge.GatedMLPMapping.hf_to_megatron(mapping, halves, None)
                    assert torch.equal(right[f"{target}{kind}".format(layer)], fused)
                    count += 1
    return count


def config_of(c):
    """Return what the functions read of the configuration of a model in Megatron-Core."""
    heads = c.get("num_attention_heads", c.get("num_heads"))
    hidden = c.get("hidden_size", c.get("d_model"))
    return SimpleNamespace(
        num_attention_heads=heads,
        num_query_groups=c.get("num_key_value_heads") or heads,
        kv_channels=c.get("head_dim") or c.get("d_kv") or hidden // heads,
        hidden_size=hidden,
        attention_output_gate=c["model_type"] == "qwen3_next",
        **{key: value for key, value in c.items() if key.startswith("linear_")},
    )


FUSED = [n for n in FAMILIES if "mtp" not in n and n not in ("gpt2", "gpt_neox", "phi3", "nemotron_h")]


@pytest.mark.parametrize("name", FUSED)
def test_every_family(name, bridge):
    family = Family(name)
    left, right, _ = moved(name, family, family.weights(), family.keys())
    assert compared(name, config_of(family.config), left, right, bridge) >= (1 if "nemotron" in name else 2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "head", "hidden"), [(6, 6, 4, 24), (6, 3, 4, 24), (6, 1, 4, 24), (8, 2, 5, 24), (1, 1, 8, 8)]
)
def test_any_heads(heads, groups, head, hidden, bias, bridge):
    """Square matrices are among them, as many groups as heads, and one group."""
    sizes = {"q_proj": heads * head, "k_proj": groups * head, "v_proj": groups * head}
    shapes = {f"model.layers.0.self_attn.{key}.weight": (size, hidden) for key, size in sizes.items()}
    shapes |= {f"model.layers.0.mlp.{key}_proj.weight": (hidden, hidden) for key in ("gate", "up")}
    if bias:
        shapes |= {key.replace("weight", "bias"): shape[:1] for key, shape in shapes.items()}
    family = Family("llama")
    c = family.config | {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head}
    c["hidden_size"] = hidden
    left, right, binding = moved("llama", family, weights(shapes), family.keys(c))
    assert compared("llama", config_of(c), left, right, bridge) == (4 if bias else 2)
    back = move(binding.right, binding.left, {key: value.numpy() for key, value in right.items()}, binding)
    assert all(np.array_equal(back[key], value.numpy()) for key, value in left.items())


def test_queries_of_another_sequence(bridge):
    family = Family("t5")
    left, right, _ = moved("t5", family, family.weights(), family.keys())
    for layer in range(family.config["num_decoder_layers"]):
        parts = [left[f"decoder.block.{layer}.layer.1.EncDecAttention.{word}.weight"] for word in "kv"]
        fused = right[f"decoder.layers.{layer}.cross_attention.linear_kv.weight"]
        assert torch.equal(fused, bridge.merge_kv_weights(config_of(family.config), *parts))


@pytest.mark.parametrize("tp", [1, 2])
def test_delta_nets(tp, bridge):
    """Megatron-Bridge has their parts in one tensor of each rank."""
    family = Family("qwen3_next")
    left, right, _ = moved("qwen3_next", family, family.weights(), family.keys())
    for layer in range(2):
        source = f"model.layers.{layer}.linear_attn.in_proj_"
        fused = bridge.merge_gdn_linear_weights(
            config_of(family.config), left[f"{source}qkvz.weight"], left[f"{source}ba.weight"], tp
        )
        target = f"decoder.layers.{layer}.self_attention.in_proj.weight."
        parts = [right[target + part] for part in ("query", "key", "value", "z", "beta", "alpha")]
        ranks = zip(*(part.chunk(tp) for part in parts), strict=True)
        assert torch.equal(fused, torch.cat([torch.cat(own) for own in ranks]))
