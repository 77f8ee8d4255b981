"""Read folders in which each rank saved its own part.

They are called `model_world_size_8_rank_3.pt`, `model_rank3.pt`, `rank_3/model.pt`, `model_3.pt`, or `model_3.safetensors`.

DTensors and ShardedTensors are joined by the places that their pickles state; those in safetensors, by the places in
`metadata.pkl` of torch_checkpointing. A plain tensor is one tensor if its ranks have equal bytes, by their CRC32, and
otherwise a tensor of each rank; `metadata.pkl` calls plain tensors replicated, so those are compared, too. The short
names are those of torch_checkpointing; a program may number its epochs so, too, whose files hold no part of a tensor.
Where each rank has one file, that may hold several states, as any file of `torch.save`.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

from bytecheckpoint.errors import CheckpointNotFoundError, IncompatibleCheckpointError, listed
from bytecheckpoint.formats.files import open_file, read_in_parallel
from bytecheckpoint.formats.foreign import ForeignCheckpoint, ForeignColumns
from bytecheckpoint.formats.meanings import StorageRef, StoredTensor
from bytecheckpoint.formats.sharded import ShardedValue
from bytecheckpoint.formats.torch_checkpointing import METADATA, RankItems, describes_safetensors
from bytecheckpoint.formats.torch_save import SUFFIXES, TorchFiles, states_of
from bytecheckpoint.formats.trees import Tree, decode_containers
from bytecheckpoint.storage import Storage

__all__ = ["CONSOLIDATED", "RANK_FILE", "are_numbered", "read_consolidated", "read_rank_files"]

RANK_FILE: Final = re.compile(r"(?:([^/]*?)_)?world_size_(\d{1,7})_rank_(\d{1,7})\.(?:pt|pth)")
"""Name of a rank's file: state, number of ranks, rank."""
CONSOLIDATED: Final = re.compile(r"consolidated\.(\d\d)\.(?:pth|pt)")
"""Name of a file of a tensor-parallel rank, as Meta publishes weights."""
_NUMBERED: Final = re.compile(r"([^/]+)_(0|[1-9]\d{0,6})\.pt")
#: Name with the word "rank" and its number, in its first part: text before, rank, text behind.
_RANKED: Final = re.compile(r"((?:[^/]*[^/a-zA-Z])?)rank[_=-]?(\d{1,7})((?:\D.*)?)\.(?:pt|pth|bin|ckpt)")
#: Bytes that are read at a time to compare copies.
_SUM_BLOCK: Final = 8 << 20


class _StateOfRanks:
    """Content of one state in the files of all ranks.

    Attributes:
        blobs: the encoded values of each rank that has any.
        sharded: parts of tensors, by rank.
        whole: whole tensors, by rank.
    """

    def __init__(self, ranks: int) -> None:
        self.blobs: list[bytes] = []
        self.sharded: list[dict[str, ShardedValue]] = [{} for _ in range(ranks)]
        self.whole: list[dict[str, StoredTensor]] = [{} for _ in range(ranks)]


def are_numbered(names: Sequence[str]) -> bool:
    """Return whether files may be those of ranks, by their names; others may lie beside those of several ranks.

    Each state has the rank 0; of numbers without the word "rank" it has all.
    """
    ranked = {name: found for name in names if (found := _state_and_rank(name))}
    numbers: dict[str, set[int]] = {}
    for state, rank in ranked.values():
        numbers.setdefault(state, set()).add(rank)
    worded = {state for name, (state, _) in ranked.items() if _RANKED.fullmatch(name)}
    several = max(map(len, numbers.values()), default=0) > 1
    return (several or len(ranked) == len(names)) and all(
        0 in held if state in worded else held == {*range(len(held))} for state, held in numbers.items()
    )


def _state_and_rank(name: str) -> tuple[str, int] | None:
    if found := _RANKED.fullmatch(name):
        return "_".join(filter(None, (found[1].strip("_=-."), found[3].strip("_=-./")))) or "model", int(found[2])
    found = _NUMBERED.fullmatch(name)
    return None if found is None else (found[1], int(found[2]))


