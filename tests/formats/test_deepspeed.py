"""Folders of DeepSpeed, read as they lie: every element equals DeepSpeed's own universal conversion."""

from __future__ import annotations

import random
import re
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from bytecheckpoint.formats.deepspeed import read_deepspeed
from bytecheckpoint.formats.detect import detect
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import export
from tests.formats.oracle import read_tensors, values_of

GOLDEN = Path(__file__).parent / "golden" / "deepspeed-0.19.8"
FROZEN = {"count", "frozen.weight"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_state_equals_the_universal_one(stage):
    folder = GOLDEN / f"zero{stage}"
    storage = resolve(str(folder))
    assert detect(storage).format == "deepspeed"
    foreign = read_deepspeed(storage)
    found, values = read_tensors(folder, foreign), values_of(folder, foreign)
    expected = torch.load(GOLDEN / f"zero{stage}.expected.pt")
    pairs = {(name, slot) for name, slots in expected.items() for slot in slots} - {(name, "fp32") for name in FROZEN}
    for name, slot in pairs:
        ours = values["optimizer"]["state"][name][slot]
        assert torch.equal(ours.flatten(), expected[name][slot].flatten()), (name, slot)
    assert len(pairs) == {1: 20, 2: 20, 3: 15}[stage]
    groups = values["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [
        ["embed.weight", "body.weight", "head.weight"], ["body.bias", "frozen.bias"],
    ]  # fmt: skip
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert values["extra_states"]["global_steps"] == 2 and values["extra_states"]["note"] == "hi"
    for name, tensor in values["model"].items():
        assert torch.equal(tensor, found[f"model/{name}"])
        if name not in FROZEN:
            fp32 = expected[name]["fp32"].flatten()
            assert torch.equal(tensor.flatten().bfloat16(), fp32.bfloat16())
            assert tensor.dtype == (torch.float32 if stage == 3 else torch.bfloat16)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_universal_form_holds_the_same(stage: int) -> None:
    folders = [GOLDEN / f"zero{stage}", GOLDEN / f"universal{stage}"]
    assert detect(resolve(str(folders[1]))).format == "deepspeed"
    native, universal = (values_of(folder, read_deepspeed(resolve(str(folder)))) for folder in folders)
    assert universal.keys() == native.keys()
    assert universal["optimizer"]["param_groups"] == native["optimizer"]["param_groups"]
    states = [values["optimizer"]["state"] for values in (native, universal)]
    assert states[0].keys() == states[1].keys()
    for name, slots in states[0].items():
        assert slots.keys() == states[1][name].keys()
        assert all(torch.equal(value, states[1][name][slot]) for slot, value in slots.items()), name
    assert native["model"].keys() == universal["model"].keys()
    assert all(torch.equal(value, universal["model"][name]) for name, value in native["model"].items())


@pytest.mark.parametrize("folder", ["zero1", "zero2", "zero3", "universal1", "universal3"])
def test_an_export_holds_the_same(folder: str, tmp_path: Path) -> None:
    export(GOLDEN / folder, tmp_path / "out", format="deepspeed-universal")
    first, second = (
        values_of(at, read_deepspeed(resolve(str(at)))) for at in (GOLDEN / folder, tmp_path / "out" / "global_step2")
    )
    assert first["optimizer"]["param_groups"] == second["optimizer"]["param_groups"]
    assert (
        second["extra_states"].items()
        >= {"global_steps": 2, "note": "hi", "ds_config": first["extra_states"]["ds_config"]}.items()
    )
    states = [values["optimizer"]["state"] for values in (first, second)]
    assert {name: sorted(slots) for name, slots in states[0].items()} == {
        name: sorted(slots) for name, slots in states[1].items()
    }
    assert all(
        torch.equal(value, states[1][name][slot]) for name, slots in states[0].items() for slot, value in slots.items()
    )
    assert first["model"].keys() == second["model"].keys()
    assert all(torch.equal(value, second["model"][name]) for name, value in first["model"].items())


@pytest.mark.parametrize("name", ["head.weight/fp32.pt", "embed.weight/exp_avg.pt", "body.bias/step.pt"])
def test_a_lost_file_of_the_universal_form_is_named(tmp_path: Path, name: str) -> None:
    shutil.copytree(GOLDEN / "universal1", tmp_path, dirs_exist_ok=True)
    (tmp_path / "zero" / name).unlink()
    with pytest.raises(CheckpointNotFoundError, match=re.escape(name)):
        read_deepspeed(resolve(str(tmp_path)))


def test_a_state_that_the_conversion_leaves_out_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    from bytecheckpoint.formats import torch_save

    plain, setting = torch_save.unpickle, re.compile(rb"(amsgradq.)\x89", re.DOTALL)
    assert not read_deepspeed(resolve(str(GOLDEN / "universal1"))).notes
    monkeypatch.setattr(
        torch_save, "unpickle", lambda opened, data, *more: plain(opened, setting.sub(b"\\1\x88", data), *more)
    )
    (note,) = read_deepspeed(resolve(str(GOLDEN / "universal1"))).notes
    assert "max_exp_avg_sq, without which an optimizer with amsgrad makes no step" in note


def test_names_of_parameters_do_not_lead_out_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from bytecheckpoint.formats import torch_save

    plain = torch_save.unpickle
    monkeypatch.setattr(
        torch_save,
        "unpickle",
        lambda opened, data, *more: plain(opened, data.replace(b"head.weight", b"../../a.wgt"), *more),
    )
    with pytest.raises(CorruptCheckpointError, match="leads out of the folder"):
        read_deepspeed(resolve(str(GOLDEN / "universal1")))


def test_frozen_parameters_and_buffers_are_those_of_the_model():
    stages = [
        values_of(GOLDEN / f"zero{n}", read_deepspeed(resolve(str(GOLDEN / f"zero{n}"))))["model"] for n in (1, 2, 3)
    ]
    for name in FROZEN:
        assert torch.equal(stages[0][name], stages[1][name]) and torch.equal(stages[0][name], stages[2][name])
    assert torch.equal(stages[2]["count"], torch.arange(4.0))


def damaged(folder: Path, stage: int) -> Path:
    shutil.copytree(GOLDEN / f"zero{stage}", folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("stage", [1, 3])
def test_missing_ranks_are_refused(tmp_path, stage):
    folder = damaged(tmp_path, stage)
    storage = resolve(str(folder))
    last = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = last.read_bytes()
    last.unlink()
    with pytest.raises(
        IncompatibleCheckpointError, match=r"optimizer of (2 ranks, and .* files of )?1: files are missing"
    ):
        read_deepspeed(storage)
    last.write_bytes(data)
    (folder / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt").write_bytes(data)
    with pytest.raises(CheckpointNotFoundError, match="data-parallel rank 2 of model-parallel rank 0"):
        read_deepspeed(storage)
    (folder / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt").rename(
        folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    )
    with pytest.raises(CheckpointNotFoundError, match="data-parallel rank 1 of model-parallel rank 1"):
        read_deepspeed(storage)


def test_without_zero(tmp_path):
    """One file holds all, the optimizer, too: the folder is given as any other of DeepSpeed."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": None, "global_steps": 1}
    torch.save(saved, tmp_path / "mp_rank_00_model_states.pt")
    again = torch.nn.Linear(3, 2)
    other = torch.optim.AdamW(again.parameters())
    bytecheckpoint.load(tmp_path, {"model": again, "optimizer": other})
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(other.state[again.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_a_folder_of_zero_without_its_optimizer_is_refused(tmp_path):
    """The weights of its file are those in 16 bits."""
    shutil.copy(GOLDEN / "zero1/mp_rank_00_model_states.pt", tmp_path)
    with pytest.raises(IncompatibleCheckpointError, match="without the optimizer's files: give one file"):
        bytecheckpoint.load(tmp_path, {"model": {}})


def test_files_of_several_saves_are_refused(tmp_path: Path) -> None:
    """A save of the same name was killed, or was of more ranks: the parts of parameters would be of different steps."""
    begin, step = b"\0\0\0\x40", b"\0\0\x40\x40"  # 2.0 and 3.0 steps
    rates = struct.pack(">d", 0.01), struct.pack(">d", 0.02)
    for name, (old, new), message in (
        ("step", (begin, step), r"ranks have different 'step' of body\.weight: files are of several saves"),
        (
            "rate",
            rates,
            r"rank_1_.*: ranks have different settings \('lr': 0\.01 and 0\.02\): files are of several saves",
        ),
    ):
        file = damaged(tmp_path / name, 1) / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        with zipfile.ZipFile(file) as archive:
            members = {member: archive.read(member) for member in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for member, data in members.items():
                archive.writestr(member, data.replace(old, new) if "data.pkl" in member or data == old else data)
        with pytest.raises(IncompatibleCheckpointError, match=message):
            read_deepspeed(resolve(str(tmp_path / name)))
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(3)]
    folder = damaged(tmp_path / "3", 3)
    shutil.copy(folder / names[1], folder / names[2])
    with pytest.raises(IncompatibleCheckpointError, match="the model of 3 ranks, and an optimizer of 2"):
        read_deepspeed(resolve(str(folder)))
    (folder / names[2]).unlink()
    torch.save(torch.load(folder / names[1], weights_only=False) | {"global_steps": 7}, folder / names[1])
    with pytest.raises(IncompatibleCheckpointError, match="files of several steps: 2, 7"):
        read_deepspeed(resolve(str(folder)))


@pytest.mark.parametrize("folder", ["zero1", "zero2", "universal1"])
def test_weights_of_another_save_are_refused(folder: str, tmp_path: Path) -> None:
    """Optimizers without a step, and the counts of each file, show nothing of it."""
    shutil.copytree(GOLDEN / folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "mp_rank_00_model_states.pt"
    value = torch.load(file, weights_only=False)
    value["module"]["head.weight"][-1, -1] += 1  # the largest parameter
    torch.save(value, file)
    with pytest.raises(
        IncompatibleCheckpointError, match=r"\.pt: its fp32 weights do not round to those in .*mp_rank_00"
    ):
        read_deepspeed(resolve(str(tmp_path)))
    value["param_shapes"] = None
    torch.save(value, file)
    with pytest.raises(IncompatibleCheckpointError, match=r"mp_rank_00.*: it says no shapes of parameters"):
        read_deepspeed(resolve(str(tmp_path)))


def test_states_of_another_parameter_are_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "universal1", tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / "zero/body.bias/exp_avg.pt", tmp_path / "zero/head.weight/exp_avg.pt")
    with pytest.raises(
        CorruptCheckpointError, match=r"head\.weight/exp_avg\.pt.*9 elements of exp_avg, and 63 of fp32"
    ):
        read_deepspeed(resolve(str(tmp_path)))


@pytest.mark.parametrize(
    ("stage", "file", "old", "new"),
    [
        (1, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", b"K?", b"K>"),  # elements of a fragment
        (3, "zero_pp_rank_0_mp_rank_00_model_states.pt", b"K\x09K\x05\x86", b"K\x08K\x05\x86"),  # shape of a parameter
    ],
)
def test_partitions_that_do_not_add_up_are_refused(tmp_path, monkeypatch, stage, file, old, new):
    from bytecheckpoint.formats import torch_save

    folder = damaged(tmp_path, stage)
    plain = torch_save.unpickle
    monkeypatch.setattr(
        torch_save,
        "unpickle",
        lambda opened, data, *more: plain(opened, data.replace(old, new) if opened.name == file else data, *more),
    )
    with pytest.raises(CorruptCheckpointError, match=r"elements"):
        read_deepspeed(resolve(str(folder)))


def test_another_object_is_damage(tmp_path):
    folder = damaged(tmp_path, 1)
    torch.save([1, 2], folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt is damaged"):
        read_deepspeed(resolve(str(folder)))


@pytest.mark.parametrize("kind", ["zero1", "zero3", "pipeline", "grid", "tensor3"])
def test_random_damage_of_pickles_is_an_error_that_names_the_folder(monkeypatch, kind):
    from bytecheckpoint.formats import torch_save

    plain, draw, texts = torch_save.unpickle, random.Random(kind), []
    folder = str(GOLDEN / kind)

    def damage(opened, data, *more):
        changed = bytearray(data)
        if draw.random() < 0.3:
            changed[draw.randrange(len(changed))] = draw.choice((0x29, 0x4B, 0x4E, 0x7D, draw.randrange(256)))
        return plain(opened, bytes(changed), *more)

    monkeypatch.setattr(torch_save, "unpickle", damage)
    for _ in range(60):
        try:
            read_deepspeed(resolve(folder))
        except CheckpointError as error:
            texts.append(str(error))
    assert texts and all(folder in text for text in texts)
