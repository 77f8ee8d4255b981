"""Trainers that end or fork during saves: the save commits, no message is printed, and no process hangs or remains."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scenarios import ROWS, SCENARIOS
from tests.support.coded import files_of, load_step
from tests.support.processes import ROOT, environment, running, wait_until
from tests.support.programs import forked
from tests.support.variants import quick

pytestmark = pytest.mark.timeout(400)

#: Exit codes other than 0.
CODES = {"end_by_sys_exit": 3, "end_by_an_exception": 1, "end_by_interrupt": -2, "end_by_sigterm": -15}


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Run the scenarios of this run in one program, which imports torch once; return their folder, how each ended."""
    folder = tmp_path_factory.mktemp("scenarios")
    names = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    done = subprocess.run(
        forked("-m", "tests.faults.scenarios", folder, *names),
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, {fact["name"]: fact for fact in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", quick(SCENARIOS, every=2))
def test_end(name: str, played: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, facts = played
    fact, path = facts[name], folder / name / "s"
    assert not fact["hangs"], fact
    assert fact["code"] == CODES.get(name, 0), fact
    if name == "end_by_an_exception":
        assert "ValueError: the training loop broke" in fact["stderr"] and fact["stderr"].count("Traceback") == 1, fact
    elif name == "end_by_interrupt":
        assert "KeyboardInterrupt" in fact["stderr"] and fact["stderr"].count("Traceback") == 1, fact
    elif name == "end_with_a_failing_save":
        assert "asynchronous save" in fact["stderr"] and "failed" in fact["stderr"], "no failure is silent"
        assert "Traceback" not in fact["stderr"], fact
    else:
        lines = [line for line in fact["stderr"].splitlines() if "passes through a staging pool" not in line]
        assert not lines, fact
    step = load_step(path, rows=ROWS)
    assert step == 2 or (name == "end_by_sigterm" and step == 1), "a save in flight is finished"
    assert len(files_of(path)) <= 6 or name == "end_by_sigterm"
    if name == "end_with_flushes_in_flight":
        assert [load_step(folder / name / str(step), rows=ROWS) for step in (3, 4)] == [3, 4]
    if (folder / name / "helper").exists():
        helper = int((folder / name / "helper").read_text())
        assert wait_until(lambda: not running(helper), 5), "the helper process outlives its trainer"
