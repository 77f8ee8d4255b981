"""Small file systems for tests to fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bytecheckpoint.storage.posix import mounts

__all__ = ["run_command", "small_ext4", "small_tmpfs"]


def run_command(*command: str) -> str:
    """Run a command and return its output; raise an OSError with its complaint if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def small_ext4(folder: Path, size: int) -> Iterator[Path]:
    """Mount an ext4 of `size` bytes at the new `folder` through a loop device; yield the image file beside it.

    Raises:
        OSError: this system or user cannot do that.
    """
    image = folder.with_suffix(".img")
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    run_command("mkfs.ext4", "-q", "-m", "0", str(image))
    run_command("mount", "-o", "loop", str(image), str(folder))
    mounts._recent_mounts.cache_clear()  # looked up once a second
    try:
        yield image
    finally:
        run_command("umount", str(folder))
        mounts._recent_mounts.cache_clear()


@contextmanager
def small_tmpfs(folder: Path, size: str, *, lazy: bool = False) -> Iterator[None]:
    """Mount a tmpfs at `folder`, which is made if it does not exist; skip the test without root.

    Args:
        folder: mount point.
        size: size in the form of mount(8); other options may follow after a comma.
        lazy: True to unmount it although files may be open.
    """
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED HERE: mounting a small file system takes root")
    folder.mkdir(exist_ok=True)
    run_command("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    mounts._recent_mounts.cache_clear()
    try:
        yield
    finally:
        run_command("umount", *(["-l"] if lazy else []), str(folder))
        mounts._recent_mounts.cache_clear()
