"""kill -9 of ranks, of the helper process and of the trainer, at any moment of a save."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint import CheckpointError, CheckpointTimeoutError
from bytecheckpoint.collectives import current
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.storage import resolve
from bytecheckpoint.world import world_of
from tests.support.coded import files_of, found_step, load_step, states
from tests.support.modes import MODES
from tests.support.processes import running, state_of, wait_until
from tests.support.programs import forked
from tests.support.ranks import check_recovery, save_all, saved
from tests.support.worlds import Worlds

ROWS = 3000
#: Seconds that a rank waits for the others in one step; generous, because test machines are busy.
TIMEOUT = 8.0


def report_of(folder: Path, rank: int) -> dict[str, Any]:
    """Return the last report of a rank."""
    try:
        facts: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    except FileNotFoundError:
        return {"committed": 0}
    return facts


def save_until_failure(folder: Path, path: Path, first: int, mode: str, writer: str) -> None:
    """Save steps to one path until a save fails; keep a report in `folder`, which outlives a killed rank."""
    rank, world, step = dist.get_rank(), dist.get_world_size(), first
    bytecheckpoint.configure(timeout=TIMEOUT, writer=writer)
    facts: dict[str, Any] = {"committed": 0}

    def report(**news: Any) -> None:
        facts.update(news)
        (folder / f"{rank}.tmp").write_text(json.dumps(facts))
        os.replace(folder / f"{rank}.tmp", folder / f"{rank}.json")

    try:
        while True:
            bytecheckpoint.save(path, states(rank, world, step, ROWS), **MODES[mode]).result(30)
            if step == first:
                helper = world_of(current()).resources.running_helper
                if rank == 0:
                    catalog, _ = read_catalog(resolve(path))
                    named = {f.name for f in catalog.files} | {"metadata.parquet"}
                    report(leftovers=[name for name in files_of(path) if name not in named])
                dist.barrier()
                report(helper=helper.pid if helper else 0)
            report(committed=step)
            step += 1
    except bytecheckpoint.CheckpointError as error:
        report(error=type(error).__name__, message=str(error), when=time.monotonic())
    except RuntimeError as error:  # of torch's barrier
        report(error="gloo", message=str(error)[:100], when=time.monotonic())


def kill_a_rank(worlds: Worlds, folder: Path, first: int, dice: random.Random) -> dict[str, Any]:
    """Kill a random rank of a new world at a random moment of its saves; return what happened to each rank."""
    notes, path = folder / f"notes-{first}", folder / "checkpoint"
    notes.mkdir()
    size = dice.choice([2, 3])
    victim, mode, writer = dice.randrange(size), dice.choice(list(MODES)), dice.choice(["process", "thread"])
    survivors = [rank for rank in range(size) if rank != victim]
    world = worlds.fresh(size)
    world.run(os.getpid)  # the process group exists before the saves
    world.start(save_until_failure, notes, path, first, mode, writer)
    # Half of the kills happen in the first save of a world, which may be the first of the path, half in later ones.
    steady = dice.random() < 0.5
    started = wait_until(lambda: not steady or report_of(notes, victim)["committed"] > 0, 60)
    time.sleep(dice.uniform(0, 0.12 if steady else 0.6))
    world.processes[victim].kill()
    killed = time.monotonic()
    ended = world.outcomes(timeout=100, grace=100)
    facts = [report_of(notes, rank) for rank in range(size)]
    helpers = [fact["helper"] for fact in facts if fact.get("helper")]
    return {
        "victim": victim, "mode": mode, "writer": writer, "steady": steady, "started": started, "first": first,
        "survivors": [ended[rank] for rank in survivors],
        "errors": [facts[rank].get("error", "none") for rank in survivors],
        "messages": [facts[rank].get("message", "") for rank in survivors],
        "seconds": max(facts[rank].get("when", killed) - killed for rank in survivors),
        "committed": max(fact["committed"] for fact in facts),
        "found": found_step(path, rows=ROWS),
        "leftovers": facts[0].get("leftovers", []),
        "helpers ended": wait_until(lambda: not any(map(running, helpers)), 5),
    }  # fmt: skip


def kill_ranks(worlds: Worlds, folder: Path, kills: int, seed: int) -> None:
    """Kill ranks again and again; fail unless one whole step remains, as new as the reports say, and nothing hangs."""
    dice, before, first = random.Random(seed), 0, 1
    for number in range(kills):
        fact = kill_a_rank(worlds, folder, first, dice)
        where = f"kill {number}: {fact}"
        assert all(ok for ok, _ in fact["survivors"]), f"a survivor hangs or died. {where}"
        assert fact["started"], where
        assert fact["seconds"] < (24.0 if fact["steady"] else 45.0), f"survivors waited too long. {where}"
        # A save may have been committed with no survivor to report it.
        last = fact["committed"] or before
        assert fact["found"] in (last, max(last, first - 1) + 1), where
        allowed = {"PeerLostError"} if fact["steady"] else {"PeerLostError", "CheckpointTimeoutError", "gloo"}
        assert set(fact["errors"]) <= allowed, where
        assert fact["leftovers"] == [], where
        assert fact["helpers ended"], where
        before = fact["found"]
        first = max(fact["found"], fact["committed"], first) + 1000


@pytest.mark.timeout(300)
def test_kill_a_random_rank_during_saves_and_overwrites(worlds: Worlds, tmp_path: Path) -> None:
    kill_ranks(worlds, tmp_path, 6, seed=20240720)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kill_a_random_rank_sixty_times(worlds: Worlds, tmp_path: Path) -> None:
    kill_ranks(worlds, tmp_path, 60, seed=int(time.time()))


@pytest.fixture
def helper() -> Any:
    """Return a function that returns the running helper process."""
    bytecheckpoint.configure(writer="process", timeout=3.0)
    return world_of(current()).resources.helper


def test_the_writer_process_is_killed_during_a_save(path: Path, helper: Any) -> None:
    rows = 100_000  # 96 MB
    bytecheckpoint.save(path, states(step=1, rows=rows), async_checkpoint=True).result(30)
    before = files_of(path)
    pid = helper().pid
    handle = bytecheckpoint.save(path, states(step=2, rows=rows), async_checkpoint=True)
    assert wait_until(lambda: files_of(path) != before, 20)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match=r"rank 0, write: the writer process died"):
        handle.result(20)
    assert handle.staged.done() and handle.committed.done()
    assert load_step(path, rows=rows) == 1 and files_of(path) == before
    assert bytecheckpoint.save(path, states(step=4), async_checkpoint=True).result(30).bytes_written > 0
    assert helper().pid != pid
    assert load_step(path) == 4 and len(files_of(path)) == len(before)


def test_the_writer_process_is_killed_between_saves(path: Path, helper: Any) -> None:
    bytecheckpoint.save(path, states(step=1), async_checkpoint=True).result(30)
    for step in range(2, 6):
        # The process may still count as running while its threads end, so the save must not wait.
        os.kill(helper().pid, signal.SIGKILL)
        bytecheckpoint.save(path, states(step=step), async_checkpoint=True).result(30)
        assert load_step(path) == step


def test_the_writer_process_of_one_rank_is_killed_while_it_gets_a_message(path: Path) -> None:
    """It stops once it has files, so that what it is sent stays in its pipe, and dies: all ranks raise the same error."""
    bytecheckpoint.configure(writer="process", timeout=20.0)
    rows, world = 100_000, saved(path, 2, rows=100_000, **MODES["async"])
    before = set(files_of(path))
    helper = world_of(world.ranks[1]).resources.running_helper
    assert helper is not None
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save_all, world, path, 2, rows=rows, **MODES["async"])
        assert wait_until(lambda: any("rank-00001" in name for name in {*files_of(path)} - before), 20)
        os.kill(helper.pid, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(helper.pid, signal.SIGKILL)
    for error in saving.result():
        assert isinstance(error, CheckpointError) and "rank 1, write: the writer process died" in str(error), error
    assert load_step(path, rows=rows) == 1 and {*files_of(path)} == before
    check_recovery(world, path, "async")


def test_a_writer_process_that_hangs_ends_the_save_in_time(path: Path, helper: Any) -> None:
    bytecheckpoint.save(path, states(step=1), async_checkpoint=True).result(30)
    pid = helper().pid
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: state_of(pid) == "T", 5)
    begun = time.monotonic()
    handle = bytecheckpoint.save(path, states(step=2), async_checkpoint=True)
    with pytest.raises(CheckpointTimeoutError, match=r"rank 0, write: the writer process did not finish"):
        handle.result(40)
    assert time.monotonic() - begun < 20
    assert not Path(f"/proc/{pid}").exists() or load_step(path) == 1
    bytecheckpoint.save(path, states(step=4), async_checkpoint=True).result(30)
    assert load_step(path) == 4


TRAINER = """
import os, sys, time, torch, bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.world import world_of
from tests.support.coded import states
path = sys.argv[1]
os.setsid()
bytecheckpoint.save(path, states(step=1, rows=200), async_checkpoint=True).result(60)
if os.fork() == 0:  # as the workers of a DataLoader: holds copies of all descriptors, outlives the trainer
    sys.stdout.close()
    time.sleep(30)
    os._exit(0)
