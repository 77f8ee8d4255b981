"""Write torchtitan.json: the names, shapes and checksums of what torchtitan's own adapters make of the families' weights.

python tests/layouts/families/titan.py     # where torch and torchtitan 0.3 are installed
"""

import importlib
import json
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace as Config

import torch

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[2]))
from tests.layouts.models import COPY, Family  # noqa: E402  from this repository, which is not installed here

ADAPTERS = {
    "llama": ("llama3", "Llama3StateDictAdapter"),
    "qwen3": ("qwen3", "Qwen3StateDictAdapter"),
    "qwen3_moe": ("qwen3", "Qwen3StateDictAdapter"),
    "deepseek_v3": ("deepseek_v3", "DeepSeekV3StateDictAdapter"),
    "deepseek_v3-mtp": ("deepseek_v3", "DeepSeekV3StateDictAdapter"),
    "gpt_oss": ("gpt_oss", "GptOssStateDictAdapter"),
}

made = {}
for name, (module, adapter) in ADAPTERS.items():
    family = Family(name)
    c = family.config
    attention = Config(
        n_heads=c["num_attention_heads"],
        n_kv_heads=c["num_key_value_heads"],
        head_dim=c.get("head_dim"),
        q_lora_rank=c.get("q_lora_rank"),
    )
    experts = Config(num_experts=c.get("num_local_experts", c.get("n_routed_experts")))
    layers = [Config(attention=attention, moe=experts)] * c["num_hidden_layers"]
    mtp = [None] * c.get("num_nextn_predict_layers", 0) if name.endswith("-mtp") else []
    config = Config(layers=layers, mtp_layers=mtp, dim=c["hidden_size"], enable_weight_tying=False)
    made_by = getattr(importlib.import_module(f"torchtitan.models.{module}.state_dict_adapter"), adapter)(config, None)
    made_by._validate_hf_rope_config = lambda *_: None
    weights = {key: torch.from_numpy(array) for key, array in family.weights().items() if not COPY.match(key)}
    for key in [key for key in weights if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weights[f"{key}_blocks"] = weights.pop(key).transpose(1, 2)  # as torch's reader of mxfp4 makes them
    found = made_by.from_hf(weights)
    made[name] = {
        key: [zlib.crc32(tensor.contiguous().numpy().tobytes()), *tensor.shape] for key, tensor in sorted(found.items())
    }
text = json.dumps(made, indent=1)
(FOLDER.parent / "torchtitan.json").write_text(
    text.replace(",\n   ", ", ").replace("[\n   ", "[").replace("\n  ]", "]") + "\n"
)
