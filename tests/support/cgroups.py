"""Control groups with a memory limit, for child processes of tests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["limited_cgroup"]

_ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited_cgroup(nbytes: int) -> Iterator[Path]:
    """Make a cgroup that may use `nbytes` of memory; skip the test where that cannot be.

    Yields:
        Its `cgroup.procs`: a process that writes its id there belongs to it, and so does what it allocates from then on.
    """
    places = ((_ROOT / "memory", "memory.limit_in_bytes"), (_ROOT, "memory.max"), (_ROOT / "unified", "memory.max"))
    for parent, limit in places:
        folder = parent / f"bytecheckpoint-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / limit).exists():  # else the kernel limits memory by the other version
                (folder / limit).write_text(str(nbytes))
                yield folder / "cgroup.procs"
                return
        finally:
            _remove(folder)
    pytest.skip("NOT TESTED HERE: making a cgroup with a memory limit takes root and a writable /sys/fs/cgroup")


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while True:  # a process that has just ended may still be in it
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
