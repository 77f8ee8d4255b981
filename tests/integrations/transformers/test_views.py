"""Steps as folders of Hugging Face: `from_pretrained` of Transformers reads them as they were committed."""

from __future__ import annotations

import os
import signal
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
from bytecheckpoint.tools import export
from bytecheckpoint.tools.huggingface import WeightFiles
from tests.integrations.transformers.jobs import make
from tests.support.worlds import Worlds, on_ranks


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
    export(tmp_path / "half", tmp_path / "exported", dtype="float16")  # with the configuration of the view
    check(tmp_path / "exported", model.state_dict(), torch.float16)
    (tmp_path / "half" / VIEW_INDEX).unlink()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        check(tmp_path / "half", model.state_dict())


def distributed(model: Any, layout: str) -> Any:
    """Distribute a model over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if layout == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if layout == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if layout == "tp":
        layers = {"self_attn.q_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        plan = {f"model.layers.*.{name}": style for name, style in layers.items()}
        return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize(
    ("layout", "tied"), [("fsdp2", False), ("fsdp2", True), ("fsdp1", False), ("ddp", True), ("tp", False)]
)
@on_ranks(2)
def test_two_ranks(tmp_path: Path, layout: str, tied: bool) -> None:
    model = llama(tied=tied)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    model = distributed(model, layout)
    states = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    handle = bytecheckpoint.save(tmp_path / "step", states, view=HuggingFaceView(), async_checkpoint=True)
    assert handle.result().view == "index"
    handle.viewed.result()
    dist.barrier()
    check(tmp_path / "step", wanted)
    dist.barrier()


@pytest.mark.parametrize("layout", ["hsdp", "tp x fsdp"])
@on_ranks(4)
def test_meshes_of_two_dimensions(tmp_path: Path, layout: str) -> None:
    """Boxes that two ranks hold, and boxes that are cut twice, some unevenly."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = llama(tied=layout == "hsdp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if layout == "hsdp":
        fully_shard(model, mesh=mesh)
    else:
        layers = {
            "self_attn.q_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        plan = {f"model.layers.*.{name}": style for name, style in layers.items()}
        parallelize_module(model, mesh["inner"], plan)
        fully_shard(model, mesh=mesh["outer"])
    optimizer = torch.optim.AdamW(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    states = {"model": model, "optimizer": optimizer}
    wanted = {name: value.full_tensor() for name, value in model.state_dict().items()}
    for name, options in (("a", {}), ("b", {"async_checkpoint": True, "staging": "background"})):
        report = bytecheckpoint.save(tmp_path / name, states, view=HuggingFaceView(), **options).result()
        assert report.view == "index"
        dist.barrier()
        check(tmp_path / name, wanted)
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


@on_ranks(1)
def test_ties_that_the_configuration_lacks_are_refused(tmp_path: Path) -> None:
    model = llama(tied=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    wanted = dict(model.state_dict())
    with pytest.raises(bytecheckpoint.UsageError, match=r"lm_head.weight, model.embed_tokens.weight are one tensor"):
        bytecheckpoint.save(tmp_path, {"model": model}, view=HuggingFaceView())
    model.config.tie_word_embeddings = True
    model.generation_config.temperature = 0.5
    with pytest.raises(bytecheckpoint.UsageError, match="configuration of LlamaForCausalLM cannot be saved"):
        bytecheckpoint.save(tmp_path, {"model": model}, view=HuggingFaceView())
    model.generation_config.do_sample = True
    bytecheckpoint.save(tmp_path, {"model": model}, view=HuggingFaceView())
    check(tmp_path, wanted)


def train(root: Path, die_at: int | None, last: int) -> None:
    """Continue a run of FSDP2, and die on all ranks when the files of a view are written, but not its index."""
    from torch.distributed.fsdp import fully_shard

    model = llama(tied=True)
    fully_shard(model)
    states = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    write = WeightFiles.write
    options = SaveOptions(view=HuggingFaceView(dtype="float32", max_shard_bytes=2000))
    with CheckpointManager(root, states, keep=Retention(2, grace=0.0), save_options=options) as manager:
        begun = manager.restore_latest()
        for step in range(0 if begun is None else begun.step, last):
            with torch.no_grad():
                model.model.norm.weight.add_(1)
            if step + 1 == die_at:
                WeightFiles.write = lambda *args: (write(*args), os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[method-assign]
            manager.save(step + 1).viewed.result()
        found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        check(root / f"step_{last:08d}", found)
    dist.barrier()


def test_a_kill_in_a_view(worlds: Worlds, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    worlds.fresh(2).start(train, tmp_path, 2, 3).outcomes(grace=2)
    AutoModelForCausalLM.from_pretrained(tmp_path / "step_00000001")
    assert len(list(tmp_path.glob("step_00000002/model-*"))) > 1
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "step_00000002")
    worlds.run(2, train, tmp_path, None, 4)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000003", "step_00000004"]
