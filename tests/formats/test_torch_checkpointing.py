"""Folders of torch_checkpointing whose ranks wrote safetensors, as the real package saves them."""

from __future__ import annotations

import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, IncompatibleCheckpointError
from bytecheckpoint.formats.detect import detect
from bytecheckpoint.storage import resolve
from tests.formats.oracle import read_tensors
from tests.formats.test_rank_files import MODEL
from tests.support.programs import forked

#: The package gathers its metadata on GPUs alone; here, gloo does.
RANKS = (
    """
import sys, torch, torch.distributed as dist, torch_checkpointing
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/init-{world}", rank=rank, world_size=world)
def gathered(self, data, process_group=None):
    found = [None] * world
    dist.all_gather_object(found, data)
    return dict(enumerate(found))
DefaultMetadataManager._all_gather_pickled_data = gathered
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
"""
    + MODEL
    + """
states = {
    "both": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
    "twice": distribute_tensor(whole, mesh, [Shard(0), Shard(0)]),
    "mixed": distribute_tensor(whole, mesh, [Replicate(), Shard(1)]).to(torch.bfloat16),
    "same": distribute_tensor(whole, mesh, [Replicate(), Replicate()]),
    "scalar": distribute_tensor(torch.tensor(3.0), mesh, [Replicate(), Replicate()]),
    "short": distribute_tensor(torch.ones(1, 4), mesh, [Replicate(), Shard(0)]),
    "turned": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]).t(),
    "plain": torch.arange(5),
    "empty": torch.zeros(0, 3),
    "rng": torch.full((3,), rank),
    "layers": {"a": [torch.ones(2), {"b": whole.t()}]},
    **model.state_dict(),
}
layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())
inside = LayoutInfo("rank_{rank}/ema.safetensors", SafetensorsSerialization())
items = {
    "model": torch_checkpointing.ItemSpec(layout=layout, resharder=DefaultResharder()),
    "ema": torch_checkpointing.ItemSpec(layout=inside, resharder=DefaultResharder()),
    "optim": torch_checkpointing.ItemSpec(resharder=DefaultResharder()),
}
manager = torch_checkpointing.CheckpointManager.Config(
    items=items,
    save=torch_checkpointing.SyncCheckpointSaverConfig(),
    storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
).build()
for step in ("first", "second"):
    optim = {"state": {0: {"exp_avg": states["both"]}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    payload = {"model": states, "ema": {"both": states["both"]}, "optim": optim, "step": 3}
    manager.save(f"{folder}/{world}-{step}", payload)
    dist.barrier()
manager.close()
dist.destroy_process_group()
"""
)
WHOLE = torch.arange(77.0).view(7, 11)
EXPECTED = {
    "model/both": WHOLE,
    "model/twice": WHOLE,
    "model/mixed": WHOLE.bfloat16(),
    "model/same": WHOLE,
    "model/scalar": torch.tensor(3.0),
    "model/short": torch.ones(1, 4),
    "model/turned": WHOLE.t(),
    "model/plain": torch.arange(5),
    "model/empty": torch.zeros(0, 3),
    "model/layers.a.0": torch.ones(2),
    "model/layers.a.1.b": WHOLE.t(),
    "model/0.weight": torch.arange(120.0).view(12, 10),
    "model/1.weight": torch.arange(72.0).view(6, 12),
    "ema/both": WHOLE,
    "optim/state.0.exp_avg": WHOLE,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for world in (2, 4):
        ranks = [subprocess.Popen(forked("-c", RANKS, rank, world, folder)) for rank in range(world)]
        assert [process.wait(timeout=240) for process in ranks] == [0] * world
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved / "2-first", tmp_path / "copy")


@pytest.mark.parametrize("world", [2, 4])
def test_tensors_are_whole(saved: Path, world: int) -> None:
    folder = saved / f"{world}-first"
    storage = resolve(str(folder))
    assert detect(storage).format == "rank-files"
    foreign = detect(storage).read(storage)
    found, catalog = read_tensors(folder, foreign), foreign.catalog
    assert {*found} == {*EXPECTED, "model/rng"}
    for name, tensor in EXPECTED.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    owners = zip(catalog.keys(), catalog.owner.tolist(), strict=True)
    assert sorted((key.fqn, rank) for key, rank in owners if rank >= 0) == [("rng", rank) for rank in range(world)]
    assert foreign.facts["world_size"] == world and not foreign.notes


def test_load_at_another_layout(saved: Path) -> None:
    model = {name.partition("/")[2]: torch.zeros_like(one) for name, one in EXPECTED.items() if name[:5] == "model"}
    bytecheckpoint.load(saved / "4-first", {"model": model}, strict=False)
    assert all(torch.equal(one, EXPECTED[f"model/{name}"]) for name, one in model.items())
    with bytecheckpoint.open(saved / "4-first") as opened:
        assert opened["optim/param_groups"][0]["lr"] == 0.1
        assert opened["step/value"] == 3