def read_rank_files(storage: Storage) -> ForeignCheckpoint:
    """Read a folder with a file of each rank; the text before `world_size` is the state."""
    present = [name for name, _ in storage.list()]
    described = RankItems(storage, present) if describes_safetensors(present) else None
    groups = {(state, described.ranks): names for state, names in described.files.items()} if described else {}
    groups |= _ranks_of(storage.url, present)
    others = () if groups and not described else present
    numbered = {name: found for name in others if (found := _state_and_rank(name))}
    ranks = described.ranks if described else 1 + max((rank for _, rank in numbered.values()), default=0)
    for name, (state, rank) in numbered.items():
        _add_rank(storage.url, groups.setdefault((state, ranks), {}), rank, name)
    if not groups:
        raise CheckpointNotFoundError(f"{storage.url} has no file of a rank")
    counts = {count: min(names.values()) for (_, count), names in groups.items()}
    if len(counts) > 1:
        text = f"files of several numbers of ranks ({listed(sorted(counts.values()))}): keep those of one save"
        raise IncompatibleCheckpointError(f"{storage.url} has {text}")
    columns, tree = ForeignColumns(), Tree(storage.url)
    files = TorchFiles(storage, columns)
    values: dict[str, bytes] = {}
    divided = described is not None
    for (state, count), names in groups.items():
        if missing := [rank for rank in range(count) if rank not in names]:
            raise CheckpointNotFoundError(
                f"{storage.url} lacks the files of ranks {missing[:5]} of {count} of {state!r}"
            )
        held: dict[str, _StateOfRanks] = {}
        for rank in range(count):
            if described and state in described.files:
                with open_file(storage, names[rank]) as file:
                    tensors = described.read(file, state, rank, columns)
                    one = held.setdefault(state, _StateOfRanks(count))
                    one.sharded[rank] = {fqn: t for fqn, t in tensors.items() if isinstance(t, ShardedValue)}
                    one.whole[rank] = {fqn: t for fqn, t in tensors.items() if isinstance(t, StoredTensor)}
                continue
            with files.open(names[rank], rank) as (_, value):
                for own, item in states_of(value).items() if len(groups) == 1 else [(state, value)]:
                    one = held.setdefault(own, _StateOfRanks(count))
                    one.blobs.append(tree.encode(item))
                    one.sharded[rank], one.whole[rank] = tree.sharded, tree.tensors
        for own, one in held.items():
            divided = divided or any(map(_is_divided, chain.from_iterable(parts.values() for parts in one.sharded)))
            _add_state(storage, own, one, columns, tree, files)
            if one.blobs:
                values[own] = one.blobs[0]
    if ranks > 1 and not divided:
        raise IncompatibleCheckpointError(
            f"{storage.url} has {len(numbered)} files of torch.save ({min(numbered)}, ...), and none holds "
            "a part of a tensor: give one"
        )
    left_out = []
    if described and described.others:
        unplaced = listed(described.others)
        left_out.append(f"{unplaced}: not read, since {METADATA} does not say the places of their tensors")
    read = {name for names in groups.values() for name in names.values()}
    if beside := [name for name in present if name.endswith(SUFFIXES) and name not in read]:
        left_out.append(f"{listed(beside)}: not read, since files of ranks lie beside; give one by name")
    tree.notes += left_out
    facts: dict[str, Any] = {"world_size": max(counts)} | ({"left_out": left_out} if left_out else {})
    return ForeignCheckpoint("rank-files", columns, values, tree.notes, sums=files.sums(), facts=facts)


def read_consolidated(storage: Storage, names: Sequence[str]) -> ForeignCheckpoint:
    """Read `consolidated.00.pth`, `consolidated.01.pth` and so on, as Meta publishes the weights of tensor-parallel ranks.

    No file says how a tensor is divided: each rank has its own, called "consolidated.01:<name>", for a layout to join.
    """
    found = {int(match[1]): name for name in names if (match := CONSOLIDATED.fullmatch(name))}
    if missing := [rank for rank in range(1 + max(found)) if rank not in found]:
        raise CheckpointNotFoundError(f"{storage.url} lacks the files of ranks {missing[:5]}, beside {max(names)}")
    columns, tree = ForeignColumns(), Tree(storage.url)
    files = TorchFiles(storage, columns)
    for rank, name in sorted(found.items()):
        with files.open(name, rank) as (_, value):
            tree.encode(value)
            columns.add_whole("model", {f"consolidated.{rank:02}:{fqn}": t for fqn, t in tree.tensors.items()})
    tree.notes.append(
        f"nothing says how the tensors of {len(found)} ranks are divided: each of them has tensors "
        '"consolidated.00:<name>", which a layout can join'
    )
    return ForeignCheckpoint("rank-files", columns, {}, tree.notes, sums=files.sums())


