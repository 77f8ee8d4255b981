"""Settings of the package that hold for a while."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.saving.saver import saver_of


@contextlib.contextmanager
def using(**changes: Any) -> Iterator[None]:
    """Other settings inside the block, those of before after it, whatever was configured in between."""
    before = dataclasses.asdict(bytecheckpoint.settings())
    bytecheckpoint.configure(**changes)
    try:
        yield
    finally:
        bytecheckpoint.configure(**before)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """The settings of before after the block, and no failed save left whose error a later one would raise."""
    with using():
        yield
    saver = saver_of(current())
    saver.drain()
    saver._failed = None
