"""Progress lines of rank 0."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import sys, torch, bytecheckpoint
from bytecheckpoint.storage.testing.fault_rule import FaultRule
from bytecheckpoint.storage.testing.wrappers import FaultyStorage
from bytecheckpoint.storage import resolve
from bytecheckpoint.monitoring.sinks import console
from bytecheckpoint.tuning import tuned

console._LINE_SECONDS = 0.0
bytecheckpoint.configure(metrics="console", writer="thread")
storage = FaultyStorage(resolve(sys.argv[1] + "/step_00000005"), [FaultRule("write", delay=0.5)])
with tuned(progress_interval=0.05):
    bytecheckpoint.save(storage, {"model": torch.nn.Linear(64, 64)})
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_save_shows_how_far_it_is(tmp_path: Path, terminal: bool) -> None:
    ours, theirs = pty.openpty() if terminal else os.pipe()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    program = subprocess.Popen([sys.executable, "-c", _PROGRAM, str(tmp_path)], stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # what a terminal without a writer answers
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    assert program.wait(60) == 0, shown
    assert b"save step 5, rank 0 in write" in shown
    assert terminal or b"step_00000005: done" in shown
