"""Tests that every training tool passes: a subclass names the tool, whose module `jobs` trains as a `Training` says.

    class TestLightning(Conformance):
        tool = "lightning"

All trainings take twelve steps, six of an epoch, and save every four.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError, UsageError
from bytecheckpoint.handles import SaveHandle
from bytecheckpoint.manager import saves
from tests.support.damage import damage, storage_file
from tests.support.faulty_storage import Faults
from tests.support.memory import new_memory
from tests.support.runs import die_in_commit, kill_demo, steps_in
from tests.support.worlds import Worlds

__all__ = ["CHANGES", "Conformance", "Losses", "Training", "after", "collected_warnings", "noted_saves"]

Losses = dict[int, float]


@dataclass(frozen=True)
class Training:
    """One training, in the same words for all tools.

    Attributes:
        attached: False to train without this package.
        resume: False to begin a new run.
        steps: number of steps of the whole training.
        until: step at which to stop early, or 0.
        every: steps between two saves.
        keep: number of the newest steps to keep, or None.
        on_error: reaction to a failed save.
        preempted: True to save at SIGTERM.
        at: functions to call at the end of steps.
        layout: "one" process, "ddp", or another one that the tool has.
        dropout: True to draw random numbers in every forward pass, other ones on each rank.
    """

    attached: bool = True
    resume: bool = True
    steps: int = 12
    until: int = 0
    every: int = 4
    keep: int | None = None
    on_error: str = "raise"
    preempted: bool = False
    at: Mapping[int, Callable[[], object]] = field(default_factory=dict)
    layout: str = "one"
    dropout: bool = True


WHOLE = Training(attached=False)
#: Changes of the layout for tools that have DDP and FSDP2.
CHANGES = (
    ("ddp", "one"), ("one", "ddp"), ("fsdp2", "fsdp2"), ("fsdp2", "one"), ("one", "fsdp2"), ("ddp", "fsdp2"),
    ("fsdp2", "ddp"),
)  # fmt: skip


def after(step: int, losses: dict[int, Any]) -> dict[int, Any]:
    """Return the losses after a step."""
    return {number: loss for number, loss in losses.items() if number > step}


# --- run on the ranks of a world ----------------------------------------------------------------------------------


def jobs_of(tool: str) -> Any:
    return importlib.import_module(f"tests.integrations.{tool}.jobs")


def train(tool: str, folder: Path | str, training: Training) -> Losses:
    """Train; return the losses of the steps."""
    found: Losses = jobs_of(tool).conform(str(folder), training)
    return found


@contextlib.contextmanager
def noted_saves() -> Iterator[list[SaveHandle]]:
    """Note the handles of all saves in a `with` block."""
    handles: list[SaveHandle] = []

    def save(*arguments: Any, **options: Any) -> SaveHandle:
        handles.append(bytecheckpoint.save(*arguments, **options))
        return handles[-1]

    with patch.object(saves, "save", save):
        yield handles


@contextlib.contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect what this package logs."""
    found: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("bytecheckpoint")
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield found
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def copies(tool: str, folder: Path, training: Training) -> list[str]:
    """Train; return how each save has copied the state."""
    with noted_saves() as handles:
        train(tool, folder, training)
    return [handle.result(60).staging for handle in handles]


def die_in_second_commit(tool: str, folder: Path, training: Training) -> None:
    die_in_commit(2, lambda: train(tool, folder, training))


def train_with_failing_commits(tool: str, folder: Path, training: Training, skip: int, times: int) -> Losses:
    with pytest.MonkeyPatch.context() as patch:
        fault = {"name": "metadata.parquet", "skip": skip, "times": times}
        Faults().install(patch).add("publish", OSError("no commit"), **fault)
        if training.on_error == "warn":
            return train(tool, folder, training)
        with pytest.raises(CheckpointError, match="no commit"):
            train(tool, folder, training)
        return {}


def train_in_memory(tool: str) -> Losses:
    """Train in two jobs on a storage that is no folder; return the losses of the second one."""
    with new_memory() as root:
        train(tool, root, Training(until=8))
        return train(tool, root, Training())


def refuse_new_run(tool: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"holds a run up to step 12: "):
        train(tool, folder, Training(resume=False))


