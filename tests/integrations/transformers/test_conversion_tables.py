"""Models of transformers 5 differ in memory from their files; its own tables say how, and become layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.integrations.transformers import layout_of
from bytecheckpoint.tools import export
from bytecheckpoint.tools.huggingface_view import HuggingFaceView
from tests.support.worlds import on_ranks

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 6, "depth": 2, "num_heads": 4, "embed_dim": 32, "image_size": 28, "patch_size": 14, "pad_token_id": 0,
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
}  # fmt: skip
#: Class of each family, and what its table has.
FAMILIES = {
    "afmoe": "AfmoeForCausalLM",  # experts
    "aria": "AriaForConditionalGeneration",  # names
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",  # a tied head that the file lacks
    "gemma3": "Gemma3ForConditionalGeneration",  # prefixes, and a tied head
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",  # experts below a prefix
    "granitemoe": "GraniteMoeForCausalLM",  # names of experts
    "kimi_k25": "Kimi_K25ForConditionalGeneration",  # cut projections, of which two are turned for rotary positions
    "phimoe": "PhimoeForCausalLM",  # experts under other names
    "swin": "SwinModel",  # numbers of two levels
    "voxtral": "VoxtralForConditionalGeneration",  # several submodels
}


def shrink(config: Any) -> Any:
    for name, value in SMALL.items():
        if type(getattr(config, name, None)) is int:
            setattr(config, name, value)
    for name in getattr(config, "sub_configs", None) or {}:
        shrink(getattr(config, name))
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return config


def model_of(name: str) -> Any:
    import transformers

    return getattr(transformers, FAMILIES[name])(shrink(transformers.AutoConfig.for_model(name)))


def assert_equal(model: Any, expected: Any) -> None:
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert [key for key, value in theirs.items() if not torch.equal(value, ours[key])] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_files_of_a_family(name: str, tmp_path: Path) -> None:
    """A load equals transformers' own; a step of a training leads back to the same files, which transformers reads."""
    torch.manual_seed(0)
    saved, model = model_of(name), model_of(name)
    saved.save_pretrained(tmp_path / "hf")
    report = bytecheckpoint.load(tmp_path / "hf", {"model": model}, layout="auto")
    assert not report.missing and not report.unexpected
    assert_equal(model, type(saved).from_pretrained(tmp_path / "hf"))
    bytecheckpoint.save(tmp_path / "own", {"model": saved})
    layout = layout_of(saved, tmp_path / "hf")
    assert layout is not None
    with bytecheckpoint.open(tmp_path / "own", layout=layout) as found, bytecheckpoint.open(tmp_path / "hf") as files:
        assert set(files.tensors) <= set(found.tensors)
        assert all(torch.equal(found[key][...], files[key][...]) for key in files.tensors)
        export(found, tmp_path / "out", files_from=tmp_path / "hf")
    assert_equal(type(saved).from_pretrained(tmp_path / "out"), saved)


@on_ranks(2)
def test_two_ranks_load_their_parts(path: str) -> None:
    """Each rank of FSDP2 reads its part of stacked experts, and of a model whose head is tied; a view leads back."""
    for name in ("gemma3", "phimoe"):
        torch.manual_seed(0)
        saved, model = model_of(name), model_of(name)
        if dist.get_rank() == 0:
            saved.save_pretrained(f"{path}/{name}")
        dist.barrier()
        replica = model_of(name)
        bytecheckpoint.load(f"{path}/{name}", {"model": DistributedDataParallel(replica)}, layout="auto")
        assert_equal(replica, saved)
        layout = layout_of(model, f"{path}/{name}")
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        bytecheckpoint.load(f"{path}/{name}", {"model": model}, layout="auto")
        whole = {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value
            for key, value in model.state_dict().items()
        }
        assert all(torch.equal(whole[key], value) for key, value in saved.state_dict().items())
        view = HuggingFaceView(layout=layout, files_from=f"{path}/{name}")
        bytecheckpoint.save(f"{path}/{name}-own", {"model": model}, view=view).viewed.result()
        dist.barrier()
        assert_equal(type(saved).from_pretrained(f"{path}/{name}-own"), saved)


def test_what_cannot_be_stated_is_refused(tmp_path: Path) -> None:
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping

    class Other(loading.ConversionOps):  # type: ignore[misc,name-defined]
        def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return input_dict

    model = model_of("granitemoe")
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name.replace("q_proj", "old_q")] = tensors.pop(name)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    transpose = loading.Transpose(0, 1, check_dims=True)
    for operation, message in ((Other(), "Other, which no layout states"), (transpose, "guesses .* square")):
        converter = loading.WeightConverter("old_q", "q_proj", [operation])
        register_checkpoint_conversion_mapping("granitemoe", [converter], overwrite=True)
        with pytest.raises(IncompatibleCheckpointError, match=rf"q_proj\.weight of .*old_q\.weight .*{message}"):
            bytecheckpoint.load(tmp_path, {"model": model}, layout="auto")
    with pytest.raises(UsageError, match="not for Linear"):
        layout_of(torch.nn.Linear(2, 2), tmp_path)
