"""Small file systems for tests to fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["small_tmpfs"]


@contextmanager
def small_tmpfs(folder: Path, size: str, *, lazy: bool = False) -> Iterator[None]:
    """Mount a tmpfs at `folder`, which is made if it does not exist; skip the test without root.

    Args:
        folder: where to mount it.
        size: as mount(8) takes it.
        lazy: unmount it although files may be open.
    """
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED HERE: mounting a small file system takes root")
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", *(["-l"] if lazy else []), str(folder)], check=True)