def _add_state(
    storage: Storage, state: str, held: _StateOfRanks, columns: ForeignColumns, tree: Tree, files: TorchFiles
) -> None:
    """Add the tensors of a state, and notes where ranks differ."""
    blobs = held.blobs
    if any(blob != blobs[0] for blob in blobs):
        trees = [own for own in map(decode_containers, blobs) if isinstance(own, dict)]
        settings = [own["param_groups"] for own in trees if "param_groups" in own]
        if any(groups != settings[0] for groups in settings):
            raise IncompatibleCheckpointError(
                f"{storage.url}: ranks have different 'param_groups' of {state!r}: their files are of several saves"
            )
        tree.notes.append(f"{state}: the ranks have different plain values; those of rank 0 are kept")
    columns.add_sharded(state, held.sharded, storage.url)
    if different := _different_copies(held.sharded, files.crcs):
        tree.notes.append(
            f"{state}: ranks have different copies of {listed(different)}, as files of several saves have: "
            "those of the lowest rank are kept"
        )
    if any(fqn.endswith("_flat_param") for tensors in held.sharded for fqn in tensors):
        tree.notes.append(
            f"{state}: flat parameters of FSDP1 (LOCAL_STATE_DICT), of which only its module knows the parts: save "
            "SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    _sum_copies(storage, columns, held.whole, files.crcs)
    _add_whole(columns, state, held.whole, files)


def _ranks_of(url: str, present: Sequence[str]) -> dict[tuple[str, int], dict[int, str]]:
    """Return the files of ranks among the names of a folder, by state and number of ranks, then by rank."""
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for name in present:
        if (found := RANK_FILE.fullmatch(name)) is None:
            continue
        count, rank = int(found[2]), int(found[3])
        if rank >= count:
            raise IncompatibleCheckpointError(f"{url} has {name!r}, and ranks of {count} are 0 to {count - 1}")
        _add_rank(url, groups.setdefault((found[1] or "model", count), {}), rank, name)
    return groups


def _is_divided(value: ShardedValue) -> bool:
    """Return whether a file holds less than the whole tensor, as none does that a world of one rank wrote."""
    return sum(math.prod(part.shape) for _, part in value.parts) < math.prod(value.shape)


def _add_rank(url: str, names: dict[int, str], rank: int, name: str) -> None:
    if (other := names.setdefault(rank, name)) != name:
        raise IncompatibleCheckpointError(f"{url} has two files of one rank, {other!r} and {name!r}: keep one")


def _sum_copies(
    storage: Storage, columns: ForeignColumns, ranks: Sequence[Mapping[str, StoredTensor]], sums: dict[str, int | None]
) -> None:
    """Add the CRC32 of each tensor in safetensors of which several ranks have one; no file states it."""
    holders = Counter(fqn for tensors in ranks for fqn in tensors)
    copies = []
    for fqn, tensor in (pair for tensors in ranks for pair in tensors.items()):
        if tensor.storage.key not in sums:
            sums[tensor.storage.key] = None
            if holders[fqn] > 1:
                copies.append(tensor.storage)

    def read(ref: StorageRef) -> int:
        number, begin = columns.places[ref.key]
        crc = 0
        with open_file(storage, columns.files[number].name) as file:
            for at in range(0, ref.nbytes, _SUM_BLOCK):
                crc = zlib.crc32(file.read(begin + at, min(_SUM_BLOCK, ref.nbytes - at)), crc)
        return crc

    found = read_in_parallel(storage, read, copies)
    sums.update(zip((ref.key for ref in copies), found, strict=True))


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


def _different_copies(ranks: Sequence[Mapping[str, ShardedValue]], sums: Mapping[str, int | None]) -> list[str]:
    """Return the tensors of which several ranks have a part, with different bytes."""
    copies: dict[tuple[str, tuple[int, ...]], set[Any]] = {}
    for fqn, value in (pair for tensors in ranks for pair in tensors.items()):
        for offsets, part in value.parts:
            if sums.get(part.storage.key) is not None:
                copies.setdefault((fqn, offsets), set()).add(_content(part, sums))
    return [*dict.fromkeys(fqn for (fqn, _), found in copies.items() if len(found) > 1)]


def _content(tensor: StoredTensor, sums: Mapping[str, int | None]) -> tuple[Any, ...] | None:
    """Return facts that are equal if the bytes are; None if nothing says so."""
    crc, nbytes = sums[tensor.storage.key], tensor.storage.nbytes
    if nbytes and crc is None:
        return None
    return crc, nbytes, tensor.start, tensor.dtype, tensor.shape, tensor.strides, tensor.requires_grad
