"""A compressed week of one run: kills, storage errors, slow ranks, other numbers of ranks each day, steps that are retired.

`make soak` runs 40 days; SOAK_SHORT=1 runs 6. `WEEK_SEED` draws another week.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import psutil
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CheckpointManager
from bytecheckpoint.dataloader import SequenceSource, TokenBufferLoader, TokenRecipe
from bytecheckpoint.manager import Best, EverySeconds, Latest, Retention, SaveOptions
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import verify
from tests.soak.growth import check_growth, measure, shared_memory
from tests.support.lost_rank_job import CONTEXT, EVERY, LEFT, ROWS, TEXTS, train
from tests.support.runs import steps_in
from tests.support.worlds import Worlds

pytestmark = pytest.mark.soak

DAYS = 6 if os.environ.get("SOAK_SHORT") else 40
STEPS = 11  # of a day, at most
KEPT, MILESTONE = 3, 4 * EVERY


def live(worlds: Worlds, folder: Path, day: int, draw: random.Random) -> None:
    """Train for a day on some ranks, with what goes wrong on it; fail if something of it is left."""
    root, size = folder / "run", draw.choice([1, 2, 3, 4])
    newest = max(steps_in(root), default=0)
    victims: tuple[int, ...] = ()
    if size > 1 and draw.random() < 0.6:
        victims = tuple(draw.sample(range(size), draw.choice([1, 1, size - 1])))
    where = draw.choice(["forward", "boundary", "commit"])
    death = newest + draw.randint(2, EVERY if where == "commit" else STEPS - 1)  # a save follows before the day is over
    options = {
        "kind": draw.choice(["ddp", "hsdp"]), "victims": victims,
        "at": (where, death), "just_in_time": draw.random() < 0.5,
        "errors": 0 if victims and where == "commit" else draw.choice([0, 0, 2]),
        "slow": draw.choice([0.0, 0.02]), "log": str(folder / f"day{day}"),
        "keep": KEPT, "milestone": MILESTONE, "save_options": SaveOptions(on_error="warn"), "grace": 0.0,
    }  # fmt: skip
    world = worlds.fresh(size)
    try:
        children = [child for process in world.processes for child in psutil.Process(process.pid).children()]
        world.start(train, str(root), newest + STEPS, **options)
        if victims:
            for process in world.processes:
                process.join(90)
            codes = [process.exitcode for process in world.processes]
            # A victim may learn of another one's death before its own.
            allowed = [{-9, LEFT} if rank in victims else {LEFT} for rank in range(size)]
            assert -9 in codes and all(map(set.__contains__, allowed, codes)), (codes, options)
        else:
            assert all(ok for ok, _ in world.outcomes(90)), options
            assert world.close() == [0] * size
    finally:
        world.kill()
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE], options


def test_a_week(tmp_path: Path, worlds: Worlds) -> None:
    seed = int(os.environ.get("WEEK_SEED", "1"))
    draw = random.Random(seed)
    wanted, _ = train(str(tmp_path / "reference"), DAYS * STEPS)
    before, process = shared_memory(), psutil.Process()
    descriptors = 0
    for day in range(DAYS):
        newest = max(steps_in(tmp_path / "run"), default=0)
        live(worlds, tmp_path, day, draw)
        logs = "\n".join(path.read_text() for path in sorted(tmp_path.glob(f"day{day}.?")))
        for path in tmp_path.glob(f"day{day}.*.json"):
            found = {int(step): loss for step, loss in json.loads(path.read_text()).items()}
            assert [*found][:1] in ([], [newest + 1]), logs
            assert found == pytest.approx({step: wanted[step] for step in found}, rel=1e-9), (day, seed, logs)
        steps = steps_in(tmp_path / "run")
        assert max(steps, default=0) >= newest, logs
        for step in steps:
            assert verify(resolve(tmp_path / "run" / f"step_{step:08d}")).ok, (day, step)
        assert shared_memory() <= before, day
        if day == 0:
            descriptors = process.num_fds()
    assert max(steps) >= DAYS  # it got somewhere
    train(str(tmp_path / "run"), max(steps) + STEPS, keep=KEPT, milestone=MILESTONE, grace=0.0)  # and cleans up
    steps = steps_in(tmp_path / "run")
    assert all(step % MILESTONE == 0 for step in steps[:-KEPT]), steps
    assert process.num_fds() <= descriptors + 2


def test_a_manager_does_not_grow(tmp_path: Path) -> None:
    """Neither with its saves nor with the steps that it retires, nor does its folder."""
    bytecheckpoint.configure(writer="thread")
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    recipe = TokenRecipe(SequenceSource(TEXTS, "texts"), CONTEXT, ROWS, document_end=0, shuffle_buffer=8)
    loader = TokenBufferLoader(recipe)
    states = {"model": model, "optimizer": optimizer, "dataloader": loader, "rng": bytecheckpoint.rng_state()}
    process, first = psutil.Process(), {}
    steps = 50 * DAYS
    with CheckpointManager(
        tmp_path,
        states,
        every=[5, EverySeconds(1)],
        keep=Retention([Latest(2), Best("loss", 2)], grace=0.0),
        just_in_time=True,
    ) as manager:
        for step in range(1, steps + 1):
            loss = model(next(loader)["tokens"].float().mean() * torch.ones(4, 200)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.maybe_save(step, {"loss": loss})
            if step == steps // 3:
                first = measure(process)
    check_growth(first, measure(process), 48 << 20)
    assert len(steps_in(tmp_path)) <= 2 + 2 + 1
