"""Files of Megatron's ranks: every element equals what our own adapter saved of the same model."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.formats.detect import detect
from bytecheckpoint.formats.megatron_ranks import _division, _numbered, read_megatron_ranks
from bytecheckpoint.representation.values.codec import decode
from bytecheckpoint.representation.values.tree import TensorRef
from bytecheckpoint.storage import resolve

GOLDEN = Path(__file__).parent / "golden" / "megatron-ranks-0.19.2" / "iter_0000002"
RANKS = [f"mp_rank_{t:02}_{p:03}" for t in range(2) for p in range(2)]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "saved"))


def change(folder: Path, rank: str, **entries: Any) -> None:
    file = folder / rank / "model_optim_rng.pt"
    value = torch.load(file, weights_only=False)
    for key, entry in entries.items():
        if key == "args":
            vars(value["args"]).update(entry)
        elif isinstance(value.get(key), dict):
            value[key].update(entry)
        else:
            value[key] = entry
    torch.save(value, file)


@pytest.mark.parametrize(("number", "what"), [(1, "1 tensor"), (2, "1 pipeline")])
def test_lost_ranks_are_named(copied: Path, number: int, what: str) -> None:
    """All those of the second half, of which the other files show nothing."""
    for rank in [rank for rank in RANKS if int(rank.split("_")[1 + number])]:
        shutil.rmtree(copied / rank)
    with pytest.raises(CheckpointNotFoundError, match=rf"has files of {what}-parallel ranks, and its args say 2"):
        read_megatron_ranks(resolve(str(copied)))


def test_ranks_of_several_iterations_are_refused(copied: Path) -> None:
    change(copied, RANKS[-1], iteration=1)
    with pytest.raises(IncompatibleCheckpointError, match="files of several iterations: 1, 2"):
        read_megatron_ranks(resolve(str(copied)))


def test_every_tensor_equals_what_was_trained() -> None:
    """Two tensor-parallel ranks, two stages with two chunks each; norms have both names."""
    assert detect(resolve(str(GOLDEN))).format == "megatron-ranks"
    expected = json.loads((GOLDEN.parent / "expected.json").read_text())
    with bytecheckpoint.open(GOLDEN) as found:
        names = {stored: name for name, stored in found._catalog.aliases["model"].items()}
        tensors = {key: tensor[...].contiguous().reshape(-1) for key, tensor in found.tensors.items()}
    digests = {key: sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest() for key, tensor in tensors.items()}
    digests |= {f"model/{name}": digests[f"model/{stored}"] for stored, name in names.items()}
    assert digests == expected and len(expected) == 43
    foreign = read_megatron_ranks(resolve(str(GOLDEN)))
    extra, scheduler = (
        decode(foreign.values[state], on_tensor=TensorRef, on_unregistered=lambda name, value: value)
        for state in ("extra_states", "opt_param_scheduler")
    )
    assert (extra["iteration"], extra["args"]["num_layers"], scheduler["num_steps"]) == (2, 4, 2)
    assert [re.search("flat tensors, distrib_optim.pt, is missing", note) is not None for note in foreign.notes] == [
        True
    ]


class Named(nn.Module):
    """A module with parameters of given names, and a configuration of transformers."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type=config["model_type"], to_dict=lambda: config)
        for name, shape in shapes.items():
            module: nn.Module = self
            *steps, last = name.split(".")
            for step in steps:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(last, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))


def test_layouts_of_hugging_face_work_on_top() -> None:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (30, 16), "lm_head.weight": (30, 16)}
    for number in range(4):
        layer = f"model.layers.{number}."
        shapes |= {f"{layer}self_attn.{k}_proj.weight": (16 if k in "qo" else 8, 16) for k in "qkvo"}
        shapes |= {f"{layer}self_attn.{k}_norm.weight": (4,) for k in "qk"}
        shapes |= {f"{layer}mlp.{k}_proj.weight": (16, 24) if k == "down" else (24, 16) for k in ("gate", "up", "down")}
        shapes |= {f"{layer}{k}_layernorm.weight": (16,) for k in ("input", "post_attention")}
    shapes["model.norm.weight"] = (16,)
    model = Named(
        shapes,
        model_type="qwen3",
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=30,
        hidden_size=16,
    )
    bytecheckpoint.load(str(GOLDEN), {"model": model}, layout="llama")
    found = model.state_dict()
    files = [torch.load(GOLDEN / rank / "model_optim_rng.pt", weights_only=False) for rank in RANKS]
    # Layer 1 is the first of stage 1, layer 2 the second chunk of stage 0.
    queries = [files[k]["model0"]["decoder.layers.0.self_attention.linear_qkv.weight"] for k in (1, 3)]
    assert torch.equal(found["model.layers.1.self_attn.q_proj.weight"], torch.cat([part[:8] for part in queries]))
    assert torch.equal(found["model.layers.1.self_attn.v_proj.weight"], torch.cat([part[12:] for part in queries]))
    joined = [files[k]["model1"]["decoder.layers.0.mlp.linear_fc1.weight"] for k in (0, 2)]
    assert torch.equal(found["model.layers.2.mlp.up_proj.weight"], torch.cat([part[12:] for part in joined]))
    down = [files[k]["model1"]["decoder.layers.0.mlp.linear_fc2.weight"] for k in (0, 2)]
    assert torch.equal(found["model.layers.2.mlp.down_proj.weight"], torch.cat(down, 1))
    assert torch.equal(
        found["lm_head.weight"], torch.cat([files[k]["model1"]["output_layer.weight"] for k in (1, 3)])[:30]
    )


