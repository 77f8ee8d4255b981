"""Files of torch.save, read as they lie: every byte and value equals what torch.load returns."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import io
import pathlib
import re
import struct
import types
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.formats.torch_save import read_torch_save
from bytecheckpoint.representation.dtypes import dtype_names
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import compare, verify
from tests.formats.hostile import old, storage, tensor
from tests.formats.oracle import assert_same, read_tensors, values_of


class Phase(enum.Enum):
    EARLY = 1
    LATE = 2


class Place(NamedTuple):
    row: int
    name: str


@dataclasses.dataclass
class Config:
    layers: int


class Node:
    """A part of a configuration, as no class of a library."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts


_EAST = datetime.timezone(datetime.timedelta(hours=9), "east")
BOTH = pytest.mark.parametrize("new", [True, False], ids=["zip", "old"])


def save(folder: Path, value: Any, new: bool = True) -> Any:
    torch.save(value, folder / "x.pt", _use_new_zipfile_serialization=new)
    return read_torch_save(resolve(str(folder)), "x.pt")


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(48.0).view(4, 12)
    shared = torch.arange(20, dtype=torch.int32)
    tied = torch.nn.Parameter(torch.randn(3, 2))
    return {
        "plain": base.clone(),
        "transposed": base.t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 3).expand(4, 3),
        "sliced": base[1:3, ::2],
        "view.a": shared[:10],
        "view.b": shared[5:].view(3, 5),
        "embed.weight": tied,
        "head.weight": tied,
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 7),
        "one": torch.randn(1, 1, 3)[:, :, 1:2],
        "grad": torch.randn(2, requires_grad=True),
    }


@BOTH
def test_every_tensor_is_a_view_of_the_file(tmp_path, new):
    theirs = tensors()
    foreign = save(tmp_path, theirs, new)
    assert_same(values_of(tmp_path, foreign)["model"], theirs)
    assert foreign.catalog.aliases == {"model": {"head.weight": "embed.weight"}}
    grads = dict(zip(foreign.catalog.fqns("model"), foreign.catalog.requires_grad.tolist(), strict=True))
    assert [name for name, flag in grads.items() if flag] == ["embed.weight", "grad"]


def test_tied_weights_load(tmp_path):
    """The file has two names of one tensor, and so has the model, or it has the first one alone."""
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    torch.save({"model": model.state_dict()}, tmp_path / "x.pt")
    saved = model["embed"].weight.detach().clone()
    for states in ({"model": model}, {"model": torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3)})}):
        torch.nn.init.zeros_(states["model"]["embed"].weight)
        assert not bytecheckpoint.load(tmp_path / "x.pt", states).unexpected
        assert torch.equal(states["model"]["embed"].weight, saved)


@pytest.mark.parametrize(
    "name", [name for name in dtype_names() if not re.fullmatch("u?int[1-7]", name)]
)  # torch saves none
def test_every_dtype(tmp_path, name):
    dtype = getattr(torch, name, None)
    try:
        value = torch.arange(64, dtype=torch.uint8).view(dtype).view(2, -1)
        torch.save(value, io.BytesIO())
    except (RuntimeError, TypeError, NotImplementedError, KeyError, AttributeError) as error:
        pytest.skip(f"torch cannot save {name}: {error}")
    foreign = save(tmp_path, {"a": value, "b": value.t()})
    found = read_tensors_as_bytes(tmp_path, foreign)
    assert found["model/a"] == value.contiguous().view(torch.uint8).numpy().tobytes()
    assert found["model/b"] == found["model/a"]  # the same bytes, transposed
    assert foreign.catalog.dtype.to_list() == [name, name]


def read_tensors_as_bytes(folder: Path, foreign: Any) -> dict[str, bytes]:
    catalog = foreign.catalog
    data = (folder / "x.pt").read_bytes()
    rows = zip(catalog.boxes.tensor.tolist(), catalog.byte_offset.tolist(), catalog.byte_length.tolist(), strict=True)
    return {str(catalog.key(i)): data[begin : begin + length] for i, begin, length in rows}


