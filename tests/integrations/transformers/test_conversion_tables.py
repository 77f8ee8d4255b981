"""Models of transformers 5 differ in memory from their files; its own tables say how, and become layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
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
#: Others: a table that is built in, and the names of files.
CLASSES = FAMILIES | {"bert": "BertForMaskedLM", "deepseek_v3": "DeepseekV3ForCausalLM", "gpt2": "GPT2LMHeadModel"}
CLASSES |= {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}


def shrink(config: Any) -> Any:
    for name, value in SMALL.items():
        if type(getattr(config, name, None)) is int:
            setattr(config, name, value)
    for name in getattr(config, "sub_configs", None) or {}:
        shrink(getattr(config, name))
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return config


def model_of(name: str, **changes: Any) -> Any:
    import transformers

    config = shrink(transformers.AutoConfig.for_model(name))
    for key, value in changes.items():
        setattr(config, key, value)
    return getattr(transformers, CLASSES[name])(config)


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


@pytest.mark.parametrize("name", ["bert", "deepseek_v3", "granitemoe", "llama"])
def test_what_only_the_files_or_the_model_have(name: str, tmp_path: Path) -> None:
    """Layers, names and heads that one side lacks are unexpected or missing, as in a load without a layout."""
    torch.manual_seed(0)
    saved, shorter = model_of(name, num_hidden_layers=3), model_of(name)
    saved.save_pretrained(tmp_path / "hf")
    with pytest.raises(IncompatibleCheckpointError, match=r"hf holds .*layer.*\.2\..* which no rank wants"):
        bytecheckpoint.load(tmp_path / "hf", {"model": shorter}, layout="auto")
    report = bytecheckpoint.load(tmp_path / "hf", {"model": shorter}, layout="auto", strict=False)
    expected = saved.state_dict()
    assert not report.missing and any(".2." in key for key in report.unexpected)
    assert all(torch.equal(value, expected[key]) for key, value in shorter.state_dict().items())


@pytest.mark.parametrize("name", ["bert", "deepseek_v3", "granitemoe", "llama", "mixtral"])
def test_a_head_that_one_side_lacks(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved, model = model_of(name, tie_word_embeddings=False), model_of(name, tie_word_embeddings=False)
    base, other = saved.base_model, model.base_model
    saved.save_pretrained(tmp_path / "head")
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(IncompatibleCheckpointError, match=r"head holds .* which no rank wants"):
        bytecheckpoint.load(tmp_path / "head", {"model": other}, layout="auto")
    for path, live in (("head", other), ("base", model)):
        with torch.no_grad():
            _ = [parameter.zero_() for parameter in model.parameters()]
        bytecheckpoint.load(tmp_path / path, {"model": live}, layout="auto", strict=False)
        assert_equal(other, base)


@pytest.mark.parametrize("name", ["deepseek_v3", "granitemoe"])
def test_a_head_of_files_that_the_model_ties(name: str, tmp_path: Path) -> None:
    """The head would be lost; the other way round, the files' configuration says what it is."""
    model = model_of(name, tie_word_embeddings=True)
    model_of(name, tie_word_embeddings=False).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"requires hf\.tie_word_embeddings .* is False"):
        bytecheckpoint.load(tmp_path, {"model": model}, layout="auto")


OLD_FILES = {
    "gpt2": {"h.0.attn.bias": "h.0.attn.bias", "transformer.": ""},  # the pattern fits "c_attn.bias", too
    "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": "model.layers.0.self_attn.rotary_emb.inv_freq"},
    "bert": {"bert.embeddings.position_ids": "bert.embeddings.position_ids", "LayerNorm.weight": "LayerNorm.gamma"},
}


@pytest.mark.parametrize("name", OLD_FILES)
def test_what_transformers_ignores_in_old_files(name: str, tmp_path: Path) -> None:
    """Names without a place in the model that transformers ignores are ignored, and no others."""
    torch.manual_seed(0)
    saved, model = model_of(name), model_of(name)
    saved.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for new, old in OLD_FILES[name].items():
        tensors = {key.replace(new, old): value for key, value in tensors.items()} if new != old else tensors
        tensors |= {new: torch.ones(4)} if new == old else {}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    report = bytecheckpoint.load(tmp_path, {"model": model}, layout="auto")
    assert not report.unexpected and any("ignores 1 tensors" in note for note in report.notes)
    assert_equal(model, saved)
    assert (layout_of(model, tmp_path) is None) == (name == "llama")
    tensors["foo.weight"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IncompatibleCheckpointError, match=r"holds model/foo\.weight"):
        bytecheckpoint.load(tmp_path, {"model": model}, layout="auto")


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
