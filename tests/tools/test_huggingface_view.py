"""The view for Hugging Face: the folder of a step is one that `from_pretrained` reads, or one without an index."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bytecheckpoint
from bytecheckpoint import (
    CheckpointManager,
    CheckpointNotFoundError,
    HuggingFaceView,
    IncompatibleCheckpointError,
    SaveOptions,
    UsageError,
    tools,
)
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.engine.view_files import VIEW_INDEX
from bytecheckpoint.layouts import Layout, Rule
from bytecheckpoint.manager import Retention
from bytecheckpoint.saving import coordinator
from bytecheckpoint.storage import resolve
from bytecheckpoint.tiers.cooldown import cool, plan_cooldown
from bytecheckpoint.tools.retirement import finish_retirement, retire, tombstones
from tests.support.damage import flip_bit
from tests.support.memory import folder_in_memory, hot_tier
from tests.support.pretrained import Net, Own, check, read, trained, view_of_own
from tests.support.processes import environment
from tests.support.programs import forked

VIEW = HuggingFaceView()
AS_FILES = HuggingFaceView(dtype="float32")


@pytest.mark.parametrize("incremental", [False, True])
def test_whole_tensors_are_named_where_they_lie(tmp_path: Path, incremental: bool) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/tokenizer.model").write_bytes(b"\xff\x00")
    (tmp_path / "base/model.safetensors").write_bytes(b"no")
    states, view = trained(), HuggingFaceView(files_from=tmp_path / "base")
    (tmp_path / "base/metadata.parquet").write_bytes(b"no")  # if it is a step of another run
    states["model"].layer.requires_grad_(False)
    for name in "ab":
        bytecheckpoint.save(tmp_path / name, states, view=view, incremental=incremental)
        check(tmp_path / name)
        assert (tmp_path / name / "tokenizer.model").read_bytes() == b"\xff\x00"
        report = tools.verify(tmp_path / name)
        assert report.ok and not report.notes
    fresh = trained(0.0)
    bytecheckpoint.load(tmp_path / "b", fresh)
    assert torch.equal(fresh["model"].head.weight, Net().embed.weight)


def test_a_save_replaces_the_view_too(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        bytecheckpoint.save(tmp_path, trained(value), view=VIEW)
        check(tmp_path, value)
    bytecheckpoint.save(tmp_path, trained(3.0))
    assert not (tmp_path / VIEW_INDEX).exists() and not (tmp_path / "config.json").exists()


def test_a_step_whose_view_was_not_written_has_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bytecheckpoint.save(tmp_path, trained(), view=VIEW)
    monkeypatch.setattr(coordinator, "publish_view", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        bytecheckpoint.save(tmp_path, trained(2.0), view=VIEW)
    assert "committed without its view" in caplog.text
    with pytest.raises(FileNotFoundError):  # an old index may stay, and names files that are gone
        read(tmp_path)


def test_what_cannot_be_viewed_is_refused_by_name(tmp_path: Path) -> None:
    states = trained()
    wrapped = {"model": nn.Sequential(states["model"])}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (states, {"view": "model"}, "give a HuggingFaceView"),
        (states, {"view": HuggingFaceView(state="net")}, "no state 'net' to save, only model, optimizer"),
        (states, {"view": HuggingFaceView(state="optimizer")}, "'optimizer' is a AdamW: give a module"),
        (states, {"exclude": ["*embed*"]}, "may leave out a part of 'model'"),
        (states, {"include": ["model/layer*"]}, "may leave out a part of 'model'"),
        (wrapped, {}, "'model' is a Sequential and no model of transformers"),
        (states, {"view": HuggingFaceView(files_from=tmp_path / "no")}, "holds no files to copy"),
    ]
    for saved, options, text in cases:
        with pytest.raises(UsageError, match=text.replace("*", ".")):
            bytecheckpoint.save(tmp_path / "step", saved, **{"view": VIEW, **options})
    bytecheckpoint.save(tmp_path / "step", states, view=VIEW, include=["model/*"], exclude=["optimizer/*"])
    states["model"].odd = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UsageError, match="odd of complex64 does not fit into safetensors"):
        bytecheckpoint.save(tmp_path / "step", states, view=VIEW)
    check(tmp_path / "step")


def test_a_copy_has_the_view_and_a_damaged_one_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bytecheckpoint.save(tmp_path / "step", trained(), view=VIEW)
    tools.copy(tmp_path / "step", str(tmp_path / "copy"))
    check(tmp_path / "copy")
    flip_bit(tmp_path / "copy/config.json", 8)
    (finding,) = tools.verify(tmp_path / "copy").findings
    assert (finding.kind, finding.file) == ("sum", "config.json") and tools.verify(tmp_path / "copy").restorable
    (tmp_path / "copy" / VIEW_INDEX).unlink()
    assert any("view for other programs is not there" in note for note in tools.verify(tmp_path / "copy").notes)
    tools.remove(tmp_path / "copy")
    assert not os.listdir(tmp_path / "copy")


def test_retired_steps_lose_their_views(tmp_path: Path) -> None:
    keep = Retention(1, grace=0.0)
    with CheckpointManager(tmp_path, trained(), keep=keep, save_options=SaveOptions(view=VIEW)) as manager:
        for step in (1, 2, 3):
            manager.save(step)
    check(tmp_path / "step_00000003")
    assert [name for name in sorted(os.listdir(tmp_path)) if name.startswith("step")] == ["step_00000003"]


def test_the_view_follows_a_flush_and_a_cooldown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hot_tier(monkeypatch) as url:
        hot = folder_in_memory(url)
        path = f"tier+file://{tmp_path}/run/step_1"
        bytecheckpoint.save(path, trained(), view=VIEW).result()
        check(tmp_path / "run/step_1")
        assert any(name == VIEW_INDEX for _, _, names in os.walk(hot) for name in names)
        tools.remove(path)
        assert not [names for _, _, names in os.walk(hot) for name in names if name == VIEW_INDEX]
    for step in (1, 2):
        bytecheckpoint.save(tmp_path / f"run/step_{step}", trained(step), view=VIEW)
    for step in plan_cooldown(str(tmp_path / "run"), str(tmp_path / "cold"), older_than=0, now=time.time() + 9):
        assert not cool(step).error
    check(tmp_path / "cold/step_1")
    assert not {VIEW_INDEX, "config.json"} & {*os.listdir(tmp_path / "run/step_1")}


@pytest.mark.parametrize("turned", [False, True])
def test_a_layout_leads_to_the_names(tmp_path: Path, turned: bool) -> None:
    """Tensors lie in the files of the step under their names, but for the transposed one."""
    for left in ("hf", "mine"):
        view = view_of_own(tmp_path / "base", turned=turned, left=left)
        with (
            contextlib.nullcontext() if left == "hf" else pytest.raises(UsageError, match="names does not lead 'model'")
        ):
            model = Own(turned=turned)
            optimizer = torch.optim.AdamW(model.parameters())
            sum(parameter.sum() for parameter in model.parameters()).backward()
            optimizer.step()
            model.load_state_dict(Own(turned=turned).state_dict())
            handle = bytecheckpoint.save(tmp_path / "step", {"model": model, "optimizer": optimizer}, view=view)
            handle.viewed.result()
            assert handle.result().view == ("files" if turned else "index")
        check(tmp_path / "step", architecture=None)
    keys = sorted(sorted(load_file(file)) for file in (tmp_path / "step").glob("model/rank-*"))
    assert keys == ([["block"], ["embed.weight"]] if turned else [["embed.weight", "layer.weight"]])
    fresh = Own(0.0, turned=turned)
    bytecheckpoint.load(tmp_path / "step", {"model": fresh})
    wanted = Own(turned=turned).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in fresh.state_dict().items())
    model = Own(turned=turned)
    model.extra = nn.Parameter(torch.zeros(1))
    view = view_of_own(tmp_path / "base", turned=turned)
    with pytest.raises(IncompatibleCheckpointError, match="extra"):
        bytecheckpoint.save(tmp_path / "step", {"model": model}, view=view)


@pytest.mark.parametrize(("groups", "wide", "form"), [(16, 4, "index"), (17, 4, "files"), (17, 1 << 12, "index")])
def test_short_runs_are_written_once_more(tmp_path: Path, groups: int, wide: int, form: str) -> None:
    """Rows that a layout puts in turn are places in the catalog, if they are few or long."""
    (tmp_path / "config.json").write_text("{}")
    rule = Rule({"a": "x = (g n) d", "b": "y = (g n) d"}, {"both": "(g [x: n | y: n]) d"})
    view = HuggingFaceView(layout=Layout("r", "hf", "own", rules=[rule], dims={"n": "2"}), files_from=tmp_path)
    model = nn.Module()
    model.both = nn.Parameter(torch.arange(4.0 * groups * wide).view(4 * groups, wide))
    handle = bytecheckpoint.save(tmp_path / "step", {"model": model}, view=view)
    handle.viewed.result()
    assert handle.result().view == form
    wanted = model.both.detach().view(groups, 2, 2, wide)
    for number, (_, value) in enumerate(sorted(read(tmp_path / "step", None).items())):
        assert torch.equal(value, wanted[:, number].reshape(-1, wide))


def test_a_cached_plan_is_not_that_of_another_configuration(tmp_path: Path) -> None:
    """The rows of the parts depend on a value of the configuration, which changes between two saves of one model."""
    rule = Rule({"a": "x = (g n) d", "b": "y = (g n) d"}, {"both": "(g [x: n | y: n]) d"})
    view = HuggingFaceView(layout=Layout("r", "hf", "own", rules=[rule], dims={"g": "hf.groups"}), files_from=tmp_path)
    model = nn.Module()
    model.both = nn.Parameter(torch.arange(16.0 * 3).view(16, 3))
    for groups, form in ((2, "index"), (4, "files"), (2, "index")):
        (tmp_path / "config.json").write_text(f'{{"groups": {groups}}}')
        handle = bytecheckpoint.save(tmp_path / "step", {"model": model}, view=view)
        handle.viewed.result()
        assert handle.result().view == form
        wanted = model.both.detach().view(groups, 2, 8 // groups, 3)
        for number, (_, value) in enumerate(sorted(read(tmp_path / "step", None).items())):
            assert torch.equal(value, wanted[:, number].reshape(-1, 3))


def test_ranks_with_different_views_are_refused(tmp_path: Path) -> None:
    """Each would write its share of the files by its own layout."""
    layouts = [Layout("names", "hf", "own", rules=[Rule({"a": "n m"}, {"b": axes})]) for axes in ("m n", "n m")]
    (tmp_path / "config.json").write_text("{}")

    def save(collective: Collective) -> None:
        model = nn.Module()
        model.b = nn.Parameter(torch.ones(4, 4))
        view = HuggingFaceView(layout=layouts[collective.rank], files_from=tmp_path)
        handle = bytecheckpoint.save(tmp_path / "step", {"model": model}, view=view)
        handle.result()
        with pytest.raises(UsageError, match=r"rank 0 saves with view=.*'model', names \(\w+\), .*, rank 1 with view="):
            handle.viewed.result()

    ThreadWorld(2).run(save)
    assert not (tmp_path / "step" / VIEW_INDEX).exists()


def test_an_incremental_save_writes_the_tensors_of_a_layout_once_more(tmp_path: Path) -> None:
    view = view_of_own(tmp_path / "base", turned=False)
    for name in "ab":
        handle = bytecheckpoint.save(tmp_path / name, {"model": Own(turned=False)}, view=view, incremental=True)
        handle.viewed.result()
        assert handle.result().view == "files"
        check(tmp_path / name, architecture=None)


@pytest.mark.parametrize("turned", [False, True])
def test_the_view_of_a_layout_follows_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turned: bool) -> None:
    view, url = view_of_own(tmp_path / "base", turned=turned), f"tier+file://{tmp_path}/step"
    with hot_tier(monkeypatch):
        for value in (1.0, 2.0):
            states = {"model": Own(value, turned=turned)}
            bytecheckpoint.prepare(states, view=view)
            handle = bytecheckpoint.save(url, states, view=view, async_checkpoint=True)
            assert handle.result().view == ("files" if turned else "index")
            handle.viewed.result()
            check(tmp_path / "step", value, None)
        assert not tools.verify(url).notes
    tools.copy(tmp_path / "step", str(tmp_path / "copy"))
    shutil.rmtree(tmp_path / "step")
    check(tmp_path / "copy", 2.0, None)
    assert tools.verify(tmp_path / "copy").ok and not tools.verify(tmp_path / "copy").notes


def test_the_files_of_a_view_follow_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hot_tier(monkeypatch):
        for value in (1.0, 2.0):
            handle = bytecheckpoint.save(f"tier+file://{tmp_path}/step", trained(value), view=AS_FILES)
            assert handle.result().view == "files"
            handle.viewed.result()
            check(tmp_path / "step", value)
        assert not tools.verify(f"tier+file://{tmp_path}/step").notes
    assert tools.verify(tmp_path / "step").ok and len(list(tmp_path.glob("step/model-*"))) == 1


@pytest.mark.parametrize("view", [VIEW, AS_FILES])
def test_what_is_left_of_a_step_is_no_checkpoint(tmp_path: Path, view: HuggingFaceView) -> None:
    created = 0.0
    bytecheckpoint.save(tmp_path / "step", trained(), view=view).viewed.result()
    with bytecheckpoint.open(tmp_path / "step") as checkpoint:
        created = checkpoint.info["created"]
    assert retire(resolve(tmp_path / "step"), created) == ""
    assert not (tmp_path / "step" / VIEW_INDEX).exists()
    with pytest.raises(CheckpointNotFoundError):
        bytecheckpoint.open(tmp_path / "step")
    (stone,) = tombstones(resolve(tmp_path / "step"))
    finish_retirement(resolve(tmp_path / "step"), stone)
    assert not (tmp_path / "step").exists()


@pytest.mark.parametrize("view", [VIEW, AS_FILES])
def test_object_stores_have_views(tmp_path: Path, view: HuggingFaceView) -> None:
    url = f"fsspec+memory://views-{uuid.uuid4().hex}/step"
    for value in (1.0, 2.0):
        bytecheckpoint.save(url, trained(value), view=view).viewed.result()
        assert tools.verify(url).ok
    tools.copy(url, f"{url}-copy")
    tools.copy(f"{url}-copy", str(tmp_path / "step"))
    check(tmp_path / "step", 2.0)
    tools.remove(url)
    assert not resolve(url).list()


def test_values_that_become_infinite_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        bytecheckpoint.save(tmp_path, trained(1e9), view=HuggingFaceView(dtype="float16")).viewed.result()
    assert "finite values are infinite in the view: embed.weight, layer.weight" in caplog.text


_KILLED = """
import os, signal, sys
import bytecheckpoint
from tests.support.faulty_storage import Faults
from tests.support.pretrained import trained
from tests.tools.test_huggingface_view import AS_FILES, VIEW
path, form, number = sys.argv[1:]
bytecheckpoint.configure(writer="thread")
view = {"files": AS_FILES, "index": VIEW}[form]
bytecheckpoint.save(path, trained(1.0), view=view).viewed.result()
faults = Faults()
faults.add(lambda _: True, skip=int(number), before=lambda: os.kill(os.getpid(), signal.SIGKILL))
bytecheckpoint.save(faults.at(path), trained(2.0), view=view).viewed.result()
"""


@pytest.mark.parametrize("form", ["index", "files"])
def test_a_kill_leaves_a_whole_view_or_none(tmp_path: Path, form: str) -> None:
    code, number, views = -signal.SIGKILL, 0, set()
    while code == -signal.SIGKILL:
        path = tmp_path / str(number)
        code = subprocess.run(forked("-c", _KILLED, path, form, number), env=environment(), check=False).returncode
        fresh = trained(0.0)
        bytecheckpoint.load(path, fresh)
        value = fresh["model"].embed.weight[0, 0].item()
        try:
            check(path, value)  # that of the checkpoint
        except FileNotFoundError:
            views.add("none")
        else:
            views.add(value)
        bytecheckpoint.save(path, trained(3.0), view=VIEW)
        check(path, 3.0)
        assert not list(path.glob("model-*")), "files of killed views go"
        number += 4
    assert code == 0 and number > 20 and views >= {1.0, 2.0}


def test_the_end_of_a_program_waits_for_the_view(tmp_path: Path) -> None:
    code = f"""
import bytecheckpoint
from tests.support.pretrained import trained
from tests.tools.test_huggingface_view import AS_FILES
bytecheckpoint.save({str(tmp_path)!r}, trained(), view=AS_FILES, async_checkpoint=True)
"""
    subprocess.run(forked("-c", code), env=environment(), check=True)
    check(tmp_path)
