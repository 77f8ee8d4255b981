"""JSON of every verb: one document on stdout, whose members the reference names."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.cli.app import app
from bytecheckpoint.cli.main import run
from bytecheckpoint.monitoring.simulation import Fault, SimulatedRun
from tests.support.memory import hot_tier
from tests.support.metrics_runs import write_metrics
from tests.support.settings import using

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference-cli.md").read_text()
#: Members whose own members are names of the user.
FREE = {"states", "tensors", "totals", "metadata", "layout", "versions", "errors", "info"}
#: Arguments of each verb. "R" is a run of two steps, "D" one of a damaged step, "M" one with metrics, "T" one of a tier,
#: "F" a file of torch.save, and "N" a new folder.
CALLS = {
    "ls": [["R"], ["R/step_1"]],
    "inspect": [["R/step_1", "--boxes", "--values"]],
    "verify": [["R"], ["R/step_1"], ["D"]],
    "cp": [["R", "N"], ["R/step_1", "N"]],
    "diff": [["R/step_1", "R/step_2"]],
    "fingerprint": [["R/step_1"]],
    "export": [["R/step_1", "N"]],
    "adopt": [["F", "N"]],
    "repair": [["R/step_1"]],
    "flush": [["tier+file://T"]],
    "cooldown": [["R", "N", "--older-than", "0s"]],
    "gc": [["R"]],
    "rm": [["R/step_1"]],
    "plan-interval": [["--stall", "1s", "--write", "9s", "--mtbf", "4h"]],
    "report": [["M", "--mtbf", "4h"]],
    "compare": [["M", "M"]],
    "measure": [["M", "--size", "1MiB"]],
    "monitor": [["M", "--port", "0"]],
}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    for step in (1, 2):
        with using(writer="thread"):
            state = {"w": torch.full((9,), 1.0 * step)}
            bytecheckpoint.save(tmp_path / "R" / f"step_{step}", {"model": state, "extra_states": {"step": step}})
    (tmp_path / "D" / "step").mkdir(parents=True)
    (tmp_path / "D" / "step" / "metadata.parquet").write_bytes(b"damaged")
    torch.save({"w": torch.ones(3)}, tmp_path / "F")
    (tmp_path / "M").mkdir()
    faults = [Fault("slow", [3], first=5), Fault("fail", [2], first=8), Fault("missing", [1], first=7, last=7)]
    write_metrics(tmp_path / "M", SimulatedRun({"dp": 4}, saves=9, faults=faults).records())
    monkeypatch.setattr("uvicorn.Server.run", lambda *_: None)
    with hot_tier(monkeypatch), using(writer="thread"):
        bytecheckpoint.save(f"tier+file://{tmp_path}/T/step", {"model": state}).result(60)
        shutil.rmtree(tmp_path / "T")  # so that it is not flushed
        yield {name: str(tmp_path / name) for name in "RDFMNT"}


def section(verb: str) -> set[str]:
    """Return the words in code of a verb's section, and of those that it refers to."""
    text = re.split(r"^## ", REFERENCE, flags=re.MULTILINE)
    mine = next(part for part in text if part.startswith((f"`{verb} ", f"`{verb}`")))
    return {word for part in re.findall(r"`([^`]+)`", mine) for word in re.split(r"[^\w.-]+", part)}


def members(value: Any) -> set[str]:
    if isinstance(value, list):
        return {name for item in value for name in members(item)}
    if not isinstance(value, dict):
        return set()
    return set(value) | {name for key, item in value.items() if key not in FREE for name in members(item)}


@pytest.mark.parametrize("verb", CALLS)
def test_every_member_is_in_the_reference(
    verb: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    known = section(verb)
    if verb == "inspect":
        known |= section("ls")
    if verb in ("repair", "gc", "report"):
        known |= section({"repair": "verify", "gc": "rm", "report": "measure"}[verb])
    for arguments in CALLS[verb]:
        filled = [re.sub(r"(^|//)([RDFMNT])(?=$|/)", lambda found: found[1] + folders[found[2]], a) for a in arguments]
        if verb == "cp":
            filled[1] += str(len(filled[0]))
        assert run([verb, *filled, "--json"]) in (0, 1), capsys.readouterr()
        done = capsys.readouterr()
        document = json.loads(done.out)
        assert members(document) and not done.err and done.out.isascii()
        assert not (members(document) - known), (verb, sorted(members(document) - known))


def test_every_verb_has_json() -> None:
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert verbs == set(CALLS)
