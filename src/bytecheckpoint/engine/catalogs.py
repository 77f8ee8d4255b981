"""Reading the catalog of a checkpoint, without torch: tools that only list checkpoints need none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from bytecheckpoint.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageUnavailableError,
    UsageError,
)
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_file import decode
from bytecheckpoint.representation.catalog_groups import CatalogGroups
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.threads import call_with_timeout
from bytecheckpoint.tuning import tuning

__all__ = ["check_rank", "open_groups", "read_catalog", "read_groups"]

_T = TypeVar("_T")


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
    with _located(storage):
        return decode(data), data


@contextlib.contextmanager
def open_groups(storage: Storage, ranks: int) -> Iterator[CatalogGroups | None]:
    """Open the catalog of the checkpoint in `storage` for a load by so many ranks; give None if it is to be read whole.

    A catalog that is missing or damaged is to be read whole too: `read_catalog` says what is wrong. Perhaps another save
    has replaced it between two reads.
    """
    if not 0 < storage.parts_from_ranks <= ranks:
        yield None
        return

    def timed(function: Callable[[], _T], nbytes: int = 0) -> _T:
        if storage.in_memory:
            return function()
        return call_with_timeout(storage.call_timeout(nbytes), function, f"cannot read {storage.url}/{CATALOG_NAME}")

    try:
        reader = timed(lambda: storage.open(CATALOG_NAME))
    except FileNotFoundError:
        yield None
        return

    def read_into(offset: int, memory: memoryview) -> None:
        if timed(lambda: reader.read_into(offset, [memory]), len(memory)) != len(memory):
            raise CorruptCheckpointError(f"it ends before byte {offset + len(memory)}", file=CATALOG_NAME)

    try:
        groups = None
        if reader.size * 4 >= tuning().catalog_group_bytes:
            with contextlib.suppress(CorruptCheckpointError):
                groups = CatalogGroups.open(reader.size, read_into)
        yield groups
    finally:
        with contextlib.suppress(StorageUnavailableError):
            timed(reader.close)


def read_groups(storage: Storage, groups: CatalogGroups, wanted: Int64s) -> Catalog:
    """Read the catalog with the rows of some of its groups. Raises as `read_catalog`."""
    with _located(storage):
        return groups.catalog(wanted)


@contextlib.contextmanager
def _located(storage: Storage) -> Iterator[None]:
    """Name the catalog's file in errors."""
    try:
        yield
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
