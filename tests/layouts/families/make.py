"""Write the files of this folder: the tensors of a model of each family in a file of Hugging Face's, and its logits.

    python tests/layouts/families/make.py [FAMILY ...]     # where torch, transformers 5.24 and safetensors are installed

The weights follow from the names of the tensors, so that a file holds names, shapes, configuration and logits only.
transformers reads the weights from a file of its own, by its own conversions.
"""

import glob
import json
import re
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
)

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[2]))
from tests.layouts.models import collapsed, weights  # noqa: E402  from this repository, which is not installed here

BASE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 37}
BASE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 64}
GROUPED = BASE | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 8}
EXPERTS = {"num_experts": 3, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6, "q_lora_rank": 14}
ROPE, KINDS = {"rope_type": "default", "rope_theta": 10000.0}, ("full_attention", "sliding_attention")
FAMILIES = {
    "llama": GROUPED,
    "llama-tied": GROUPED | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": WIDE,
    "qwen2": GROUPED,
    "qwen3": WIDE,
    "seed_oss": WIDE,
    "smollm3": GROUPED | {"num_hidden_layers": 4},
    "phi3": GROUPED,
    "stablelm": GROUPED | {"use_qkv_bias": True, "num_attention_heads": 2, "num_key_value_heads": 1},
    "starcoder2": GROUPED,
    "gpt2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 37,
        "n_positions": 8,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "gpt_neox": BASE | {"use_parallel_residual": False},
    "gemma": WIDE,
    "gemma2": WIDE | {"query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0},
    "gemma3_text": WIDE | {"query_pre_attn_scalar": 10, "rope_parameters": dict.fromkeys(KINDS, ROPE)},
    "olmo2": GROUPED,
    "olmo3": GROUPED,
    "exaone4": WIDE | {"layer_types": ["sliding_attention", "full_attention"]},
    "granite": GROUPED
    | {"embedding_multiplier": 3.0, "attention_multiplier": 0.7, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    "arcee": GROUPED,
    "nemotron": GROUPED | {"head_dim": 4},
    "ernie4_5": WIDE | {"use_bias": True},
    "glm": WIDE | {"attention_bias": True},
    "glm4": WIDE | {"attention_bias": True},
    "olmoe": GROUPED | {"num_experts": 3, "num_experts_per_tok": 2},
    "mixtral": GROUPED | {"num_local_experts": 3},
    "qwen2_moe": GROUPED | EXPERTS | {"shared_expert_intermediate_size": 20},
    "qwen3_moe": WIDE | EXPERTS | {"mlp_only_layers": [0]},
    "qwen3_next": WIDE
    | EXPERTS
    | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [1], "num_hidden_layers": 3}
    | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 7},
    "glm4_moe": WIDE
    | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "use_qk_norm": True}
    | {"moe_intermediate_size": 12, "num_experts_per_tok": 2, "n_shared_experts": 2, "attention_bias": True},
    "deepseek_v3": BASE
    | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    | {"moe_intermediate_size": 12, "num_experts_per_tok": 2, "n_shared_experts": 2}
    | LATENT,
    "nemotron_h": WIDE
    | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_routed_experts": 4}
    | {"moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20, "moe_latent_size": 8}
    | {"ssm_state_size": 7, "mamba_num_heads": 6, "mamba_head_dim": 5, "n_groups": 2, "time_step_min": 1e-9},
    "gpt_oss": WIDE
    | {"num_local_experts": 3, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}
    | {"rope_parameters": ROPE},
}
BERT = BASE | {"max_position_embeddings": 8}
FAMILIES |= {
    "bert": BERT | {"num_hidden_layers": 3},
    "megatron_bert": BERT,
    "t5": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_heads": 4,
        "vocab_size": 37,
        "num_layers": 2,
        "num_decoder_layers": 3,
    }
    | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "relative_attention_num_buckets": 8},
}
CLASSES = dict.fromkeys(["bert", "megatron_bert"], AutoModelForPreTraining) | {"t5": AutoModelForSeq2SeqLM}
FAMILIES["nemotron_h-mtp"] = FAMILIES["nemotron_h"] | {"num_nextn_predict_layers": 1}
FAMILIES["qwen3_next-mtp"] = FAMILIES["qwen3_next"] | {"num_nextn_predict_layers": 1}
FAMILIES["glm4_moe-mtp"] = FAMILIES["glm4_moe"] | {"num_nextn_predict_layers": 1}
FAMILIES["deepseek_v3-mtp"] = FAMILIES["deepseek_v3"] | {"num_nextn_predict_layers": 2}