def test_other_names_are_those_of_ranks_and_optimizers_are_left_out(copied: Path) -> None:
    for rank in RANKS[::2]:
        change(copied, rank, model0={"adapter.weight": torch.ones(2), "decoder.layers.0.x._extra_state": torch.ones(1)})
    foreign = read_megatron_ranks(resolve(str(copied)))
    assert {"mp_rank_00:adapter.weight", "mp_rank_01:adapter.weight"} <= set(foreign.catalog.fqn.to_list())
    assert [note[:30] for note in foreign.notes] == [
        "nothing says how 2 tensor-para", "2 extra states of modules are ", "the optimizer is left out, bec",
    ]  # fmt: skip


def test_the_last_stage_s_copy_of_tied_embeddings_is_skipped(copied: Path) -> None:
    for rank in RANKS:
        change(copied, rank, args={"untie_embeddings_and_output_weights": False})
    foreign = read_megatron_ranks(resolve(str(copied)))
    assert "output_layer.weight" not in foreign.catalog.fqn.to_list()


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        (
            {"args": {"num_experts": 4, "expert_tensor_parallel_size": 1}},
            IncompatibleCheckpointError,
            "experts on 1 tensor",
        ),
        (
            {"args": {"num_experts": 4, "expert_model_parallel_size": 2}},
            CorruptCheckpointError,
            "and on 2 in",
        ),
        ({"args": {"moe_glu_interleave_size": 32}}, IncompatibleCheckpointError, "interleaved gates"),
        ({"args": {"num_query_groups": 1}}, IncompatibleCheckpointError, "1 groups of queries on 2"),
        ({"model0": {"language_model": {}}}, IncompatibleCheckpointError, "before Megatron-Core"),
        ({"model0": {"embedding.word_embeddings.weight": torch.ones(16, 15)}}, CorruptCheckpointError, "do not join"),
        ({"model0": {"x.weight": torch.ones(1)}}, CorruptCheckpointError, "lack 'x.weight'"),
        ({"model1": {"embedding.word_embeddings.weight": torch.ones(16, 16)}}, IncompatibleCheckpointError, "is tied"),
    ],
)
def test_what_cannot_be_proven_is_refused(
    copied: Path, entries: dict[str, Any], error: type[Exception], message: str
) -> None:
    change(copied, RANKS[0], **entries)
    with pytest.raises(error, match=message):
        read_megatron_ranks(resolve(str(copied)))


def test_missing_ranks_and_ranks_of_experts_are_refused(copied: Path) -> None:
    shutil.copytree(copied / RANKS[0], copied / f"{RANKS[0]}_000")
    with pytest.raises(IncompatibleCheckpointError, match="different numbers of ranks"):
        read_megatron_ranks(resolve(str(copied)))
    shutil.rmtree(copied / f"{RANKS[0]}_000")
    shutil.rmtree(copied / RANKS[3])
    with pytest.raises(CheckpointNotFoundError, match="3 files of 2 x 2 x 1"):
        read_megatron_ranks(resolve(str(copied)))


