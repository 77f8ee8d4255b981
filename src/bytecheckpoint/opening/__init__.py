"""Reading a checkpoint without loading it: a lazy mapping of all that it holds, in one process, from any layout."""

from __future__ import annotations

import os

from ..engine.catalogs import read_catalog
from ..errors import UsageError
from ..storage import Storage, resolve
from .checkpoint import Checkpoint
from .entry import Entry
from .slices import OutOfRangeError

__all__ = ["Checkpoint", "Entry", "OutOfRangeError", "open"]


def open(path: str | os.PathLike[str] | Storage, *, rank: int | None = None) -> Checkpoint:
    """Open a checkpoint for reading, whatever layout it was saved from.

    Only the catalog is read here. The result is a read-only mapping: `model/<fqn>` and the other keys lead to an
    `Entry` (a tensor, read when it is sliced) or to a plain value.

    Args:
        path: folder or URL of the checkpoint, or its storage.
        rank: where ranks saved different values under one key (random number generators, dataloaders), show those of
            this rank. A key of which it has no copy shows the shared one, else the lowest rank's, as does None.

    Returns:
        The checkpoint; `close` it or use it in a `with` statement to release its files early.

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        CorruptCheckpointError: the catalog is damaged.
        IncompatibleCheckpointError: a newer version wrote it.

    Examples:
        >>> import tempfile, torch, bytecheckpoint
        >>> path = tempfile.mkdtemp() + "/step_1"
        >>> handle = bytecheckpoint.save(path, {"model": torch.nn.Linear(4, 2), "extra_states": {"epoch": 3}})
        >>> with bytecheckpoint.open(path) as checkpoint:
        ...     sorted(checkpoint), checkpoint["extra_states/epoch"], checkpoint["model/weight"][0, 1:3].shape
        (['extra_states/epoch', 'model/bias', 'model/weight'], 3, torch.Size([2]))
    """
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 0):
        raise UsageError(f"open(rank={rank!r}): give the number of a rank that saved, or None")
    storage = resolve(path)
    catalog, _ = read_catalog(storage)
    return Checkpoint(storage, catalog, rank)
