"""The layouts that are built in, on names and shapes of real models.

tests/frameworks/megatron/test_foreign_layouts.py compares logits; torchtitan's own adapters made torchtitan.json.
"""

import functools
import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from bytecheckpoint.errors import CheckpointError, UsageError
from bytecheckpoint.layouts.binding import bind
from bytecheckpoint.layouts.config import flattened
from bytecheckpoint.layouts.layout import builtin_names, find
from bytecheckpoint.layouts.matching import Side
from tests.layouts.models import FAMILIES, Family, move

TRANSFORMER_ENGINE = {
    r"pre_mlp_layernorm\.(weight|bias)$": r"mlp.linear_fc1.layer_norm_\1",
    r"(?<!final_)input_layernorm\.(weight|bias)$": r"self_attention.linear_qkv.layer_norm_\1",
    r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$": r"mlp.experts.\2\1",
    r"\.kv_layernorm\.weight$": r".linear_kv_up_proj.layer_norm_weight",
}

MOE = find("moe")
TORCHTITAN = json.loads((Path(__file__).parent / "torchtitan.json").read_text())


def side(shapes):
    return Side(list(shapes), list(shapes.values()))


@functools.cache
def layouts():
    return [*map(find, builtin_names())]


def layout_of(family, right="megatron"):
    (layout,) = (x for x in layouts() if x.right == right and x.is_for(family.keys()))
    return layout


@pytest.mark.parametrize("name", FAMILIES)
def test_real_names_and_shapes(name):
    family = Family(name)
    layout, keys, weights = layout_of(family), family.keys(), family.weights()
    both = bind(layout, side(family.shapes), side(family.megatron), keys)
    assert not len(both.left.unbound) and not len(both.right.unbound)
    arrays = move(both.left, both.right, weights, both)
    assert not any(np.isnan(array).any() for array in arrays.values())
    for key, array in move(both.right, both.left, arrays, both).items():
        np.testing.assert_array_equal(array, weights[key])
    assert set(bind(layout, side(family.shapes), config=keys).right.names) == family.derived()
    derived = bind(layout, right=side(family.megatron), config=keys).left
    assert {
        n: tuple(s for s in shape if s >= 0) for n, shape in zip(derived.names, derived.shapes.tolist(), strict=True)
    } == (family.shapes)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_of_transformer_engine(name):
    family = Family(name)
    names = list(family.megatron)
    for pattern, text in TRANSFORMER_ENGINE.items():
        if "input_layernorm" not in pattern or not name.startswith(
            "deepseek_v3"
        ):  # latent attention has a norm of its own
            names = [re.sub(pattern, text, found) for found in names]
    if name.startswith("nemotron_h"):
        names = [re.sub(r"(layers.\d+).norm.weight$", r"\1.mixer.in_proj.layer_norm_weight", n) for n in names]
        names = [re.sub(r"(layers.3).pre_mlp_layernorm.", r"\1.mlp.linear_fc1.layer_norm_", n) for n in names]
        assert names.count("decoder.layers.3.mlp.linear_fc1.layer_norm_weight") == 1
    if name.startswith("qwen3_next"):  # the first two layers are delta nets
        names = [
            re.sub(r"^(decoder.layers.[01].self_attention).linear_qkv.layer", r"\1.in_proj.layer", n) for n in names
        ]
        assert "decoder.layers.1.self_attention.in_proj.layer_norm_weight" in names
    right = Side(names, list(family.megatron.values()))
    assert not len(bind(layout_of(family), side(family.shapes), right, family.keys()).right.unbound)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "qwen3_next", "nemotron_h"])
