"""The helper process: what its client does when it misbehaves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bytecheckpoint.engine.helper import HelperProcess
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.tuning import tuned

_CLOSES_ITS_CHANNEL = f"""#!{sys.executable}
import os, sys, time
channel = int(sys.argv[-1])
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
