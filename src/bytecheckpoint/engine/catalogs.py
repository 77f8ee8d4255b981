"""Reading the catalog of a checkpoint, without torch: tools that only list checkpoints need none."""

from __future__ import annotations

from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError, UsageError
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_file import decode
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage

__all__ = ["check_rank", "read_catalog"]


def read_catalog(storage: Storage) -> tuple[Catalog, bytes]:
    """Read the catalog of the checkpoint in `storage`; return it and its bytes.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint.
        CorruptCheckpointError: the catalog is damaged.
        IncompatibleCheckpointError: a newer version wrote it.
    """
    try:
        data = storage.read(CATALOG_NAME)
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{storage.url} holds no committed checkpoint (no {CATALOG_NAME}); give the folder of one step"
        ) from None
    try:
        return decode(data), data
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{storage.url}/{CATALOG_NAME}: {error}", file=CATALOG_NAME) from None


def check_rank(url: str, catalog: Catalog, rank: int | None) -> None:
    """Check that a checkpoint has a rank; a rank that saved no values of its own counts too.

    Args:
        url: of the checkpoint.
        catalog: of the checkpoint.
        rank: its number; None: no particular rank.

    Raises:
        UsageError: it has no such rank.
    """
    world_size = max(int(catalog.info.get("world_size", 0)), *(file.rank + 1 for file in catalog.files), 1)
    if rank is not None and rank >= world_size:
        has = f"ranks 0 to {world_size - 1}" if world_size > 1 else "rank 0 only"
        raise UsageError(f"{url} has no rank {rank}: it was saved by {has}")
