"""One namespace of tools: lazy, and every function takes a path, a storage or an open checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import UsageError, tools
from bytecheckpoint.storage import resolve
from tests.support.processes import run_program

SUBJECTS: dict[str, Callable[[Path], Any]] = {
    "text": str,
    "path": lambda path: path,
    "storage": resolve,
    "checkpoint": bytecheckpoint.open,
}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    bytecheckpoint.save(tmp_path / "run" / "step", {"model": {"w": torch.arange(10.0)}})
    return tmp_path / "run" / "step"


@pytest.mark.parametrize("kind", SUBJECTS)
def test_every_tool_takes_every_subject(step: Path, tmp_path: Path, kind: str) -> None:
    subject = SUBJECTS[kind](step)
    assert tools.verify(subject).ok
    assert not tools.repair(subject).written
    assert tools.compare(subject, step).equal and tools.compare(step, subject).equal
    assert tools.export(subject, tmp_path / "hf").tensors == 1
    with pytest.raises(UsageError, match="give the folder of the run"):
        tools.measure(subject, 1 << 20, 1)
    assert tools.collect_garbage(subject, older_than=3600.0) == []
    (removal,) = tools.remove(subject)
    assert removal.path == str(step) and not list(step.rglob("*.safetensors"))


@pytest.mark.parametrize("call", [tools.verify, tools.repair, lambda subject: tools.compare(subject, subject)])
def test_what_is_no_checkpoint(call: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match="is not a checkpoint path"):
        call(3)


def test_tools_are_imported_when_they_are_used() -> None:
    done = run_program(
        "import sys, bytecheckpoint\n"
        "assert not any(name.startswith('bytecheckpoint.tools') for name in sys.modules)\n"
        "assert callable(bytecheckpoint.tools.verify) and 'torch' not in sys.modules\n"
        "assert set(bytecheckpoint.tools.__all__) == set(dir(bytecheckpoint.tools))\n"
        "assert all(getattr(bytecheckpoint.tools, name) for name in dir(bytecheckpoint.tools))\n",
        fresh=True,
    )
    assert done.returncode == 0, done.stderr
