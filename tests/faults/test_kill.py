"""kill -9 of ranks, of the writer process and of the trainer, at any moment of a save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointError, CheckpointTimeoutError
from bytecheckpoint.collectives import current
from bytecheckpoint.saving.saver import saver_of
from tests.faults.coded import files_of, load_step, states

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    source = str(Path(bytecheckpoint.__file__).resolve().parents[1])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([source, str(ROOT)])}


def kill_ranks(folder: Path, kills: int, seed: int, timeout: float) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.kill_world", str(folder), str(kills), str(seed)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    facts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(facts) == kills
    return facts


def judge(facts: list[dict[str, Any]]) -> None:
    """After every kill: one whole step, at least the last that anybody was told of; nobody waits; nothing piles up."""
    before = 0
    for number, fact in enumerate(facts):
        where = f"kill {number}: {fact}"
        assert fact["survivors_ended"], f"a survivor hangs. {where}"
        assert fact["started"], where
        # "gloo": the rank died while torch's own group was still connecting, which has time limits of its own.
        patience = 24.0 if fact["steady"] else 100.0 if "gloo" in fact["errors"] else 45.0
        assert fact["seconds"] < patience, f"survivors waited too long. {where}"
        assert fact["found"] is not None, f"the checkpoint cannot be loaded. {where}"
        # A save may have been committed without anybody living to tell; never more than one.
        last = fact["committed"] or before
        assert fact["found"] in (last, max(last, fact["first"] - 1) + 1), where
        allowed = {"PeerLostError"} if fact["steady"] else {"PeerLostError", "CheckpointTimeoutError", "gloo"}
        assert set(fact["errors"]) <= allowed, where
        assert fact["leftovers"] == [], where
        assert fact["helpers_ended"], where
        before = fact["found"]


@pytest.mark.timeout(150)
def test_kill_a_random_rank_during_saves_and_overwrites(tmp_path: Path) -> None:
    judge(kill_ranks(tmp_path, 12, seed=20240720, timeout=140))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_a_random_rank_sixty_times(tmp_path: Path) -> None:
    judge(kill_ranks(tmp_path, 60, seed=int(time.time()), timeout=880))


@pytest.fixture
def helper() -> Iterator[Any]:
    """The writer process of this process's saves, running."""
    bytecheckpoint.configure(writer="process", timeout=3.0)
    saver = saver_of(current())
    yield lambda: saver.helper(bytecheckpoint.settings())
    saver.drain()
    saver._failed = None


def stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_writer_process_is_killed_during_a_save(tmp_path: Path, helper: Any) -> None:
    path = tmp_path / "s"
    bytecheckpoint.save(path, states(step=1), async_checkpoint=True).result(30)
    before = files_of(path)
    pid = helper().pid
    stopped(pid)
    handle = bytecheckpoint.save(path, states(step=2), async_checkpoint=True)
    time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match=r"rank 0, write: the writer process died"):
        handle.result(20)
    assert handle.staged.done() and handle.committed.done()
    assert load_step(path) == 1 and files_of(path) == before
    with pytest.raises(CheckpointError, match="earlier asynchronous save failed"):
        bytecheckpoint.save(path, states(step=3), async_checkpoint=True)
    assert bytecheckpoint.save(path, states(step=4), async_checkpoint=True).result(30).bytes_written > 0
    assert helper().pid != pid
    assert load_step(path) == 4 and len(files_of(path)) == len(before)


def test_the_writer_process_is_killed_between_saves(tmp_path: Path, helper: Any) -> None:
    path = tmp_path / "s"
    bytecheckpoint.save(path, states(step=1), async_checkpoint=True).result(30)
    os.kill(helper().pid, signal.SIGKILL)
    time.sleep(0.1)
    bytecheckpoint.save(path, states(step=2), async_checkpoint=True).result(30)
    assert load_step(path) == 2


def test_a_writer_process_that_hangs_ends_the_save_in_time(tmp_path: Path, helper: Any) -> None:
    path = tmp_path / "s"
    bytecheckpoint.save(path, states(step=1), async_checkpoint=True).result(30)
    pid = helper().pid
    stopped(pid)
    begun = time.monotonic()
    handle = bytecheckpoint.save(path, states(step=2), async_checkpoint=True)
    with pytest.raises(CheckpointTimeoutError, match=r"rank 0, write: the writer process did not finish"):
        handle.result(40)
    assert time.monotonic() - begun < 20
    assert not Path(f"/proc/{pid}").exists() or load_step(path) == 1
    with pytest.raises(CheckpointError, match="earlier asynchronous save failed"):
        bytecheckpoint.save(path, states(step=3))
    bytecheckpoint.save(path, states(step=4), async_checkpoint=True).result(30)
    assert load_step(path) == 4


TRAINER = """
import os, sys, time, torch, bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.saving.saver import saver_of
from tests.faults.coded import states
path = sys.argv[1]
bytecheckpoint.save(path, states(step=1, rows=200), async_checkpoint=True).result(60)
if os.fork() == 0:  # as the workers of a DataLoader: holds copies of all descriptors, outlives the trainer
    sys.stdout.close()
    time.sleep(30)
    os._exit(0)
big = states(step=2, rows=400_000)
print(saver_of(current())._helper.pid, flush=True)
while True:
    handle = bytecheckpoint.save(path + "-big", big, async_checkpoint=True)
    print("saving", flush=True)
    handle.result(60)
"""


@pytest.mark.timeout(120)
def test_the_writer_process_ends_when_the_trainer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(path)],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert trainer.stdout is not None
    try:
        pid = int(trainer.stdout.readline())
        assert trainer.stdout.readline() == "saving\n"
        time.sleep(0.1)
        trainer.kill()
        trainer.wait(10)
        deadline = time.monotonic() + 5
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1][:3]:
            assert time.monotonic() < deadline, "the writer process outlives its trainer"
            time.sleep(0.05)
        assert load_step(path, rows=200) == 1
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait(10)
    left = files_of(str(path) + "-big")
    bytecheckpoint.save(str(path) + "-big", states(step=5))
    after = files_of(str(path) + "-big")
    assert len(after) == 6, f"{len(left)} files were left and {len(after)} are there now: {after}"
    assert load_step(str(path) + "-big") == 5
