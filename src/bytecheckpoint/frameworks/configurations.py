"""Configurations of live modules: the plain values by which layouts find sizes and compare models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from bytecheckpoint.frameworks.megatron.model_facts import is_configuration, model_facts
from bytecheckpoint.frameworks.modules import as_modules, modules_of
from bytecheckpoint.layouts.config import flattened

__all__ = ["configuration_of"]

_log = logging.getLogger("bytecheckpoint")
_warned_of: set[type] = set()

#: Names of classes in transformers' configurations: perhaps thousands, of which no layout asks for one.
_CLASSES = ("id2label", "label2id")
#: Keys of which the value here counts where files have another one.
_OF_HF5 = ("model_type", "tie_word_embeddings")
#: Characters of a value: a list of some hundred layers is shorter.
_LONGEST = 4096


def configuration_of(states: Mapping[str, object]) -> dict[str, bool | int | float | str]:
    """Return the plain values in the configurations of modules, under "hf." (transformers) or "megatron.".

    A model of torchtitan has its name, `torchtitan.model`, alone.
    A module in which transformers 5 has stacked the experts of a layer has `hf.fused_experts` and `hf5.model_type`, too.
    A module whose configuration cannot be read has no values: with a part of them, layouts would take the defaults of the
    others for the model's.
    """
    found: dict[str, bool | int | float | str] = {}
    for state, value in states.items():
        for module in as_modules(state, value) or ():
            config: object = module  # the one to name if its `config` raises
            try:
                config = next((one.config for one in modules_of(module) if hasattr(one, "config")), None)
                found |= _plain(_values(config, module))
            except Exception as error:  # noqa: BLE001  a program's `config` may do anything, and fails no load
                _warn_once(type(config), error)
    return found


def _warn_once(kind: type, error: Exception) -> None:
    """Warn of the first configuration of a type that cannot be read; the notes of a load have what it did not compare."""
    if kind not in _warned_of:
        _warned_of.add(kind)
        _log.warning(
            "cannot read the configuration of a model (%s.%s: %s: %s): saves do not keep it, and layouts cannot compare it",
            kind.__module__, kind.__qualname__, type(error).__name__, error, exc_info=error,
        )  # fmt: skip


def _values(config: Any, module: nn.Module) -> dict[str, object]:
    if hasattr(config, "to_dict") and hasattr(config, "model_type"):
        found = flattened("hf", {key: value for key, value in config.to_dict().items() if key not in _CLASSES})
        experts = (one._modules.get("experts") for one in modules_of(module))
        if any(one is not None and "gate_up_proj" in one._parameters for one in experts):
            found["hf.fused_experts"] = True
            found |= {f"hf5.{key}": found[f"hf.{key}"] for key in _OF_HF5 if f"hf.{key}" in found}
        return found
    if is_configuration(config):
        return flattened("megatron", model_facts(config, module))
    program, _, model = type(config).__module__.partition(".models.")
    return {"torchtitan.model": model.partition(".")[0]} if program == "torchtitan" else {}


def _plain(values: Mapping[str, object]) -> dict[str, bool | int | float | str]:
    """Return those of the values that JSON keeps exactly, without long texts."""
    return {
        name: value
        for name, value in values.items()
        if (isinstance(value, bool | int | float) and abs(value) < 1 << 53)
        or (isinstance(value, str) and len(value) < _LONGEST)
    }
