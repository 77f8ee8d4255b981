"""The helper process: what its client does when it misbehaves."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint.engine.helper import HelperProcess
from bytecheckpoint.engine.image_writer import HelperWriter, WriteJob
from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.engine.writing import FileTask
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.failures import Cancellation, Failure
from bytecheckpoint.storage import resolve
from bytecheckpoint.tuning import tuned

_CLOSES_ITS_CHANNEL = f"""#!{sys.executable}
import os, sys, time
channel = int(sys.argv[-2])
os.read(channel, 1 << 20)
os.close(channel)
time.sleep(60)
"""


def test_a_call_fails_when_the_helper_has_closed_its_channel_but_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(_CLOSES_ITS_CHANNEL)
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    helper = HelperProcess()
    with tuned(helper_end=0.1), pytest.raises(CheckpointError, match="closed its channel during 'ping' and has not"):
        helper.call({"op": "ping"}, timeout=20.0)
    assert not helper.alive


def test_the_helper_of_a_lost_process_ends_without_the_code_of_others() -> None:
    """Coverage's `os._exit` stores data, and crashed where the main thread was about to do so too."""
    program = (
        "import os; from bytecheckpoint.engine import helper_server; os._exit = print; helper_server._end_with(-1)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


STOPPED = Failure("CheckpointError", "no space", rank=1)


def helper_writer(helper: HelperProcess, folder: Path, nbytes: int, cancel: Cancellation) -> HelperWriter:
    """Return a writer of a file with a header of 8 bytes and a data section of `nbytes`."""
    job = WriteJob([FileTask("x", 8, nbytes, 1 << 20)], resolve(folder), bytecheckpoint.settings(), cancel)
    return HelperWriter(job, lambda: helper, StagingPool(), stable=False)


def call_until_it_fails(writer: HelperWriter) -> None:
    """A stop takes another way than the calls, which may overtake it."""
    while True:
        writer.sums()


def test_a_job_is_stopped_and_the_next_one_is_not(tmp_path: Path) -> None:
    bytecheckpoint.configure(direct_io="off")
    helper = HelperProcess()
    cancel = Cancellation()
    writer = helper_writer(helper, tmp_path, 1 << 20, cancel)
    writer.open()
    cancel.set(STOPPED)
    with pytest.raises(CheckpointError, match="another rank failed"):
        call_until_it_fails(writer)
    writer.abort()
    assert list(tmp_path.iterdir()) == []
    writer = helper_writer(helper, tmp_path, 0, Cancellation())
    writer.open()
    writer.sums()
    writer.finish([b"8 bytes."])
    assert (tmp_path / "x").read_bytes() == b"8 bytes."
    helper.stop()


def test_a_stop_may_come_before_its_job(tmp_path: Path) -> None:
    helper = HelperProcess()
    cancel = Cancellation()
    writer = helper_writer(helper, tmp_path, 1 << 20, cancel)
    cancel.set(STOPPED)
    with pytest.raises(CheckpointError, match="rank 1: no space"):
        writer.open()
    with pytest.raises(CheckpointError):
        call_until_it_fails(writer)
    helper.stop()
