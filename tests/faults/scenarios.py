"""A program that runs trainers that end or fork, each in its own process, and prints how each ended.

    python -m tests.faults.scenarios FOLDER NAME...

This process imports torch once, starts no thread, and forks the trainers. A trainer ends as any program does: `main`
returns or raises, and the interpreter shuts down. The output is one JSON object for each scenario.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.world import world_of
from tests.support.coded import load_step, states

ROWS = 20_000
LIMIT = 60.0
BACKGROUND = {"staging": "background"}

Scenario = Callable[[Path], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Add a scenario under the name of its function."""
    SCENARIOS[function.__name__] = function
    return function


def save(path: str | Path, step: int, **options: Any) -> bytecheckpoint.SaveHandle:
    """Begin an asynchronous save."""
    return bytecheckpoint.save(path, states(step=step, rows=ROWS), async_checkpoint=True, **options)


def save_again(path: Path) -> None:
    """Save step 1, note the process id of the helper process, and begin to save step 2."""
    save(path, 1).result(LIMIT)
    helper = world_of(current()).resources.running_helper
    (path.parent / "helper").write_text(str(helper.pid if helper else 0))
    save(path, 2)


def wait_for(pid: int, seconds: float) -> int | None:
    """Wait for a child process; return its status, or kill it and return None if it does not end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


# --- ends -------------------------------------------------------------------------------------------------------


SMALL_POOL = {"staging_bytes": 2 << 20, "chunk_bytes": 1 << 20}
#: Scenarios that end right after a save: the settings, and the options of the save.
ENDS_AFTER_A_SAVE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "end_right_after_an_async_save": ({}, {}),
    "end_right_after_a_background_save": ({}, BACKGROUND),
    "end_with_the_thread_writer": ({"writer": "thread"}, BACKGROUND),
    "end_with_a_small_pool": (SMALL_POOL, BACKGROUND),
    "end_with_a_small_pool_and_the_thread_writer": ({**SMALL_POOL, "writer": "thread"}, BACKGROUND),
}


def end_after_a_save(path: Path, settings: dict[str, Any], options: dict[str, Any]) -> None:
    bytecheckpoint.configure(**settings)
    save(path, 2, **options)


for name, case in ENDS_AFTER_A_SAVE.items():
    SCENARIOS[name] = lambda path, case=case: end_after_a_save(path, *case)


@scenario
def end_with_several_copying_threads(path: Path) -> None:
    torch.set_num_threads(4)  # the tests' environment says one
    save(path, 2, **BACKGROUND)


@scenario
def end_with_three_saves_in_flight(path: Path) -> None:
    for step in (4, 3, 2):
        save(path, step, **BACKGROUND)


@scenario
def end_with_flushes_in_flight(path: Path) -> None:
    bytecheckpoint.configure(tier_hot=str(path.parent / "hot"))
    for step, folder in ((4, path.parent / "4"), (3, path.parent / "3"), (2, path)):
        save(f"tier+file://{folder}", step)


@scenario
def end_with_the_second_save_in_flight(path: Path) -> None:
    save_again(path)


@scenario
def end_by_sys_exit(path: Path) -> None:
    save(path, 2)
    sys.exit(3)


@scenario
def end_by_an_exception(path: Path) -> None:
    save(path, 2)
    raise ValueError("the training loop broke")


@scenario
def end_by_interrupt(path: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores SIGINT
    save(path, 2)
    signal.raise_signal(signal.SIGINT)


@scenario
def end_by_sigterm(path: Path) -> None:
    save_again(path)
    signal.raise_signal(signal.SIGTERM)


@scenario
def end_by_sigterm_with_a_handler(path: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    save(path, 1).result(LIMIT)
    save(path, 2)
    signal.raise_signal(signal.SIGTERM)


@scenario
def end_after_a_sync_save(path: Path) -> None:
    bytecheckpoint.save(path, states(step=2, rows=ROWS))


@scenario
def end_after_a_load(path: Path) -> None:
    bytecheckpoint.save(path, states(step=2, rows=ROWS))
    assert load_step(path, rows=ROWS) == 2
    checkpoint = bytecheckpoint.open(path)
    assert checkpoint["model/bias"][...].shape == (40,)


@scenario
def end_after_prepare(path: Path) -> None:
    bytecheckpoint.prepare(states(step=2, rows=ROWS))
    bytecheckpoint.save(path, states(step=2, rows=ROWS))
    bytecheckpoint.prepare(states(step=2, rows=ROWS))


@scenario
def end_with_a_failing_save(path: Path) -> None:
    save(path, 2).result(LIMIT)
    (path.parent / "file").write_text("in the way")
    save(path.parent / "file" / "s", 3, **BACKGROUND)


@scenario
def end_with_a_save_in_an_exit_hook(path: Path) -> None:
    bytecheckpoint.save(path, states(step=2, rows=ROWS))

    def hook() -> None:
        # A failed assertion would be printed, and standard error must stay empty.
        with pytest.raises(bytecheckpoint.UsageError, match="while the interpreter ends"):
            bytecheckpoint.save(path, states(step=3, rows=ROWS))

    atexit.register(hook)


# --- forks ------------------------------------------------------------------------------------------------------


def child(work: Callable[[], None], *, clean: bool) -> None:
    """Run `work` in a forked child; fail unless it succeeds in time. A `clean` child shuts its interpreter down."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(LIMIT / 2))  # ends a child that hangs
        try:
            work()
        except BaseException as error:  # noqa: BLE001  the end of this process
            sys.stderr.write(f"fork: {error!r}\n")
            os._exit(1)
        sys.exit(0) if clean else os._exit(0)
    status = wait_for(pid, LIMIT)
    assert status == 0, "the fork hangs" if status is None else f"the fork ended with status {status}"


