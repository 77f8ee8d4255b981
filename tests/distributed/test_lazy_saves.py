"""Saves in the background at each step, with the next step right behind the call, in real layouts."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.frameworks.native import NativeFramework
from tests.support.modes import MODES
from tests.support.tiny_model import source_values
from tests.support.torch_layouts import LAYOUTS, WORLD_SIZE, build, in_layout
from tests.support.worlds import Worlds

#: Layouts in which a save differs from all others; the rest runs with `-m slow`.
USUAL = ("one", "ddp2", "fsdp2", "tp2-fsdp2", "pp2-fsdp2", "ep2-fsdp2")


def data_files(path: Path) -> dict[str, bytes]:
    """Bytes of the tensors in each file of a checkpoint."""
    found = {}
    for file in path.rglob("*.safetensors"):
        content = file.read_bytes()
        name = f"{file.parent.name}/{file.name.split('.')[0]}"
        found[name] = content[8 + int.from_bytes(content[:8], "little") :]
    return found


@pytest.mark.parametrize("layout", [pytest.param(n, marks=() if n in USUAL else (pytest.mark.slow,)) for n in LAYOUTS])
@in_layout
def test_a_lazy_save_holds_what_a_blocking_one_holds(layout: str, path: str) -> None:
    trainer = build(layout, source_values)
    with patch.object(NativeFramework, "capture", autospec=True, side_effect=NativeFramework.capture) as captured:
        for number in range(4):
            trainer.step()
            if number == 2 and "fsdp" in layout and "pp" not in layout:
                with torch.no_grad():
                    trainer.model(trainer.local_batch()[0])  # leaves the root's parameters gathered
            root = Path(path) / str(number)
            bytecheckpoint.save(root / "blocking", trainer.states())
            lazy = bytecheckpoint.save(root / "lazy", trainer.states(), **MODES["background"])
            trainer.step()
            assert lazy.result(60).staging == "background", lazy.result().staging
            if dist.is_initialized():
                dist.barrier()
            blocking, found = data_files(root / "blocking"), data_files(root / "lazy")
            assert blocking and found.keys() == blocking.keys()
            assert [name for name in found if found[name] != blocking[name]] == []
    assert captured.call_count == 1


STEPS = 20


def train(layout: str, folder: Path, *, saves: bool) -> None:
    """Train up to the last step, from the checkpoint if there is one, and note the loss of each step."""
    trainer = build(layout, source_values)
    path = folder / "checkpoint"
    if (path / "metadata.parquet").exists():
        bytecheckpoint.load(path, trainer.states())
    handle = None
    while trainer.extra["step"] < STEPS:
        loss = trainer.step()
        if not dist.is_initialized() or dist.get_rank() == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{trainer.extra['step']} {loss.hex()}\n")
        if saves:
            handle = bytecheckpoint.save(path, trainer.states(), **MODES["background"])
    if handle is not None:
        assert handle.result(60).staging == "background"


def losses(folder: Path) -> list[tuple[int, str]]:
    lines = (folder / "losses").read_text().splitlines() if (folder / "losses").exists() else []
    return [(int(step), loss) for step, loss in map(str.split, lines)]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "fsdp2"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["fsdp2", *SLOW])
def test_a_killed_job_goes_on_with_equal_losses(worlds: Worlds, tmp_path: Path, layout: str) -> None:
    """All ranks are killed at random moments of twenty steps, each with a save behind it."""
    dice, size = random.Random(layout), WORLD_SIZE[layout]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    worlds.get(size).run(train, layout, whole, saves=False)
    expected = dict(losses(whole))
    assert list(expected) == list(range(1, STEPS + 1))
    for _ in range(2):
        world, begun = worlds.fresh(size).start(train, layout, killed, saves=True), len(losses(killed))
        steps = dice.randrange(2, 9)
        while len(losses(killed)) < begun + steps and all(process.is_alive() for process in world.processes):
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.1))
        world.kill()
    worlds.get(size).run(train, layout, killed, saves=True)
    found = losses(killed)
    assert found[-1][0] == STEPS and [step for step, loss in found if loss != expected[step]] == []
    # At most the two saves that were in flight are lost in each kill.
    assert all(later - step in (1, 0, -1) for (step, _), (later, _) in pairwise(found)), found