@BOTH
def test_plain_values_keep_their_types(tmp_path, new):
    theirs = {
        "state": {0: {"exp_avg": torch.randn(3), "step": torch.tensor(2.0)}, (1, "x"): None},
        "list": [
            1,
            -(2**70),
            2**63,
            1.5,
            True,
            None,
            "é\ud800",
            b"\xff\x00",
            bytearray(b"y"),
            2j,
            range(3),
            slice(1, None),
        ],
        "sets": {frozenset((1, 2)), 3},
        "ordered": collections.OrderedDict(a=1),
        "size": torch.Size((2, 3)),
        "device": torch.device("cuda:1"),
        "dtype": torch.bfloat16,
        "array": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "scalar": np.float32(2.5),
        "path": pathlib.PosixPath("/a/b"),
        "args": argparse.Namespace(lr=0.1),
        "rng": np.random.RandomState(1).get_state(),
        "milestones": collections.Counter((2, 4, 4)),
        "counts": [
            collections.defaultdict(factory, {3: 1}) for factory in (int, str, list, collections.OrderedDict, None)
        ],
        "recent": [collections.deque((1.5, [2]), maxlen=5), collections.deque(), collections.deque((1,))],
        "namespaces": [types.SimpleNamespace(a=1), types.SimpleNamespace()],
        "times": [datetime.datetime(2026, 2, 3, 4, 5, 6, 7), datetime.timedelta(1, 2, 3), datetime.date(2026, 2, 3)],
        "zones": [datetime.datetime(2026, 2, 3, tzinfo=zone) for zone in (datetime.UTC, _EAST)],
        "version": str(torch.__version__),
        "decimal": decimal.Decimal("1.50"),
    }
    found = values_of(tmp_path, save(tmp_path, {**theirs, "version": torch.__version__}, new))["model"]
    assert_same(found, theirs)


def test_objects_of_programs_are_records(tmp_path):
    class Local:
        pass

    Local.__qualname__, Local.__module__ = "Thing", __name__
    globals()["Thing"] = Local
    thing = Local()
    thing.weight, thing.step = torch.ones(2), 3
    foreign = save(tmp_path, {"w": torch.zeros(1), "thing": thing, "function": print})
    found = values_of(tmp_path, foreign)["model"]
    name, fields = found["thing"]
    assert (name, fields["step"], found["function"]) == (f"{__name__}.Thing", 3, None)
    assert torch.equal(fields["weight"], thing.weight)
    assert foreign.notes == ["function: the function or class builtins.print is left out"]


@pytest.mark.parametrize("new", [True, False])
def test_a_whole_module_has_the_names_of_its_state_dict(tmp_path, new):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    found = read_tensors(tmp_path, save(tmp_path, model, new))
    assert_same({name.removeprefix("model/"): tensor for name, tensor in found.items()}, dict(model.state_dict()))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_of_torchscript_loads(tmp_path: Path) -> None:
    def made() -> torch.nn.Module:
        shared = torch.nn.Linear(3, 3)
        inner = torch.nn.Sequential(shared, torch.nn.BatchNorm1d(3), torch.nn.ReLU(), shared)
        return torch.nn.Sequential(inner, torch.nn.LSTM(3, 2))

    module, other = made(), made()
    module(torch.rand(4, 3))
    torch.jit.save(torch.jit.script(module), tmp_path / "x.pt")
    report = bytecheckpoint.load(tmp_path / "x.pt", {"model": other})
    assert not report.missing and not report.notes
    assert_same(dict(other.state_dict()), dict(module.state_dict()))


@pytest.mark.parametrize("key", [None, "model"])
def test_a_whole_module_loads(tmp_path: Path, key: str | None) -> None:
    """Without what its `state_dict` leaves out: attributes, and buffers that are not persistent."""

    def made() -> torch.nn.Module:
        shared = torch.nn.Linear(3, 3)
        module = torch.nn.Sequential(shared, torch.nn.BatchNorm1d(3), shared, torch.nn.Linear(3, 3, bias=False))
        module.register_buffer("cache", torch.ones(3), persistent=False)
        module.tensor, module.config, module.activation = torch.ones(2), {"a": 1}, torch.nn.functional.relu
        return module

    module, other = made(), made()
    torch.save(module if key is None else {key: module, "epoch": 3}, tmp_path / "x.pt")
    report = bytecheckpoint.load(tmp_path / "x.pt", {"model": other})
    assert not report.missing and not report.unexpected
    assert_same(dict(other.state_dict()), dict(module.state_dict()))
    module._modules["again"] = module
    with pytest.raises(IncompatibleCheckpointError, match="modules are nested more than"):
        save(tmp_path, module)