# Models of many MiB, whose tensors are read apart from each other, in the folder `large`. Logits of every 50th token.
LARGE = {
    "llama-large": {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 2000,
    },
    "qwen3_moe-large": {
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 2000,
        "num_experts": 8,
        "moe_intermediate_size": 512,
        "num_experts_per_tok": 2,
    },
}

# Models that see: names and shapes only, for torchtitan's adapters, in the folder `names`.
SIGHT = {"hidden_size": 20, "intermediate_size": 28, "patch_size": 3}
ROWS = SIGHT | {"num_attention_heads": 2, "num_hidden_layers": 2, "pos_emb_height": 4, "pos_emb_width": 5}
MIXED = WIDE | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
MIXED |= {"linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 7}
QWEN = SIGHT | {"depth": 2, "num_heads": 2, "out_hidden_size": 16, "num_position_embeddings": 16}
SEEING = {
    "qwen3_5": {"text_config": MIXED, "vision_config": QWEN},
    "qwen3_5_moe": {
        "text_config": MIXED | EXPERTS | {"shared_expert_intermediate_size": 20},
        "vision_config": QWEN,
    },
    "kimi_k25": {
        "text_config": FAMILIES["deepseek_v3"] | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0},
        "vision_config": ROWS | {"pos_emb_time": 2},
        "projection_hidden_size": 20,
        "tie_word_embeddings": False,
    },
    "muse_glimmer": {
        "text_config": WIDE | {"layer_rope_theta": [1e4, 0], "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": ROWS | {"layer_types": ["window_attention", "full_attention"]},
        "out_hidden_size": 16,
        "projector_hidden_size": 18,
    },
}
# transformers 5.23 writes some names of Kimi K2.5 that published files do not have.
PUBLISHED = {"language_model.model.blocks.": "language_model.model.layers.", "model.mm_projector.": "mm_projector."}
PUBLISHED |= {"vision_tower.encoder.patch_embed.": "vision_tower.patch_embed."}


def seeing(family):
    """Write the names and shapes of a model that sees."""
    config = AutoConfig.for_model(family, **SEEING[family])
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
        shapes = shapes_in(folder)
        written = json.loads(Path(folder, "config.json").read_text())
    for begin, end in PUBLISHED.items():
        found = {name: name.replace(begin, end) if name.startswith(begin) else name for name in shapes}
        shapes = {found[name]: shape for name, shape in shapes.items()}
    write(FOLDER / "names" / f"{family}.json", {"config": written, "tensors": collapsed(shapes)})


def shapes_in(folder):
    """Return the shapes of the tensors in the files of a folder, by name."""
    shapes = {}
    for file in glob.glob(f"{folder}/*.safetensors"):
        with safe_open(file, "pt") as opened:
            shapes |= {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes


def write(file, made):
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), json.dumps(made, indent=1))
    file.write_text(text + "\n")


# Names of what prediction layers have beside a decoder's layers, where they do not begin with a number.
OWN = {
    "qwen3_next": {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "shared_head.norm": "mtp.norm",
    },
    "nemotron_h": {name: f"mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj")}
    | {"shared_head.norm": "mtp.layers.1.final_layernorm"},
}


def added(config, number, name):
    """Return the name of a tensor that a prediction layer has beside those of a decoder's layer."""
    return f"{OWN.get(config.model_type, {}).get(name, f'model.layers.{number}.{name}')}.weight"


def predicted(model, tensors, ids, depth, length):
    """Return the logits of prediction layers, which transformers ignores: its decoder has their layers as its last ones.

    The block of number k, of `length` layers, has the hidden states of the one before and the embeddings of the tokens k
    places further on.
    """
    inner, count, found = model.model, len(model.model.layers) - depth * length, []
    layers, inner.layers = inner.layers, inner.layers[:count]
    model.config.num_hidden_layers = count
    logits, hidden = model(ids).logits[0], inner(ids).last_hidden_state
    places = torch.arange(ids.shape[1])[None]
    mask = torch.full((1, 1, ids.shape[1], ids.shape[1]), -torch.inf).triu(1)

    def norm(name, x):
        scale = tensors[added(model.config, count + k, name)] + (model.config.model_type == "qwen3_next")
        eps = getattr(model.config, "rms_norm_eps", None) or model.config.layer_norm_epsilon
        return torch.nn.functional.rms_norm(x, scale.shape, scale, eps)

    for k in range(depth):
        ids = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
        both = torch.cat([norm("enorm", inner.get_input_embeddings()(ids)), norm("hnorm", hidden)], -1)
        x = both @ tensors[added(model.config, count + k, "eh_proj")].T
        given = {"attention_mask": mask, "position_ids": places}
        if hasattr(inner, "rotary_emb"):
            given["position_embeddings"] = inner.rotary_emb(x, places)
        for layer in layers[count + k * length : count + (k + 1) * length]:
            x = layer(x, **given)
        hidden = norm("shared_head.norm", x)
        found.append(model.lm_head(hidden)[0])
    return logits, found


