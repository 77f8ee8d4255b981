"""The warnings of the package in this process: on a rank of a world, where pytest's `caplog` is not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["warned"]


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """Collect the package's warnings inside the block."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("bytecheckpoint")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
