"""What a case asks of a contender."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from benchmarks.state import Tensors

__all__ = ["Peer", "fsync_all"]


class Peer:
    """Saves and loads flat dicts of tensors.

    Attributes:
        name: for tables.
        durable: its save makes the files durable by itself; for the others the benchmark calls fsync.
        asynchronous: has `save_async`.
        ranks: can save from several ranks.
        reshards: takes DTensors, and loads them at another layout.
    """

    name: ClassVar[str]
    durable: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = True
    ranks: ClassVar[bool] = True
    reshards: ClassVar[bool] = True

    @classmethod
    def available(cls) -> bool:
        """Whether it is installed."""
        return True

    def save(self, path: Path, state: Tensors) -> None:
        """Return when the checkpoint is written (and durable, where `durable`)."""
        raise NotImplementedError

    def save_async(self, path: Path, state: Tensors) -> Callable[[], object]:
        """Return when `state` may change again; the result waits for the end."""
        raise NotImplementedError

    def load(self, path: Path, state: Tensors) -> None:
        """Fill the tensors of `state` in place."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back processes and memory."""


def fsync_all(folder: Path) -> None:
    """Make all files under `folder` durable."""
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