def notify() -> None:
    """Send SIGTERM to the last rank."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)


def be_preempted(tool: str, folder: Path, layout: str) -> int:
    """Train until the job is to stop; return the last step."""
    before = signal.getsignal(signal.SIGTERM)
    losses = train(tool, folder, Training(steps=36, every=1000, layout=layout, preempted=True, at={7: notify}))
    assert signal.getsignal(signal.SIGTERM) == before
    return max(losses)


def fail() -> None:
    raise ZeroDivisionError("of the training")


def fail_in_training(tool: str, folder: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="of the training"):
        train(tool, folder, Training(at={9: fail}))


def run_demo(tool: str, demo: str, folder: Path, steps: int) -> None:
    jobs_of(tool).prepare_rank()
    if dist.is_initialized():
        os.environ["RANK"] = str(dist.get_rank())
    importlib.import_module(f"demo.{demo}").main(str(folder), steps)


def die_in_demo(tool: str, demo: str, folder: Path, steps: int) -> None:
    die_in_commit(2, lambda: run_demo(tool, demo, folder, steps))


def demo_losses(folder: Path) -> list[float]:
    found = json.loads((folder / "losses.json").read_text())
    return list(found.values()) if isinstance(found, dict) else found


# --- the suite ----------------------------------------------------------------------------------------------------


class Conformance:
    """Kills, failures, resumes and layouts.

    Attributes:
        tool: name of the package in tests/integrations.
        ranks: number of ranks of each layout.
        close: relative difference of losses whose additions were in another order.
        demo: module in demo/.
        demo_close: relative difference of the demo's losses.
        changes: layouts before and after a resume.
    """

    tool: ClassVar[str]
    ranks: ClassVar[Mapping[str, int]] = {"one": 1, "ddp": 2, "fsdp2": 2}
    close = 1e-5
    demo: ClassVar[str]
    demo_close = 1e-9
    changes: ClassVar[Sequence[tuple[str, str]]]

    def run(self, worlds: Worlds, folder: Path, training: Training) -> list[Losses]:
        """Train on the ranks of the layout; return the losses of each rank."""
        return worlds.run(self.ranks[training.layout], train, self.tool, folder, training)

    @pytest.mark.parametrize("layout", ["one", "ddp"])
    def test_killed_in_a_save(self, worlds: Worlds, tmp_path: Path, layout: str) -> None:
        """Rank 0 dies in a commit. Random numbers, which differ between ranks, continue too."""
        wanted = self.run(worlds, tmp_path / "whole", replace(WHOLE, layout=layout))
        assert len(set(wanted[0].values())) == len(wanted[0]) == 12
        folder, training = tmp_path / "run", Training(layout=layout)
        world = worlds.fresh(self.ranks[layout])
        outcomes = world.start(die_in_second_commit, self.tool, folder, training).outcomes(grace=1)
        assert "exit code -9" in outcomes[0][1]
        assert steps_in(folder) == [4] and list((folder / "step_00000008").rglob("*.safetensors"))
        assert self.run(worlds, folder, training) == [after(4, losses) for losses in wanted]
        assert steps_in(folder) == [4, 8, 12]

    @pytest.mark.parametrize("layout", ["one", "fsdp2"])
    def test_saves_behind_the_training(self, worlds: Worlds, tmp_path: Path, layout: str) -> None:
        """The first two saves find out that nothing changes before a step."""
        wanted = self.run(worlds, tmp_path / "whole", replace(WHOLE, layout=layout))
        training, ranks = Training(layout=layout, every=2), self.ranks[layout]
        found = worlds.run(ranks, copies, self.tool, tmp_path / "run", replace(training, until=10))
        assert [ways[:5] for ways in found] == [["blocking"] * 2 + ["background"] * 3] * ranks
        assert self.run(worlds, tmp_path / "run", training) == [after(10, losses) for losses in wanted]

    def test_another_layout(self, worlds: Worlds, tmp_path: Path, layouts: tuple[str, str]) -> None:
        """In the middle of an epoch, with the same samples in each step."""
        before, now = layouts
        wanted = self.run(worlds, tmp_path / "whole", replace(WHOLE, layout=before, dropout=False))[0]
        self.run(worlds, tmp_path / "run", Training(layout=before, until=8, dropout=False))
        assert steps_in(tmp_path / "run") == [4, 8]
        for losses in self.run(worlds, tmp_path / "run", Training(layout=now, dropout=False)):
            assert losses == pytest.approx(after(8, wanted), rel=self.close)

    def test_a_failed_save_deletes_nothing(self, worlds: Worlds, tmp_path: Path) -> None:
        """Tools delete old steps before a save is committed; here the save of step 12 fails."""
        training = Training(keep=2)
        worlds.run(1, train_with_failing_commits, self.tool, tmp_path, training, 2, -1)
        assert steps_in(tmp_path) == [4, 8]
        self.run(worlds, tmp_path, training)
        assert steps_in(tmp_path) == [8, 12]

    def test_a_failed_save_may_be_a_warning(self, worlds: Worlds, tmp_path: Path) -> None:
        training = Training(on_error="warn")
        (losses,) = worlds.run(1, train_with_failing_commits, self.tool, tmp_path, training, 1, 1)
        assert len(losses) == 12 and steps_in(tmp_path) == [4, 12]

    def test_a_damaged_step_and_foreign_files(self, worlds: Worlds, tmp_path: Path) -> None:
        """A damaged step is skipped, and everything that is no step stays."""
        for name in ("step_5", "notes", "step_00000099"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file.txt").write_text("mine")
        wanted = self.run(worlds, tmp_path, Training())[0]
        damage(storage_file(tmp_path / "step_00000012"), "flip")
        assert self.run(worlds, tmp_path, Training()) == [after(8, wanted)]
        assert self.run(worlds, tmp_path, Training()) == [{}]
        assert len(list(tmp_path.rglob("file.txt"))) == 3 and steps_in(tmp_path) == [4, 8, 12]

    def test_a_storage_that_is_no_folder(self, worlds: Worlds, tmp_path: Path) -> None:
        wanted = self.run(worlds, tmp_path, WHOLE)[0]
        assert worlds.run(1, train_in_memory, self.tool) == [after(8, wanted)]

    def test_a_new_run_in_an_old_folder(self, worlds: Worlds, tmp_path: Path) -> None:
        self.run(worlds, tmp_path, Training())
        worlds.run(1, refuse_new_run, self.tool, tmp_path)
        assert steps_in(tmp_path) == [4, 8, 12]

    @pytest.mark.parametrize("layout", ["one", "ddp"])
    def test_a_signal(self, worlds: Worlds, tmp_path: Path, layout: str) -> None:
        """One rank gets it. All ranks save at one step, and leave together."""
        training = Training(steps=36, every=1000, layout=layout)
        wanted = self.run(worlds, tmp_path / "whole", replace(training, attached=False))
        folder = tmp_path / "run"
        last = worlds.run(self.ranks[layout], be_preempted, self.tool, folder, layout)
        (step,) = steps_in(folder)
        assert set(last) == {step} and 7 <= step < 36
        assert self.run(worlds, folder, training) == [after(step, losses) for losses in wanted]

    def test_an_exception(self, worlds: Worlds, tmp_path: Path) -> None:
        """The save in flight is committed, and the exception is the program's own."""
        wanted = self.run(worlds, tmp_path / "whole", WHOLE)[0]
        worlds.run(1, fail_in_training, self.tool, tmp_path / "run")
        assert steps_in(tmp_path / "run") == [4, 8]
        assert self.run(worlds, tmp_path / "run", Training()) == [after(8, wanted)]

    @pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
    @pytest.mark.timeout(600)
    def test_the_demo(self, worlds: Worlds, tmp_path: Path, torchrun: bool) -> None:
        """Killed on two ranks, started again on one."""
        steps = 400 if torchrun else 100
        if torchrun:
            kill_demo(f"{self.demo}.py", tmp_path / "run", steps)
        else:
            worlds.fresh(2).start(die_in_demo, self.tool, self.demo, tmp_path / "run", steps).outcomes(grace=1)
            assert steps_in(tmp_path / "run") == [10]
        for name in ("whole", "run"):
            worlds.fresh(1).run(run_demo, self.tool, self.demo, tmp_path / name, steps, timeout=200)
        wanted = demo_losses(tmp_path / "whole")
        assert len(wanted) == steps and wanted[-1] < 0.7 * wanted[0]
        assert demo_losses(tmp_path / "run") == pytest.approx(wanted, rel=self.demo_close)
        assert len(steps_in(tmp_path / "run")) == 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Pair the layouts of a tool; imported by its test_conformance.py."""
    if "layouts" in metafunc.fixturenames and metafunc.cls is not None:
        metafunc.parametrize("layouts", metafunc.cls.changes, ids="-".join)
