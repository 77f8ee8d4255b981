"""Checkpoints are seen through several layouts, each of which leads on from the names to which the one before led."""

from __future__ import annotations

import itertools
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.layouts import Layout, Rule, Statement
from bytecheckpoint.tools.fingerprints import fingerprint
from tests.layouts.oracle import tensors
from tests.layouts.test_mappings import RandomRule
from tests.loading.test_layouts import LAYERS, SIZE, assert_holds, folder_of, fused, module_of, sized, weights
from tests.loading.test_optimizers_through_layouts import OPTIMIZERS, Tensors, filled, gradients, groups, train
from tests.support.worlds import on_ranks


def regrouped(rng: random.Random, name: str, array: np.ndarray) -> tuple[Rule, np.ndarray]:
    """Cut the dimensions of an array into factors, and join them in another order."""
    dims: dict[str, int] = {}
    left: list[str] = []
    for k, size in enumerate(array.shape):
        first = rng.choice([n for n in range(1, size + 1) if size % n == 0])
        dims |= {f"a{k}": first, f"b{k}": size // first}
        left.append(f"(a{k} b{k})")
    order = rng.sample(sorted(dims), len(dims))
    cuts = sorted({0, len(order), *(rng.randrange(len(order) + 1) for _ in range(2))})
    joined = [order[a:b] for a, b in itertools.pairwise(cuts)]
    turned = array.reshape(list(dims.values())).transpose([list(dims).index(dim) for dim in order])
    right = " ".join(f"({' '.join(found)})" for found in joined)
    rule = Rule({name: " ".join(left)}, {f"new.{name}": right}, **dims)
    return rule, turned.reshape([int(np.prod([dims[d] for d in found])) for found in joined])


@given(st.integers(0, 2**32))
def test_random_rules_one_after_the_other(seed: int) -> None:
    """What lies between the layouts is stored nowhere; the result equals that of numpy, and leads back."""
    first, rng = RandomRule(seed), random.Random(seed)
    names = " ".join([*first.left, *first.left.values(), *first.right, *first.right.values()])
    sizes = {n: 0 if n[0] == "z" else size for n, size in first.sizes.items() if n in re.findall(r"\w+", names)}
    keys = [tensors(families, sizes, first.same, first.texts) for families in (first.left, first.right)]
    numbers: dict[Any, int] = {}
    number = np.vectorize(lambda key: numbers.setdefault(key, len(numbers)), [np.int64])
    values = [{name: number(array) for name, array in own.items()} for own in keys]
    stored = {}
    for name, array in values[0].items():
        order = rng.sample(range(array.ndim), array.ndim)
        memory = torch.from_numpy(array.transpose(order).copy())
        stored[name] = memory.permute([order.index(k) for k in range(array.ndim)])
    a = Layout("a", "one", "two", rules=[Rule(first.left, first.right, same=first.same, **sizes)])
    made = {name: regrouped(rng, name, array) for name, array in values[1].items() if array.ndim and array.size}
    others = [Statement("two", re.escape(name)) for name in values[1] if name not in made]
    b = Layout("b", "two", "three", rules=[rule for rule, _ in made.values()], ignore=others)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(stored, path := f"{folder}/m.pt")
        if made:
            with bytecheckpoint.open(path, layout=[a, b]) as found:
                for name, (_, expected) in made.items():
                    entry = found[f"model/new.{name}"]
                    np.testing.assert_array_equal(entry[...].numpy(), expected)
                    part = tuple(slice(rng.randrange(n), n) for n in expected.shape)
                    np.testing.assert_array_equal(entry[part].numpy(), expected[part])
        if not first.same:
            with bytecheckpoint.open(path, layout=[a, a]) as found:
                for name, expected in values[0].items():
                    np.testing.assert_array_equal(found[f"model/{name}"][...].numpy(), expected)


STACKED = Layout.from_text(
    f"""layout stacked  hf <-> own
rules
model.layers.{{l}}.self_attn.(q|k|v|o)_proj.weight : (n d) h
    <-> attn.(q|k|v|o)                             : l n h d
    with d = {SIZE}
model.layers.{{l}}.(input_layernorm|post_attention_layernorm|mlp.gate_proj|mlp.up_proj|mlp.down_proj).weight : ...
    <-> block.{{l}}.(input_layernorm|post_attention_layernorm|mlp.gate_proj|mlp.up_proj|mlp.down_proj).weight : ...
<x>.weight                                         : ...
    <-> <x>.w                                      : ...
    names model.embed_tokens = words
    names model.norm = norm
    names lm_head = head
"""
)


def stacked(found: Tensors) -> Tensors:
    """The weights of transformers as a program has them that stacks its layers."""
    attention = {
        f"attn.{n}": torch.stack([found[f"model.layers.{k}.self_attn.{n}_proj.weight"] for k in range(LAYERS)])
        for n in "qkvo"
    }
    made = {n: value.unflatten(1, (-1, SIZE)).transpose(2, 3).contiguous() for n, value in attention.items()}
    names = {"model.embed_tokens.weight": "words.w", "model.norm.weight": "norm.w", "lm_head.weight": "head.w"}
    for name, value in found.items():
        if "self_attn" not in name:
            made[names.get(name, name.replace("model.layers", "block"))] = value
    return made


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_training_goes_on_two_layouts_away(tmp_path: Path, kind: str) -> None:
    """From fused names over those of transformers to stacked ones, with the optimizer, and back."""
    model = filled(fused(weights()))
    optimizer, more = OPTIMIZERS[kind](groups(model)), gradients(6)
    train(model, optimizer, list(map(fused, more[:3])))
    bytecheckpoint.save(tmp_path / "first", {"model": model, "optimizer": optimizer})
    other = module_of(stacked(weights()))
    second = OPTIMIZERS[kind](groups(other))
    report = bytecheckpoint.load(tmp_path / "first", {"model": other, "optimizer": second}, layout=[sized(), STACKED])
    assert not report.missing and not report.unexpected
    train(model, optimizer, list(map(fused, more[3:])))
    train(other, second, list(map(stacked, more[3:])))
    bytecheckpoint.save(tmp_path / "second", {"model": other, "optimizer": second})
    back = module_of(fused(weights()))
    third = OPTIMIZERS[kind](groups(back))
    bytecheckpoint.load(tmp_path / "second", {"model": back, "optimizer": third}, layout=[STACKED, sized()])
    expected = dict(model.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in back.named_parameters())
    for group, of in zip(optimizer.param_groups, third.param_groups, strict=True):
        for one, two in zip(group["params"], of["params"], strict=True):
            for key, value in optimizer.state[one].items():
                assert value is None or torch.equal(value, third.state[two][key]), key


def test_values_that_the_first_layout_joins_must_agree(tmp_path: Path) -> None:
    model = filled(weights())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, gradients(1))
    optimizer.state[dict(model.named_parameters())["model.layers.1.self_attn.k_proj.weight"]]["step"] += 7
    bytecheckpoint.save(tmp_path / "own", {"model": model, "optimizer": optimizer})
    back = module_of(weights())
    states = {"model": back, "optimizer": OPTIMIZERS["adamw"](back.parameters())}
    with pytest.raises(
        IncompatibleCheckpointError, match=r"joins .*layers\.1\.self_attn\.[qkv]_proj.* 8\.0|8\.0.* 1\.0"
    ):
        bytecheckpoint.load(tmp_path / "own", states, layout=[sized(), sized()])


