"""Single edits of the layouts that are built in: each is refused, or moves some element elsewhere.

tests/frameworks/megatron/test_foreign_layouts.py does the same with logits of Megatron-Core.
"""

import itertools
import random
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.layouts import Layout
from bytecheckpoint.layouts.binding import bind
from tests.layouts.models import Family, move
from tests.layouts.mutants import mutants, whole
from tests.layouts.test_families import TORCHTITAN, layout_of, layouts, side
from tests.loading.test_element_maps import in_blocks, saved

EDITS = 40
EXPERT = re.compile(r"(.*\.(?:mlp|block_sparse_moe)\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")


def survivors(layout, keys, left, right, is_right, name):
    """Return edits that neither the layout's checks nor `is_right` notices, of rules that a model has tensors for."""
    binding = bind(layout, left, right, keys)
    weights = Family(name).weights()
    assert is_right(move(binding.left, binding.right, weights, binding))
    text = whole(layout, binding).to_text()
    found = []
    for edited in itertools.islice(mutants(text, random.Random(name)), EDITS):
        try:
            binding = bind(Layout.from_text(edited), left, right, keys)
            arrays = move(binding.left, binding.right, weights, binding)
        except CheckpointError:
            continue
        if is_right(arrays):
            changed = [pair for pair in zip(text.split("\n"), edited.split("\n"), strict=True) if pair[0] != pair[1]]
            if any("mtp_layers" in n for n in right.names) or not all("mtp_layers" in line for line, _ in changed):
                found.append(changed)
    return found


@pytest.mark.parametrize("name", TORCHTITAN)
def test_layouts_of_torchtitan(name):
    family, expected = Family(name), TORCHTITAN[name]

    def as_the_adapters_have_it(arrays):
        return {key: [zlib.crc32(array.tobytes()), *array.shape] for key, array in arrays.items()} == expected

    right = side({key: shape for key, (_, *shape) in expected.items()})
    layout = layout_of(family, "torchtitan")
    assert not survivors(layout, family.keys(), side(family.shapes), right, as_the_adapters_have_it, name)


def in_memory(weights):
    """Return what transformers 5 makes of the weights in a file: gate and up in one tensor, all experts in one."""
    experts = {match: array for key, array in weights.items() if (match := EXPERT.fullmatch(key))}
    found = {key.replace("block_sparse_moe", "mlp"): a for key, a in weights.items() if not EXPERT.fullmatch(key)}
    for prefix in {match[1] for match in experts}:
        kinds = {}
        for match, array in experts.items():
            if match[1] == prefix:
                kinds.setdefault(match[3], {})[int(match[2])] = array
        gate, up, down = (
            np.stack([kinds[kind][number] for number in sorted(kinds[kind])])
            for kind in (("w1", "w3", "w2") if "w1" in kinds else ("gate_proj", "up_proj", "down_proj"))
        )
        name = prefix.replace("block_sparse_moe", "mlp")
        found |= {f"{name}gate_up_proj": np.concatenate([gate, up], 1), f"{name}down_proj": down}
    return found


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3"])
def test_layouts_of_transformers_5(name):
    family = Family(name)
    keys, expected = family.keys() | {"hf5.model_type": family.model_type}, in_memory(family.weights())

    def as_in_memory(arrays):
        return arrays.keys() == expected.keys() and all(np.array_equal(arrays[key], expected[key]) for key in arrays)

    (layout,) = (x for x in layouts() if x.right == "hf5" and x.is_for(keys))
    right = side({key: array.shape for key, array in expected.items()})
    assert not survivors(layout, keys, side(family.shapes), right, as_in_memory, name)


@pytest.mark.parametrize("shape", [(300, 130), (256, 256)], ids=str)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("o i of", "i o of"),
        ("o i of", "o of"),
        ("o i of", "i of"),
        ("(o a) (i b)", "(i a) (o b)"),
        ("(o a) (i b)", "(a o) (i b)"),
        ("(o a) (i b)", "(o a) (b i)"),
        ("(o a) (i b)", "(o a)"),
        ("(o a) (i b)", "(o a) i"),
        ("(o a) (i b)", "o (i b)"),
        ("a = 128", "a = 64"),
        ("b = 128", "b = 64"),
        ("a = 128", "a = 256"),
        ("b = 128", "b = 256"),
        ("b = 128", "b = 0"),
        (", b = 128", ""),
        ("-> blocks", "-> mxfp4"),
        ("<w>_scale_inv", "<w>_scale"),
        ("of <w>", "of <w>.weight"),
        ("scales quantized <w>", "ignore quantized <w>"),
        ("<x> : ...", "<x> : a b"),
        ("<x> : ...", "<x>.weight : ..."),
    ],
)
def test_blocks_of_fp8(old, new, shape, tmp_path: Path):
    text = (Path(bytecheckpoint.__file__).parent / "layouts/builtin/fp8.layout").read_text()
    assert old in text
    quantised, scale, meant = in_blocks(torch.randn(shape) * torch.logspace(0, 2, shape[0])[:, None])
    path = saved(tmp_path, {"w.weight": quantised, "w.weight_scale_inv": scale, "b": torch.ones(3)})

    def loaded(edited):
        live = {"w.weight": torch.zeros(shape), "b": torch.zeros(3)}
        bytecheckpoint.load(path, {"model": live}, layout=Layout.from_text(edited), cast=True)
        return torch.equal(live["w.weight"], meant) and torch.equal(live["b"], torch.ones(3))

    assert loaded(text)
    try:
        found = loaded(text.replace(old, new, 1))
    except CheckpointError:
        return
    assert not found