def test_files_of_an_optimizer_and_of_a_scheduler_alone(tmp_path: Path) -> None:
    def made() -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    states, other = made(), made()
    states["model"](torch.ones(1, 2)).sum().backward()
    states["optimizer"].step()
    states["scheduler"].step()
    for name in ("optimizer", "scheduler"):
        torch.save(states[name].state_dict(), tmp_path / f"{name}.pt")
        bytecheckpoint.load(tmp_path / f"{name}.pt", other, include=[f"{name}/*"])
    assert torch.equal(*(one["optimizer"].state_dict()["state"][0]["exp_avg"] for one in (states, other)))
    assert states["scheduler"].state_dict() == other["scheduler"].state_dict()


@pytest.mark.parametrize("kind", ["plateau", "sequence", "chain"])
def test_files_of_schedules_that_count_otherwise(tmp_path: Path, kind: str) -> None:
    def make() -> Any:
        schedules = torch.optim.lr_scheduler
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        if kind == "plateau":
            return schedules.ReduceLROnPlateau(optimizer)
        parts = [schedules.LinearLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)]
        return (
            schedules.SequentialLR(optimizer, parts, [1]) if kind == "sequence" else schedules.ChainedScheduler(parts)
        )

    saved, live = make(), make()
    saved.step(*([0.5] if kind == "plateau" else []))
    torch.save(saved.state_dict(), tmp_path / "scheduler.pt")
    bytecheckpoint.load(tmp_path / "scheduler.pt", {"scheduler": live})
    assert live.state_dict() == saved.state_dict()


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("x", None, "has no files, nor have its folders, or there is no such folder"),
        ("x.gguf", "GGUF", "x.gguf is no file of safetensors or torch.save"),
    ],
)
def test_addresses_without_a_checkpoint_say_what_lies_there(
    tmp_path: Path, name: str, content: str | None, what: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointNotFoundError, match=what):
        bytecheckpoint.load(tmp_path / name, {"model": torch.nn.Linear(1, 1)})


def test_checkpoints_of_programs_have_states(tmp_path):
    model = torch.nn.Linear(2, 2)
    theirs = {
        "epoch": 3,
        "global_step": 12,
        "pytorch-lightning_version": "2.5",
        "state_dict": model.state_dict(),
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "lr_schedulers": [],
    }
    found = values_of(tmp_path, save(tmp_path, theirs))
    assert list(found) == ["model", "optimizer", "extra_states"]
    assert_same(found["optimizer"], theirs["optimizer_states"][0])  # type: ignore[index]
    assert found["extra_states"]["epoch"] == 3 and found["extra_states"]["lr_schedulers"] == []
    assert_same(dict(found["model"]), dict(model.state_dict()))


def test_other_keys_of_programs_are_states(tmp_path: Path) -> None:
    """One model under a key of its own, several with an optimizer each, and a scaler that is off."""

    def made() -> dict[str, Any]:
        models = {name: torch.nn.Linear(2, 2) for name in ("netG", "netD")}
        optimizers = {f"opt{name[-1]}": torch.optim.Adam(model.parameters()) for name, model in models.items()}
        return {**models, **optimizers, "scaler": torch.amp.GradScaler("cpu", enabled=False)}

    states, other = made(), made()
    for name in ("netG", "netD"):
        states[name](torch.ones(1, 2)).sum().backward()
        states[f"opt{name[-1]}"].step()
    theirs = {name: state.state_dict() for name, state in states.items()}
    torch.save(theirs, tmp_path / "gan.pt")
    assert not bytecheckpoint.load(tmp_path / "gan.pt", other).missing
    assert_same({name: state.state_dict() for name, state in other.items()}, theirs)
    torch.save({"netG": theirs["netG"], "epoch": 3}, tmp_path / "one.pt")
    found = {"model": torch.nn.Linear(2, 2), "extra_states": {"epoch": 0}}
    bytecheckpoint.load(tmp_path / "one.pt", found)
    assert_same(dict(found["model"].state_dict()), dict(theirs["netG"]))  # type: ignore[attr-defined]
    assert found["extra_states"] == {"epoch": 3}


