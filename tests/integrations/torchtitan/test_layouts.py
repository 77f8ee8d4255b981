"""Names of torchtitan's own models fit the layouts that are built in, which its adapters do not always do."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file

import bytecheckpoint
from bytecheckpoint.layouts.binding import bind
from bytecheckpoint.layouts.layout import Layout, find
from bytecheckpoint.layouts.matching import Side

RULE = "ops.gated_delta_rule"
KERNELS = ("modules.conv.triton.ops", "modules.conv.causal_conv1d", RULE, f"{RULE}.chunk", f"{RULE}.fused_recurrent")
MODELS = {
    "llama3": ["debugmodel"],
    "qwen3": ["debugmodel", "debugmodel_moe"],
    "deepseek_v3": ["debugmodel"],
    "gpt_oss": ["debugmodel"],
    "qwen3_5": ["debugmodel", "debugmodel_moe"],
    "kimi_k2_7": ["debugmodel"],
    "muse_glimmer": ["debugmodel_mm"],
}
GIVEN = {"attn_backend": "flex", "moe_comm_backend": "standard", "num_mtp_layers": 1}


def model_of(module: str, name: str) -> Any:
    found = vars(importlib.import_module(f"torchtitan.models.{module}"))
    configs = next(value for key, value in found.items() if key.endswith("_configs") and isinstance(value, dict))
    wanted = inspect.signature(configs[name]).parameters
    return configs[name](**{key: value for key, value in GIVEN.items() if key in wanted}).build()


def fits(layout: Layout, name: str) -> bool:
    return any(f.template.match(name) for rule in layout.parsed for f in rule.families if f.side == 1)


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, found in MODELS.items() for name in found])
def test_names_of_the_models(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    for part in KERNELS if module == "qwen3_5" else ():  # a package for GPUs
        monkeypatch.setitem(sys.modules, f"fla.{part}", MagicMock())
    with torch.device("meta"):
        names = list(model_of(module, name).state_dict())
    others = [key for key in names if not fits(find(f"torchtitan_{module}"), key)]
    assert {key.partition(".moe.")[2] for key in others} <= {"expert_bias_E"}, others


@pytest.mark.parametrize(("module", "name"), [("gpt_oss", "debugmodel"), ("deepseek_v3", "debugmodel")])
def test_every_parameter_is_loaded(tmp_path: Path, module: str, name: str) -> None:
    """By the layout that "auto" finds, since the module says which model of torchtitan it is."""
    model, layout = model_of(module, name), find(f"torchtitan_{module}")
    state = model.state_dict()
    config = {"model_type": module, "num_hidden_layers": len(model.layers), "tie_word_embeddings": False}
    right = Side(list(state), [tuple(tensor.shape) for tensor in state.values()])
    left = bind(layout, None, right, {f"hf.{key}": value for key, value in config.items()}).left
    shapes = [[size for size in shape if size >= 0] for shape in left.shapes.tolist()]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.rand(s) for name, s in zip(left.names, shapes, strict=True)}, tmp_path / "model.safetensors")
    with torch.no_grad():
        for tensor in state.values():
            tensor.fill_(2)
    report = bytecheckpoint.load(tmp_path, {"model": model}, layout="auto")
    assert not report.missing and not report.unexpected
    kept = [key for key, tensor in model.state_dict().items() if (tensor == 2).any()]
    assert all(key.endswith("expert_bias_E") and module == "gpt_oss" for key in kept), kept
