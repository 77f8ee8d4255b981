"""Room in a machine's hot tier: flushed steps of all runs go, the oldest first, when a save needs their memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from bytecheckpoint.engine.memory import free_memory
from bytecheckpoint.errors import CheckpointError, StorageFullError
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage.posix.storage import PosixStorage
from bytecheckpoint.tiers.hot_folder import HotFolder, HotStep, StepRecord

__all__ = ["hot_steps", "with_room"]

_log = logging.getLogger("bytecheckpoint")
_T = TypeVar("_T")
#: Bytes left free for catalogs and records.
_SPARE = 256 << 10
#: Bytes of memory left free for the program, beside those.
_SPARE_MEMORY = 64 << 20


def hot_steps(
    root: PosixStorage, wanted: Callable[[StepRecord], bool] = lambda _: True
) -> Iterator[tuple[HotFolder, HotStep]]:
    """Yield the steps of all runs that are committed in the hot tier `root`.

    Args:
        root: the tier.
        wanted: function of a record that returns whether the step is looked for. Catalogs of others are not read.
    """
    for folder, _, files in os.walk(root.root):
        if CATALOG_NAME in files:
            hot = HotFolder(PosixStorage(folder, folder), folder)
            if hot.may_be(wanted, files) and (step := hot.step()) is not None and wanted(step.record):
                yield hot, step


def with_room(root: PosixStorage, nbytes: int, write: Callable[[], _T]) -> _T:
    """Return `write()`, which puts `nbytes` into a hot tier, and remove flushed steps as far as it needs their space.

    Args:
        root: the tier.
        nbytes: number of bytes that `write` needs.
        write: function that writes or reserves them.

    Raises:
        StorageFullError: it does not fit, although no flushed step is left.
    """
    flushed: list[tuple[HotFolder, HotStep]] | None = None
    while True:
        lacking = _lacking(root, nbytes)
        if not lacking:
            try:
                return write()
            except StorageFullError as error:  # other ranks of the machine write too
                lacking = str(error)
        if flushed is None:
            flushed = list(hot_steps(root, lambda record: record.flushed))
            flushed.sort(key=lambda found: found[1].record.saved, reverse=True)
        if not flushed:
            raise StorageFullError(f"the hot tier {root.url} is full: {lacking}")
        folder, step = flushed.pop()
        try:
            folder.remove_step(step.catalog)
        except (CheckpointError, OSError) as error:
            _log.warning("%s cannot be removed from memory: %s", step.record.url, error)
        else:
            _log.info("%s, which is durable, was removed from memory to make room", step.record.url)


def _lacking(root: PosixStorage, nbytes: int) -> str:
    """Return what a write of `nbytes` lacks, "" if nothing."""
    free = root.free_bytes()
    if free < nbytes + _SPARE:
        return f"{nbytes} bytes are needed, {free} are free"
    if root.capabilities.in_memory and (memory := free_memory()).nbytes < nbytes + _SPARE_MEMORY:
        return f"{nbytes} bytes are needed, {memory.source} has {memory.nbytes} bytes of memory free"
    return ""