def test_modules_and_nothing_else_are_states(tmp_path: Path) -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    plain = {"first": dict(first.state_dict()), "second": dict(second.state_dict())}  # may be the layers of one model
    torch.save({"params": first.state_dict(), "params_ema": second.state_dict()}, tmp_path / "both.pt")
    torch.save({"params_ema": second.state_dict()}, tmp_path / "one.pt")
    torch.save(plain, tmp_path / "plain.pt")
    for name, state, expected in (("both", "params", first), ("both", "params_ema", second), ("one", "model", second)):
        found = torch.nn.Linear(2, 2)
        bytecheckpoint.load(tmp_path / f"{name}.pt", {state: found})
        assert_same(dict(found.state_dict()), dict(expected.state_dict()))
    layers = torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2), "second": torch.nn.Linear(2, 2)})
    bytecheckpoint.load(tmp_path / "plain.pt", {"model": layers})
    assert_same(dict(layers["second"].state_dict()), plain["second"])


def test_a_load_says_what_was_left_out(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "kind": collections.OrderedDict, "step": 3}, tmp_path / "x.pt")
    states: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "extra_states": {}}
    report = bytecheckpoint.load(tmp_path / "x.pt", states)
    assert report.notes == ("kind: the function or class collections.OrderedDict is left out",)
    assert states["extra_states"] == {"kind": None, "step": 3}


def test_tensors_of_other_layouts_are_left_out(tmp_path: Path) -> None:
    others = {"a": torch.eye(2).to_sparse(), "b": torch.ones(2, device="meta"), "c": torch.eye(2).to_sparse_csr()}
    torch.save({"w": torch.ones(2), **others}, tmp_path / "x.pt")
    report = bytecheckpoint.load(tmp_path / "x.pt", {"model": (found := {"w": torch.zeros(2)})})
    assert torch.equal(found["w"], torch.ones(2)) and [note[:4] for note in report.notes] == ["a: a", "b: a", "c: a"]
    with pytest.raises(IncompatibleCheckpointError, match="lacks model/a"):
        bytecheckpoint.load(tmp_path / "x.pt", {"model": {"w": torch.zeros(2), "a": torch.zeros(2, 2)}})


@pytest.mark.parametrize("new", [True, False])
def test_tensors_among_hyperparameters(tmp_path, new):
    """As compiled optimizers have them; groups may share one."""

    def made(rate):
        torch.manual_seed(0)
        model, rate = torch.nn.Linear(4, 3), torch.tensor(rate)
        groups = [{"params": [p], "lr": rate, "betas": (0.5, 0.9)} for p in model.parameters()]
        return model, torch.optim.AdamW(groups, foreach=False)

    def step(model, optimizer):
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model, optimizer = made(0.125)
    step(model, optimizer)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        tmp_path / "it.pt",
        _use_new_zipfile_serialization=new,
    )
    other, others = made(0.5)
    bytecheckpoint.load(tmp_path / "it.pt", {"model": other, "optimizer": others})
    assert [group["lr"].item() for group in others.param_groups] == [0.125] * 2
    assert [step(other, others) for _ in range(3)] == [step(model, optimizer) for _ in range(3)]


def test_an_unknown_class_beside_wanted_values_is_left_out(tmp_path: Path) -> None:
    """It is loaded where the live dict shows the class, and refused where that has another value."""
    model, config = torch.nn.Linear(2, 2), Config(3)
    file = {"model": model.state_dict(), "step": 7, "config": config, "arguments": {"layers": 3}}
    torch.save(file, tmp_path / "x.pt")

    def loaded(extra: dict[str, Any]) -> Any:
        return bytecheckpoint.load(tmp_path / "x.pt", {"model": model, "extra_states": extra}).notes

    wanted: dict[str, Any] = {"step": 0, "best": 1.0, "arguments": {}}
    assert loaded(wanted) == (
        f"extra_states: 'config' is left out: {__name__}.Config is not registered here",
        "extra_states: the dict here loses what the checkpoint lacks: best, arguments (arguments: a state of its own "
        "there)",
    )
    assert wanted == {"step": 7}
    assert loaded(wanted := {"config": Config(0)}) == () and wanted == {"config": config, "step": 7}
    with pytest.raises(IncompatibleCheckpointError, match="not registered here"):
        loaded({"config": None})


