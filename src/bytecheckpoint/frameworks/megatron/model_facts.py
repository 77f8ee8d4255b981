"""Facts about live models of Megatron-Core that no weight says, for layouts to compare with other configurations."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from bytecheckpoint.frameworks.modules import modules_of

__all__ = ["is_configuration", "model_facts"]

#: Attributes of models that their configurations do not have.
_OF_MODELS = (
    "vocab_size",
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
)
#: transformers' name of an activation by the name of the function. Exact and approximate gelu count as one.
_ACTIVATIONS = {"silu": "silu", "relu": "relu", "squared_relu": "relu2", "quick_gelu": "quick_gelu"}
_ACTIVATIONS |= dict.fromkeys(("gelu", "erf_gelu", "fast_gelu", "openai_gelu"), "gelu")


def is_configuration(config: object) -> bool:
    """Return whether `config` is the configuration of a model of Megatron-Core."""
    return any(base.__name__ == "ModelParallelConfig" for base in type(config).__mro__)


def model_facts(config: Any, module: nn.Module) -> Mapping[str, object]:
    """Return the configuration of a model, and in transformers' terms what else decides what it computes."""
    model = next((one for one in modules_of(module) if hasattr(one, "vocab_size")), None)  # the model in its wrappers
    facts = {**vars(config), **{name: getattr(model, name) for name in _OF_MODELS if hasattr(model, name)}}
    if getattr(config, "multi_latent_attention", False):
        facts["rotary_percent"] = config.rotary_percent  # its attention does not ask the model
        facts["rotary_mscale_all_dim"] = config.mscale_all_dim if config.rotary_scaling_factor > 1 else 0
    else:
        facts["query_scalar"] = _query_scalar(config)
    buckets = (getattr(one, "relative_attention_max_distance", None) for one in modules_of(module))
    facts["relative_attention_max_distance"] = next(filter(None, buckets), None)
    window = getattr(config, "window_size", None)  # an integer in models of Megatron-Bridge
    facts["sliding_window"] = window[0] + 1 if isinstance(window, tuple | list) else window
    facts |= _kinds_of_layers(config)
    facts["activation"] = _activation(config)
    facts["activation_func_clamp_value"] = getattr(config, "activation_func_clamp_value", None) or 0
    rotary = next((one for one in modules_of(module) if hasattr(one, "inv_freq")), None)
    if rotary is not None:
        facts |= {f"rotary_{name}": value for name, value in _rotary(rotary, model).items()}
    return facts


def _kinds_of_layers(config: Any) -> dict[str, object]:
    """Return which layers have a window, and which have rotary positions, in transformers' terms."""
    facts: dict[str, object] = {}
    layers = range(1, config.num_layers + 1)
    # Megatron-Bridge's models of Gemma 3 decide by a pattern of their own.
    if getattr(config, "window_size", None) and not hasattr(config, "interleaved_attn_pattern"):
        full = getattr(config, "window_attn_skip_freq", None)
        windows = [bool(full[n - 1] if isinstance(full, list) else not full or n % full) for n in layers]
        facts["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    if hasattr(config, "no_rope_freq"):
        every = config.no_rope_freq or config.num_layers + 1
        skipped = every if isinstance(every, list) else [n % every == 0 for n in layers]
        facts["no_rope_layers"] = [int(not skip) for skip in skipped]  # transformers' name of the layers that have them
        facts["layer_types_by_rope"] = ["full_attention" if skip else "sliding_attention" for skip in skipped]
    return facts


def _query_scalar(config: Any) -> float | None:
    """Return the number whose root divides the scores of attention."""
    scale: float | None = getattr(config, "softmax_scale", None)
    return round(scale**-2, 3) if scale else getattr(config, "kv_channels", None)


def _activation(config: Any) -> str | None:
    """Return transformers' name of the activation, "clamped_swiglu" for that of gpt-oss; None if it is not known."""
    if getattr(config, "activation_func_clamp_value", None) or getattr(config, "glu_linear_offset", 0):
        return "clamped_swiglu"
    function = getattr(config, "activation_func", None)
    return _ACTIVATIONS.get(getattr(getattr(function, "func", function), "__name__", ""))


def _rotary(rotary: Any, model: Any) -> dict[str, object]:
    """Return the parameters of rotary positions under transformers' names; of the factors, those that its type has."""
    if hasattr(rotary, "scaling_factor"):
        if rotary.scaling_factor == 1:
            return {"type": "default"}  # YaRN that changes nothing
        scales = rotary.mscale, rotary.mscale_all_dim
        mscale, mscale_all_dim = (1, 0) if None in scales else scales
        names = ("original_max_position_embeddings", "beta_fast", "beta_slow")
        return {name: getattr(rotary, name) for name in names} | {
            "type": "yarn",
            "factor": rotary.scaling_factor,
            "truncate": getattr(rotary, "correction_range_round_to_int", True),
            "mscale": mscale,
            "mscale_all_dim": mscale_all_dim,
        }
    if rotary.seq_len_interpolation_factor is not None:
        return {"type": "linear", "factor": rotary.seq_len_interpolation_factor}
    if not getattr(model, "rotary_scaling", False):
        return {"type": "default"}
    # Megatron-Core has these as defaults of a method, and keeps the factor in the frequencies only.
    defaults = inspect.signature(rotary._apply_scaling).parameters
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = {name: defaults[name].default for name in names}
    return {**scaling, "type": "llama3", "factor": _factor(rotary, model.rotary_base, *scaling.values())}


def _factor(rotary: Any, base: float, low: float, high: float, length: int) -> float | None:
    """Return the factor by which Llama 3 scales low frequencies, from the lowest one; None if that one is not scaled."""
    if rotary.inv_freq.is_meta:
        return None
    count = len(rotary.inv_freq)
    plain = base ** -((count - 1) / count)
    kept = max(0.0, (length * plain / (2 * math.pi) - low) / (high - low))  # part of the frequency that stays
    return None if kept >= 1 else round((1 - kept) / (float(rotary.inv_freq[-1]) / plain - kept), 2)