def test_prediction_layers_of_one_side_only(name):
    family, without = Family(f"{name}-mtp"), Family(name)
    layout, keys = layout_of(family), family.keys() | {"megatron.num_layers": family.config.get("num_hidden_layers", 4)}
    with pytest.raises(
        CheckpointError, match=r"(model.layers.2|mtp).\S+ is missing on the hf side: mtp.layers.0.\S+ .*needs it"
    ):
        bind(layout, side(without.shapes), side(family.megatron), keys | {"megatron.mtp_num_layers": 1})
    second = "model.layers.3." if name == "deepseek_v3" else "-"
    if name in ("glm4_moe", "deepseek_v3"):
        unknown = {key: value for key, value in family.keys().items() if key != "hf.num_hidden_layers"}
        with pytest.raises(CheckpointError, match=r"the size of 'l' in {.*} does not follow from the names"):
            bind(layout, right=side(family.megatron), config=unknown)
    one = {n: s for n, s in family.shapes.items() if not n.startswith(second)}
    left = bind(layout, side(one), side(without.megatron), keys).left
    assert {left.names[k] for k in left.ignored} == one.keys() - without.shapes.keys() != set()


def test_second_names():
    """Files have shared tensors once or under each name, and so do states of Megatron-Core's T5Model."""
    for name, more, in_megatron in (
        (
            "t5",
            {"encoder.embed_tokens.weight": (37, 16), "decoder.embed_tokens.weight": (37, 16)},
            "output_layer.weight",
        ),
        ("bert", {"cls.predictions.decoder.bias": (37,), "cls.predictions.decoder.weight": (37, 16)}, ""),
    ):
        family = Family(name)
        right = family.megatron | ({in_megatron: (48, 16)} if in_megatron else {})
        both = bind(layout_of(family), side(family.shapes | more), side(right), family.keys())
        assert not len(both.left.unbound) and not len(both.right.unbound)
        for end, names in ((both.left, set(more)), (both.right, {in_megatron} - {""})):
            assert {end.names[tensor] for tensor in end.places.tensor[end.places.copy]} == names


def test_names_of_old_files_of_bert():
    family = Family("bert")
    old = {re.sub("LayerNorm.bias$", "LayerNorm.beta", n): s for n, s in family.shapes.items()}
    old = {re.sub("LayerNorm.weight$", "LayerNorm.gamma", n): s for n, s in old.items()}
    both = bind(
        layout_of(family), side(old | {"bert.embeddings.position_ids": (1, 8)}), side(family.megatron), family.keys()
    )
    assert len(both.left.unbound) == 1 and not len(both.right.unbound)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "megatron.rotary_interleaved", True),
        ("mistral", "megatron.layernorm_zero_centered_gamma", True),
        ("gpt_neox", "hf.use_parallel_residual", True),
        ("starcoder2", "megatron.layernorm_zero_centered_gamma", True),
        ("gemma", "megatron.layernorm_zero_centered_gamma", False),
        ("gemma2", "megatron.query_pre_attn_scalar", 8),
        ("gemma2", "megatron.attn_logit_softcapping", 50.0),
        ("gemma2", "megatron.final_logit_softcapping", 50.0),
        ("gemma3_text", "megatron.layernorm_zero_centered_gamma", False),
        ("gemma3_text", "megatron.rotary_base", 1000000),
        ("gemma3_text", "hf.use_bidirectional_attention", True),
        ("granite", "megatron.softmax_scale", 0.5),
        ("granite", "megatron.mup_embedding_mult", 1.0),
        ("granite", "megatron.residual_multiplier", 1.0),
        ("granite", "megatron.logits_scaling", 1.0),
        ("ernie4_5", "megatron.layernorm_zero_centered_gamma", True),
        ("glm4", "megatron.rotary_interleaved", False),
        ("olmoe", "hf.clip_qkv", 8.0),
        ("llama", "megatron.softmax_type", "off-by-one"),
        ("llama", "megatron.use_mup", True),
        ("qwen3_moe", "megatron.moe_mlp_glu_interleave_size", 32),
        ("deepseek_v3", "megatron.moe_shared_expert_glu_interleave_size", 32),
        ("mixtral", "megatron.moe_apply_probs_on_input", True),
        ("gpt_oss", "megatron.activation_func_clamp_value", 0),
        ("gpt_oss", "megatron.glu_linear_offset", 0.0),
        ("gpt_oss", "megatron.activation", "silu"),
        ("llama", "megatron.activation", "clamped_swiglu"),
        ("gemma", "megatron.activation", "silu"),
        ("gemma2", "megatron.sliding_window", 5),
        ("gemma3_text", "megatron.query_scalar", 64),
        ("starcoder2", "megatron.activation", "relu2"),
        ("nemotron", "megatron.activation", "gelu"),
        ("nemotron", "megatron.rotary_percent", 1.0),
        ("stablelm", "megatron.rotary_percent", 1.0),
        ("glm4", "megatron.rotary_percent", 1.0),
        ("glm4_moe", "megatron.rotary_percent", 1.0),
        ("qwen3_next", "megatron.rotary_percent", 1.0),
        ("gpt_neox", "megatron.rotary_percent", 1.0),
        ("gpt_neox", "megatron.activation", "relu"),
        ("gpt2", "megatron.activation", "relu"),
        ("gpt2", "hf.scale_attn_weights", False),
        ("gpt2", "hf.scale_attn_by_inverse_layer_idx", True),
        ("nemotron_h", "megatron.position_embedding_type", "rope"),
        ("t5", "megatron.relative_attention_max_distance", 64),
        ("bert", "megatron.activation", "relu"),
        ("bert", "megatron.apply_residual_connection_post_layernorm", False),
        ("megatron_bert", "megatron.apply_residual_connection_post_layernorm", True),
        ("megatron_bert", "megatron.layernorm_zero_centered_gamma", True),
        ("t5", "megatron.softmax_scale", 0.5),
        ("t5", "hf.scale_decoder_outputs", True),
        ("t5", "megatron.layernorm_zero_centered_gamma", True),
    ],
)
def test_equal_weights_of_another_model(name, key, value):
    family = Family(name)
    with pytest.raises(UsageError, match=re.escape(f"{key} is {value}")):
        layout_of(family).check_config(family.keys() | {key: value})


