"""A checkpoint that is being loaded, and what one rank wants of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.errors import CheckpointError, CheckpointReplacedError, CorruptCheckpointError
from bytecheckpoint.frameworks.base import Destination, is_strict
from bytecheckpoint.loading.call import LoadArguments
from bytecheckpoint.loading.fit import Fit
from bytecheckpoint.loading.saved import SavedView
from bytecheckpoint.loading.trees import Trees
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_groups import CatalogGroups
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage

__all__ = ["OpenCheckpoint", "Source", "detect_replacement", "refused_mismatches"]


class Source(NamedTuple):
    """A checkpoint that is open, before its contents are matched with the live objects; fields as of `OpenCheckpoint`.

    `groups` is None for a catalog that is read whole. `catalog` begins with the rows of plain values.
    """

    arguments: LoadArguments
    catalog: Catalog
    data: bytes
    files: FileSet
    trees: Trees
    groups: CatalogGroups | None


@dataclass(slots=True)
class OpenCheckpoint:
    """A checkpoint that is being loaded, and what this rank wants of it.

    Attributes:
        arguments: of the load.
        catalog: its catalog; of one in groups, the rows that this rank needs.
        data: the bytes of the catalog; of one in groups, its tail.
        files: its files.
        trees: reads its trees of plain values.
        view: the catalog as the adapter sees it.
        destination: what this rank fills.
        fit: what this rank reads.
        exchanges: whether this rank exchanges with others what several want.
        bytes_read: bytes read from storage.
        bytes_received: bytes received from other ranks.
    """

    arguments: LoadArguments
    catalog: Catalog
    data: bytes
    files: FileSet
    trees: Trees
    view: SavedView
    destination: Destination
    fit: Fit
    exchanges: bool
    bytes_read: int = 0
    bytes_received: int = 0

    @property
    def storage(self) -> Storage:
        """Where it is."""
        return self.arguments.storage


def refused_mismatches(arguments: LoadArguments, destination: Destination) -> list[str]:
    """Return the mismatches about which the load is strict. Each begins with its kind."""
    return [m for m in destination.mismatches if is_strict(arguments.strict, m.partition(":")[0])]


@contextlib.contextmanager
def detect_replacement(storage: Storage, catalog: bytes) -> Iterator[None]:
    """Turn a damaged read into `CheckpointReplacedError` if another save has replaced `catalog` and removed its files.

    `catalog` holds the bytes of the catalog, or of its tail.
    """
    try:
        yield
    except CorruptCheckpointError as error:
        replaced = False
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            replaced = not storage.read(CATALOG_NAME).endswith(catalog)
        if replaced:
            raise CheckpointReplacedError(str(error)) from error
        raise
