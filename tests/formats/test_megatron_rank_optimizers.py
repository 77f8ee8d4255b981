"""Optimizers in files of Megatron's ranks: every state has the name of its parameter, or the optimizer is left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.formats.megatron_ranks import read_megatron_ranks
from bytecheckpoint.representation.values.codec import decode
from bytecheckpoint.representation.values.tree import TensorRef
from bytecheckpoint.storage import resolve

LAYER = "decoder.layers.0"
#: Shapes of a model, in its order, and the dimension along which ranks divide each tensor; the second one is frozen.
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "embedding.word_embeddings.weight": ((4000, 6), 0),
    "embedding.position_embeddings.weight": ((7, 6), None),
    f"{LAYER}.input_layernorm.weight": ((6,), None),
    f"{LAYER}.self_attention.linear_qkv.weight": ((18, 6), 0),
    f"{LAYER}.self_attention.linear_qkv.bias": ((18,), 0),
    f"{LAYER}.pre_mlp_layernorm.weight": ((6,), None),
    "decoder.final_layernorm.weight": ((6,), None),
    "output_layer.weight": ((4000, 6), 0),
}
FROZEN = "embedding.position_embeddings.weight"
SLOTS = ("master", "exp_avg", "exp_avg_sq")
RANKS = 2
#: Number of the parameters behind which a bucket ends, in the reverse order of the model.
BUCKETS = {"flat": (2, 3), "one-bucket": ()}


def whole_run(dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Return a model, whose norms are all alike in its precision, and the state of each parameter."""
    generator = torch.Generator().manual_seed(1)
    model, states = {}, {}
    for name, (shape, _) in SHAPES.items():
        states[name] = {slot: torch.randn(shape, generator=generator) for slot in SLOTS}
        if "norm" in name:
            states[name]["master"] = 1 + 1e-4 * states[name]["master"]
        model[name] = states[name]["master"].to(dtype)
    del states[FROZEN]
    return model, states