def test_an_unknown_class_is_left_out_with_all_that_it_holds(tmp_path: Path) -> None:
    """As the configurations of Hydra, whose parts refer to those around them, and generators of numpy."""
    root = Node([Node([int, float]), {"a": Node([1])}])
    root.parts += [root, Node([root])]
    for number, config in enumerate((root, np.random.default_rng(0))):
        torch.save({"model": {"w": torch.ones(1)}, "step": 7, "config": config}, path := tmp_path / f"{number}.pt")
        states: dict[str, Any] = {"model": {"w": torch.zeros(1)}, "extra_states": {"step": 0}}
        report = bytecheckpoint.load(path, states)
        assert states["extra_states"] == {"step": 7} and report.notes[0].startswith("extra_states: 'config' is left")
        assert len(report.notes) == 2 and report.notes[1].endswith(" is left out; this object may hold more that is")


def test_enums_and_named_tuples_of_shown_classes(tmp_path: Path) -> None:
    model, values = torch.nn.Linear(2, 2), {"phase": Phase.LATE, "place": [Place(1, "x")], "step": 7}
    torch.save({"model": model.state_dict(), "progress": values}, tmp_path / "x.pt")
    found: dict[str, Any] = {"phase": Phase.EARLY, "place": [Place(0, "")], "step": 0}
    bytecheckpoint.load(tmp_path / "x.pt", {"model": model, "progress": found})
    assert found == values and type(found["place"][0]) is Place


def test_steps_of_old_optimizers_are_numbers(tmp_path: Path) -> None:
    """As torch before 1.12 saved them; the optimizer converts them as in its `load_state_dict`."""

    def made() -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    states, other = made(), made()
    states["model"](torch.ones(1, 2)).sum().backward()
    states["optimizer"].step()
    theirs = states["optimizer"].state_dict()
    old_state = {number: {**slots, "step": int(slots["step"])} for number, slots in theirs["state"].items()}
    torch.save({"model": states["model"].state_dict(), "optimizer": {**theirs, "state": old_state}}, tmp_path / "x.pt")
    bytecheckpoint.load(tmp_path / "x.pt", other)
    for number, slots in other["optimizer"].state_dict()["state"].items():
        assert_same(dict(sorted(slots.items())), dict(sorted(theirs["state"][number].items())))


def test_what_resembles_an_optimizer(tmp_path):
    theirs = {"state": {}, "param_groups": [{"params": [[0]], "lr": 2**70}]}
    torch.save({"model": {"w": torch.ones(1)}, "optimizer": theirs}, tmp_path / "x.pt")
    with bytecheckpoint.open(tmp_path / "x.pt") as found:
        assert found["optimizer/param_groups.0.params.0.0"] == 0 and found["optimizer/param_groups.0.lr"] == 2**70


def test_a_tensor_of_the_first_torch(tmp_path):
    """Files of 2018 have `_rebuild_tensor`, without gradients and hooks."""
    made = (
        tensor(storage(), 1, (3,), (1,)).replace(b"_rebuild_tensor_v2", b"_rebuild_tensor").replace(b"\x89)tR", b"tR")
    )
    (tmp_path / "x.pt").write_bytes(old(made, ["0"], struct.pack("<q", 4) + np.arange(4, dtype=np.float32).tobytes()))
    found = values_of(tmp_path, read_torch_save(resolve(str(tmp_path)), "x.pt"))["model"]
    assert torch.equal(found, torch.tensor([1.0, 2, 3]))


def test_sums_are_those_of_the_zip(tmp_path):
    import zlib

    foreign = save(tmp_path, tensors())
    data, sums = (tmp_path / "x.pt").read_bytes(), foreign.sums
    assert len(sums) > 5
    for _, begin, length, crc in sums.tolist():
        assert zlib.crc32(data[begin : begin + length]) == crc


@BOTH
def test_requests_are_few(tmp_path, new, monkeypatch):
    from bytecheckpoint.formats.files import RangedFile

    counted, plain = [], RangedFile.read
    monkeypatch.setattr(RangedFile, "read", lambda file, *at: counted.append(at) or plain(file, *at))
    save(tmp_path, {str(k): torch.zeros(100_000) for k in range(20)}, new)
    assert len(counted) <= 2 + 20 + 5  # kind of file, directory, byte order, two reads of the pickle; a header each
    assert sum(length for _, length in counted) < 100_000 + (1 << 20)


