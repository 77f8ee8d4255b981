"""Checkpoints of PyTorch DCP, read as they lie: every byte and value equals what dcp.load returns."""

from __future__ import annotations

import pickle
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import bytecheckpoint
from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.formats.dcp import read_dcp
from bytecheckpoint.formats.files import RangedFile
from bytecheckpoint.formats.torch_save import read_torch_save
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.wrappers import Call, WrappedStorage
from bytecheckpoint.tools import verify
from tests.formats.golden.make import states
from tests.formats.hostile import pickles
from tests.formats.oracle import assert_same, read_tensors, values_of
from tests.support.programs import forked

GOLDEN = Path(__file__).parent / "golden" / "torch-2.4.1"


def saved(folder: Path, value: dict[str, Any]) -> Path:
    dcp.save(value, checkpoint_id=str(folder), no_dist=True)
    return folder


def check(folder: Path) -> None:
    theirs = states()
    found = values_of(folder, read_dcp(resolve(str(folder))))
    assert_same(found["model"], theirs["model"])
    assert_same(found["optimizer"], theirs["optimizer"])
    assert_same(found["list"], theirs["list"])
    assert found["extra_states"] == {"step": 5}


def test_every_tensor_and_value_is_as_saved(tmp_path):
    check(saved(tmp_path, states()))


@pytest.mark.parametrize(
    ("states", "wanted"),
    [
        ({"state_dict", "optimizer_0"}, {"model", "optimizer"}),  # Lightning's
        ({"state_dict", "optimizer_0", "optimizer_1"}, {"model", "optimizer_0", "optimizer_1"}),
        ({"state_dict", "model"}, {"state_dict", "model"}),
    ],
)
def test_a_state_dict_is_the_model(tmp_path: Path, states: set[str], wanted: set[str]) -> None:
    saved(tmp_path, {state: {"w": torch.ones(2)} for state in states})
    with bytecheckpoint.open(tmp_path) as found:
        assert set(found.states) == wanted and set(found) == {f"{state}/w" for state in wanted}


def test_files_beside_are_named_and_files_of_it_are_no_checkpoints(tmp_path: Path) -> None:
    saved(tmp_path, {"model": {"w": torch.ones(2)}})
    torch.save({"epoch": 3}, tmp_path / "meta.pt")  # as Lightning does
    assert read_dcp(resolve(str(tmp_path))).notes == [
        "meta.pt: not read, since DCP's files lie beside; give one by name"
    ]
    for name in (".metadata", "__0_0.distcp"):
        with pytest.raises(
            CheckpointNotFoundError, match=f"{name} is one file of a checkpoint of DCP: give its folder"
        ):
            bytecheckpoint.open(tmp_path / name)


def test_a_checkpoint_of_torch_2_4():
    check(GOLDEN / "dcp")


@pytest.mark.parametrize("name", ["new.pt", "old.pt"])
def test_files_of_torch_2_4(name):
    foreign = read_torch_save(resolve(str(GOLDEN)), name)
    found, theirs = values_of(GOLDEN, foreign), states()
    for state in ("model", "optimizer", "list"):
        assert_same(found[state], theirs[state])


def test_tensors_beyond_the_usual_number_of_values(tmp_path, monkeypatch):
    """Metadata have room for a value in each 64 bytes; a pickle of references to one object does not grow with them."""
    monkeypatch.setattr("bytecheckpoint.formats.trees._MOST_VALUES", 50)
    saved = {"model": {f"w{k}": torch.full((2,), float(k)) for k in range(200)}}
    dcp.save(saved, checkpoint_id=tmp_path / "many", no_dist=True)
    with bytecheckpoint.open(tmp_path / "many") as found:
        assert len(found.tensors) == 200 and found["model/w199"][:].tolist() == [199.0, 199.0]
    dcp.save({"plain": [[0] * 10] * 100_000}, checkpoint_id=tmp_path / "laughs", no_dist=True)
    with pytest.raises(IncompatibleCheckpointError, match=r"more than \d+ values"):
        bytecheckpoint.open(tmp_path / "laughs")


class CountedStorage(WrappedStorage):
    """Count the calls by operation and file."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()

    def around(self, call: Call, do: Callable[[], Any]) -> Any:
        self.calls[f"{call.operation} {call.name}".strip()] += 1
        return do()


def test_requests_are_few(tmp_path, monkeypatch):
    saved(tmp_path, {"model": {str(k): torch.zeros(100_000) for k in range(30)}})
    counted, plain = [], RangedFile.read
    monkeypatch.setattr(RangedFile, "read", lambda file, *at: counted.append(at) or plain(file, *at))
    storage = CountedStorage(resolve(str(tmp_path)))
    read_dcp(storage)
    assert storage.calls["list"] == storage.calls["open .metadata"] == 1
    assert len(counted) <= 36  # metadata; directory and headers of one item; a head each
    assert sum(length for _, length in counted) < 200_000


def test_names_at_the_top(tmp_path):
    """Programs such as torchtitan put the model's tensors at the top; names with dots stay as they are."""
    saved(
        tmp_path,
        {"layers.0.weight": torch.ones(2), "optimizer": {"state.layers.0.weight.exp_avg": torch.zeros(2)}, "step": 1},
    )
    foreign = read_dcp(resolve(str(tmp_path)))
    assert set(map(str, foreign.catalog.keys())) == {"model/layers.0.weight", "optimizer/state.layers.0.weight.exp_avg"}
    assert values_of(tmp_path, foreign)["extra_states"] == {"step": 1}


