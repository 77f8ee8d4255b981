"""Make the catalog, check that all files are there, judge a failed publish, remove old files."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import names_of_ranks
from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.engine.view_files import VIEW_INDEX, committed_view
from bytecheckpoint.errors import StorageConflictError, StorageError, StorageUnavailableError, UsageError
from bytecheckpoint.planning.planned_rows import SavePlan
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog import DELTA, SHARED, Catalog, StorageFile, TensorTable
from bytecheckpoint.representation.names import CATALOG_NAME, companions, generation_of, unescape
from bytecheckpoint.saving.messages import FileRecord, WriteReport
from bytecheckpoint.saving.plans import owners_of_values
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.optional import UnfinishedUpload, abort_uploads, unfinished_uploads
from bytecheckpoint.tracing.operation import pause
from bytecheckpoint.tuning import tuning

__all__ = ["build_catalog", "may_have_committed", "remove_stale_files", "stale_files", "stale_uploads"]

_log = logging.getLogger("bytecheckpoint")


def build_catalog(
    plan: SavePlan, reports: Mapping[int, WriteReport], generation: str, info: Mapping[str, Any]
) -> Catalog:
    """Join the plan and the ranks' reports to a catalog.

    Args:
        plan: rows and files of all ranks.
        reports: reports of all ranks.
        generation: generation of the files that this save wrote.
        info: facts about the save as a whole.
    """
    encoded = {name: nbytes for report in reports.values() for name, nbytes in report.encoded.items()}
    files: list[StorageFile] = []
    sums = []
    sums_of_boxes: list[bytes] = []

    def add(rank: int, record: FileRecord) -> int:
        files.append(
            StorageFile(
                name=record.name,
                state=unescape(record.state),
                rank=rank,
                size=record.size,
                data_offset=record.data_offset,
                header_sum=record.header_sum,
                block_bytes=record.block_bytes,
                generation=generation_of(record.name) or generation,
                format=DELTA if record.name in encoded else "safetensors",
                stored=encoded.get(record.name, 0),
            )
        )
        sums.append(np.frombuffer(record.sums[0], np.uint64))
        return len(files) - 1

    planned = {(rank, f.state, f.part): f for rank, report in reports.items() for f in report.files if not f.values}
    for rank, state, part in zip(plan.file_rank.tolist(), plan.file_state, plan.file_part.tolist(), strict=True):
        add(rank, planned[rank, state, part])
        sums_of_boxes.append(planned[rank, state, part].sums[1])
    data_offset = np.array([f.data_offset for f in files], np.int64)

    values = owners_of_values({rank: report.values for rank, report in reports.items()}, SHARED)
    value_file = []
    added: dict[tuple[int, int], int] = {}  # numbers of the files of values
    for rank, record, _ in values:
        if (rank, record.file) not in added:
            added[rank, record.file] = add(rank, reports[rank].files[record.file])
        value_file.append(added[rank, record.file])
    for rank, report in reports.items():
        for index, found in enumerate(report.files):
            if found.values and (rank, index) not in added:
                add(rank, found)  # without tensors: it names adopted files

    tensors = plan.tensors
    count = len(tensors)
    value_shapes = [r.shape for _, r, _ in values]
    value_boxes = BoxTable.build(
        range(count, count + len(values)), [(0,) * len(s) for s in value_shapes], value_shapes, plan.boxes.ndim
    )
    boxes = BoxTable.concat([plan.boxes, value_boxes])
    shapes = np.pad(plan.shapes, ((0, 0), (0, boxes.ndim - plan.shapes.shape[1])), constant_values=1)
    offsets = plan.offset + (data_offset[plan.file] if len(plan.file) else 0)
    value_offsets = [files[f].data_offset + r.offset for f, (_, r, _) in zip(value_file, values, strict=True)]
    catalog = Catalog.build(
        TensorTable.of(
            states=[unescape(t.state) for t in tensors] + [unescape(r.key[0]) for _, r, _ in values],
            fqns=[unescape(t.fqn) for t in tensors] + [unescape(r.key[1]) for _, r, _ in values],
            slots=[unescape(t.slot) for t in tensors] + [unescape(r.key[2]) for _, r, _ in values],
            dtypes=[t.dtype for t in tensors] + [r.dtype for _, r, _ in values],
            shapes=np.concatenate([shapes, value_boxes.lengths.reshape(len(values), -1)]) if values else shapes,
            ndims=np.concatenate([plan.ndims, np.array([len(s) for s in value_shapes], np.int64)]),
            owner=np.array([SHARED] * count + [o for _, _, o in values], np.int32),
            requires_grad=np.array([t.requires_grad for t in tensors] + [False] * len(values), bool),
            devices=[t.device for t in tensors] + ["cpu"] * len(values),
        ),
        boxes=boxes,
        file=np.concatenate([plan.file, np.array(value_file, np.int64)]).astype(np.int32),
        byte_offset=np.concatenate([offsets, np.array(value_offsets, np.int64)]),
        byte_length=np.concatenate([plan.nbytes, np.array([r.nbytes for _, r, _ in values], np.int64)]),
        files=files,
        sums=sums,
        aliases={
            unescape(state): {unescape(alias): unescape(fqn) for alias, fqn in names.items()}
            for state, names in plan.aliases().items()
        },
        info=info,
    ).with_tilings(None if plan.tiles is None else plan.tiles.tilings.shifted(data_offset))
    return replace(catalog, fingerprints=_fingerprints(plan, sums_of_boxes))


def _fingerprints(plan: SavePlan, sums: Sequence[bytes]) -> NDArray[np.uint64] | None:
    """Add up the fingerprints of all boxes to those of the plan's tensors, uint64 [t, 2]; None where no rank made any.

    Args:
        plan: rows of all ranks.
        sums: uint64 [boxes, 2] of each file of the plan, by the boxes' place in it, as bytes.

    Raises:
        UsageError: some ranks made fingerprints, and others did not.
    """
    if not any(sums):
        return None
    tensor, file, offset, nbytes = plan.boxes.tensor, plan.file, plan.offset, plan.nbytes
    if plan.tiles is not None:
        tilings = plan.tiles.tilings
        rows = tilings.rows(np.arange(len(tilings.file)))
        tensor, file = np.append(tensor, rows.boxes.tensor), np.append(file, rows.file)
        offset, nbytes = np.append(offset, rows.byte_offset), np.append(nbytes, rows.byte_length)
        order = np.lexsort((nbytes > 0, offset, file))
        tensor, file = tensor[order], file[order]
    here = np.array([len(found) // 16 for found in sums], np.int64)
    wanted = np.bincount(file, minlength=len(sums))
    if lacking := plan.file_rank[here != wanted].tolist():
        raise UsageError(
            f"{names_of_ranks(set(lacking))} made no fingerprints, other ranks did: give all the same setting fingerprint"
        )
    found = np.zeros((len(plan.tensors), 2), np.uint64)
    np.add.at(found, tensor, np.frombuffer(b"".join(sums), np.uint64).reshape(-1, 2))
    return found


def stale_files(storage: Storage, named: Mapping[str, int], replaces: str, view: Collection[str] = ()) -> list[str]:
    """Check that the new files are there, and return the storage files that the new catalog does not name.

    Args:
        storage: storage of the checkpoint, on rank 0.
        named: new files and their sizes.
        replaces: version of the catalog that the new one replaces.
        view: names of the small files of the new view, which replace those of the old one.

    Returns:
        Files of the replaced checkpoint and of killed saves; none if the storage cannot be listed.

    Raises:
        StorageConflictError: another save has committed meanwhile, and has removed new files as a killed save's.
        StorageError: a new file is not there, or has another size: ranks do not share the path.
    """
    present: dict[str, int] = {}
    try:
        present = dict(storage.list())
    except Exception as error:  # noqa: BLE001  a storage that cannot be listed can be saved to
        _log.warning("%s: old files could not be removed: %s", storage.url, error)
    unseen = [name for name, size in named.items() if present.get(name) != size]
    if unseen and not storage.capabilities.machine_only:
        if storage.version(CATALOG_NAME) != replaces:
            raise StorageConflictError(
                f"cannot publish {storage.url}/{CATALOG_NAME}: another save replaced it meanwhile; let one job at "
                f"a time save to a path"
            )
        parallel_map(
            lambda n: _refuse_unseen(storage, n, named[n]),
            unseen,
            storage.capabilities.parallel_reads,
            "bytecheckpoint-stat",
        )
    kept = {*named, *companions(named)}
    stale = [name for name in present if generation_of(name) is not None and name not in kept]
    old_view = committed_view(storage, present)
    return [*(name for name in old_view if name == VIEW_INDEX or name not in view), *stale]


def stale_uploads(storage: Storage) -> Sequence[UnfinishedUpload]:
    """Return the uploads to storage files that are not completed, when all files of this save are.

    A save to this path that began one of them has read the catalog's version before. So if this save commits now, the other
    one cannot, whether it lives or not.
    """
    try:
        return [upload for upload in unfinished_uploads(storage) if generation_of(upload.name) is not None]
    except Exception as error:  # noqa: BLE001  a storage that cannot list them can be saved to
        _log.info("uploads of killed saves are left to the storage: %s", error)
        return ()


def may_have_committed(storage: Storage, catalog: bytes, error: BaseException) -> bool:
    """Return whether a publish that raised `error` may have taken effect: a lost answer, an fsync after the rename."""
    if isinstance(error, StorageUnavailableError) and error.undecided:
        return True
    try:
        return storage.read(CATALOG_NAME) == catalog
    except FileNotFoundError:
        return False
    except (StorageError, OSError):
        return True


def remove_stale_files(storage: Storage, stale: Sequence[str], uploads: Sequence[UnfinishedUpload]) -> None:
    """Remove files after the commit, and abort uploads. Never raises: nothing may report a committed save as failed."""
    try:
        storage.delete(stale)
        if uploads:
            abort_uploads(storage, uploads)
    except Exception as error:  # noqa: BLE001  the save is committed
        _log.warning("%s: old files could not be removed: %s", storage.url, error)


def _refuse_unseen(storage: Storage, name: str, size: int) -> None:
    """Refuse a file that `stat` does not see either: network file systems may take listings and sizes from a cache."""
    present = -1
    for seconds in (None, *tuning().stale_pauses):
        if seconds is not None:
            pause(seconds)
        try:
            present = storage.stat(name).size
        except FileNotFoundError:
            break
        if present == size:
            break
    if present != size:
        found = f"{present} bytes of it" if present >= 0 else "nothing of it"
        raise StorageError(
            f"{storage.url}: {name} was written with {size} bytes, but rank 0 sees {found}; the path must be on storage "
            f"that all ranks share, and nobody else may remove its files"
        )
