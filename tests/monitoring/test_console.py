"""Progress lines of rank 0."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
from pathlib import Path

import pytest

from bytecheckpoint.monitoring.analysis.summary import summarize
from bytecheckpoint.monitoring.progress import OperationProgress
from bytecheckpoint.monitoring.simulation import Fault, SimulatedRun
from bytecheckpoint.monitoring.sinks.console import ConsoleSink
from tests.support.programs import forked

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


def test_a_save_shows_on_a_terminal_how_far_it_is(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    program = subprocess.Popen(forked("-c", _PROGRAM, tmp_path), stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # what a terminal without a writer answers
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    assert program.wait(60) == 0, shown
    assert b"save step 5, rank 0 in write" in shown


@pytest.mark.parametrize(("fault", "outcome"), [("fail", "failed"), ("missing", "done"), ("retry", "done")])
def test_only_a_rank_that_failed_makes_it_failed(capsys: pytest.CaptureFixture[str], fault: str, outcome: str) -> None:
    (record,) = SimulatedRun({"dp": 2}, saves=1, loads=0, faults=[Fault(fault, [1])]).records()
    sink = ConsoleSink("console")
    ranks = {"rank": [0], "host": [""], "phase": ["write"], "seconds": [1.0], "done": [1], "planned": [2]}
    sink.progress(OperationProgress(record.id, "save", record.path, 1, 2, 0.0, 1e9, False, ranks))
    sink.deliver(record, summarize(record))
    first, *_, last = capsys.readouterr().err.splitlines()
    assert (
        "rank 0 in write: 0 of 0 MiB" in first
        and first.endswith("s, about 1.0 s left")
        and last == f"save {record.path}: {outcome}"
    )
