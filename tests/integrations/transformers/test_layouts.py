"""Files of Hugging Face become models of transformers 5, which stacks experts in memory, and files again."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bytecheckpoint
from bytecheckpoint.errors import UsageError
from bytecheckpoint.layouts.layout import find
from bytecheckpoint.planning.part_space import _stored_config
from bytecheckpoint.tools import export

BASE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 37}
BASE |= {"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6, "q_lora_rank": 14}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 2}
FAMILIES = {
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "tie_word_embeddings": True},
    "qwen3_next": {"num_experts": 3, "num_hidden_layers": 4},
    "deepseek_v3": GROUPS | LATENT | {"num_key_value_heads": 4, "head_dim": 4},
    "glm4_moe": GROUPS,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_files_and_models(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **BASE | FAMILIES[name])
    torch.manual_seed(0)
    saved, model = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    saved.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    report = bytecheckpoint.load(tmp_path / "hf", {"model": model}, layout="auto")
    assert not report.missing and not report.unexpected
    for key, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    bytecheckpoint.save(tmp_path / "own", {"model": model})
    layout = "hf5_mixtral" if name == "mixtral" else "hf5_moe"
    with bytecheckpoint.open(tmp_path / "own", layout=layout) as found:
        export(found, tmp_path / "out", files_from=tmp_path / "hf")
    files = [
        {key: value for file in (tmp_path / folder).glob("*.safetensors") for key, value in load_file(file).items()}
        for folder in ("hf", "out")
    ]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(value, files[1][key]) for key, value in files[0].items())
    again, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.arange(5)[None]
    assert torch.equal(again(ids).logits, saved(ids).logits)


@pytest.mark.parametrize("kind", ["default", "llama3"])
def test_positions_of_a_live_model_are_compared(kind: str, tmp_path: Path) -> None:
    """A model saved by this package is compared as its files are, with the parameters of its rotary positions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    positions = {"rope_theta": 1e4, "rope_type": kind} | (scaling if kind == "llama3" else {})
    sizes = BASE | {"vocab_size": 40 + len(positions)}  # saves of equal shapes share a plan, and what it says
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, rope_parameters=positions))
    bytecheckpoint.save(tmp_path / "own", {"model": model})
    model.save_pretrained(tmp_path / "hf")
    for folder in ("own", "hf"):
        with bytecheckpoint.open(tmp_path / folder) as found:
            config = _stored_config(found._catalog)
        said = {f"megatron.rotary_{name}": value for name, value in scaling.items()}
        layout = find("llama")
        layout.check_config(config | said | {"megatron.rotary_type": kind})
        with pytest.raises(UsageError, match=rf"rope_type is {kind}, megatron\.rotary_type is linear"):
            layout.check_config(config | {"megatron.rotary_type": "linear"})
        if kind == "llama3":
            with pytest.raises(UsageError, match=r"rope_parameters\.factor is 8\.0, megatron\.rotary_factor is 2\.0"):
                layout.check_config(config | said | {"megatron.rotary_type": kind, "megatron.rotary_factor": 2.0})
