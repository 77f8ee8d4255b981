"""Files of ranks with DTensors and ShardedTensors, joined without DTensor: every element is at its coordinate."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.formats.detect import detect
from bytecheckpoint.formats.rank_files import read_rank_files
from bytecheckpoint.formats.torch_save import read_torch_save
from bytecheckpoint.layouts import Layout
from bytecheckpoint.storage import resolve
from tests.formats.oracle import read_tensors, values_of
from tests.support.programs import forked

#: Lines of a rank that has a mesh "dp" x "tp": a whole tensor, and a model of parts that the whole ones show.
MODEL = """
whole = torch.arange(77.0).view(7, 11)
model = torch.nn.Sequential(torch.nn.Linear(10, 12, bias=False), torch.nn.Linear(12, 6, bias=False))
with torch.no_grad():
    model[0].weight.copy_(torch.arange(120.0).view(12, 10))
    model[1].weight.copy_(torch.arange(72.0).view(6, 12))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
"""
RANKS = (
    """
import sys, torch, torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as Held, ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=4)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
"""
    + MODEL
    + """
part = whole.chunk(4)[rank] if rank < len(whole.chunk(4)) else whole[7:]
held = Held(part.clone(), ShardMetadata([2 * rank, 0], list(part.shape), f"rank:{rank}/cpu"))
states = {
    "both": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
    "twice": distribute_tensor(whole, mesh, [Shard(0), Shard(0)]),
    "mixed": distribute_tensor(whole, mesh, [Replicate(), Shard(1)]).to(torch.bfloat16),
    "same": distribute_tensor(whole, mesh, [Replicate(), Replicate()]),
    "row": distribute_tensor(whole, init_device_mesh("cpu", (1, 4)), [Shard(0), Shard(1)]),
    "scalar": distribute_tensor(torch.tensor(3.0), mesh, [Replicate(), Replicate()]),
    "transposed": distribute_tensor(whole, mesh, [Shard(0), Replicate()]).t(),
    "sharded": ShardedTensor._init_from_local_shards([held], (7, 11)),
    "plain": torch.arange(5.0),
    **model.state_dict(),
}
torch.save(states, f"{folder}/model_world_size_4_rank_{rank}.pt")
optim = {"state": {0: {"exp_avg": states["both"], "step": torch.tensor(4.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
torch.save(optim, f"{folder}/optim_world_size_4_rank_{rank}.pt")
torch.save({"model": states, "optimizer": optim, "epoch": 2}, f"{folder}.rank{rank}")
torch.save({"0._flat_param": states["both"]}, f"{folder}.flat{rank}")
torch.save({"rng": torch.full((3,), rank), "epoch": 2}, f"{folder}/extra_state_world_size_4_rank_{rank}.pt")
if rank == 0:
    torch.save({"w": DTensor.from_local(whole, mesh, [Partial(), Replicate()])}, f"{folder}/partial.pt")
if rank == 1:
    optim["param_groups"][0]["lr"] = 0.2
    states["same"] = DTensor.from_local(whole + 1, mesh, [Replicate(), Replicate()])
    torch.save(states, f"{folder}.model")
    torch.save(optim, f"{folder}.optim")
dist.destroy_process_group()
"""
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [subprocess.Popen(forked("-c", RANKS, rank, folder)) for rank in range(4)]
    assert [process.wait(timeout=240) for process in ranks] == [0, 0, 0, 0]
    (folder / "init").unlink(missing_ok=True)
    (folder / "partial.pt").rename(folder.parent / "partial.pt")
    return folder


def test_tensors_are_whole(saved):
    storage = resolve(str(saved))
    assert detect(storage).format == "rank-files"
    foreign = read_rank_files(storage)
    found, whole = read_tensors(saved, foreign), torch.arange(77.0).view(7, 11)
    for name in ("both", "twice", "same", "row", "sharded"):
        assert torch.equal(found[f"model/{name}"], whole), name
    assert torch.equal(found["model/mixed"], whole.bfloat16())
    assert torch.equal(found["model/transposed"], whole.t())
    assert found["model/scalar"] == 3
    assert torch.equal(found["model/plain"], torch.arange(5.0))
    assert torch.equal(found["model/0.weight"], torch.arange(120.0).view(12, 10))
    assert torch.equal(found["model/1.weight"], torch.arange(72.0).view(6, 12))
    assert torch.equal(found["optim/state.0.exp_avg"], whole)
    assert values_of(saved, foreign)["optim"]["param_groups"] == [{"lr": 0.1, "params": [0]}]
    own = [
        rank
        for key, rank in zip(foreign.catalog.keys(), foreign.catalog.owner.tolist(), strict=True)
        if key.fqn == "rng"
    ]
    assert own == [0, 1, 2, 3] and set(foreign.catalog.owner.tolist()) == {-1, 0, 1, 2, 3}


def test_missing_parts_are_refused(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    storage = resolve(str(tmp_path))
    with pytest.raises(CorruptCheckpointError, match=r"'both' have \d+ of 77 elements: files of other ranks"):
        read_torch_save(storage, "model_world_size_4_rank_0.pt")
    with pytest.raises(IncompatibleCheckpointError, match=r"partial\.pt.*'Partial'"):
        read_torch_save(resolve(str(saved.parent)), "partial.pt")
    (tmp_path / "model_world_size_4_rank_2.pt").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"ranks \[2\] of 4 of 'model'"):
        read_rank_files(storage)
    shutil.copy(tmp_path / "model_world_size_4_rank_1.pt", tmp_path / "model_world_size_4_rank_2.pt")
    with pytest.raises(CorruptCheckpointError, match="elements"):
        read_rank_files(storage)
    shutil.copy(tmp_path / "model_world_size_4_rank_1.pt", tmp_path / "model_world_size_2_rank_1.pt")
    with pytest.raises(IncompatibleCheckpointError, match="several numbers of ranks"):
        read_rank_files(storage)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model_world_size_4_rank_4.pt", r"'model_world_size_4_rank_4\.pt', and ranks of 4 are 0 to 3"),
        ("model_world_size_4_rank_1.pth", r"two files of one rank, 'model_.*1\.pt' and 'model_.*1\.pth'"),
        ("critic_world_size_2_rank_0.pt", r"ranks \(critic_world_size_2_rank_0\.pt, \w+_world_size_4_rank_0\.pt\)"),
    ],
)
def test_files_of_other_saves_are_refused(saved, tmp_path, name, message):
    """They lie in the folder as where a run was killed, or ended with fewer ranks."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / "model_world_size_4_rank_1.pt", tmp_path / name)
    with pytest.raises(IncompatibleCheckpointError, match=message):
        read_rank_files(resolve(str(tmp_path)))


def test_ranks_of_two_saves(saved, tmp_path):
    """Settings of an optimizer are the same on all ranks; copies of a tensor are, unless they have drifted apart."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    shutil.copy(f"{saved}.model", tmp_path / "model_world_size_4_rank_1.pt")
    (note,) = (n for n in read_rank_files(resolve(str(tmp_path))).notes if n.startswith("model"))
    assert "different copies of same, as" in note
    shutil.copy(f"{saved}.optim", tmp_path / "optim_world_size_4_rank_1.pt")
    with pytest.raises(IncompatibleCheckpointError, match=r"different 'param_groups' of 'optim': .* several saves"):
        read_rank_files(resolve(str(tmp_path)))


def test_files_of_torch_checkpointing(saved, tmp_path):
    """A file for each item and rank, without the number of ranks."""
    for rank in range(4):
        for name in ("model", "optim", "extra_state"):
            shutil.copy(saved / f"{name}_world_size_4_rank_{rank}.pt", tmp_path / f"{name}_{rank}.pt")
    expected = read_tensors(saved, read_rank_files(resolve(str(saved))))
    storage = resolve(str(tmp_path))
    found = read_tensors(tmp_path, detect(storage).read(storage))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    state = {"both": torch.zeros(7, 11), "0.weight": torch.zeros(12, 10)}
    bytecheckpoint.load(tmp_path, {"model": state}, strict=False)
    assert torch.equal(state["both"], torch.arange(77.0).view(7, 11))
    (tmp_path / "model_3.pt").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"ranks \[3\] of 4 of 'model'"):
        read_rank_files(storage)


@pytest.mark.parametrize(
    "name", ["checkpoint_{}.pt", "rank{}.pt", "rank_{}/model.pt", "a=3-rank={}.ckpt", "m-rank-0{}.pth"]
)
def test_one_file_of_each_rank(saved, tmp_path, name):
    """It is divided into states as any file of torch.save is."""
    for rank in range(4):
        (tmp_path / name.format(rank)).parent.mkdir(exist_ok=True)
        shutil.copy(f"{saved}.rank{rank}", tmp_path / name.format(rank))
    whole = torch.arange(77.0).view(7, 11)
    with bytecheckpoint.open(tmp_path) as found:
        assert torch.equal(found["model/both"][:], whole)
        assert torch.equal(found["optimizer/state/#0/exp_avg"][:], whole)
        assert found["extra_states/epoch"] == 2
    (tmp_path / name.format(3)).unlink()
    with pytest.raises(CorruptCheckpointError, match="files of other ranks are needed"):
        bytecheckpoint.open(tmp_path)


def test_flat_parameters_of_fsdp1(saved, tmp_path):
    """Files of LOCAL_STATE_DICT have no names of parameters: a note says what to save."""
    for rank in range(4):
        shutil.copy(f"{saved}.flat{rank}", tmp_path / f"rank{rank}.pt")
    (note,) = read_rank_files(resolve(str(tmp_path))).notes
    assert "model: flat parameters of FSDP1 (LOCAL_STATE_DICT)" in note


@pytest.mark.parametrize("name", ["model_{}.pt", "model_rank{}.pt"])
def test_files_beside_those_of_ranks(saved, tmp_path, name):
    """They are named, and so they are by the refusal of a load that lacks them."""
    for rank in range(4):
        shutil.copy(f"{saved}.rank{rank}", tmp_path / name.format(rank))
    for other in ("args.pt", "best.ckpt"):
        torch.save({"w": torch.zeros(3)}, tmp_path / other)
    found = detect(resolve(str(tmp_path))).read(resolve(str(tmp_path)))
    assert [note for note in found.notes if "args.pt, best.ckpt: not read" in note]
    assert torch.equal(read_tensors(tmp_path, found)["model/both"], torch.arange(77.0).view(7, 11))
    with pytest.raises(IncompatibleCheckpointError, match=r"lacks other.*best\.ckpt: not read"):
        bytecheckpoint.load(tmp_path, {"other": {"w": torch.ones(3)}})


def test_epochs_of_one_rank(tmp_path):
    """DTensors of a world of one rank are whole in each file, which are those of several saves."""
    run = (
        RANKS.replace("world_size=4", "world_size=1").partition("mesh = ")[0]
        + """
mesh = init_device_mesh("cpu", (1,))
for number in (0, 1):
    torch.save({"w": distribute_tensor(torch.full((3,), number), mesh, [Shard(0)])}, f"{folder}/epoch_{number}.pt")
"""
    )
    subprocess.run(forked("-c", run, 0, tmp_path), check=True)
    (tmp_path / "init").unlink(missing_ok=True)
    with pytest.raises(IncompatibleCheckpointError, match=r"none holds a part of a tensor: give one"):
        bytecheckpoint.open(tmp_path)
    with bytecheckpoint.open(tmp_path / "epoch_1.pt") as found:
        assert found["model/w"][:].tolist() == [1, 1, 1]


def test_two_files_of_one_rank(saved, tmp_path):
    for name in ("model_rank0.pt", "rank_0/model.pt", "model_rank1.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(f"{saved}.rank0", tmp_path / name)
    with pytest.raises(IncompatibleCheckpointError, match="two files of one rank"):
        bytecheckpoint.open(tmp_path)


@pytest.mark.parametrize(
    "names",
    [["model_0", "model_1", "optim_0", "optim_1"], ["epoch_1", "epoch_2"], ["a", "b_0"], ["lora_rank4", "lora_rank8"]],
)
def test_numbers_that_are_no_ranks(tmp_path, names):
    """A script that numbers its epochs has whole tensors in each file."""
    for number, name in enumerate(names):
        torch.save({"w": torch.full((3,), float(number))}, tmp_path / f"{name}.pt")
    with pytest.raises(IncompatibleCheckpointError, match=r"files of torch\.save .*give one"):
        bytecheckpoint.open(tmp_path)
    for name in names[1:]:
        (tmp_path / f"{name}.pt").unlink()
    with bytecheckpoint.open(tmp_path) as found:
        assert found["model/w"][:].tolist() == [0.0] * 3


def test_consolidated_files_of_ranks(tmp_path):
    """No file says how Meta's ranks divide a tensor: a layout does."""
    rows, columns, norm = torch.randn(6, 4), torch.randn(4, 6), torch.randn(4)
    for rank in (0, 1):
        part = {"w1": rows.chunk(2)[rank].clone(), "w2": columns.chunk(2, 1)[rank].clone(), "norm": norm}
        torch.save(part, tmp_path / f"consolidated.0{rank}.pth")
    layout = Layout.from_text(
        "layout meta own <-> files\nrules\n"
        "up   : (r f) h <-> consolidated.{r:02}:w1   : f h\n"
        "down : h (r f) <-> consolidated.{r:02}:w2   : h f\n"
        "norm : h       <-> consolidated.{r:02}:norm : h same r\n"
    )
    model = {"up": torch.zeros(6, 4), "down": torch.zeros(4, 6), "norm": torch.zeros(4)}
    report = bytecheckpoint.load(tmp_path, {"model": model}, layout=layout)
    assert all(map(torch.equal, model.values(), (rows, columns, norm)))
    assert any("which a layout can join" in note for note in report.notes)
    (tmp_path / "consolidated.00.pth").rename(tmp_path / "consolidated.02.pth")
    with pytest.raises(CheckpointNotFoundError, match=r"lacks the files of ranks \[0\], beside consolidated\.02\.pth"):
        bytecheckpoint.open(tmp_path)
