"""A checkpoint that another save replaces while it is open: every read says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CorruptCheckpointError
from bytecheckpoint.errors import CheckpointReplacedError

READS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda found: found["model/w"][:],
    "slice": lambda found: found["model/w"][3:5],
    "chunks": lambda found: list(found["model/w"].chunks(1 << 10)),
    "values": lambda found: found["extra_states/a"],
}


@pytest.mark.parametrize("read", READS)
def test_every_read_says_that_the_checkpoint_was_replaced(tmp_path: Path, read: str) -> None:
    states = {"model": {"w": torch.arange(100_000.0)}, "extra_states": {"a": [1, "b"], "t": torch.ones(3)}}
    bytecheckpoint.save(tmp_path / "s", states)
    with bytecheckpoint.open(tmp_path / "s") as found:
        bytecheckpoint.save(tmp_path / "s", states)
        with pytest.raises(CheckpointReplacedError, match=r"replaced by another save, .* while it was open"):
            READS[read](found)


def test_damage_is_no_replacement(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "s", {"model": {"w": torch.arange(100_000.0)}})
    with bytecheckpoint.open(tmp_path / "s") as found:
        for file in (tmp_path / "s").rglob("rank*"):
            file.write_bytes(b"\0" * file.stat().st_size)
        with pytest.raises(CorruptCheckpointError) as caught:
            found["model/w"][:]
    assert not isinstance(caught.value, CheckpointReplacedError)
