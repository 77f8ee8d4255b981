"""Models of Megatron-Core with equal weights that compute something else: layouts refuse them, and real logits differ."""

import json
import math

import pytest
import torch
from safetensors.numpy import save_file

import bytecheckpoint
from bytecheckpoint.errors import UsageError
from tests.frameworks.megatron.test_foreign_layouts import Model, configuration, fast_gelu
from tests.layouts.models import move
from tests.support.megatron.models import Layout, initialize_parallel

pytestmark = pytest.mark.timeout(300)

SOFTMAX = [
    {"moe_router_topk": 1},
    {"moe_router_score_function": "sigmoid"},
    {"moe_router_topk_scaling_factor": 2.5},
]
NORMALISED = [*SOFTMAX[1:], {"moe_router_pre_softmax": True}]  # Megatron-Core refuses one expert after a softmax
PLAIN = [*SOFTMAX, {"moe_router_pre_softmax": False}]
SIGMOID = [{"moe_router_topk": 1}, {"moe_router_topk_scaling_factor": 7.0}]
ONE_GROUP = {"moe_router_num_groups": None, "moe_router_group_topk": None}
ROUTERS = {
    "mixtral": NORMALISED,
    "gpt_oss": [*NORMALISED, {"activation_func_clamp_value": 0.3}, {"glu_linear_offset": 0.5}],
    "qwen3_next": [*NORMALISED, {"rotary_percent": 1.0}],
    "qwen2_moe": PLAIN,
    "qwen3_moe": PLAIN,
    "olmoe": PLAIN,
    "glm4_moe": [*SIGMOID, {"rotary_percent": 1.0}],
    "deepseek_v3": [*SIGMOID, ONE_GROUP, {"rope_type": "yarn", "rotary_scaling_factor": 4.0}],
    "nemotron_h": [*SIGMOID, {"moe_router_num_groups": 2, "moe_router_group_topk": 1}],
}
OTHERS = {
    "llama": [{"rotary_base": 500}, {"rotary_percent": 0.5}, {"seq_len_interpolation_factor": 4.0}]
    + [{"position_embedding_type": "none"}, {"activation_func": fast_gelu}]
    + [{"softmax_scale": 1.0}, {"use_mup": True, "mup_embedding_mult": 3.0}],
    "gpt_neox": [{"rotary_percent": 1.0}, {"activation_func": torch.nn.functional.silu}],
    "stablelm": [{"rotary_percent": 1.0}, {"seq_len_interpolation_factor": 4.0}],
    "nemotron": [{"rotary_percent": 1.0}, {"activation_func": fast_gelu}],
    "glm4": [{"rotary_percent": 1.0}],
    "ernie4_5": [{"seq_len_interpolation_factor": 4.0}],
    "starcoder2": [{"activation_func": torch.nn.functional.relu}],
    "gpt2": [{"activation_func": torch.nn.functional.relu}],
    "gemma": [{"activation_func": torch.nn.functional.silu}],
    "gemma3_text": [{"softmax_scale": 1.0}],
    "t5": [{"activation_func": torch.nn.functional.silu}],
    "smollm3": [{"no_rope_freq": None}, {"no_rope_freq": 2}],
    "exaone4": [{"no_rope_freq": None}],
    "qwen3": [{"no_rope_freq": 2}],
}
CASES = [(name, edit) for name, found in (ROUTERS | OTHERS).items() for edit in found]
# Arguments of models; other names are those of the configuration.
OF_MODEL = (
    "rotary_base",
    "rotary_percent",
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
    "position_embedding_type",
    "share_embeddings_and_output_weights",
    "relative_attention_max_distance",
)


def changed(name, edit):
    given = {key: value for key, value in edit.items() if key in OF_MODEL}
    return Model(name, given, **{key: value for key, value in edit.items() if key not in given})


