"""Runs the README as a reader does: its program on as many ranks as its console block says, then the rest."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import python_blocks
from tests.servers.process import free_port
from tests.support.processes import ROOT
from tests.support.programs import forked

README = (ROOT / "README.md").read_text(encoding="utf-8")


#: Forks the ranks of a program.
_RANKS = """
import os, runpy, sys
import torch._dynamo, torch.distributed.fsdp, bytecheckpoint.loading, bytecheckpoint.saving

program, size, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ranks = []
for rank in range(size):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        runpy.run_path(program, run_name="__main__")
        sys.exit()
assert not any(os.waitpid(rank, 0)[1] for rank in ranks)
"""


@pytest.mark.timeout(300)
def test_the_example_trains_and_continues_at_another_layout(tmp_path: Path) -> None:
    train, look = python_blocks(README)
    (tmp_path / "train.py").write_text(train.code, encoding="utf-8")
    (tmp_path / "look.py").write_text(look.code, encoding="utf-8")
    runs = re.findall(r"^\$ torchrun --nproc-per-node (\d+) train.py\n(saved .*)$", README, re.MULTILINE)
    assert len(runs) == 2

    def run(*command: object) -> str:
        done = subprocess.run(forked(*command), cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    for size, printed in runs:
        assert run("-c", _RANKS, "train.py", size, free_port()) == printed
    assert run("look.py").startswith("20 ")
    assert run("-m", "bytecheckpoint.cli.main", "verify", "checkpoints/latest").endswith(": sound")