@pytest.mark.parametrize("name", FAMILIES)
def test_norms_and_rotary_positions_are_compared(name):
    family = Family(name)

    def refused(key, value):
        try:
            layout_of(family).check_config(family.keys() | {f"megatron.{key}": value})
        except UsageError:
            return True
        return False

    assert refused("normalization", "L2Norm") and refused("layernorm_epsilon", 0.5)
    assert refused("layernorm_zero_centered_gamma", True) != refused("layernorm_zero_centered_gamma", False)
    if not name.startswith(("gpt2", "bert", "megatron_bert", "t5", "nemotron_h")):
        assert refused("rotary_interleaved", True) != refused("rotary_interleaved", False)
        assert refused("rotary_base", 12345)


@pytest.mark.parametrize(
    ("config", "said", "other"),
    [
        ({"rope_parameters": {"rope_type": "llama3"}}, {"rotary_type": "llama3"}, {"rotary_type": "default"}),
        ({"rope_scaling": {"type": "linear"}}, {"rotary_type": "linear"}, {"rotary_type": "default"}),
        ({"rope_scaling": None}, {"rotary_type": "default"}, {"rotary_type": "llama3"}),
        ({"hidden_act": "gelu"}, {"activation": "gelu"}, {"activation": "silu"}),
        ({"hidden_act": "gelu_pytorch_tanh"}, {"activation": "gelu"}, {"activation": "silu"}),
        ({"partial_rotary_factor": 0.5}, {"rotary_percent": 0.5}, {"rotary_percent": 1.0}),
        ({"vocab_size": 5}, {"rotary_percent": 1.0}, {"rotary_percent": 0.5}),
        ({"vocab_size": 5}, {"rotary_type": "default"}, {"rotary_type": "yarn"}),
        ({"vocab_size": 5}, {"position_embedding_type": "rope"}, {"position_embedding_type": "none"}),
        ({"sliding_window": 128}, {"sliding_window": 128}, {"sliding_window": 127}),
        ({"sliding_window": None}, {"sliding_window": 0}, {"sliding_window": 127}),
        ({"use_sliding_window": True, "sliding_window": 8}, {"sliding_window": 8}, {"sliding_window": 9}),
        (
            {"tie_word_embeddings": False},
            {"share_embeddings_and_output_weights": False},
            {"share_embeddings_and_output_weights": True},
        ),
    ],
)
def test_models_that_differ_with_equal_weights(config, said, other):
    keys = flattened("hf", config)
    assert not any(
        f"megatron.{name}" in text for text in MOE.check_config(keys | flattened("megatron", said)) for name in said
    )
    with pytest.raises(UsageError, match=f"megatron.{next(iter(other))} is"):
        MOE.check_config(keys | flattened("megatron", other))
    if config not in ({"vocab_size": 5}, {"sliding_window": None}):  # of keys that the configuration lacks
        assert any(f"megatron.{next(iter(said))}" in text for text in MOE.check_config(keys)), "not compared, and said"


