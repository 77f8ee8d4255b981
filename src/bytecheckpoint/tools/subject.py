"""Find the storage or the open checkpoint that an argument of a tool stands for. Torch is imported for the second only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias, Union

from bytecheckpoint.errors import UsageError
from bytecheckpoint.formats.detect import as_checkpoint
from bytecheckpoint.storage import Storage, resolve

if TYPE_CHECKING:
    from bytecheckpoint.opening import Checkpoint

__all__ = ["Subject", "opened", "refuse_other_programs", "storage_of"]

#: A path or URL, a storage, or an open checkpoint.
Subject: TypeAlias = Union[str, os.PathLike[str], Storage, "Checkpoint"]


def storage_of(subject: Subject) -> Storage:
    """Return the storage of a path, of a storage itself, or of an open checkpoint's path."""
    if isinstance(subject, str | os.PathLike | Storage):
        return resolve(subject)
    path: str = getattr(subject, "path", subject)  # type: ignore[arg-type]  # `resolve` refuses what is no path
    return resolve(path)


def refuse_other_programs(storage: Storage, tool: str) -> None:
    """Refuse a checkpoint of another program, at an address without one of this package.

    Raises:
        UsageError: there is one.
        IncompatibleCheckpointError: there is one of a format that is not read.
    """
    if as_checkpoint(storage) is not None:
        raise UsageError(
            f"{storage.url} is a checkpoint of another program: {tool} works on those of this package only"
        )


@contextlib.contextmanager
def opened(subject: Subject) -> Iterator[Checkpoint]:
    """Yield an open checkpoint. One that was opened here is closed afterwards."""
    from bytecheckpoint.opening import Checkpoint
    from bytecheckpoint.opening import open as open_checkpoint

    if isinstance(subject, Checkpoint):
        yield subject
        return
    with open_checkpoint(subject) as checkpoint:
        yield checkpoint
