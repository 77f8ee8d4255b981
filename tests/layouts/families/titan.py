"""Write torchtitan.json: the names, shapes and checksums of what torchtitan's own adapters make of the families' weights.

python tests/layouts/families/titan.py     # where torch and torchtitan 0.3 are installed
"""

import importlib
import json
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace as Config
from unittest.mock import MagicMock

import torch

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[2]))
from tests.layouts.models import COPY, Family  # noqa: E402  from this repository, which is not installed here

# torchtitan's Qwen3.5 has kernels of a package for GPUs.
RULE = "ops.gated_delta_rule"
for part in ("modules.conv.triton.ops", "modules.conv.causal_conv1d", RULE, f"{RULE}.chunk", f"{RULE}.fused_recurrent"):
    sys.modules[f"fla.{part}"] = MagicMock()
ADAPTERS = {
    "llama": ("llama3", "Llama3StateDictAdapter"),
    "qwen3": ("qwen3", "Qwen3StateDictAdapter"),
    "qwen3_moe": ("qwen3", "Qwen3StateDictAdapter"),
    "deepseek_v3": ("deepseek_v3", "DeepSeekV3StateDictAdapter"),
    "deepseek_v3-mtp": ("deepseek_v3", "DeepSeekV3StateDictAdapter"),
    "gpt_oss": ("gpt_oss", "GptOssStateDictAdapter"),
    "qwen3_5": ("qwen3_5", "Qwen35StateDictAdapter"),
    "qwen3_5_moe": ("qwen3_5", "Qwen35StateDictAdapter"),
    "kimi_k25": ("kimi_k2_7", "KimiK25StateDictAdapter"),
    "muse_glimmer": ("muse_glimmer", "MuseGlimmerStateDictAdapter"),
}


def config_of(name, c, vision):
    """Return what the adapters ask of torchtitan's configuration."""
    attention = Config(
        n_heads=c["num_attention_heads"],
        n_kv_heads=c["num_key_value_heads"],
        head_dim=c.get("head_dim"),
        q_lora_rank=c.get("q_lora_rank"),
    )
    rows = [c.get(f"linear_num_{kind}_heads", 0) * c.get(f"linear_{kind}_head_dim", 0) for kind in ("key", "value")]
    net = Config(in_proj_q=Config(out_features=rows[0]), in_proj_v=Config(out_features=rows[1]))
    experts = Config(num_experts=c.get("num_local_experts", c.get("n_routed_experts")))
    layers = [Config(attention=attention, moe=experts, delta_net=net)] * c["num_hidden_layers"]
    mtp = [None] * c.get("num_nextn_predict_layers", 0) if name.endswith("-mtp") else []
    encoder = Config(num_heads=vision.get("num_attention_heads"), patch_size=vision.get("patch_size"), in_channels=3)
    given = {"dim": c["hidden_size"], "enable_weight_tying": False, "vision_encoder": encoder}
    return Config(layers=layers, mtp_layers=mtp, **given)


def as_the_adapter_knows_them(name, weights):
    """Return the weights with the experts in the form that the adapter reads."""
    if name == "gpt_oss":  # as torch's reader of mxfp4 makes them
        for key in [key for key in weights if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            weights[f"{key}_blocks"] = weights.pop(key).transpose(1, 2)
    if name == "qwen3_5_moe":  # stacked and transposed, as no file has them
        for layer in range(2):
            experts = f"model.language_model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([weights.pop(f"{experts}.{e}.{kind}_proj.weight").T for e in range(3)])
                for kind in ("gate", "up", "down")
            )
            weights |= {f"{experts}.gate_up_proj": torch.cat([gate, up], -1), f"{experts}.down_proj": down}
    return weights


made = {}
for name, (module, adapter) in ADAPTERS.items():
    family = Family(name)
    config = config_of(name, family.config.get("text_config", family.config), family.config.get("vision_config", {}))
    made_by = getattr(importlib.import_module(f"torchtitan.models.{module}.state_dict_adapter"), adapter)(config, None)
    made_by._validate_hf_rope_config = lambda *_: None
    weights = {key: torch.from_numpy(array) for key, array in family.weights().items() if not COPY.match(key)}
    found = made_by.from_hf(as_the_adapter_knows_them(name, weights))
    # The adapter of gpt-oss in 0.3.0 has names that the parameters of its model had before.
    ends = {"mlp1_weight": "EGD", "mlp1_bias": "EG", "mlp2_weight": "EDF", "mlp2_bias": "ED"}
    found = {f"{key}_{ends[last]}" if (last := key.rpartition(".")[2]) in ends else key: t for key, t in found.items()}
    made[name] = {
        key: [zlib.crc32(tensor.contiguous().numpy().tobytes()), *tensor.shape] for key, tensor in sorted(found.items())
    }
text = json.dumps(made, indent=1)
(FOLDER.parent / "torchtitan.json").write_text(
    text.replace(",\n   ", ", ").replace("[\n   ", "[").replace("\n  ]", "]") + "\n"
)