def save_and_load(path: Path, step: int) -> None:
    bytecheckpoint.save(path, states(step=step, rows=ROWS))
    assert load_step(path, rows=ROWS) == step
    save(path, step + 1).result(LIMIT / 3)
    assert load_step(path, rows=ROWS) == step + 1


@scenario
def fork_after_saves(path: Path) -> None:
    save(path, 1).result(LIMIT)
    bytecheckpoint.save(path, states(step=2, rows=ROWS))
    assert load_step(path, rows=ROWS) == 2
    child(lambda: save_and_load(path.parent / "forked", 5), clean=False)
    child(lambda: save_and_load(path.parent / "forked", 7), clean=True)
    assert load_step(path.parent / "forked", rows=ROWS) == 8
    save(path, 2).result(LIMIT)


@scenario
def fork_during_a_save(path: Path) -> None:
    save(path, 1).result(LIMIT)
    for number in range(3):
        handle = save(path, 2, **BACKGROUND)
        time.sleep(0.01 * number)
        child(lambda: save_and_load(path.parent / "forked", 5), clean=True)
        handle.result(LIMIT)


@scenario
def fork_that_ends_at_once(path: Path) -> None:
    save(path, 1).result(LIMIT)
    for _ in range(3):
        handle = save(path, 2, **BACKGROUND)
        child(lambda: None, clean=True)
        handle.result(LIMIT)


@scenario
def fork_with_the_thread_writer(path: Path) -> None:
    bytecheckpoint.configure(writer="thread")
    fork_during_a_save(path)


@scenario
def fork_by_multiprocessing(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    handle = save(path, 2)
    processes = [context.Process(target=save_and_load, args=(path.parent / f"forked{n}", 5)) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
        assert process.exitcode == 0, process.exitcode
    handle.result(LIMIT)


@scenario
def fork_of_dataloader_workers(path: Path) -> None:
    for step in (4, 3, 2):
        handle = save(path, step, **BACKGROUND)
        seen = sum(int(batch.sum()) for batch in DataLoader(torch.arange(64), batch_size=4, num_workers=2))  # type: ignore[arg-type]
        assert seen == 64 * 63 // 2
        handle.result(LIMIT)


# ----------------------------------------------------------------------------------------------------------------


def play(folder: Path, name: str) -> dict[str, Any]:
    """Run a scenario in its own process; return how it ended and what it printed."""
    (folder / name).mkdir()
    path = folder / name / "s"
    pid = os.fork()
    if pid == 0:
        for number in (1, 2):
            os.dup2(os.open(folder / name / f"{number}", os.O_CREAT | os.O_WRONLY), number)
        SCENARIOS[name](path)
        sys.exit(0)  # unwinds to the end of this program, as any trainer does
    status = wait_for(pid, 2 * LIMIT)
    return {
        "name": name,
        "hangs": status is None,
        "code": None if status is None else os.waitstatus_to_exitcode(status),
        "stderr": (folder / name / "2").read_text(),
    }


def main() -> None:
    """Run the named scenarios."""
    folder = Path(sys.argv[1])
    gc.freeze()  # else the end of each trainer visits all of torch, which takes most of a second
    for name in sys.argv[2:]:
        print(json.dumps(play(folder, name)), flush=True)


if __name__ == "__main__":
    main()