def test_the_metadata_of_the_first_step_serve_the_second(saved: Path, tmp_path: Path) -> None:
    """The package's synchronous saver writes them once; without them, nothing in the folder says any place."""
    assert not (saved / "2-second/metadata.pkl").exists()
    with pytest.raises(IncompatibleCheckpointError, match=r"nothing here says their places.*'metadata\.pkl'"):
        bytecheckpoint.open(saved / "2-second")
    shutil.copytree(saved / "2-second", tmp_path, dirs_exist_ok=True)
    shutil.copy(saved / "2-first/metadata.pkl", tmp_path)
    state = {"both": torch.zeros(7, 11)}
    bytecheckpoint.load(tmp_path, {"model": state}, strict=False)
    assert torch.equal(state["both"], WHOLE)


def test_a_copy_that_differs_is_a_tensor_of_its_rank(copied: Path) -> None:
    tensors = load_file(copied / "model_1.safetensors")
    tensors["same"][6, 10] += 1
    save_file(tensors, copied / "model_1.safetensors")
    storage = resolve(str(copied))
    catalog = detect(storage).read(storage).catalog
    owners = zip(catalog.keys(), catalog.owner.tolist(), strict=True)
    assert [owner for key, owner in owners if key.fqn == "same"] == [0, 1]


def test_files_that_are_not_described(copied: Path) -> None:
    shutil.copy(copied / "model_0.safetensors", copied / "other_0.safetensors")
    storage = resolve(str(copied))
    assert any(note.startswith("other_0.safetensors: not read") for note in detect(storage).read(storage).notes)


def lost(folder: Path) -> None:
    (folder / "model_1.safetensors").unlink()


def larger(folder: Path) -> None:
    shutil.copy(folder / "step_1.pt", folder / "step_2.pt")


def pickled(folder: Path) -> None:
    shutil.copy(folder / "optim_0.pt", folder / "model_0.pt")


def swapped(folder: Path) -> None:
    shutil.copy(folder / "model_0.safetensors", folder / "model_1.safetensors")


def edited(rank: int, edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / f"model_{rank}.safetensors")
        edit(tensors)
        save_file(tensors, folder / f"model_{rank}.safetensors")

    return change


def described(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = pickle.loads((folder / "metadata.pkl").read_bytes())
        edit(content)
        (folder / "metadata.pkl").write_bytes(pickle.dumps(content))

    return change


def tensor_of(content: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = content["metadata"]["model"]["nested_path_to_metadata"][f'["{name}"]'][0]
    return found["sharding_metadata"]


def too_many(content: dict[str, Any]) -> None:
    groups = content["metadata"]["model"]["nested_path_to_metadata"]
    alike = [groups['["both"]'][0]] * 5_000
    groups.update({f'["{number}"]': alike for number in range(5_000)})


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "lost": (lost, r"lacks the files of ranks \[1\] of 2 of 'model', such as 'model_1\.safetensors'"),
    "larger": (larger, r"has 'step_2\.pt', which metadata\.pkl does not name"),
    "pickled": (pickled, r"has 'model_0\.pt', which metadata\.pkl does not name"),
    "swapped": (swapped, r"model_1\.safetensors.*local tensor has shape"),
    "not the file's": (edited(1, lambda t: t.pop("both")), r"says that it has the tensor 'both', which it lacks"),
    "not described": (edited(1, lambda t: t.update(new=torch.ones(2))), r"does not say the place of 'new'"),
    "dtype": (edited(0, lambda t: t.update(both=t["both"].half())), r"float16 instead of torch\.float32"),
    "version": (described(lambda c: c.update(version="3.0")), r"version is '3\.0', not '2\.0'"),
    "no dict": (lambda folder: (folder / "metadata.pkl").write_bytes(pickle.dumps([1])), r"not those of torch_check"),
    "kind": (described(lambda c: tensor_of(c, "both").update(type="default_tensor_v1")), r"by 'default_tensor_v1'"),
    "shape": (described(lambda c: tensor_of(c, "both")["data"].update(global_shape=[7, 13])), r"local tensor has shape"),
    "ranks": (described(lambda c: c.update(world_size=3)), r"not one file of each of 3 ranks"),
    "whole": (described(lambda c: tensor_of(c, "both")["data"].update(placements=[{"type": "Partial"}] * 2)), "'Partial'"),
    "too many": (described(too_many), r"its values refer to each other, and are too many"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_what_does_not_fit_is_refused(copied: Path, case: str) -> None:
    change, message = HOSTILE[case]
    change(copied)
    with pytest.raises(CheckpointError, match=message) as caught:
        bytecheckpoint.open(copied)
    assert isinstance(caught.value, CheckpointNotFoundError) == (case == "lost")


def test_metadata_of_another_number_of_ranks(saved: Path, copied: Path) -> None:
    shutil.copy(saved / "4-first/metadata.pkl", copied)
    with pytest.raises(CheckpointNotFoundError, match=r"lacks the files of ranks \[2, 3\] of 4"):
        bytecheckpoint.open(copied)


def test_whole_weights_beside_metadata_of_another_program(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "weights.safetensors")
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps([1]))
    with bytecheckpoint.open(tmp_path) as opened:
        assert opened["model/w"][:].tolist() == [1.0] * 3
