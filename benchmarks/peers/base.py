"""The interface of a peer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from benchmarks.state import Tensors

__all__ = ["Peer", "fsync_all"]


class Peer:
    """A library that saves and loads flat dicts of tensors.

    Attributes:
        name: its name in tables.
        durable: True if its save makes the files durable; for other peers the benchmark calls fsync.
        asynchronous: True if it has `save_async`.
        ranks: True if it can save from several ranks.
        reshards: True if it saves DTensors, and loads them at another layout.
    """

    name: ClassVar[str]
    durable: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = True
    ranks: ClassVar[bool] = True
    reshards: ClassVar[bool] = True

    @classmethod
    def available(cls) -> bool:
        """Tell whether the library is installed."""
        return True

    def save(self, path: Path, state: Tensors) -> None:
        """Save `state`, and return when it is written (and durable, where `durable`)."""
        raise NotImplementedError

    def save_async(self, path: Path, state: Tensors) -> Callable[[], object]:
        """Start a save, after which `state` may change behind `wait_until_staged`; the result waits for the save's end."""
        raise NotImplementedError

    def wait_until_staged(self) -> None:
        """Wait until the state of the last `save_async` may change, which a library that copies behind it asks for."""

    def async_ways(self) -> Sequence[Peer]:
        """List further ways of this library to save asynchronously, as peers of which only `save_async` is measured."""
        return ()

    def load(self, path: Path, state: Tensors) -> None:
        """Fill the tensors of `state` in place."""
        raise NotImplementedError

    def close(self) -> None:
        """Release processes and memory."""


def fsync_all(folder: Path) -> None:
    """Make all files under `folder` durable."""
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