def rank_of(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    dim = SHAPES[name][1]
    return tensor if dim is None else tensor.chunk(RANKS, dim)[rank].clone()


def groups_of(names: list[str], **more: Any) -> list[dict[str, Any]]:
    """Return Megatron's groups, with names."""
    vectors = [name for name in names if len(SHAPES[name][0]) == 1]
    common = {"lr": 0.1, "is_expert_parallel": False, **more}
    return [
        {"params": [name for name in names if name not in vectors], "wd_mult": 1.0, "weight_decay": 0.1, **common},
        {"params": vectors, "wd_mult": 0.0, "weight_decay": 0.0, **common},
    ]


def numbered(state: dict[str, dict[str, torch.Tensor]], masters: bool) -> dict[str, Any]:
    """Return the entry of an optimizer whose parameters have numbers."""
    groups = groups_of(list(state))
    order = [name for group in groups for name in group["params"]]
    inner = {
        "state": {
            k: {"step": torch.tensor(7.0), **{slot: state[name][slot] for slot in SLOTS[1:]}}
            for k, name in enumerate(order)
        },
        "param_groups": [{**g, "params": [order.index(name) for name in g["params"]]} for g in groups],
    }
    high = [[state[name]["master"] for name in group["params"]] for group in groups]
    return {"optimizer": inner, "fp32_from_fp16_params": high} if masters else inner


def flat(state: dict[str, dict[str, torch.Tensor]], dtype: torch.dtype, ends: tuple[int, ...]) -> dict[str, Any]:
    """Return the flat tensors of a distributed optimizer."""
    tensors: dict[str, torch.Tensor] = {"param": torch.zeros(0)}
    for slot in SLOTS:
        parts: list[torch.Tensor] = []
        begin = end = 0
        for k, name in enumerate(reversed(state)):
            aligned = begin + -(-(end - begin) // 64) * 64
            parts += [torch.zeros(aligned - end), state[name][slot].reshape(-1)]
            end = aligned + state[name][slot].numel()
            begin = end if k in ends else begin
        tensors["param" if slot == "master" else slot] = torch.cat(parts)
    return {"buckets_coalesced": True, 0: {(dtype, torch.float32): {**tensors, "numel_unpadded": end}}}


def save(folder: Path, form: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Save the files of two tensor-parallel ranks; return the tensors that a reader has to find."""
    model, states = whole_run(dtype)
    for rank in range(RANKS):
        own = {name: {slot: rank_of(name, one[slot], rank).clone() for slot in SLOTS} for name, one in states.items()}
        value: dict[str, Any] = {"args": SimpleNamespace(untie_embeddings_and_output_weights=True), "iteration": 7}
        value["model"] = {name: rank_of(name, tensor, rank).clone() for name, tensor in model.items()}
        path = folder / f"mp_rank_{rank:02}"
        path.mkdir(parents=True)
        if form in BUCKETS:
            groups = [{k: v for k, v in group.items() if k != "params"} for group in groups_of(list(own), step=7)]
            value["optimizer"] = {"optimizer": {"param_groups": groups}}
            torch.save(flat(own, dtype, BUCKETS[form]), path / "distrib_optim.pt")
        else:
            value["optimizer"] = numbered(own, masters=form == "masters")
        torch.save(value, path / "model_optim_rng.pt")
    slots = SLOTS[1:] if form == "plain" else SLOTS
    found = {f"optimizer/state/{name}/{slot}": one[slot] for name, one in states.items() for slot in slots}
    found |= {f"optimizer/state/{name}/step": torch.tensor(7.0) for name in states}
    return found | {f"model/{name}": tensor for name, tensor in model.items()}


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("plain", torch.float32),
        ("masters", torch.bfloat16),
        ("masters", torch.float16),
        ("flat", torch.bfloat16),
        ("flat", torch.float32),
        ("one-bucket", torch.bfloat16),
    ],
)
def test_every_state_has_its_name(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    expected = save(tmp_path, form, dtype)
    with bytecheckpoint.open(tmp_path) as opened:
        tensors = {key: tensor[...] for key, tensor in opened.tensors.items()}
    assert tensors.keys() - expected.keys() == {f"model/{LAYER}.self_attention.linear_qkv.layer_norm_weight"}
    assert [key for key in expected if not torch.equal(tensors[key], expected[key])] == []
    foreign = read_megatron_ranks(resolve(str(tmp_path)))
    tree = decode(foreign.values["optimizer"], on_tensor=TensorRef, on_unregistered=lambda name, value: value)
    trained = [name for name in SHAPES if name != FROZEN]
    vectors = [name for name in trained if len(SHAPES[name][0]) == 1]
    matrices = [name for name in trained if name not in vectors]
    found = {group["weight_decay"]: group["params"] for group in tree["param_groups"]}
    assert (found, foreign.notes) == ({0.1: matrices, 0.0: vectors}, [])


Change = Callable[[dict[str, Any]], None]


def edit(folder: Path, change: Change, rank: int = 1, file: str = "model_optim_rng.pt") -> None:
    path = folder / f"mp_rank_{rank:02}" / file
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


def masters(value: dict[str, Any]) -> list[list[torch.Tensor]]:
    found: list[list[torch.Tensor]] = value["optimizer"]["fp32_from_fp16_params"]
    return found


def inner(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["optimizer"].get("optimizer", value["optimizer"])
    return found


def buffers(value: dict[str, Any]) -> dict[str, Any]:
    ((_, found),) = value[0].items()
    return dict(found)


def next_after(tensor: torch.Tensor) -> None:
    """Change the last element, as little as changes what it rounds to."""
    tensor.reshape(-1)[-1] *= 1.01


def freeze_twin(value: dict[str, Any]) -> None:
    """Freeze a norm that has the values of another one."""
    value["model"] = {"first_layernorm.weight": torch.ones(6), **value["model"]}
    value["model"]["first_layernorm.weight"] = torch.ones(6, dtype=torch.bfloat16)


def split_groups(value: dict[str, Any]) -> None:
    """Have two groups of matrices, of which both begin with a shape of the first one."""
    first, *rest = inner(value)["param_groups"]
    taken = first["params"].pop()
    other = {**first, "params": [taken], "lr_mult": 0.5}
    inner(value)["param_groups"] = [first, other, *rest]


FLAT = "distrib_optim.pt"
HOSTILE: dict[str, tuple[str, str, Change, str]] = {
    "element": ("masters", "", lambda v: next_after(masters(v)[0][1]), r"group 0 fits no parameter.*linear_qkv\.weight"),
    "flat element": (
        "flat", FLAT, lambda v: next_after(buffers(v)["param"][:12000]), r"from element 0 on.*the next one is output_layer",
    ),
    "first element": ("masters", "", lambda v: next_after(masters(v)[0][0][:1]), r"of group 0 fits no .*word_embeddings"),
    "moment": (
        "masters", "", lambda v: inner(v)["state"][1].update(exp_avg=torch.ones(9, 5)), r"'exp_avg': \[9, 5\]",
    ),
    "plain moment": (
        "plain", "", lambda v: inner(v)["state"][1].update(exp_avg=torch.ones(9, 5), exp_avg_sq=torch.ones(9, 5)),
        r"group 0 fits no parameter .*without state are none",
    ),
    "groups": ("masters", "", lambda v: masters(v).pop(), "not as many fp32 tensors"),
    "numbers": ("plain", "", lambda v: inner(v)["param_groups"][0]["params"].pop(), "not numbered through"),
    "no state": ("plain", "", lambda v: inner(v)["state"].clear(), r"group 0 fits no parameter \(\{\}\)"),
    "twin": ("masters", "", freeze_twin, "first_layernorm.weight.* fit the same states"),
    "flat twin": ("flat", "", freeze_twin, "layernorm.weight and .*norm.weight fit the same state"),
    "two groups": ("plain", "", split_groups, r"embeddings.weight' fits the next states of groups \[0, 1\]"),
    "size": (
        "flat", FLAT, lambda v: v[0].update({next(iter(v[0])): {**buffers(v), "numel_unpadded": 3}}), "not 3 elements",
    ),
    "no weights": ("flat", FLAT, lambda v: next(iter(v[0].values())).pop("param"), "elements in all slots"),
    "buckets": ("flat", FLAT, lambda v: v.pop("buckets_coalesced"), "of single buckets are not read"),
    "other optimizer": ("masters", "", lambda v: v.update(optimizer={"shards": 3}), "objects are not those of Megatron"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_proven_is_left_out_by_name(tmp_path: Path, name: str) -> None:
    form, file, change, message = HOSTILE[name]
    dtype = torch.float32 if form == "plain" else torch.bfloat16
    expected = save(tmp_path, form, dtype)
    edit(tmp_path, change, file=file or "model_optim_rng.pt")
    if "twin" in name:
        edit(tmp_path, change, rank=0)
    foreign = read_megatron_ranks(resolve(str(tmp_path)))
    assert re.fullmatch(
        f"the optimizer is left out, because .*{message}.*; load it with Megatron, .*", foreign.notes[0]
    )
    model = torch.nn.ModuleDict({"output_layer": torch.nn.Linear(6, 4000, bias=False, dtype=dtype)})
    report = bytecheckpoint.load(str(tmp_path), {"model": model}, strict=False)
    assert torch.equal(model["output_layer"].weight, expected["model/output_layer.weight"]) and not report.missing
    with pytest.raises(IncompatibleCheckpointError, match=f"lacks optimizer/.*{message}"):
        bytecheckpoint.load(str(tmp_path), {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


def test_a_lost_file_of_flat_tensors(tmp_path: Path) -> None:
    save(tmp_path, "flat")
    (tmp_path / "mp_rank_01" / FLAT).unlink()
    assert "distrib_optim.pt, is missing" in read_megatron_ranks(resolve(str(tmp_path))).notes[0]


def test_ranks_with_other_steps_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "masters")
    edit(tmp_path, lambda v: inner(v)["state"][2]["step"].fill_(8))
    with pytest.raises(CorruptCheckpointError, match=r"have other slots, settings or steps of 'output_layer.weight'"):
        read_megatron_ranks(resolve(str(tmp_path)))


def test_steps_of_groups_and_chained_optimizers(tmp_path: Path) -> None:
    """Experts have an optimizer of their own; a dense parameter of the same shape is not taken for one of them."""
    names = ["a.mlp.linear_fc1.weight", "a.mlp.experts.local_experts.0.linear_fc1.weight"]
    weights = {name: torch.full((2, 2), k + 1.0) for k, name in enumerate(names)}
    chained = [
        {
            "state": {0: {"exp_avg": weights[name] / 8}},
            "param_groups": [{"params": [0], "lr": 0.1, "step": 4 + k, "is_expert_parallel": k > 0}],
        }
        for k, name in enumerate(names)
    ]
    (tmp_path / "mp_rank_00").mkdir()
    value = {"args": SimpleNamespace(num_experts=1), "model": dict(reversed(weights.items())), "optimizer": chained}
    torch.save(value, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    with bytecheckpoint.open(tmp_path) as found:
        for k, name in enumerate(names):
            assert torch.equal(found[f"optimizer/state/{name}/exp_avg"][...], weights[name] / 8)
            assert found[f"optimizer/state/{name}/step"][...].item() == 4 + k
