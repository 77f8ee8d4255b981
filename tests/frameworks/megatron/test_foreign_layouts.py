"""The layouts that are built in, by logits: weights as files of Hugging Face's have them, in real models of Megatron-Core.

The files of tests/layouts/families have names, shapes and the logits that transformers computes. Square matrices, the
order of gate and up, interleaved heads and tied embeddings show in logits, and in nothing else.
"""

import random

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.frameworks.configurations import configuration_of
from bytecheckpoint.layouts import Layout as TensorLayout
from bytecheckpoint.layouts.binding import bind
from bytecheckpoint.layouts.layout import builtin_names, find
from bytecheckpoint.layouts.matching import Side
from tests.layouts.models import FAMILIES, Family, move
from tests.layouts.mutants import mutants, whole
from tests.support.megatron.models import Layout, initialize_parallel, transformer_config

pytestmark = pytest.mark.timeout(300)


def fast_gelu(x):
    """Compute Megatron-Core's function of this name, which is compiled."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def squared_relu(x):
    """Compute Megatron-Core's function of this name, which is compiled."""
    return torch.relu(x).square()


LAYER_NORM = {"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False}
LAYER_NORM |= {"activation_func": fast_gelu}
QK_NORMS = ("qwen3", "qwen3_moe", "qwen3_next", "glm4_moe", "gemma3_text", "olmo2", "olmo3", "olmoe", "exaone4")
# What a model computes by modules of its own, under the names that Megatron-Bridge or transformers have.
OF_THE_MODEL = {
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "residual_multiplier",
    "logits_scaling",
}
NO_BALANCE = {
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
    "moe_aux_loss_coeff": 0.0,
}


def first(config, *keys):
    """Return the value of the first of the keys that a configuration has."""
    return next((config[key] for key in keys if key in config), None)


def arguments(family, c):
    """Return changes of the configuration and arguments of GPTModel, from a configuration of Hugging Face's."""
    predicts, family = "-mtp" in family, family.removesuffix("-mtp")
    rope = c.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    config = {
        "num_layers": first(c, "num_decoder_layers", "num_hidden_layers", "n_layer"),
        "num_attention_heads": first(c, "num_attention_heads", "n_head", "num_heads"),
        "ffn_hidden_size": first(c, "intermediate_size", "d_ff") or 64,
        "num_query_groups": c.get("num_key_value_heads"),
        "kv_channels": first(c, "head_dim", "d_kv"),
        "layernorm_epsilon": first(
            c, "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"
        ),
        "add_qkv_bias": family in ("qwen2", "qwen2_moe", "seed_oss", "stablelm", "glm4_moe", "glm", "glm4"),
        "qk_layernorm": family in QK_NORMS,
    }
    model = {
        "position_embedding_type": "rope",
        "rotary_base": int(rope.get("rope_theta", 10000)),
        "rotary_percent": rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0)),
        "share_embeddings_and_output_weights": c["tie_word_embeddings"],
    }
    experts = c.get("num_experts", c.get("num_local_experts", c.get("n_routed_experts")))
    if window := c.get("sliding_window"):
        config["window_size"] = (window - 1, 0)
        if kinds := c.get("layer_types"):
            config["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in kinds]
    if experts:
        config |= NO_BALANCE | {
            "num_moe_experts": experts,
            "moe_router_topk": c["num_experts_per_tok"],
            "moe_ffn_hidden_size": c.get("moe_intermediate_size", c["intermediate_size"]),
            "moe_router_pre_softmax": not c.get("norm_topk_prob", True),
        }
    if dense := c.get("first_k_dense_replace", len(c.get("mlp_only_layers") or [])):
        config["moe_layer_freq"] = [int(layer >= dense) for layer in range(config["num_layers"])]
    if shared := c.get("shared_expert_intermediate_size"):
        config |= {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": True}
    if family in ("deepseek_v3", "glm4_moe"):
        config |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_pre_softmax": False,
            "moe_router_num_groups": c["n_group"],
            "moe_router_group_topk": c["topk_group"],
            "moe_router_topk_scaling_factor": c["routed_scaling_factor"],
            "moe_shared_expert_intermediate_size": c["n_shared_experts"] * c["moe_intermediate_size"],
        }
    if predicts:
        config["mtp_num_layers"] = c["num_nextn_predict_layers"]
    if family == "deepseek_v3":
        config |= {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": c["q_lora_rank"],
            "kv_lora_rank": c["kv_lora_rank"],
            "qk_head_dim": c["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": c["qk_rope_head_dim"],
            "v_head_dim": c["v_head_dim"],
            "rope_type": "rope",
            "rotary_base": model["rotary_base"],
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
        }
        del config["kv_channels"], config["num_query_groups"]
    if family == "qwen3_next":
        config |= {name: value for name, value in c.items() if name.startswith("linear_")} | {
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(kind == "linear_attention") for kind in c["layer_types"]],
            "moe_layer_freq": [int(layer not in c["mlp_only_layers"]) for layer in range(config["num_layers"])],
            "deterministic_mode": True,
            "hetereogenous_dist_checkpoint": True,
        }
    if family in ("gpt2", "starcoder2", "gpt_neox"):
        config |= LAYER_NORM
    if family == "gpt2":
        model |= {"position_embedding_type": "learned_absolute"}
    if family == "gpt_neox":
        config["activation_func"] = torch.nn.functional.gelu
    if family == "stablelm":
        config["normalization"] = "LayerNorm"
    if family == "llama-tied":
        config["add_bias_linear"] = True
    if family == "smollm3":
        config["no_rope_freq"] = [int(not rope) for rope in c["no_rope_layers"]]
    if family.startswith("gemma"):
        config |= LAYER_NORM | {"normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True}
        config |= {
            "layernorm_zero_centered_gamma": True,
            "softmax_scale": c.get("query_pre_attn_scalar", c["head_dim"]) ** -0.5,
        }
        config |= {"use_mup": True, "mup_embedding_mult": c["hidden_size"] ** 0.5}
    if family in ("arcee", "nemotron"):
        config |= {"activation_func": squared_relu, "gated_linear_unit": False}
    if family == "nemotron":
        config |= {"normalization": "LayerNorm", "layernorm_zero_centered_gamma": True}
    if family == "exaone4":
        config["no_rope_freq"] = [int(kind == "full_attention") for kind in c["layer_types"]]
    if family == "granite":
        config |= {"use_mup": True, "mup_embedding_mult": c["embedding_multiplier"]}
        config |= {"mup_output_mult": 1 / c["logits_scaling"], "softmax_scale": c["attention_multiplier"]}
    if family in ("glm", "glm4", "ernie4_5"):
        config |= {"rotary_interleaved": True, "add_bias_linear": c.get("use_bias", False)}
    if "bert" in family:
        config |= LAYER_NORM | {"activation_func": torch.nn.functional.gelu}
        config["apply_residual_connection_post_layernorm"] = family == "bert"
        model = {"share_embeddings_and_output_weights": True}
    if family == "t5":
        config |= LAYER_NORM | {"normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True}
        config["softmax_scale"] = 1.0
        model = {"position_embedding_type": "relative", "parallel_output": True}
        model |= {name: c[name] for name in ("relative_attention_num_buckets", "relative_attention_max_distance")}
    if family == "gpt_oss":
        config |= {
            "add_bias_linear": True,
            "activation_func": lambda x: x * torch.sigmoid(1.702 * x),
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
            "softmax_type": "learnable",
        }
    if family == "nemotron_h":
        config |= {
            "activation_func": squared_relu,
            "gated_linear_unit": False,
            "mamba_num_heads": c["mamba_num_heads"],
            "mamba_head_dim": c["mamba_head_dim"],
            "mamba_num_groups": c["n_groups"],
            "mamba_state_dim": c["ssm_state_size"],
            "moe_latent_size": c["moe_latent_size"],
            "moe_shared_expert_intermediate_size": c["moe_shared_expert_intermediate_size"],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        }
        config["num_layers"] = len(c["layers_block_type"])
        model = {"position_embedding_type": "none", "share_embeddings_and_output_weights": False}
    return {name: value for name, value in config.items() if value is not None}, model


def configuration(name, layout, **others):
    """Return the configuration of a model with `others` in it, and arguments of GPTModel."""
    family = Family(name)
    changes, given = arguments(name, family.config)
    config = transformer_config(layout, **(changes | others))
    vars(config).update({key: family.config[key] for key in OF_THE_MODEL & family.config.keys()})
    return config, given


class Model:
    """A model of Megatron-Core for a family.

    Args:
        name: name of the family.
        given: arguments of GPTModel that differ from those of the family.
        others: values of the configuration that differ from those of the family.
    """

    def __init__(self, name, given=None, **others):
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        initialize_parallel(Layout())
        from tests.support.megatron.family_modules import bert, block_spec, change_model, t5, tensors_of
        from tests.support.megatron.hybrid import hybrid_model

        self.family = Family(name)
        self.config, own = configuration(name, Layout(), **others)
        given = own | (given or {})
        size = {"vocab_size": 48, "max_sequence_length": self.family.config.get("n_positions", 8)}
        self.logits = self.decoded
        if "bert" in name:
            model, self.logits = bert(self.config, **size, **given)
        elif name == "t5":
            model, self.logits = t5(self.config, self.family.config["num_layers"], **size, **given)
        elif name.startswith("nemotron_h"):
            pattern = "ME*-/*E" if self.config.mtp_num_layers else "ME*-"
            model = hybrid_model(self.config, pattern, **size, **given)
        else:
            spec = block_spec(name, self.config)
            if self.config.mtp_num_layers:
                given["mtp_block_spec"] = get_gpt_mtp_block_spec(self.config, spec, use_transformer_engine=False)
            model = GPTModel(self.config, spec, **size, **given)
        self.model = model.float().eval()
        change_model(self.model)
        self.tensors = tensors_of(self.model)
        plain = {n: v for n, v in vars(self.config).items() if isinstance(v, int | float | str)}
        self.keys = self.family.keys() | self.family.keys(plain | given, "megatron")
        self.keys |= configuration_of({"model": self.model})
        (self.layout,) = (
            layout for layout in map(find, builtin_names()) if layout.right == "megatron" and layout.is_for(self.keys)
        )

    def decoded(self, ids):
        """Return the logits of a decoder."""
        mask = torch.triu(torch.ones(ids.shape[1], ids.shape[1]), 1).bool()[None, None]
        return self.model(ids, torch.arange(ids.shape[1])[None], mask)[0]

    def bound(self, layout):
        sides = [Side(list(shapes), list(shapes.values())) for shapes in (self.family.shapes, self.shapes())]
        return bind(layout, sides[0], sides[1], self.keys)

    def shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def difference(self, arrays):
        """Return the largest difference of the logits from those of transformers."""
        for name, tensor in self.tensors.items():
            tensor.copy_(torch.from_numpy(arrays[name]))
        ids = torch.tensor(self.family.ids)[None]
        expected, hidden = [self.family.logits, *self.family.predicted], []
        if self.config.mtp_num_layers:
            self.model.mtp.register_forward_hook(lambda *call: hidden.append(call[-1]))
        with torch.no_grad():
            found = [self.logits(ids)]
            for further in hidden[-1].chunk(len(expected))[1:] if hidden else ():
                found.append(self.model.output_layer(further)[0][:, 0])
        return max(np.abs(f[:, : e.shape[1]].numpy() - e).max() for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_the_way_back(name):
    model = Model(name)
    weights = model.family.weights()
    binding = model.bound(model.layout)
    arrays = move(binding.left, binding.right, weights, binding)
    assert model.difference(arrays) < 3e-6 * np.abs(model.family.logits).max()
    for key, array in move(binding.right, binding.left, arrays, binding).items():
        np.testing.assert_array_equal(array, weights[key], key)
    assert not binding.undecided
    derived = bind(model.layout, Side(list(weights), [a.shape for a in weights.values()]), config=model.keys).right
    assert set(derived.names) == model.family.derived()
    assert model.family.megatron == model.shapes()


@pytest.mark.parametrize("name", ["deepseek_v3-mtp", "qwen3_next-mtp", "nemotron_h-mtp"])
def test_what_megatron_itself_saved(name, tmp_path):
    """Its files have the same names of parts and of prediction layers as live models."""
    from megatron.core import dist_checkpointing

    model = Model(name)
    weights, binding = model.family.weights(), model.bound(model.layout)
    for key, array in move(binding.left, binding.right, weights, binding).items():
        model.tensors[key].copy_(torch.from_numpy(array))
    state = model.model.sharded_state_dict(metadata={"dp_cp_group": torch.distributed.group.WORLD})
    dist_checkpointing.save(state, str(tmp_path))
    with bytecheckpoint.open(tmp_path, layout=model.layout.with_sizes(model.family.keys())) as found:
        assert set(found.tensors) == {f"model/{key}" for key in weights}
        for key, array in weights.items():
            np.testing.assert_array_equal(found.tensors[f"model/{key}"][...].numpy(), array, key)


EDITED = ["llama", "phi3", "gpt2", "deepseek_v3-mtp", "glm4_moe-mtp", "qwen3_next-mtp", "nemotron_h-mtp"]
EDITED += ["gemma3_text", "olmo2", "nemotron", "ernie4_5", "glm4", "bert", "megatron_bert", "t5"]
EDITED += ["granite", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"]


@pytest.mark.parametrize("name", EDITED)
def test_one_edit_of_a_layout_shows(name):
    model, rng = Model(name), random.Random(name)
    weights, refused, survivors = model.family.weights(), 0, []
    found = mutants(whole(model.layout).to_text(), rng)
    for _ in range(50):
        text = next(found)
        try:
            binding = model.bound(TensorLayout.from_text(text))
            arrays = move(binding.left, binding.right, weights, binding)
        except CheckpointError:
            refused += 1
            continue
        difference = model.difference(arrays)
        if not difference > 1e-4:  # or nan
            survivors.append(text)
    print(name, "refused", refused, "of 50")
    assert not [text for text in survivors if not equal(text, model, weights)]


def equal(text, model, weights):
    """Return whether a layout moves each element as the right one does."""
    right, changed = (model.bound(layout) for layout in (model.layout, TensorLayout.from_text(text)))
    one, two = move(right.left, right.right, weights, right), move(changed.left, changed.right, weights, changed)
    return all(np.array_equal(one[name], two[name]) for name in one)
