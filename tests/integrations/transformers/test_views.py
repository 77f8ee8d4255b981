"""Steps as folders of Hugging Face: `from_pretrained` of Transformers reads them as they were committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint import CheckpointManager, HuggingFaceView, SaveOptions
from bytecheckpoint.engine.view_files import VIEW_INDEX
from bytecheckpoint.integrations.transformers import attach
from bytecheckpoint.manager import Retention
from tests.integrations.transformers.jobs import make
from tests.support.worlds import on_ranks


def llama(*, tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def check(folder: Path, wanted: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Load a step by `from_pretrained` and compare it bit by bit."""
    from transformers import AutoModelForCausalLM

    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(map(len, info.values())), info
    found = loaded.state_dict()
    assert found.keys() == wanted.keys()
    assert not [name for name, value in found.items() if not torch.equal(value, wanted[name].to(dtype))]
    assert loaded.dtype == dtype


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(1)
def test_one_process(tmp_path: Path, tied: bool) -> None:
    model = llama(tied=tied)
    states = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    options = SaveOptions(view=HuggingFaceView())
    with CheckpointManager(tmp_path, states, keep=Retention(2, grace=0.0), save_options=options) as manager:
        for step in (1, 2, 3):
            model.model.norm.weight.data.add_(1)
            manager.save(step)
            manager.wait()
            check(tmp_path / f"step_{step:08d}", model.state_dict())
    with pytest.raises(OSError, match="step_00000001"):
        check(tmp_path / "step_00000001", model.state_dict())
    handle = bytecheckpoint.save(tmp_path / "half", states, view=HuggingFaceView(dtype="bfloat16"))
    handle.viewed.result()
    check(tmp_path / "half", model.state_dict(), torch.bfloat16)
    (tmp_path / "half" / VIEW_INDEX).unlink()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        check(tmp_path / "half", model.state_dict())


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_fsdp2(tmp_path: Path, tied: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    model = llama(tied=tied)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    states = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    handle = bytecheckpoint.save(tmp_path / "step", states, view=HuggingFaceView(), async_checkpoint=True)
    assert handle.result().view == "files"
    handle.viewed.result()
    dist.barrier()
    check(tmp_path / "step", wanted)
    dist.barrier()


@on_ranks(1)
def test_a_trainer(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path, max_steps=4)
    attach(trainer, save_options=SaveOptions(view=HuggingFaceView()))
    trainer.train()
    check(tmp_path / "step_00000004", trainer.model.state_dict())


@on_ranks(1)
def test_a_wrapped_model_is_refused(tmp_path: Path) -> None:
    import peft

    model = llama(tied=False)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(bytecheckpoint.UsageError, match="adapters of PEFT"):
        bytecheckpoint.save(tmp_path, {"model": adapted}, view=HuggingFaceView())