def test_objects_with_tensors_inside(tmp_path):
    class Holder:
        def __init__(self) -> None:
            self.tensor = torch.arange(3)

    Holder.__qualname__, Holder.__module__ = "Held", __name__
    globals()["Held"] = Holder
    saved(tmp_path, {"model": {"w": torch.ones(2)}, "thing": Holder(), "other": {"thing": Holder()}})
    foreign = read_dcp(resolve(str(tmp_path)))
    found = values_of(tmp_path, foreign)
    assert torch.equal(found["extra_states"]["thing"][1]["tensor"], torch.arange(3))
    assert torch.equal(found["other"]["thing"][1]["tensor"], torch.arange(3))


RANKS = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, Replicate, init_device_mesh, distribute_tensor
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(70.0).view(7, 10)
value = {"model": {
    "rows": distribute_tensor(whole, mesh, [Shard(0)]),
    "columns": distribute_tensor(whole, mesh, [Shard(1)]),
    "same": distribute_tensor(whole, mesh, [Replicate()]),
    "plain": whole * 2,
}, "step": 3}
dcp.save(value, checkpoint_id=folder + "/one")
writer = dcp.FileSystemWriter(folder + "/each")
dcp.save(value, storage_writer=writer, use_collectives=False)
dist.destroy_process_group()
"""


def save_each(folder, *ranks):
    """Save as ranks do that share no metadata."""
    for rank, values in enumerate(ranks):
        dcp.save(values, checkpoint_id=folder.parent / f"rank {rank}")
        add_rank(folder, rank, folder.parent / f"rank {rank}")


def add_rank(folder, rank, saved):
    """Take a checkpoint of one process as that of a rank."""
    state = pickle.loads((saved / ".metadata").read_bytes())
    folder.mkdir(exist_ok=True)
    for info in state.storage_data.values():
        shutil.copy(saved / info.relative_path, folder / f"__{rank}_0.distcp")
        info.relative_path = f"__{rank}_0.distcp"
    (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(state))


def test_ranks_that_hold_different_tensors_under_one_name(tmp_path):
    """Each keeps its own, as in files of ranks: nobody can say whose is meant. Equal ones are one tensor."""
    same = torch.arange(4.0)
    both = [{"model": {"own": torch.full((4,), float(rank)), "same": same}, "step": rank} for rank in range(2)]
    save_each(tmp_path / "each", *both)
    foreign = read_dcp(resolve(str(tmp_path / "each")))
    held = [(key.fqn, foreign.columns.owners.get(number)) for number, key in enumerate(foreign.columns.keys) if key.fqn]
    assert sorted(held, key=str) == [("own", 0), ("own", 1), ("same", None)]
    assert foreign.notes == ["ranks have stored different values of 'step': that of the lowest rank is kept"]
    with bytecheckpoint.open(tmp_path / "each") as found:
        assert torch.equal(found["model/same"][...], same)
    live = {"own": torch.zeros(4)}
    bytecheckpoint.load(tmp_path / "each", {"model": live}, strict=False)
    assert live["own"].tolist() == [0.0] * 4, "rank 0 has its own"


def test_ranks_that_stored_a_part_differently(tmp_path):
    """As where a save of fewer ranks was written over one of more."""
    save_each(tmp_path / "each", *({"model": {"w": torch.full((4,), value)}} for value in (1.0, 2.0)))
    for rank in range(2):  # each describes a half of the tensor
        path = tmp_path / "each" / f"__{rank}.metadata"
        state = pickle.loads(path.read_bytes())
        state.state_dict_metadata["model.w"].size = torch.Size([8])
        path.write_bytes(pickle.dumps(state))
    with pytest.raises(
        IncompatibleCheckpointError, match=r"ranks \[0, 1\] have stored the part of 'model.w' at \[0\] diff"
    ):
        read_dcp(resolve(str(tmp_path / "each")))


def test_ranks_that_name_a_file_outside(tmp_path):
    save_each(tmp_path / "each", *[{"model": {"w": torch.ones(4)}}] * 2)
    (tmp_path / "secret").write_bytes(bytes(4000))
    path = tmp_path / "each" / "__1.metadata"
    state = pickle.loads(path.read_bytes())
    for info in state.storage_data.values():
        info.relative_path = "../secret"
    path.write_bytes(pickle.dumps(state))
    with pytest.raises(CorruptCheckpointError, match=r"lacks '\.\./secret', which the metadata names"):
        read_dcp(resolve(str(tmp_path / "each")))


def test_shards_of_two_ranks(tmp_path):
    ranks = [subprocess.Popen(forked("-c", RANKS, rank, tmp_path)) for rank in range(2)]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    whole = torch.arange(70.0).view(7, 10)
    for folder in ("one", "each"):
        foreign = read_dcp(resolve(str(tmp_path / folder)))
        found = read_tensors(tmp_path / folder, foreign)
        for name in ("rows", "columns", "same"):
            assert torch.equal(found[f"model/{name}"], whole), (folder, name)
        assert torch.equal(found["model/plain"], whole * 2)
        assert values_of(tmp_path / folder, foreign)["extra_states"] == {"step": 3}
    assert not (tmp_path / "each" / ".metadata").exists()


def edited(folder: Path, edit: Any) -> Any:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return resolve(str(folder))


def first(metadata: Any) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "model.row")


def shift(metadata: Any) -> None:
    first(metadata).offset += 64


def lengthen(metadata: Any) -> None:
    first(metadata).length += 1 << 40


def lose(metadata: Any) -> None:
    del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "model.row")]


def cut(metadata: Any) -> None:
    metadata.state_dict_metadata["model.row"].size = torch.Size((5, 6))


def other_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.row"].properties.dtype = torch.int32


def elsewhere(metadata: Any) -> None:
    first(metadata).relative_path = "../../etc/passwd"


def transformed(metadata: Any) -> None:
    first(metadata).transform_descriptors = ["stream.lz4/1"]


def two_names(metadata: Any) -> None:
    metadata.planner_data["model.transposed"] = ("model", "row")


def deep(metadata: Any) -> None:
    metadata.planner_data["model.row"] = ("model",) * 1000


def negative(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata["model.row"].chunks[0]
    chunk.sizes = torch.Size((4, 6))
    object.__setattr__(chunk, "offsets", torch.Size((-1, 0)))


def empty(metadata: Any) -> None:
    metadata.state_dict_metadata = None


@pytest.mark.parametrize(
    "edit", [shift, lengthen, lose, cut, other_dtype, elsewhere, transformed, two_names, deep, negative, empty]
)
def test_metadata_that_lies_is_refused(tmp_path, edit):
    storage = edited(saved(tmp_path, states()), edit)
    with pytest.raises((CorruptCheckpointError, IncompatibleCheckpointError), match=str(tmp_path)):
        read_dcp(storage)


def test_files_that_lie_are_refused(tmp_path):
    saved(tmp_path, states())
    storage, path = resolve(str(tmp_path)), tmp_path / "__0_0.distcp"
    data = path.read_bytes()
    for at in (data.index(b"_rebuild_tensor_v2"), data.rindex(b"_rebuild_tensor_v2")):
        path.write_bytes(data[:at] + b"X" + data[at + 1 :])
        with pytest.raises(CorruptCheckpointError, match="distcp"):
            read_dcp(storage)
    path.write_bytes(data[:-100])
    with pytest.raises(
        CorruptCheckpointError, match=r"__0_0\.distcp is damaged: it has \d+ bytes, and .* bytes \d+ to"
    ):
        read_dcp(storage)
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"lacks '__0_0\.distcp', which the metadata names"):
        read_dcp(storage)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError):
        read_dcp(storage)


def test_pickles_that_call_are_refused(tmp_path):
    saved(tmp_path, states())
    for name, data in pickles().items():
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises((CorruptCheckpointError, IncompatibleCheckpointError), match=str(tmp_path)):
            read_dcp(resolve(str(tmp_path)))
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("rate", [0.125, torch.tensor(0.125)])
def test_state_dict_of_an_optimizer(tmp_path, rate):
    """As `optimizer.state_dict()` gives it: numbers for parameters, of which a frozen one has no state; and made a file."""

    def made(rate):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        model[1].requires_grad_(False)
        return model, torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)

    def step(model, optimizer):
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model, optimizer = made(rate)
    step(model, optimizer)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(states, checkpoint_id=tmp_path, no_dist=True)
    dcp_to_torch_save(tmp_path, tmp_path / "made.pt")
    wanted = [step(model, optimizer) for _ in range(3)]
    for path in (tmp_path, tmp_path / "made.pt"):
        other, others = made(torch.tensor(0.5) if isinstance(rate, torch.Tensor) else 0.5)
        bytecheckpoint.load(path, {"model": other, "optimizer": others})
        assert [step(other, others) for _ in range(3)] == wanted


def test_keys_that_are_numbers(tmp_path: Path) -> None:
    """DCP makes texts of all keys: a schedule would have no milestones, and an optimizer under other names no state."""

    def made(rate: float) -> dict[str, Any]:
        torch.manual_seed(int(rate))
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 3] if rate == 1 else [4])
        return {"app": {"model": model, "optim": optimizer}, "scheduler": scheduler, "best": {1: rate, -2: "x"}}

    states, other = made(1.0), made(2.0)
    states["app"]["model"](torch.ones(1, 2)).sum().backward()
    states["app"]["optim"].step()
    states["scheduler"].step()
    app = {name: item.state_dict() for name, item in states["app"].items()}
    saved(tmp_path / "x", {"app": app, "scheduler": states["scheduler"].state_dict(), "best": states["best"]})
    bytecheckpoint.load(tmp_path / "x", other)
    assert other["best"] == states["best"]
    assert_same(other["scheduler"].state_dict(), states["scheduler"].state_dict())
    assert_same(other["app"]["optim"].state_dict()["state"], app["optim"]["state"])


def test_items_that_zstd_has_compressed(tmp_path: Path) -> None:
    """torch 2.13 wrote them (`_extensions=[ZStandard()]`, with the package zstandard); damage and bombs are named."""
    torch.manual_seed(0)
    model = {"w": torch.randint(0, 3, (20, 30)).float(), "t": torch.randn(6, 5).t(), "b": torch.arange(7.0).bfloat16()}
    folder = GOLDEN.parent / "dcp-zstd-2.13"
    with bytecheckpoint.open(folder) as found:
        for name, value in model.items():
            assert torch.equal(found[f"model/{name}"][...], value)
            assert torch.equal(found[f"model/{name}"][2:4], value[2:4])
        assert [found[f"note/a.{k}"] for k in range(3)] == [1, 2.5, "x"] and found["extra_states/epoch"] == 3
    live = {name: torch.zeros_like(value) for name, value in model.items()}
    bytecheckpoint.load(folder, {"model": live})
    assert all(torch.equal(live[name], value) for name, value in model.items())
    assert verify(folder).ok
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == "model.w")
    data = (folder / place.relative_path).read_bytes()
    for rank in range(2):
        add_rank(tmp_path / "each", rank, folder)
    live = {name: torch.zeros_like(value) for name, value in model.items()}
    bytecheckpoint.load(tmp_path / "each", {"model": live})
    assert all(torch.equal(live[name], value) for name, value in model.items()), "equal items are one"
    bomb = bytes(pa.compress(bytes(8 << 20), codec="zstd", asbytes=True))
    for content, words in (
        (data[place.offset :][:-40] + bytes(40), "cannot be decompressed"),
        (bomb, "is larger than"),
    ):
        copy = Path(shutil.copytree(folder, tmp_path / words))
        changed = data[: place.offset] + content + data[place.offset :][len(content) :]
        (copy / place.relative_path).write_bytes(changed)
        with pytest.raises(CorruptCheckpointError, match=words):
            bytecheckpoint.open(copy)


def test_a_tensor_in_a_tuple_may_have_the_name_of_another(tmp_path: Path) -> None:
    dcp.save({"m": {"a.0": torch.ones(2), "a": (torch.zeros(2),)}}, checkpoint_id=str(tmp_path), no_dist=True)
    with bytecheckpoint.open(tmp_path) as found:
        assert {key: entry[...].tolist() for key, entry in found.tensors.items()} == {
            "m/a.0": [1, 1],
            "m/a.0#2": [0, 0],
        }


@pytest.mark.parametrize("flat", [False, True])
def test_state_dicts_of_optimizers_with_names(tmp_path: Path, flat: bool) -> None:
    """`flatten_optimizer_state_dict` writes them flat, as torchtitan does: into optimizers, and dicts of either form."""

    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.3 + seed}]
        optimizer = torch.optim.AdamW(groups, lr=0.1 + seed)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    def slots(optimizer: tuple[torch.nn.Module, torch.optim.Optimizer], flat: bool) -> dict[str, Any]:
        return get_optimizer_state_dict(*optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))

    first = made(0)
    expected = {form: slots(first, form) for form in (False, True)}
    states = {"model": first[0].state_dict(), "optimizer": expected[flat]}
    saved(tmp_path / "x", states)
    torch.save(states, tmp_path / "x.pt")
    for name in ("x", "x.pt"):
        model, optimizer = made(1)
        bytecheckpoint.load(tmp_path / name, {"model": model, "optimizer": optimizer})
        assert_same(slots((model, optimizer), flat=True), expected[True])
        for form in (False, True):
            live = slots(made(1), form)
            bytecheckpoint.load(tmp_path / name, {"optimizer": live})
            assert_same(live, expected[form])
