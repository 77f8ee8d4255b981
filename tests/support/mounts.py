"""Small file systems that tests fill."""

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
    """A tmpfs at `folder`, which is made if it is not there; without root the test is skipped.

    Args:
        folder: where to mount it.
        size: as mount(8) takes it.
        lazy: files may be open at the end.
    """
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED HERE: mounting a small file system takes root")
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", *(["-l"] if lazy else []), str(folder)], check=True)
