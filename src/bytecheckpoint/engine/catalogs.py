"""Reading the catalog of a checkpoint, without torch: tools that only list checkpoints need none."""

from __future__ import annotations

from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_file import decode
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage

__all__ = ["read_catalog"]


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