@pytest.mark.parametrize(("method", "said"), [("group_limited_greedy", True), ("greedy", False), (None, False)])
def test_a_choice_of_groups_that_megatron_lacks_is_said(method, said):
    family = Family("deepseek_v3")
    notes = layout_of(family).check_config(family.keys() | {"hf.topk_method": method})
    assert any("topk_method" in note for note in notes) == said


ROPES = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        "truncate": True,
    },
}


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling", "rope_parameters.full_attention"])
@pytest.mark.parametrize("kind", ROPES)
def test_factors_of_scaled_positions(kind, place):
    said = {f"megatron.rotary_{name}": value for name, value in ROPES[kind].items()} | {"megatron.rotary_type": kind}
    config = {f"hf.{place}.{name}": value for name, value in ROPES[kind].items()} | {f"hf.{place}.rope_type": kind}
    assert not any("megatron.rotary_type" in text for text in MOE.check_config(config | said))
    for name, value in ROPES[kind].items():
        other = not value if isinstance(value, bool) else value + 1
        for key, its in ((f"hf.{place}.{name}", value), (f"megatron.rotary_{name}", value)):
            with pytest.raises(UsageError, match=f"{key} is {other}") as error:
                MOE.check_config(config | said | {key: other})
            assert f"is {its}" in str(error.value)
    short = {f"hf.{place}.factor": 4.0, f"hf.{place}.original_max_position_embeddings": 4096}
    if kind == "yarn":  # the others have defaults
        MOE.check_config(short | said | {f"hf.{place}.rope_type": "yarn"})


ROUTED = {"megatron.num_moe_experts": 4}
SOFTMAX = {
    **ROUTED,
    "megatron.moe_router_topk": 2,
    "megatron.moe_router_score_function": "softmax",
    "megatron.moe_router_pre_softmax": False,
}
SIGMOID = SOFTMAX | {"megatron.moe_router_score_function": "sigmoid"}
GROUPS = {"megatron.moe_router_num_groups": 2, "megatron.moe_router_group_topk": 1}


