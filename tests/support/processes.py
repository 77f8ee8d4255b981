"""Child processes: how to start programs of this repository, and what has become of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.support.programs import forked

__all__ = ["ROOT", "environment", "interrupted", "python", "run_program", "running", "state_of", "wait_until"]

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """Return the environment of a program that imports the package and its tests."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def python(*arguments: object) -> list[str]:
    """Return the command that runs this interpreter."""
    return [sys.executable, *map(str, arguments)]


def run_program(code: str, *arguments: object, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python code that imports the package and its tests; return its exit code and output.

    Args:
        code: the program.
        *arguments: its arguments.
        fresh: True for a process that imports by itself what it needs; else it begins with torch, which is faster.
    """
    command = (python if fresh else forked)("-c", code, *arguments)
    return subprocess.run(
        command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False
    )


def interrupted(command: list[str], number: signal.Signals, begun: Callable[[], object]) -> tuple[int, str]:
    """Send a signal to a command that has begun; return its exit code and errors."""
    # A program in the background of a shell, or below nohup, ignores some signals, and so would its children.
    heed = partial(signal.signal, number, signal.SIG_DFL)
    pipes = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": heed}
    with subprocess.Popen(command, **pipes) as process:  # waits at its end
        while not begun() and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    return process.returncode, err


def state_of(pid: int) -> str:
    """Return the state of a process: "R", "S", "T" (stopped), "Z" (ended, not waited for), ...; "" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def running(pid: int) -> bool:
    """Return whether a process has not ended."""
    return state_of(pid) not in ("", "Z")


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether `condition` came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
