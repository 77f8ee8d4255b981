"""Open a checkpoint of any layout for reading, as a lazy mapping, in one process."""

from __future__ import annotations

import os

import numpy as np

from bytecheckpoint.arguments import check_layout
from bytecheckpoint.engine.catalogs import check_rank, open_catalog
from bytecheckpoint.errors import OutOfRangeError, UsageError
from bytecheckpoint.layouts import LayoutArgument
from bytecheckpoint.opening.box_reader import BoxReader
from bytecheckpoint.opening.checkpoint import Checkpoint
from bytecheckpoint.opening.entry import Entry
from bytecheckpoint.planning.chained_layouts import lay_out_through
from bytecheckpoint.planning.part_space import layout_of_model
from bytecheckpoint.storage import Storage, resolve

__all__ = ["Checkpoint", "Entry", "OutOfRangeError", "open"]


def open(
    path: str | os.PathLike[str] | Storage,
    *,
    rank: int | None = None,
    layout: LayoutArgument | None = None,
) -> Checkpoint:
    """Open a checkpoint of any layout for reading.

    This call reads only the catalog; of a large one, only the list of tensors, whose places are read with them. The result
    is a read-only mapping from keys such as `model/<fqn>` to an `Entry` (a tensor, read when it is sliced) or to a plain
    value.

    Args:
        path: folder or URL of the checkpoint, or its storage.
        rank: rank whose values to show where ranks saved different values under one key (random number generators,
            dataloaders). If this rank has no value, or with None, a key shows the shared value if there is one, else that
            of the lowest rank.
        layout: layout by which the tensors are shown under other names (docs/layouts.md): a name of one that is built in, a
            file, a `Layout`, or "auto" for the only one that is built in for the model; or several, as for `load`.

    Returns:
        The checkpoint; `close` it or use it in a `with` statement to release its files early.

    Raises:
        CheckpointNotFoundError: `path` holds no committed checkpoint.
        CorruptCheckpointError: the catalog is damaged.
        IncompatibleCheckpointError: a newer version wrote the checkpoint.
        UsageError: no such rank saved it.

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
    storage, reader = open_catalog(resolve(path))
    reader.close()
    check_rank(storage.url, reader.catalog, rank)
    if (chosen := check_layout(layout)) is None:
        return Checkpoint(BoxReader(storage, reader.catalog, reader), rank)
    catalog = reader.catalog
    if chosen == "auto":
        chosen = layout_of_model(catalog)
    if reader.groups is not None:
        catalog = reader.rows(np.union1d(reader.groups.group, reader.groups.head_groups))
        reader.close()
    laid = lay_out_through(catalog, chosen)
    return Checkpoint(BoxReader(storage, laid.catalog, None, laid), rank)