@pytest.mark.parametrize(
    ("name", "edit"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_what_computes_something_else_is_refused(name, edit):
    right, other = Model(name), changed(name, edit)
    weights, binding = right.family.weights(), right.bound(right.layout)
    assert other.shapes() == right.shapes()
    assert other.difference(move(binding.left, binding.right, weights, binding)) > 1e-4, "the weights do not say it"
    with pytest.raises(UsageError, match=r"requires .* but .*(hf|megatron)\.") as error:
        other.layout.check_config(other.keys)
    said = str(error.value).rpartition(" but ")[2]
    assert "megatron." in said
    values = [str(value) for value in edit.values()]
    assert any(f" is {value}" in said for value in values) or any(
        word in said for word in ("activation", "rotary", "rope", "not set")
    )


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
YARN_OF_MODEL = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 64,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": None,
    "yarn_mscale_all_dim": None,
    "yarn_correction_range_round_to_int": True,
}
LATENT = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 64}


def with_values(monkeypatch, values):
    """Have configurations say what those of Megatron-Bridge say in fields of their own."""
    from tests.frameworks.megatron import test_foreign_layouts

    def configured(name, layout, **others):
        config, given = configuration(name, layout, **others)
        vars(config).update(values)
        return config, given

    monkeypatch.setattr(test_foreign_layouts, "configuration", configured)


@pytest.mark.parametrize("base", [500000, 10000000])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_llama_3_are_read_from_frequencies(base, factor):
    model = Model("llama", {"rope_scaling": True, "rope_scaling_factor": factor, "rotary_base": base})
    keys = model.keys | {f"hf.rope_parameters.{name}": value for name, value in LLAMA_3.items()}
    keys |= {"hf.rope_parameters.factor": factor, "hf.rope_parameters.rope_theta": base}
    assert not model.layout.check_config(keys)
    for name, value in {"factor": 16.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 4096}.items():
        with pytest.raises(UsageError, match=rf"{name} is {value}, megatron\.rotary_{name} is"):
            model.layout.check_config(keys | {f"hf.rope_parameters.{name}": value})


def test_a_factor_that_no_frequency_shows_is_said_to_be_unknown():
    model = Model("llama", {"rope_scaling": True, "rotary_base": 5})  # the longest wave has 34 positions
    keys = model.keys | {f"hf.rope_parameters.{name}": value for name, value in LLAMA_3.items()}
    (unknown,) = model.layout.check_config(keys | {"hf.rope_parameters.rope_theta": 5})
    assert "megatron.rotary_factor" in unknown


def test_linear_positions():
    model = Model("llama", {"seq_len_interpolation_factor": 4.0})
    keys = model.keys | {"hf.rope_parameters.rope_type": "linear"}
    assert not model.layout.check_config(keys | {"hf.rope_parameters.factor": 4.0})
    with pytest.raises(UsageError, match=r"hf\.rope_parameters\.factor is 2\.0, megatron\.rotary_factor is 4\.0"):
        model.layout.check_config(keys | {"hf.rope_parameters.factor": 2.0})


YARN_EDITS = {"factor": 8.0, "original_max_position_embeddings": 128, "beta_fast": 16, "beta_slow": 2}


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_yarn(name, monkeypatch):
    if name == "llama":
        with_values(monkeypatch, YARN_OF_MODEL)
    model = Model(name, {"position_embedding_type": "yarn"}) if name == "llama" else Model(name, **LATENT)
    keys = model.keys | {f"hf.rope_parameters.{key}": value for key, value in YARN.items()}
    assert not model.layout.check_config(keys)
    for key, value in (YARN_EDITS | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.0}).items():
        with pytest.raises(UsageError, match=rf"{key} is {value}, megatron\.rotary_{key} is"):
            model.layout.check_config(keys | {f"hf.rope_parameters.{key}": value})


def test_yarn_that_changes_nothing_is_none():
    """Megatron-Bridge makes such models of latent attention."""
    model = Model("deepseek_v3", rope_type="yarn", rotary_scaling_factor=1.0, mscale_all_dim=1.0)
    assert not model.layout.check_config(model.keys)
    scaled = Model("deepseek_v3", rotary_scaling_factor=40.0, mscale_all_dim=1.0)  # scores, not positions
    with pytest.raises(UsageError, match=r"mscale_all_dim is 1\.0"):
        scaled.layout.check_config(scaled.keys)


