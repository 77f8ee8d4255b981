"""A checkpoint that is being loaded, and what one rank wants of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from bytecheckpoint.engine.catalogs import CatalogReader
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.errors import CheckpointReplacedError, CorruptCheckpointError
from bytecheckpoint.frameworks.base import Destination, is_strict
from bytecheckpoint.loading.call import LoadArguments
from bytecheckpoint.loading.fit import Fit
from bytecheckpoint.loading.saved import SavedView
from bytecheckpoint.loading.trees import Trees
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.storage import Storage

__all__ = ["OpenCheckpoint", "detect_replacement", "refused_mismatches"]


@dataclass(slots=True)
class OpenCheckpoint:
    """A checkpoint that is being loaded, and what this rank wants of it.

    Attributes:
        arguments: of the load.
        catalog: its catalog; of one in groups, the rows that this rank needs.
        reader: has read it.
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
    reader: CatalogReader
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
    """Return the mismatches about which the load is strict. Each begins with its state."""
    return [m for m in destination.mismatches if is_strict(arguments.strict, m.partition(":")[0])]


@contextlib.contextmanager
def detect_replacement(catalog: CatalogReader) -> Iterator[None]:
    """Turn a damaged read into `CheckpointReplacedError` if another save has replaced the catalog and removed its files."""
    try:
        yield
    except CorruptCheckpointError as error:
        if catalog.replaced():
            raise CheckpointReplacedError(str(error)) from error
        raise
