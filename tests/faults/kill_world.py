"""A program that starts worlds of gloo ranks, kills one with SIGKILL at a random moment, and judges what is left.

    python -m tests.faults.kill_world FOLDER KILLS SEED

Importing torch takes seconds and a world lives for one kill, so this process imports everything, starts no thread,
and forks the ranks. It prints one JSON object per kill; the test reads them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.loading.saved import read_catalog
from bytecheckpoint.saving.saver import saver_of
from bytecheckpoint.storage import resolve
from tests.faults.coded import files_of, load_step, states

ROWS = 3000
#: Seconds that a rank waits for the others in one step; generous, because test machines are busy.
TIMEOUT = 8.0
MODES: list[dict[str, Any]] = [
    {},
    {"async_checkpoint": True},
    {"async_checkpoint": True, "staging": "background"},
]


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:  # noqa: BLE001  the end of this process
        sys.stderr.write(f"child {os.getpid()}: {error!r}\n")
    finally:
        os._exit(code)


def rank_program(note: Path, path: Path, rank: int, world: int, first: int, mode: dict[str, Any], writer: str) -> None:
    """Save step after step over one path, until something fails; says in files what happened."""
    bytecheckpoint.configure(timeout=TIMEOUT, writer=writer)
    said: dict[str, Any] = {"committed": 0}

    def say(**facts: Any) -> None:
        said.update(facts)
        (note / f"{rank}.tmp").write_text(json.dumps(said))
        os.replace(note / f"{rank}.tmp", note / f"{rank}.json")

    step = first
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{note}/store", rank=rank, world_size=world, timeout=timedelta(seconds=10)
        )
        while True:
            handle = bytecheckpoint.save(path, states(rank, world, step, ROWS), **mode)
            handle.result(30)
            if step == first:
                helper = saver_of(current())._helper
                if rank == 0:
                    catalog, _ = read_catalog(resolve(path))
                    named = sorted([f.name for f in catalog.files] + ["metadata.parquet"])
                    say(leftovers=[name for name in files_of(path) if name not in named])
                dist.barrier()
                say(helper=helper.pid if helper else 0)
            say(committed=step)
            step += 1
    except bytecheckpoint.CheckpointError as error:
        say(error=type(error).__name__, message=str(error), when=time.monotonic())
    except RuntimeError as error:  # gloo's own: this program's start and barrier, not the package
        say(error="gloo", message=str(error)[:100], when=time.monotonic())


def told(note: Path, rank: int) -> dict[str, Any]:
    """What a rank has said so far."""
    try:
        facts: dict[str, Any] = json.loads((note / f"{rank}.json").read_text())
    except FileNotFoundError:
        return {"committed": 0}
    return facts


def alive(pid: int) -> bool:
    """Whether a process runs (one that has ended and waits for its parent does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def one_kill(folder: Path, number: int, first: int, dice: random.Random) -> dict[str, Any]:
    """A world, a kill, a verdict."""
    note, path = folder / f"note-{number}", folder / "checkpoint"
    note.mkdir()
    world = dice.choice([2, 3])
    victim = dice.randrange(world)
    mode, writer = dice.choice(MODES), dice.choice(["process", "thread"])
    pids = [
        fork(lambda rank=rank: rank_program(note, path, rank, world, first, mode, writer))  # type: ignore[misc]
        for rank in range(world)
    ]
    try:
        # Half of the kills come while the first save of a path or of a world runs, half in steady state.
        steady = dice.random() < 0.5
        started = wait_for(lambda: told(note, victim)["committed"] > 0 or not steady, 60)
        time.sleep(dice.uniform(0, 0.12 if steady else 1.2))
        os.kill(pids[victim], signal.SIGKILL)
        killed = time.monotonic()
        survivors = [rank for rank in range(world) if rank != victim]
        ended = wait_for(lambda: all("error" in told(note, rank) for rank in survivors), 60)
    finally:
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    facts = [told(note, rank) for rank in range(world)]
    helpers = [fact["helper"] for fact in facts if fact.get("helper")]
    verdict = fork(lambda: (note / "found").write_text(str(found_step(path))) and None)
    _, status = os.waitpid(verdict, 0)
    return {
        "world": world,
        "victim": victim,
        "mode": mode,
        "writer": writer,
        "steady": steady,
        "started": started,
        "survivors_ended": ended,
        "errors": [facts[rank].get("error", "none") for rank in survivors],
        "messages": [facts[rank].get("message", "") for rank in survivors],
        "seconds": max([facts[rank].get("when", killed) - killed for rank in survivors]),
        "committed": max(fact["committed"] for fact in facts),
        "found": int((note / "found").read_text()) if status == 0 else None,
        "leftovers": facts[0].get("leftovers", []),
        "helpers_ended": wait_for(lambda: not any(map(alive, helpers)), 5),
        "first": first,
    }


def found_step(path: Path) -> int:
    """The one step that the checkpoint holds, 0 for none; fails on a mixture or damage."""
    try:
        return load_step(path, rows=ROWS)
    except bytecheckpoint.CheckpointNotFoundError:
        return 0


def main() -> None:
    """Kill, report, again."""
    folder, kills, dice = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    first = 1
    for number in range(kills):
        facts = one_kill(folder, number, first, dice)
        print(json.dumps(facts), flush=True)
        first = max(facts["found"] or 0, facts["committed"], first) + 1000


if __name__ == "__main__":
    main()