big = states(step=2, rows=100_000)
print(os.getpid(), world_of(current()).resources.running_helper.pid, flush=True)
while True:
    handle = bytecheckpoint.save(path + "-big", big, async_checkpoint=True)
    print("saving", flush=True)
    handle.result(60)
"""


@pytest.mark.timeout(120)
def test_the_writer_process_ends_when_the_trainer_is_killed(path: Path) -> None:
    trainer = subprocess.Popen(
        forked("-c", TRAINER, path), stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert trainer.stdout is not None
    try:
        group, pid = map(int, trainer.stdout.readline().split())
        assert trainer.stdout.readline() == "saving\n"
        time.sleep(0.1)
        trainer.kill()
        trainer.wait(10)
        assert wait_until(lambda: not running(pid), 5), "the helper process outlives its trainer"
        assert load_step(path, rows=200) == 1
    finally:
        trainer.kill()
        trainer.wait(10)
    os.killpg(group, signal.SIGKILL)  # the child that outlives the trainer
    left = files_of(str(path) + "-big")
    bytecheckpoint.save(str(path) + "-big", states(step=5))
    after = files_of(str(path) + "-big")
    assert len(after) == 6, f"{len(left)} files were left and {len(after)} are there now: {after}"
    assert load_step(str(path) + "-big") == 5
