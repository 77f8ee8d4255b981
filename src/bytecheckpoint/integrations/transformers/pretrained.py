"""Describe a model of Hugging Face in its checkpoints, so that an export of a step needs nothing else."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

from bytecheckpoint.tools.huggingface_description import (
    AdapterDescription,
    ModelDescription,
    configuration_files,
    texts_written_by,
)

__all__ = ["adapter_names", "describe_pretrained"]

_log = logging.getLogger("bytecheckpoint")


def describe_pretrained(model: Any) -> dict[str, str]:
    """Return a state that lets `tools.export` write a complete folder, to be saved under the name "huggingface".

    `attach` does so by itself. Leave the state out of loads: `load(..., include=["model/*", ...])`, or another dict.

    Args:
        model: a `PreTrainedModel`, or a `PeftModel`. Other models, and those whose configuration cannot be written, have
            an empty description.
    """
    try:
        return _describe(model).state()
    except Exception as error:  # noqa: BLE001  a training does not end because an export will need --files-from
        _log.warning("steps will not describe their model, because its configuration cannot be written: %s", error)
        return ModelDescription().state()


def _describe(model: Any) -> ModelDescription:
    if getattr(model, "peft_config", None) and hasattr(model, "base_model"):
        return ModelDescription(
            adapters={name: _adapter(model, name) for name in model.peft_config},
            active=next(iter(model.active_adapters), ""),
        )
    return ModelDescription(files=configuration_files(model))


def _adapter(model: Any, name: str) -> AdapterDescription:
    names = adapter_names(model, name)
    if names is None:
        _log.warning(
            "steps do not describe the adapter %r, because its tensors are not those of PEFT's file, and tools.export "
            "does not write that file: load a step into the model, and call save_pretrained", name,
        )  # fmt: skip
        return AdapterDescription(exceptions=dict.fromkeys(model.state_dict()))
    config = copy.deepcopy(model.peft_config[name])
    config.inference_mode = True  # as PEFT writes it
    for field, value in vars(config).items():
        if isinstance(value, set):  # of names, in another order in each process
            setattr(config, field, sorted(value))
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = model.get_base_model().__dict__.get("name_or_path") or None
    base = type(model.get_base_model())
    mapping = (
        {"base_model_class": base.__name__, "parent_library": base.__module__} if config.task_type is None else None
    )
    description = AdapterDescription(texts_written_by(partial(config.save_pretrained, auto_mapping_dict=mapping)))
    for key in model.state_dict():
        if description.name(name, key) != names.get(key):
            description.exceptions[key] = names.get(key)
    return description


def adapter_names(model: Any, adapter: str) -> dict[str, str] | None:
    """Return the tensors of an adapter: names in PEFT's file by names in the model; None if PEFT computes its tensors."""
    from peft import get_peft_model_state_dict

    config = model.peft_config[adapter]
    if getattr(model, "_tp_size", None):
        return None
    state = model.state_dict()
    prompt = [key for key in state if key.startswith(f"prompt_encoder.{adapter}.")]
    if config.is_prompt_learning and (len(prompt) != 1 or hasattr(state[prompt[0]], "placements")):
        return None
    keys = {id(value): key for key, value in state.items()}
    resized = _has_other_vocabulary(model, config)
    written = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter, save_embedding_layers=resized)
    if config.is_prompt_learning:  # PEFT looks all rows of this one tensor up
        keys[id(written["prompt_embeddings"])] = prompt[0]
    if any(id(value) not in keys for value in written.values()):
        return None
    return {keys[id(value)]: name for name, value in written.items()}


def _has_other_vocabulary(model: Any, config: Any) -> bool:
    """Return whether a model has other tokens than its base model in files. PEFT then writes the embeddings, too.

    PEFT asks the hub; here the base model's configuration is local, because the model was made of it.
    """
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if not size or not config.base_model_name_or_path:
        return False
    try:
        found = type(model.config).from_pretrained(config.base_model_name_or_path, local_files_only=True)
    except (OSError, ValueError):  # as PEFT assumes
        return False
    return bool(found.vocab_size != size)