@pytest.mark.parametrize(
    ("name", "said", "edits"),
    [
        (
            "mixtral",
            SOFTMAX,
            {"megatron.moe_router_pre_softmax": True, "megatron.moe_router_score_function": "sigmoid"},
        ),
        ("gpt_oss", SOFTMAX, {"megatron.moe_router_pre_softmax": True, "hf.num_experts_per_tok": 3}),
        ("qwen3_next", SOFTMAX, {"hf.norm_topk_prob": False, "megatron.moe_router_topk_scaling_factor": 2.5}),
        (
            "qwen3_moe",
            SOFTMAX | {"megatron.moe_router_pre_softmax": True},
            {"hf.norm_topk_prob": True, "megatron.moe_router_num_groups": 2},
        ),
        ("qwen2_moe", SOFTMAX | {"megatron.moe_router_pre_softmax": True}, {"megatron.moe_router_pre_softmax": False}),
        ("olmoe", SOFTMAX | {"megatron.moe_router_pre_softmax": True}, {"megatron.moe_router_topk": 1}),
        (
            "glm4_moe",
            SIGMOID | GROUPS,
            {"megatron.moe_router_score_function": "softmax", "hf.n_group": 4, "hf.topk_group": 2},
        ),
        (
            "deepseek_v3",
            SIGMOID | GROUPS | {"megatron.moe_router_topk_scaling_factor": 2.5},
            {
                "hf.routed_scaling_factor": 1.0,
                "hf.norm_topk_prob": False,
                "hf.rope_interleave": False,
                "megatron.moe_router_num_groups": 4,
                "megatron.moe_router_group_topk": 2,
            },
        ),
        ("nemotron_h", SIGMOID, {"hf.n_group": 2, "hf.routed_scaling_factor": 2.0, "hf.mlp_hidden_act": "silu"}),
    ],
)
def test_routers_that_differ(name, said, edits):
    family = Family(name)
    keys = family.keys() | said | ({"megatron.activation": "relu2"} if name == "nemotron_h" else {})
    assert not any("moe_router" in text for text in layout_of(family).check_config(keys))
    for key, value in edits.items():
        with pytest.raises(UsageError, match=re.escape(f"{key} is {value}")):
            layout_of(family).check_config(keys | {key: value})
    if name == "deepseek_v3":
        without = {key: value for key, value in keys.items() if key != "megatron.moe_router_topk_scaling_factor"}
        with pytest.raises(UsageError, match=r"factor is 2.5, megatron\.moe_router_topk_scaling_factor is not set"):
            layout_of(family).check_config(without)


def test_a_model_without_experts_has_no_router():
    dense = {"megatron.num_layers": 2, "megatron.moe_router_topk": 6}
    find("nemotron_h").check_config(Family("nemotron_h").keys() | dense)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gemma3", {"hf.rope_theta": 1e6, "hf.rope_local_base_freq": 1e4}),
        ("gemma2", {"hf.rope_theta": 1e4}),
        ("olmo2", {"hf.rope_theta": 1e4}),
        ("gpt_neox", {"hf.rotary_emb_base": 1e4}),
    ],
)
def test_rotary_bases_as_transformers_4_wrote_them(name, config):
    layout = find(name)
    assert not any("rotary_base" in text for text in layout.check_config(config | {"megatron.rotary_base": 10000}))
    with pytest.raises(UsageError, match="rotary_base is 1000000"):
        layout.check_config(config | {"megatron.rotary_base": 1000000})


@pytest.mark.parametrize("name", TORCHTITAN)
def test_the_adapters_of_torchtitan(name):
    family, expected = Family(name), TORCHTITAN[name]
    layout, weights = layout_of(family, "torchtitan"), family.weights()
    for right in (side({key: shape for key, (_, *shape) in expected.items()}), None):
        binding = bind(layout, side(family.shapes), right, family.keys())
        arrays = move(binding.left, binding.right, weights, binding)
        assert {key: [zlib.crc32(array.tobytes()), *array.shape] for key, array in arrays.items()} == expected
    for key, array in move(binding.right, binding.left, arrays, binding).items():
        np.testing.assert_array_equal(array, weights[key])


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "glm4_moe", "deepseek_v3"]
)
def test_experts_that_transformers_stacks_in_memory(name):
    """By way of transformers 5, weights become the same in Megatron; tests/integrations/transformers has real models."""
    family, kept = Family(name), {"hf.fused_experts": True}
    keys, weights = family.keys() | {"hf5.model_type": family.model_type}, family.weights()
    (stacked,) = (x for x in layouts() if x.right == "hf5" and x.is_for(keys))
    binding = bind(stacked, side(family.shapes), config=keys)
    live = move(binding.left, binding.right, weights, binding)
    assert any("gate_up_proj" in key for key in live)
    for key, array in move(binding.right, binding.left, live, binding).items():
        np.testing.assert_array_equal(array, weights[key])
    expected, found = (
        move(bound.left, bound.right, arrays, bound)
        for bound, arrays in (
            (bind(layout_of(family), side(family.shapes), config=keys), weights),
            (bind(layout_of(family), side({k: a.shape for k, a in live.items()}), config=keys | kept), live),
        )
    )
    assert expected.keys() == found.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array)
