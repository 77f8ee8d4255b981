"""Hooks that save and load models in their own way, as the training scripts of diffusers do with accelerate."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError, StorageUnavailableError, UsageError
from bytecheckpoint.integrations.accelerate import attach
from bytecheckpoint.integrations.accelerate.hooks import HookFiles
from bytecheckpoint.manager import SaveOptions
from bytecheckpoint.tools import verify
from tests.integrations.accelerate.jobs import Run, model
from tests.integrations.conformance import after
from tests.integrations.transformers.jobs import LENGTH, WORDS, prepare_rank
from tests.integrations.transformers.jobs import model as language_model
from tests.support.damage import flip_bit
from tests.support.faulty_storage import Faults
from tests.support.runs import die_in_commit, steps_in
from tests.support.settings import using
from tests.support.worlds import Worlds, on_ranks


@contextmanager
def spool(folder: Path) -> Iterator[Path]:
    """Let hooks write into a folder of their own, of which nothing is left."""
    place = folder / "spool"
    place.mkdir(exist_ok=True)
    with using(spool_dir=str(place)):
        yield place
    assert not os.listdir(place)


# --- a script of diffusers, with a model of transformers --------------------------------------------------------------


def train(folder: Path, epochs: int = 2) -> dict[int, tuple[float, float]]:
    """Train a language model and its moving average; return the loss and the sum of the average by step."""
    from accelerate import Accelerator
    from transformers import LlamaForCausalLM

    prepare_rank()
    accelerator = Accelerator(cpu=True)
    net = language_model(dropout=0.1)
    average = copy.deepcopy(net).eval()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data = torch.arange(48 * LENGTH).reshape(48, LENGTH) * 7 % 11 % WORDS
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, 8, shuffle=True))

    def save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            average.save_pretrained(os.path.join(output_dir, "unet_ema"))
            for one in models:
                accelerator.unwrap_model(one).save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()

    def load(models: list[nn.Module], input_dir: str) -> None:
        average.load_state_dict(LlamaForCausalLM.from_pretrained(input_dir, subfolder="unet_ema").state_dict())
        for _ in range(len(models)):
            one = accelerator.unwrap_model(models.pop())
            one.load_state_dict(LlamaForCausalLM.from_pretrained(input_dir, subfolder="unet").state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    attach(accelerator, folder)
    step = accelerator.load_state() or 0
    torch.manual_seed(step)  # which the checkpoint must not need
    if step:
        accelerator.load_state()
    found = {}
    for _ in range(loader.iteration, epochs):
        net.train()
        for batch in loader:
            step += 1
            loss = net(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            for mean, now in zip(average.parameters(), net.parameters(), strict=True):
                mean.data.lerp_(now.data, 0.1)
            found[step] = loss.item(), sum(mean.double().sum().item() for mean in average.parameters())
            if step % 4 == 0:
                accelerator.save_state(step=step)
    accelerator.end_training()
    return found


def killed(folder: Path) -> None:
    die_in_commit(2, partial(train, folder))


def test_a_killed_script_continues(worlds: Worlds, tmp_path: Path) -> None:
    wanted = worlds.run(1, train, tmp_path / "whole")[0]
    worlds.fresh(1).start(killed, tmp_path / "run").outcomes()
    assert steps_in(tmp_path / "run") == [4]
    assert worlds.run(1, train, tmp_path / "run")[0] == after(4, wanted)
    assert verify(tmp_path / "run" / "step_00000012").ok
    with bytecheckpoint.open(tmp_path / "run" / "step_00000012") as checkpoint:
        assert "model" not in checkpoint.states and "hooks/unet/config.json" in checkpoint
        assert any(key.startswith("optimizer/state/model.layers.0") for key in checkpoint)


# --- files ------------------------------------------------------------------------------------------------------------


class Hooked(Run):
    """A run whose save hook writes files and pops weights, and whose load hook keeps the files and pops models."""

    def __init__(
        self, folder: Path, files: dict[str, bytes], pop: Sequence[int] = (), *, models: int = 1, hooks: str = "save load",
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(folder, **options)
        self.files, self.pop, self.found = files, sorted(pop, reverse=True), dict[str, bytes]()
        self.nets = [self.model, *(self.accelerator.prepare(model(seed)) for seed in range(2, models + 1))]
        if "save" in hooks:
            self.accelerator.register_save_state_pre_hook(self.save)
        if "load" in hooks:
            self.accelerator.register_load_state_pre_hook(self.load)

    def save(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        assert os.listdir(output_dir) == [] and len(models) == len(weights) == len(self.nets)
        for name, data in self.files.items():
            path = Path(output_dir, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        for number in self.pop:
            weights.pop(number)

    def load(self, models: list[nn.Module], input_dir: str) -> None:
        self.found = {
            str(path.relative_to(input_dir)): path.read_bytes() for path in Path(input_dir).rglob("*") if path.is_file()
        }
        for number in self.pop:
            models.pop(number)

    def weights(self) -> list[float]:
        return [net[0].weight.sum().item() for net in map(self.accelerator.unwrap_model, self.nets)]

    def fill(self, value: float) -> None:
        for number, net in enumerate(self.nets):
            nn.init.constant_(self.accelerator.unwrap_model(net)[0].weight, value + number)


MANY = {f"a folder/{number % 7}/file {number} ü": bytes([number]) * number for number in range(100)} | {"empty": b""}
MANY |= {"#2": b"2", "new\nline": b"3", os.fsdecode(b"no \xff text"): b"4"}


@pytest.mark.parametrize("files", [{}, {"empty": b""}, MANY], ids=["none", "empty", "many"])
@pytest.mark.parametrize("pop", [(), (0,)])
@on_ranks(1)
def test_all_files_come_back(tmp_path: Path, files: dict[str, bytes], pop: tuple[int, ...]) -> None:
    with spool(tmp_path):
        job = Hooked(tmp_path, files, pop)
        job.accelerator.save_state(step=1)
        assert job.accelerator.save_state(tmp_path / "apart") == str(tmp_path / "apart")
        job.end()
        for path in (None, tmp_path / "apart"):
            again = Hooked(tmp_path, {}, pop)
            assert again.accelerator.load_state(path) == (1 if path is None else None)
            assert again.found == files


@pytest.mark.parametrize("root", ["tier+file://{}/run", "fsspec+memory://hooks{}/run"])
@on_ranks(1)
def test_any_storage(tmp_path: Path, root: str) -> None:
    with spool(tmp_path):
        job = Hooked(root.format(tmp_path), MANY, [0])
        job.accelerator.save_state(step=1)
        job.end()
        again = Hooked(root.format(tmp_path), {}, [0])
        assert again.accelerator.load_state() == 1 and again.found == MANY


@pytest.mark.parametrize(("popped", "left"), [((0,), (1, 2)), ((1,), (0, 2)), ((0, 1, 2), ()), ((), (0, 1, 2))])
@on_ranks(1)
def test_some_of_several_models(tmp_path: Path, popped: tuple[int, ...], left: tuple[int, ...]) -> None:
    """Each keeps its names, whatever is popped; models that a load pops alone stay as they are."""
    with spool(tmp_path):
        job = Hooked(tmp_path, {"a": b"1"}, popped, models=3)
        job.fill(5)
        saved = job.weights()
        job.accelerator.save_state(step=1)
        job.end()
        with bytecheckpoint.open(tmp_path / "step_00000001") as checkpoint:
            assert {key.split("/")[1].split(".")[0] for key in checkpoint if key.startswith("model/")} == set(
                map(str, left)
            )
            assert "optimizer/state/0.0.weight/step" not in checkpoint
        for pop in {popped, tuple({*popped, 2})}:
            again = Hooked(tmp_path, {}, pop, models=3)
            again.fill(7)
            before = again.weights()
            assert again.accelerator.load_state() == 1
            assert again.weights() == [before[n] if n in pop else saved[n] for n in range(3)]


@on_ranks(1)
def test_steps_and_hooks_that_do_not_go_together(tmp_path: Path) -> None:
    with spool(tmp_path):
        for name, pop, hooks in (("popped", [0], "save"), ("files", [], "save"), ("none", [], "")):
            job = Hooked(tmp_path / name, {"a": b"1"}, pop, hooks=hooks)
            job.accelerator.save_state(step=1)
            job.end()
        named = (
            "save_state_pre_hook popped the weights of models .0., .* register the hook of register_load_state_pre_hook"
        )
        for hooks in ("", "load"):
            with pytest.raises(IncompatibleCheckpointError, match=named):
                Hooked(tmp_path / "popped", {}, hooks=hooks).accelerator.load_state()
        for hooks in ("", "load"):
            assert Hooked(tmp_path / "files", {}, hooks=hooks).accelerator.load_state() == 1
        assert Hooked(tmp_path / "none", {}).accelerator.load_state() == 1
        job = Hooked(tmp_path / "none", {}, [0])
        told = "load_state_pre_hook {}, and the checkpoint was saved without a hook of register_save_state_pre_hook"
        with pytest.raises(IncompatibleCheckpointError, match=told.format("has popped models .0.")):
            job.accelerator.load_state()
        job.accelerator.register_load_state_pre_hook(lambda _, folder: os.stat(f"{folder}/unet"))
        with pytest.raises(IncompatibleCheckpointError, match=told.format("fails .FileNotFoundError.*")):
            job.accelerator.load_state()


# --- failures ---------------------------------------------------------------------------------------------------------


def first_key(weights: list[Any]) -> str:
    return next(iter(weights[0]))


EDITS: dict[str, tuple[Callable[[list[Any]], object], str]] = {
    "removed": (lambda weights: weights[0].pop(first_key(weights)), r"has edited weights\[0\]\['0.weight'\]"),
    "replaced": (lambda weights: weights[0].update({first_key(weights): torch.ones(1)}), r"weights\[0\]\['0.weight'\]"),
    "added": (lambda weights: weights[0].update({"more": torch.ones(1)}), r"weights\[0\]\['more'\]"),
    "another": (lambda weights: weights.__setitem__(0, {}), "has put weights of its own"),
}


@pytest.mark.parametrize("edit", EDITS)
@on_ranks(1)
def test_edited_weights_are_refused(tmp_path: Path, edit: str) -> None:
    change, told = EDITS[edit]
    with spool(tmp_path):
        job = Hooked(tmp_path, {"a": b"1"})
        handle = job.accelerator.register_save_state_pre_hook(lambda _, weights, __: change(weights))
        with pytest.raises(UsageError, match=told):
            job.accelerator.save_state(step=1)
        handle.remove()
        job.accelerator.save_state(step=2)
        job.end()
        assert steps_in(tmp_path) == [2]


@on_ranks(1)
def test_what_hooks_raise(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("of the program")

    with spool(tmp_path):
        job = Hooked(tmp_path, {"a": b"1"}, [0])
        handle = job.accelerator.register_save_state_pre_hook(fail)
        with pytest.raises(ZeroDivisionError, match="of the program"):
            job.accelerator.save_state(step=1)
        handle.remove()
        job.accelerator.register_save_state_pre_hook(lambda _, __, folder: os.mkfifo(f"{folder}/pipe"))
        with pytest.raises(UsageError, match=r"has made .*pipe, which is no file"):
            job.accelerator.save_state(step=1)
        job.accelerator._save_model_state_pre_hook.popitem()
        job.accelerator.save_state(step=1)
        job.end()
        job = Hooked(tmp_path, {}, [0])
        job.accelerator.register_load_state_pre_hook(fail)
        with pytest.raises(ZeroDivisionError, match="of the program"):
            job.accelerator.load_state()


@pytest.mark.parametrize("asynchronous", [True, False])
@on_ranks(1)
def test_a_save_that_fails_leaves_no_files(tmp_path: Path, asynchronous: bool) -> None:
    with spool(tmp_path), pytest.MonkeyPatch.context() as patch:
        faults = Faults().install(patch)
        job = Hooked(tmp_path, {"a": b"1"}, attached={"save_options": SaveOptions(async_checkpoint=asynchronous)})
        faults.add("publish", StorageUnavailableError("gone"))

        def save() -> None:
            job.accelerator.save_state(step=1)
            job.accelerator.bytecheckpoint.wait()

        with pytest.raises(CheckpointError, match="gone"):
            save()
        faults.clear()
        job.accelerator.save_state(step=2)
        job.end()
        assert Hooked(tmp_path, {}).accelerator.load_state() == 2


@on_ranks(1)
def test_damaged_files_lead_to_the_step_before(tmp_path: Path) -> None:
    """Whose files the hooks get."""
    with spool(tmp_path):
        for state in ("hooks", "model"):
            root = tmp_path / state
            job = Hooked(root, {"a": b"1"}, [0], models=2)
            for step in (1, 2):
                job.files = {"a": bytes([step]) * 500}
                job.accelerator.save_state(step=step)
                job.accelerator.bytecheckpoint.wait()
            job.end()
            flip_bit(next((root / "step_00000002").rglob(f"{state}/rank-*")), -100)
            again = Hooked(root, {}, [0], models=2)
            assert again.accelerator.load_state() == 1
            assert again.found == {"a": b"\1" * 500}


@on_ranks(1)
def test_a_name_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    with spool(tmp_path), pytest.MonkeyPatch.context() as patch:
        job = Hooked(tmp_path / "run", {"a": b"1"})
        pieces = HookFiles.__bytecheckpoint_pieces__

        def renamed(files: HookFiles) -> Any:
            files.files = {"../b": files.files["a"]}
            return pieces(files)

        patch.setattr(HookFiles, "__bytecheckpoint_pieces__", renamed)
        job.accelerator.save_state(step=1)
        job.end()
        with pytest.raises(IncompatibleCheckpointError, match=r"'\.\./b' of a hook would lie outside"):
            Hooked(tmp_path / "run", {}).accelerator.load_state()


def memory(field: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) << 10


@on_ranks(1)
def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    with spool(tmp_path):
        job = Hooked(tmp_path / "run", {})

        def save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
            with open(f"{output_dir}/large", "wb") as file:
                for number in range(300):
                    file.write(bytes([number % 251]) * (1 << 20))

        def load(models: list[nn.Module], input_dir: str) -> None:
            with open(f"{input_dir}/large", "rb") as file:
                assert all(file.read(1 << 20) == bytes([number % 251]) * (1 << 20) for number in range(300))

        job.accelerator.register_save_state_pre_hook(save)
        job.accelerator.save_state(step=1)
        job.accelerator.bytecheckpoint.wait()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
        before = memory("VmRSS")
        job.accelerator.save_state(step=2)
        job.end()
        again = Run(tmp_path / "run")
        again.accelerator.register_load_state_pre_hook(load)
        assert again.accelerator.load_state() == 2
        assert memory("VmHWM") - before < 100 << 20


# --- ranks ------------------------------------------------------------------------------------------------------------


def save_of_rank(folder: Path, files: list[dict[str, bytes]], hooks: list[str]) -> None:
    rank = dist.get_rank()
    with using(spool_dir=str(folder / "spool")):
        job = Hooked(folder / "run", files[rank], [0] if rank == 0 else [], hooks=hooks[rank], schedule=False)
        job.accelerator.save_state(step=1)
        job.end()


def load_of_rank(folder: Path, pop: tuple[int, ...] = (0,)) -> dict[str, bytes]:
    with using(spool_dir=str(folder / "spool")):
        job = Hooked(folder / "run", {}, pop, schedule=False)
        assert job.accelerator.load_state() == 1
        return job.found


@pytest.mark.parametrize("hooks", [["save", "save"], ["save", ""]])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_files_of_all_ranks_at_another_number(worlds: Worlds, tmp_path: Path, size: int, hooks: list[str]) -> None:
    """Equal files of one name are one file; rank 0 decides what is popped, as with accelerate."""
    files = [
        {"first": b"1", os.fsdecode(b"no \xff text"): b"4", "both/x": b"3" * 100},
        {"second/y": b"2", "both/x": b"3" * 100, "empty": b""},
    ]
    (tmp_path / "spool").mkdir()
    worlds.run(2, save_of_rank, tmp_path, files, hooks)
    wanted = {**files[0], **(files[1] if hooks[1] else {})}
    assert worlds.run(size, load_of_rank, tmp_path) == [wanted] * size
    assert not os.listdir(tmp_path / "spool")


@pytest.mark.parametrize("name", ["x", "x/y"])
@on_ranks(2)
def test_files_that_do_not_go_together(tmp_path: Path, name: str) -> None:
    (tmp_path / "spool").mkdir(exist_ok=True)
    with pytest.raises(UsageError, match="different files named 'x'"):
        save_of_rank(tmp_path, [{"x": b"1"}, {name: b"2"}], ["save", "save"])
    dist.barrier()
    assert not os.listdir(tmp_path / "spool")


@on_ranks(2)
def test_a_hook_that_raises_on_one_rank(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("of the program")

    (tmp_path / "spool").mkdir(exist_ok=True)
    with using(spool_dir=str(tmp_path / "spool")):
        job = Hooked(tmp_path, {})
        handles = [
            job.accelerator.register_save_state_pre_hook(fail), job.accelerator.register_load_state_pre_hook(fail)
        ]  # fmt: skip
        error: type[Exception] = ZeroDivisionError if dist.get_rank() == 1 else CheckpointError
        with pytest.raises(error, match="of the program"):
            job.accelerator.save_state(step=1)
        handles[0].remove()
        job.accelerator.save_state(step=1)
        with pytest.raises(error, match="of the program"):
            job.accelerator.load_state()
        handles[1].remove()
        job.pop = [0] if dist.get_rank() == 1 else []
        with pytest.raises(UsageError, match=r"popped different models on the ranks: \[\[\], \[0\]\]"):
            job.accelerator.load_state()
        job.pop = []
        assert job.accelerator.load_state() == 1
        job.end()
    dist.barrier()
    assert not os.listdir(tmp_path / "spool")