def predictions(model, ids):
    """Return the logits, behind which stand those of the next sentence if the model has them."""
    if model.config.is_encoder_decoder:
        return model(ids, decoder_input_ids=ids.flip(1)).logits[0]
    found = model(ids)
    if "seq_relationship_logits" in found:
        next_sentence = found.seq_relationship_logits.expand(ids.shape[1], 2)
        return torch.cat([found.prediction_logits[0], next_sentence], 1)
    return found.logits[0]


def main() -> None:
    for family in sys.argv[1:] or [*FAMILIES, *LARGE, *SEEING]:
        if family in SEEING:
            seeing(family)
            continue
        config = AutoConfig.for_model(
            family.partition("-")[0].replace("megatron_", "megatron-"), **(FAMILIES | LARGE)[family]
        )
        cls = CLASSES.get(family, AutoModelForCausalLM)
        for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout"):
            if hasattr(config, name):
                setattr(config, name, 0.0)
        config._attn_implementation = "eager"
        depth = getattr(config, "num_nextn_predict_layers", 0) if family.endswith("-mtp") else 0
        block = config.mtp_layers_block_type if config.model_type == "nemotron_h" else ["full_attention"]
        extra = depth * len(block)
        config.num_hidden_layers += extra
        if depth and config.model_type in OWN:
            config.layer_types = [*config.layer_types, *block]
        with tempfile.TemporaryDirectory() as folder:
            cls.from_config(config).save_pretrained(folder)
            shapes = shapes_in(folder)
            if family == "t5":
                shapes["lm_head.weight"] = shapes["shared.weight"]  # as the files of T5 1.1 have it
            # The names in files of the layers that a decoder has in the place of prediction layers.
            count = config.num_hidden_layers - extra
            renamed = {}
            for number in range(extra if config.model_type in OWN else 0):
                last = re.compile(rf"\w+\.layers\.{count + number}\.")
                renamed |= {name: last.sub(f"mtp.layers.{number}.", name) for name in shapes if last.match(name)}
            known = {renamed.get(name, name): name for name in shapes}
            shapes = {renamed.get(name, name): shape for name, shape in shapes.items()}
            for number in range(count, count + depth):
                h, v = config.hidden_size, config.vocab_size
                more = {"enorm": [h], "hnorm": [h], "eh_proj": [h, 2 * h], "shared_head.norm": [h]}
                if not renamed:
                    more |= {"embed_tokens": [v, h], "shared_head.head": [v, h]}
                shapes |= {added(config, number, name): shape for name, shape in more.items()}
            tensors = {name: torch.from_numpy(array) for name, array in weights(shapes).items()}
            save_file(
                {there: tensors[name] for name, there in known.items()}, f"{folder}/model.safetensors", {"format": "pt"}
            )
            model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            written = json.loads(Path(folder, "config.json").read_text())
            if depth:
                for key in written.keys() & {"layer_types", "layers_block_type"}:
                    written[key] = written[key][:count]
                if "num_hidden_layers" in written:
                    written["num_hidden_layers"] = count
        step = config.vocab_size // 7
        ids = torch.arange(6)[None] * step % config.vocab_size
        with torch.no_grad():
            logits, further = (
                predicted(model, tensors, ids, depth, len(block)) if depth else (predictions(model, ids), [])
            )
        print(family, len(shapes), float(logits.abs().max()))
        made = {
            "config": written,
            "tensors": collapsed(shapes),
            "ids": ids[0].tolist(),
            "logits": [[round(x, 6) for x in row] for row in logits[:, :: 50 if family in LARGE else 1].tolist()],
        }
        if depth:
            made["predicted"] = [[[round(x, 6) for x in row] for row in found.tolist()] for found in further]
        write(FOLDER / ("large" if family in LARGE else "") / f"{family}.json", made)


if __name__ == "__main__":
    main()