@BOTH
def test_a_file_that_was_cut_short_is_damaged(tmp_path, new):
    torch.save(tensors(), tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    data = (tmp_path / "x.pt").read_bytes()
    for length in (len(data) - 1, len(data) - 100, len(data) // 2, 600, 30, 3, 0):
        (tmp_path / "x.pt").write_bytes(data[:length])
        with pytest.raises((CorruptCheckpointError, IncompatibleCheckpointError), match=r"x\.pt"):
            read_torch_save(resolve(str(tmp_path)), "x.pt")


def test_refusals_say_why(tmp_path):
    storage = resolve(str(tmp_path))

    def refused(text: str, error: type[Exception] = IncompatibleCheckpointError) -> None:
        with pytest.raises(error, match=text):
            read_torch_save(storage, "x.pt")

    refused("no such file", CheckpointNotFoundError)
    (tmp_path / "x.pt").write_bytes(b"\0" * 257 + b"ustar" + b"\0" * 500)
    refused("tar file")
    (tmp_path / "x.pt").write_bytes(b"\x80\x04K\x05.")
    refused("another pickle")
    (tmp_path / "x.pt").write_bytes(b"hello")
    refused("no file of torch.save")
    (tmp_path / "x.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    refused("git lfs pull")
    torch.save({"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, tmp_path / "x.pt")
    refused("quantised|QInt8")
    torch.save({"w": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / "x.pt")
    refused("conj")
    torch.save({"w": torch.ones(4)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(data[:-24] + struct.pack("<q", 5) + data[-16:])
    refused("5 elements, not 4", CorruptCheckpointError)


def test_deflated_members(tmp_path):
    """A file that another program has compressed is inflated as it is read; damage is named."""
    torch.save({"model": tensors(), "epoch": 3}, tmp_path / "y.pt")
    with (
        zipfile.ZipFile(tmp_path / "y.pt") as old,
        zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
        largest = max(new.infolist(), key=lambda info: info.compress_size if "/data/" in info.filename else 0)
    assert compare(tmp_path / "x.pt", tmp_path / "y.pt").equal and verify(tmp_path / "x.pt").ok
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[largest.header_offset + 60 + largest.compress_size // 2] ^= 64
    (tmp_path / "x.pt").write_bytes(data)
    (finding,) = verify(tmp_path / "x.pt").findings
    assert "x.pt is damaged" in finding.message and finding.tensors


@pytest.mark.parametrize(
    ("saved", "states"),
    [
        ({"model_state_dict": "m", "optimizer_state_dict": 0, "loss": 0.1}, ["optimizer"]),
        ({"state_dict": "m", "optimizer_states": [0, 1]}, ["optimizer_0", "optimizer_1"]),
        ({"model": "m", "optimizer_G": 0, "optimizer_D": 1}, ["optimizer_G", "optimizer_D"]),
        ({"model": "m", "optimizer": {"a": 1}, "best": [0]}, ["optimizer", "optimizer_0"]),
    ],
)
def test_optimizers_of_programs_load_by_plain_names(tmp_path: Path, saved: dict[str, Any], states: list[str]) -> None:
    """The tutorial of PyTorch, Lightning with one and with two optimizers, a GAN: the next steps are equal."""

    def made() -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        return module, [
            torch.optim.AdamW(module[0].parameters()),
            torch.optim.SGD(module[1].parameters(), momentum=0.9),
        ]

    def step(module: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        module(torch.ones(5, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    def filled(value: object) -> object:
        if isinstance(value, list):
            return [filled(one) for one in value]
        return module.state_dict() if value == "m" else optimizers[value].state_dict() if type(value) is int else value

    module, optimizers = made()
    step(module, optimizers)
    torch.save({key: filled(value) for key, value in saved.items()}, tmp_path / "run.pt")
    other, mine = made()
    wanted = dict(zip([name for name in states if name != "optimizer" or len(states) == 1], mine, strict=False))
    bytecheckpoint.load(tmp_path / "run.pt", {"model": other, **wanted})
    used = len(wanted)
    for each in ((module, optimizers[:used]), (other, mine[:used])):
        each[0].zero_grad()
        step(*each)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