def test_texts_tools_and_mistakes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", weights())
    (tmp_path / "stacked.layout").write_text(STACKED.to_text())
    text = f"llama, {tmp_path}/stacked.layout"
    with pytest.raises(IncompatibleCheckpointError, match=r"lacks model/attn\.q"):
        bytecheckpoint.load(folder, {"model": module_of(stacked(weights()))}, layout=text)
    bytecheckpoint.save(tmp_path / "own", {"model": filled(fused(weights()))})
    module = module_of(stacked(weights()))
    bytecheckpoint.load(tmp_path / "own", {"model": module}, layout=[sized(), tmp_path / "stacked.layout"])
    assert_holds(module, stacked(weights()))
    with bytecheckpoint.open(tmp_path / "own", layout=[sized(), STACKED]) as found:
        assert {key.removeprefix("model/") for key in found} == stacked(weights()).keys()
    assert fingerprint(tmp_path / "own", layout=[sized(), STACKED]).states == fingerprint({"model": module}).states
    shifted = Layout("s", "hf", "own", rules=[Rule({"a": "n"}, {"b": "n"}, add=1)])
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    with pytest.raises(IncompatibleCheckpointError, match="s changes elements"):
        bytecheckpoint.open(tmp_path / "a.pt", layout=[shifted, shifted])
    for wrong in ([], [3], ""):
        with pytest.raises(UsageError, match="layout"):
            bytecheckpoint.open(tmp_path / "a.pt", layout=wrong)  # type: ignore[arg-type]


@on_ranks(2)
def test_two_ranks(path: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(filled(fused(weights())), mesh=mesh)
    bytecheckpoint.save(f"{path}/own", {"model": model})
    module = fully_shard(module_of(stacked(weights())), mesh=mesh)
    bytecheckpoint.load(f"{path}/own", {"model": module}, layout=[sized(), STACKED])
    assert_holds(module, stacked(weights()))
    assert dist.is_initialized()
