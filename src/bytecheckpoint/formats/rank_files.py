"""Read folders in which each rank saved its own part with torch.save: `model_world_size_8_rank_3.pt`, `model_3.pt`.

DTensors and ShardedTensors are joined by the places that their pickles state. A plain tensor is one tensor if
its ranks have equal bytes, by their CRC32, and otherwise a tensor of each rank. The short names are those of
torch_checkpointing; a program may number its epochs so, too, whose files hold no part of a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bytecheckpoint.errors import CheckpointNotFoundError, IncompatibleCheckpointError
from bytecheckpoint.formats.foreign import ForeignCheckpoint, ForeignColumns
from bytecheckpoint.formats.meanings import StoredTensor
from bytecheckpoint.formats.torch_save import TorchFiles
from bytecheckpoint.formats.trees import Tree
from bytecheckpoint.storage import Storage

__all__ = ["RANK_FILE", "are_numbered", "read_rank_files"]

RANK_FILE: Final = re.compile(r"(?:([^/]*?)_)?world_size_(\d{1,7})_rank_(\d{1,7})\.(?:pt|pth)")
"""Name of a rank's file: state, number of ranks, rank."""
_NUMBERED: Final = re.compile(r"([^/]+)_(0|[1-9]\d{0,6})\.pt")


def are_numbered(names: Sequence[str]) -> bool:
    """Return whether files may be those of torch_checkpointing, by their names: each state has all numbers."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        if (found := _NUMBERED.fullmatch(name)) is None:
            return False
        numbers.setdefault(found[1], set()).add(int(found[2]))
    return all(held == {*range(len(held))} for held in numbers.values())


def read_rank_files(storage: Storage) -> ForeignCheckpoint:
    """Read a folder with a file of each rank; the text before `world_size` is the state."""
    groups: dict[tuple[str, int], dict[int, str]] = {}
    listed = [name for name, _ in storage.list()]
    for name in listed:
        if found := RANK_FILE.fullmatch(name):
            groups.setdefault((found[1] or "model", int(found[2])), {})[int(found[3])] = name
    numbered = [] if groups else [found for name in listed if (found := _NUMBERED.fullmatch(name))]
    ranks = 1 + max((int(found[2]) for found in numbered), default=0)
    for found in numbered:
        groups.setdefault((found[1], ranks), {})[int(found[2])] = found[0]
    if not groups:
        raise CheckpointNotFoundError(f"{storage.url} has no file of a rank")
    if len({state for state, _ in groups}) != len(groups):
        raise IncompatibleCheckpointError(
            f"{storage.url} has files of several numbers of ranks: keep those of one save"
        )
    columns, tree = ForeignColumns(), Tree(storage.url)
    files = TorchFiles(storage, columns)
    values: dict[str, bytes] = {}
    divided = False
    for (state, count), names in groups.items():
        if missing := [rank for rank in range(count) if rank not in names]:
            raise CheckpointNotFoundError(
                f"{storage.url} lacks the files of ranks {missing[:5]} of {count} of {state!r}"
            )
        blobs, sharded, whole = [], [], []
        for rank in range(count):
            with files.open(names[rank], rank) as (_, value):
                blobs.append(tree.encode(value))
                sharded.append(tree.sharded)
                whole.append(tree.tensors)
        values[state] = blobs[0]
        if any(blob != blobs[0] for blob in blobs):
            tree.notes.append(f"{state}: the ranks have different plain values; those of rank 0 are kept")
        divided = divided or any(sharded)
        columns.add_sharded(state, sharded, storage.url)
        _add_whole(columns, state, whole, files)
    if ranks > 1 and not divided:
        raise IncompatibleCheckpointError(
            f"{storage.url} has {len(numbered)} files of torch.save ({numbered[0][0]}, ...), and none holds "
            "a part of a tensor: give one"
        )
    facts = {"world_size": max(count for _, count in groups)}
    return ForeignCheckpoint("rank-files", columns, values, tree.notes, sums=files.sums(), facts=facts)


def _add_whole(
    columns: ForeignColumns, state: str, ranks: Sequence[Mapping[str, StoredTensor]], files: TorchFiles
) -> None:
    """Add plain tensors: those that all ranks have alike once, others for each rank."""
    alike: dict[str, StoredTensor] = {}
    for fqn in dict.fromkeys(name for tensors in ranks for name in tensors):
        held = {rank: tensors[fqn] for rank, tensors in enumerate(ranks) if fqn in tensors}
        content = {_content(tensor, files.crcs) for tensor in held.values()}
        if len(content) == 1 and (None not in content or len(held) == 1):
            alike[fqn] = next(iter(held.values()))
            continue
        for rank, tensor in held.items():
            columns.add_whole(state, {fqn: tensor}, rank)
    columns.add_whole(state, alike)


def _content(tensor: StoredTensor, sums: Mapping[str, int | None]) -> tuple[Any, ...] | None:
    """Return facts that are equal if the bytes are; None if nothing says so."""
    crc, nbytes = sums[tensor.storage.key], tensor.storage.nbytes
    if nbytes and crc is None:
        return None
    return crc, nbytes, tensor.start, tensor.dtype, tensor.shape, tensor.strides, tensor.requires_grad
