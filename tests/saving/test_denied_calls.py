"""Sandboxes that deny shared memory, socket pairs or new processes: saves do without them."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from tests.support.modes import MODES
from tests.support.system_calls import failing
from tests.support.variants import crossed

DENIED: dict[str, tuple[str, Any]] = {
    "memfd_create": ("memfd_create", os),
    "socketpair": ("socketpair", socket),
    "process": ("Popen", subprocess),
}
STATE = {"w": torch.arange(3 << 20), "b": torch.ones(7)}


@pytest.mark.parametrize(
    ("call", "mode", "code"), crossed(list(DENIED), [*MODES, "prepared"], [errno.EPERM, errno.ENOSYS])
)
def test_a_save_does_without_the_denied_call(
    call: str, mode: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name, owner = DENIED[call]

    def saves(_: Collective) -> None:
        if mode == "prepared":
            bytecheckpoint.prepare({"model": STATE}).result(30)
        for step in range(3):
            bytecheckpoint.save(tmp_path / f"step_{step}", {"model": STATE}, **MODES.get(mode, MODES["async"])).result(
                30
            )

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "bytecheckpoint"):
        rule = failing(patch, name, code, owner=owner)
        ThreadWorld(1).run(saves)
    for step in range(3):
        found = {key: torch.zeros_like(tensor) for key, tensor in STATE.items()}
        bytecheckpoint.load(tmp_path / f"step_{step}", {"model": found})
        assert all(torch.equal(found[key], tensor) for key, tensor in STATE.items())
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == min(rule.hits, 1), warnings
    if warnings:
        assert "threads of this process write" in warnings[0] and os.strerror(code) in warnings[0]
    assert mode == "sync" or rule.hits, "asynchronous saves try"
