"""This package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bytecheckpoint
from benchmarks.peers.base import Peer
from benchmarks.state import Tensors

__all__ = ["Ours"]


class Ours(Peer):
    """bytecheckpoint by its defaults, with `options` for the load."""

    name = "bytecheckpoint"
    durable = True

    def __init__(self, **options: Any) -> None:
        self.load_options = options

    def save(self, path: Path, state: Tensors) -> None:
        bytecheckpoint.save(str(path), {"model": state})

    def save_async(self, path: Path, state: Tensors) -> Callable[[], object]:
        return bytecheckpoint.save(str(path), {"model": state}, async_checkpoint=True).result

    def load(self, path: Path, state: Tensors) -> None:
        bytecheckpoint.load(str(path), {"model": state}, **self.load_options)
