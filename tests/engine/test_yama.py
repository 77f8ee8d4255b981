"""Yama, simulated: a process opens its memory before another one reads it, and it stays open."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.engine import peer_memory
from bytecheckpoint.engine.exchange_rounds import PeerProcesses
from bytecheckpoint.engine.peer_memory import peer_handshake
from tests.support.memory import as_on_disk
from tests.support.worlds import on_ranks

_ELEMENTS = 4 << 20


class _Yama:
    """Yama with ptrace_scope 1, for processes that share a folder: who may be read has a file there."""

    def __init__(self, folder: Path, delay: float) -> None:
        self._folder = folder
        self._delay = delay
        self.calls: list[int] = []
        self.refused = 0
        self.bytes_read = 0

    def prctl(self, option: int, process: ctypes.c_ulong, *_: int) -> None:
        assert option == 0x59616D61
        time.sleep(self._delay)
        self.calls.append(process.value)
        opened = self._folder / str(os.getpid())
        if process.value:
            opened.touch()
        else:
            opened.unlink(missing_ok=True)

    def readv(self, pid: int, *arguments: Any) -> int:
        if pid != os.getpid() and not (self._folder / str(pid)).exists():
            self.refused += 1
            ctypes.set_errno(errno.EPERM)
            return -1
        done: int = self._readv(pid, *arguments)
        if pid != os.getpid():
            self.bytes_read += done
        return done

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Put this process under the restriction."""
        scope = self._folder / f"scope-{os.getpid()}"
        scope.write_text("1\n")
        self._readv: Any = peer_memory._readv
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_memory, "_YAMA_SCOPE", str(scope))
            patch.setattr(peer_memory, "_libc", self)
            patch.setattr(peer_memory, "_readv", self.readv)
            yield


@on_ranks(2)
def test_memory_is_open_before_the_handshake_is_sent_and_stays_open(tmp_path: Path) -> None:
    """Each rank reads the other's memory, though one of them is slow to open its own."""
    rank = dist.get_rank()
    state = {"w": torch.arange(_ELEMENTS)}
    bytecheckpoint.save(tmp_path / "step", {"model": state})
    target = {"w": torch.zeros_like(state["w"])}
    yama = _Yama(tmp_path, delay=0.3 * rank)
    with yama.in_force():
        report = bytecheckpoint.load(as_on_disk(tmp_path / "step"), {"model": target})
    assert torch.equal(target["w"], state["w"])
    assert yama.refused == 0
    assert yama.bytes_read >= report.bytes_received > 0
    assert set(yama.calls) == {ctypes.c_ulong(-1).value}, "the permission may be another library's: it stays"


@pytest.mark.parametrize("scope", ["0", "2", "3", None])
def test_other_scopes_need_or_allow_no_permission(
    scope: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yama = _Yama(tmp_path, 0.0)
    path = tmp_path / "ptrace_scope"
    if scope is not None:
        path.write_text(scope + "\n")
    monkeypatch.setattr(peer_memory, "_YAMA_SCOPE", str(path))
    monkeypatch.setattr(peer_memory, "_libc", yama)
    peer_handshake()
    assert yama.calls == []


def test_a_rank_that_takes_no_part_does_not_split_its_machine() -> None:
    own = peer_handshake()
    assert not PeerProcesses([0, 0, 0], 0, [own, own, b""]).some_unreadable()
    assert not PeerProcesses([0, 0, 0], 2, [own, own, b""]).some_unreadable()
    assert PeerProcesses([0, 0, 0], 0, [own, own[:-1], b""]).some_unreadable()