@pytest.mark.parametrize("window", [(3, 0), None])
def test_windows(window):
    model = Model("llama", window_size=window)
    keys = model.keys | {"hf.sliding_window": 4, "hf.model_type": "mistral"}
    note = [] if window else ["hf.sliding_window | 0 in 0 megatron.sliding_window"]
    assert model.layout.check_config(keys) == note
    if window:
        with pytest.raises(UsageError, match=r"hf\.sliding_window is 5, megatron\.sliding_window is 4"):
            model.layout.check_config(model.keys | {"hf.sliding_window": 5})
        with pytest.raises(UsageError, match=r"hf\.sliding_window is not set, megatron\.sliding_window is 4"):
            model.layout.check_config(model.keys)


@pytest.mark.parametrize("name", ["gemma3_text", "olmo3", "gpt_oss"])
def test_which_layers_have_a_window(name):
    right = Model(name)
    kinds = right.family.config["layer_types"]
    assert right.keys["hf.layer_types"] == right.keys["megatron.layer_types"] == " ".join(kinds)
    others = [int(kind != "sliding_attention") for kind in kinds]
    for frequency in (others, None if "full_attention" in kinds else 2):
        other = Model(name, window_attn_skip_freq=frequency)
        with pytest.raises(UsageError, match=r"hf\.layer_types is .*, megatron\.layer_types is"):
            other.layout.check_config(other.keys)
    unsaid = {key: value for key, value in right.keys.items() if key != "hf.layer_types"}
    assert right.layout.check_config(unsaid) == ["hf.layer_types = megatron.layer_types"]


def test_layers_of_models_that_decide_themselves_are_said_to_be_unknown(monkeypatch):
    """Megatron-Bridge's Gemma 3 has attention of its own, and a window in the configuration. So has Gemma 2."""
    two = Model("gemma2", window_attn_skip_freq=None)
    assert not two.layout.check_config(two.keys)
    with_values(monkeypatch, {"interleaved_attn_pattern": (5, 1)})
    three = Model("gemma3_text", window_attn_skip_freq=None)
    assert three.layout.check_config(three.keys) == ["hf.layer_types = megatron.layer_types"]


def test_layers_without_a_window_in_a_family_that_has_one_in_all():
    model = Model("llama", window_size=(3, 0), window_attn_skip_freq=2)
    with pytest.raises(UsageError, match=r"megatron\.window_attn_skip_freq is 2"):
        model.layout.check_config(model.keys | {"hf.sliding_window": 4, "hf.model_type": "mistral"})


def test_facts_of_models_themselves():
    scaled = Model("gemma3_text", softmax_scale=1 / math.sqrt(256))
    assert not scaled.layout.check_config(scaled.keys | {"hf.query_pre_attn_scalar": 256})
    maximal = Model("gemma3_text", softmax_scale=None)  # the parametrization divides by the size of heads, not its root
    with pytest.raises(UsageError, match=r"hf\.query_pre_attn_scalar is 10, megatron\.query_scalar is 64"):
        maximal.layout.check_config(maximal.keys)
    other = Model("t5", {"relative_attention_max_distance": 64})
    with pytest.raises(UsageError, match=r"distance is 128, megatron\.relative_attention_max_distance is 64"):
        other.layout.check_config(other.keys)


def test_a_load_says_what_differs(tmp_path):
    """Files of an untied model without a head, and files of another router, do not load."""
    initialize_parallel(Layout())
    for name, edit, message in (
        (
            "qwen3_moe",
            {"norm_topk_prob": True},
            r"hf\.norm_topk_prob is True, megatron\.moe_router_pre_softmax is True",
        ),
        (
            "llama-tied",
            {"tie_word_embeddings": False},
            r"hf\.tie_word_embeddings is False, megatron\.share_\w+ is True",
        ),
    ):
        model = Model(name)
        folder = tmp_path / name
        folder.mkdir()
        save_file(model.family.weights(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(model.family.config))
        report = bytecheckpoint.load(folder, {"model": model.model}, layout="auto")
        assert not report.missing and not report.unexpected
        assert not any("cannot compare" in note for note in report.notes)
        (folder / "config.json").write_text(json.dumps(model.family.config | edit))
        with pytest.raises(UsageError, match=message):
            bytecheckpoint.load(folder, {"model": model.model}, layout="auto")
