"""Runs the README as a reader does: its program under torchrun at the layouts of its console block, then the rest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_snippets import ROOT, python_blocks

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.timeout(300)  # nine processes import torch: a minute of processor time
def test_the_example_trains_and_continues_at_another_layout(tmp_path: Path) -> None:
    train, look = python_blocks(README)
    (tmp_path / "train.py").write_text(train.code, encoding="utf-8")
    (tmp_path / "look.py").write_text(look.code, encoding="utf-8")
    runs = re.findall(r"^\$ torchrun (.*)\n(saved .*)$", README, re.MULTILINE)
    assert len(runs) == 2

    def run(*command: str) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "BYTECHECKPOINT_METRICS": "off"}
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    for arguments, printed in runs:
        assert run("-m", "torch.distributed.run", "--standalone", *arguments.split()) == printed
    assert run("look.py").startswith("20 ")
    assert run("-m", "bytecheckpoint.cli.main", "verify", "checkpoints/latest").endswith(": sound")