def save_mixture(folder: Path, tensor: int, stages: int, experts: int, grouped: bool) -> dict[str, torch.Tensor]:
    """Save files of the ranks of a mixture of experts as Megatron divides them; return its whole tensors."""
    hidden, inner = 8, 12
    whole: dict[str, torch.Tensor] = {}
    ranks = itertools.product(range(tensor), range(stages), range(experts))
    files: dict[tuple[int, ...], dict[str, torch.Tensor]] = {rank: {} for rank in ranks}

    def put(
        stage: int, on: Iterable[int], names: tuple[str, str], shape: tuple[int, ...], dim: int, gates: int
    ) -> None:
        """Add a tensor to the ranks of a stage: divided along a dimension, in one or two gates; -1: whole."""
        value = whole.setdefault(names[1], torch.randn(shape))
        for t, e in itertools.product(range(tensor), on):
            parts = [part.chunk(tensor, dim)[t] for part in value.chunk(gates, dim)]
            files[t, stage, e][names[0]] = value if dim < 0 else torch.cat(parts, dim)

    for layer in range(4):
        stage, own = divmod(layer, 4 // stages)
        for name, shape, dim, gates in (
            ("self_attention.linear_qkv.weight", (12, hidden), 0, 1),
            ("self_attention.linear_proj.weight", (hidden, 4), 1, 1),
            ("mlp.router.weight", (4, hidden), -1, 1),
            ("mlp.shared_experts.linear_fc1.weight", (2 * inner, hidden), 0, 2),
            ("mlp.shared_experts.linear_fc2.weight", (hidden, inner), 1, 1),
        ):
            names = f"decoder.layers.{own}.{name}", f"decoder.layers.{layer}.{name}"
            put(stage, range(experts), names, shape, dim, gates)
        for expert, linear in itertools.product(range(4), (1, 2)):
            e, number = divmod(expert, 4 // experts)
            form = "linear_fc{1}.weight{0}" if grouped else "local_experts.{0}.linear_fc{1}.weight"
            local, name = (
                f"decoder.layers.{at}.mlp.experts.{form.format(n, linear)}"
                for at, n in ((own, number), (layer, expert))
            )
            shape = (2 * inner, hidden) if linear == 1 else (hidden, inner)
            put(stage, [e], (local, name), shape, linear - 1, 3 - linear)
    args = {"num_experts": 4, "expert_model_parallel_size": experts, "pipeline_model_parallel_size": stages}
    for (t, stage, e), model in files.items():
        name = f"mp_rank_{t:02}" + (f"_{stage:03}" if stages > 1 else "") + (f"_{e:03}" if experts > 1 else "")
        (folder / name).mkdir(parents=True)
        value = {"args": SimpleNamespace(**args), "model": model, "iteration": 1}
        torch.save(value, folder / name / "model_optim_rng.pt")
    return whole


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "sequential"])
@pytest.mark.parametrize("degrees", [(1, 1, 2), (2, 1, 4), (2, 2, 2), (1, 2, 1), (4, 1, 1), (1, 4, 2)])
def test_experts_are_numbered_through(tmp_path: Path, degrees: tuple[int, int, int], grouped: bool) -> None:
    expected = save_mixture(tmp_path, *degrees, grouped)
    with bytecheckpoint.open(tmp_path) as found:
        tensors = {key.removeprefix("model/"): tensor[...] for key, tensor in found.tensors.items()}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_more_files_than_expert_parallel_ranks_are_refused(tmp_path: Path) -> None:
    save_mixture(tmp_path, 1, 2, 2, True)
    for folder in tmp_path.iterdir():
        change(tmp_path, folder.name, args={"expert_model_parallel_size": 1})
    with pytest.raises(IncompatibleCheckpointError, match="of expert-parallel rank 1, and its args say 1 ranks"):
        read_megatron_ranks(resolve(str(tmp_path)))


def test_stacked_experts_of_several_ranks_are_refused(tmp_path: Path) -> None:
    save_mixture(tmp_path, 1, 1, 2, True)
    change(tmp_path, "mp_rank_00_001", model={"decoder.layers.0.mlp.experts.weight1": torch.ones(8, 24)})
    with pytest.raises(IncompatibleCheckpointError, match="is of several experts"):
        read_megatron_ranks(resolve(str(tmp_path)))
    shutil.rmtree(tmp_path / "mp_rank_00_001")
    with pytest.raises(CheckpointNotFoundError, match="1 files of 1 x 1 x 2"):
        read_megatron_ranks(resolve(str(tmp_path)))


def test_gates_are_told_by_the_next_layer() -> None:
    """Rows of gate and up are twice the columns of the next layer; without that layer nothing is concluded."""
    held: Any = {"m.linear_fc2.weight": SimpleNamespace(shape=(16, 4))}
    gated = _division("m.linear_fc1.weight", [(8, 16), (8, 16)], held, {})
    assert gated and [part.whole[0] for part in gated.parts] == [0, 4, 8, 12]
    plain = _division("m.linear_fc1.bias", [(4,), (4,)], held, {})
    assert plain and [part.whole[0] for part in plain.parts] == [0, 4]
    assert _division("m.linear_fc1.weight", [(8, 16), (8, 16)], {}, {}) is None
    assert _division("m.linear_fc1.weight", [(6, 16), (6, 16)], held, {}) is None


@pytest.mark.parametrize(("rows", "begins"), [(7, [0, 7]), (14, [0]), (9, None)])
def test_down_projections_are_divided_as_the_args_say(rows: int, begins: list[int] | None) -> None:
    """Transformer Engine's are whole on each rank, those of Megatron-Core are divided."""
    args = {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_pos_emb_head_dim": 4}
    for kind in ("q", "kv"):
        found = _division(f"m.linear_{kind}_down_proj.weight", [(rows, 16)] * 2, {}, args)
        assert begins == (None if found is None else sorted({part.whole[0] for part in found.parts}))
        assert _division(f"m.linear_{kind}_down_proj.weight", [(rows, 16)] * 2, {}, {}) is None


def test_layers_follow_each_other_by_chunk_and_stage() -> None:
    """Uneven stages: three, one, one and two layers."""
    counts = {(0, 0): 3, (0, 1): 1, (1, 0): 1, (1, 1): 2}
    chunks: Any = {key: {f"decoder.layers.{k}.w": (*key, k) for k in range(count)} for key, count in counts.items()}
    found = _numbered(chunks)
    assert [found[f"decoder.layers.{k}.w"] for k in range(7)] == [
        (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip
