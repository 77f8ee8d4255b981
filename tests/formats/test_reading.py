"""Foreign files are opened and loaded like checkpoints of this package, at any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError
from tests.formats.golden.make_deepspeed import Net
from tests.support.settings import using
from tests.support.tiny_model import trained
from tests.support.worlds import on_ranks


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(700, 500), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.LayerNorm(5))


def stored(folder: Path, *, old: bool = False) -> Path:
    """A file with strided weights, tied weights, plain values and elements at odd bytes (in the old form)."""
    model = net()
    state = {**model.state_dict(), "turned": model[0].weight.detach().t(), "tied": model[0].bias.detach()}
    value = {"state_dict": state, "epoch": 3, "odd": torch.ones(3, dtype=torch.uint8), "lrs": [0.1, 0.2]}
    torch.save(value, folder / "model.pt", _use_new_zipfile_serialization=not old)
    return folder / "model.pt"


@pytest.mark.parametrize("old", [False, True])
def test_open(tmp_path: Path, old: bool) -> None:
    path, model = stored(tmp_path, old=old), net()
    with bytecheckpoint.open(path) as found:
        assert found["extra_states/epoch"] == 3 and [found["lrs/0"], found["lrs/1"]] == [0.1, 0.2]
        assert torch.equal(found["model/1.weight"][...], model[1].weight)
        assert torch.equal(found["model/turned"][3:9, 5:300:7], model[0].weight.t()[3:9, 5:300:7])
        assert torch.equal(found["model/tied"][...], model[0].bias)


@pytest.mark.parametrize("old", [False, True])
def test_load_into_a_module(tmp_path: Path, old: bool) -> None:
    model = nn.Sequential(nn.Linear(700, 500), nn.Conv2d(3, 4, 3), nn.LayerNorm(5))
    report = bytecheckpoint.load(stored(tmp_path, old=old), {"model": model}, strict=False)
    assert set(report.unexpected) == {"model/turned"}  # "tied" is another name of a tensor that is loaded
    for name, value in net().state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@on_ranks(2)
def test_load_onto_a_mesh(path: str) -> None:
    """Each rank reads its part of transposed memory, cut into ranges of the smallest size."""
    if dist.get_rank() == 0:
        Path(path).mkdir()
        stored(Path(path))
    dist.barrier()
    mesh = init_device_mesh("cpu", (2,))
    for dim in (0, 1):
        empty = torch.zeros(700, 500)
        state = {"turned": distribute_tensor(empty, mesh, [Shard(dim)])}
        with using(chunk_bytes=1 << 20):
            bytecheckpoint.load(f"{path}/model.pt", {"model": state}, strict=False, overlap_loading=dim == 1)
        turned = state["turned"]
        assert isinstance(turned, DTensor) and torch.equal(turned.full_tensor(), net()[0].weight.t())


@on_ranks(2)
def test_folders_of_torch_checkpointing(path: str) -> None:
    """The real package saves on two ranks; each loads other parts of the same tensors."""
    import torch_checkpointing
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(77.0).view(7, 11)
    state = {"rows": distribute_tensor(whole, mesh, [Shard(0)]), "plain": whole.t()}
    saver = torch_checkpointing.SyncCheckpointSaverConfig()
    options = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = torch_checkpointing.CheckpointManager.Config(save=saver, storage_config=options).build()
    manager.save(path, {"model": state, "step": 3})
    manager.close()
    dist.barrier()
    target = {"rows": distribute_tensor(torch.zeros(7, 11), mesh, [Shard(1)]), "plain": torch.zeros(11, 7)}
    bytecheckpoint.load(path, {"model": target})
    assert torch.equal(target["rows"].full_tensor(), whole) and torch.equal(target["plain"], whole.t())


def test_what_is_there_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        bytecheckpoint.open(tmp_path / "model.pt")
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        bytecheckpoint.open(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"notes\.txt"):
        bytecheckpoint.open(tmp_path / "notes.txt")


def test_folders(tmp_path: Path) -> None:
    state = {name: value.contiguous() for name, value in net().state_dict().items()}
    dcp.save({"model": state, "step": 5}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "hf").mkdir()
    files: dict[str, str] = {}
    for number, name in enumerate(state):
        files[name] = f"model-{number % 2}.safetensors"
    for file in set(files.values()):
        save_file({name: state[name] for name in state if files[name] == file}, tmp_path / "hf" / file)
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for folder in ("dcp", "hf"):
        model = nn.Sequential(nn.Linear(700, 500), nn.Conv2d(3, 4, 3), nn.LayerNorm(5))
        bytecheckpoint.load(tmp_path / folder, {"model": model})
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items()), folder


def test_an_unfinished_save_is_no_foreign_folder(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "step", {"model": net()})
    (tmp_path / "step" / "metadata.parquet").unlink()
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        bytecheckpoint.load(tmp_path / "step", {"model": net()})


def assert_resumed(model: nn.Module, optimizer: torch.optim.Optimizer, expected: Mapping[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        state, wanted = optimizer.state[parameter], expected[name]
        assert state["step"] == 2, name
        assert torch.equal(parameter.detach(), wanted["fp32"].view_as(parameter)), name
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[slot], wanted[slot].view_as(parameter)), name


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_a_folder_of_deepspeed_into_plain_torch(stage: str) -> None:
    """Two ranks' flat partitions fill a model and its optimizer; weights of fp32 come from the masters, to the last bit."""
    folder = Path(__file__).parent / "golden" / "deepspeed-0.19.8" / stage
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if (p.ndim > 1) == wide]} for wide in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    report = bytecheckpoint.load(folder, {"model": model, "optimizer": optimizer}, cast=True)
    assert not report.missing and not report.unexpected
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.01, 0.1), (0.01, 0.0)]
    assert_resumed(model, optimizer, torch.load(f"{folder}.expected.pt"))


def test_an_optimizer_of_dcp(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    saved = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    new = torch.optim.AdamW(other.parameters(), lr=0.3)
    bytecheckpoint.load(tmp_path, {"model": other, "optim": new})
    assert new.param_groups[0]["lr"] == 0.1
    named = {n: {"fp32": p.detach(), **optimizer.state[p]} for n, p in model.named_parameters()}
    assert_resumed(other, new, named)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = stored(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    for call in (bytecheckpoint.open, lambda found: bytecheckpoint.load(found, {"model": net()})):
        with pytest.raises(CorruptCheckpointError, match=r"model\.pt"):
            call(path)


def test_an_optimizer_of_another_form_is_refused_by_its_keys(tmp_path: Path) -> None:
    """As DeepSpeed writes it without ZeRO, in bfloat16."""
    model = torch.nn.Linear(2, 2)
    optimizer = trained(model)
    wrapped = {"optimizer_state_dict": optimizer.state_dict(), "fp32_groups": []}
    torch.save({"module": model.state_dict(), "optimizer": wrapped}, tmp_path / "a.pt")
    with pytest.raises(IncompatibleCheckpointError, match="as a dict of optimizer_state_dict, fp32_groups, which"):
        bytecheckpoint.load(tmp_path / "a.pt", {"model": model, "optimizer": optimizer})
