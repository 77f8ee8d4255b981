"""Read the description that torch_checkpointing writes of the tensors in ranks' files of safetensors, which lack it.

`metadata.pkl` has mesh, placements and global shape of each tensor of the items that have a resharder, and the file of
each rank. It is a pickle of plain values, which refer to one description of a mesh from many places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bytecheckpoint.errors import CheckpointNotFoundError, IncompatibleCheckpointError
from bytecheckpoint.formats.files import RangedFile, damage, open_file
from bytecheckpoint.formats.foreign import ForeignColumns
from bytecheckpoint.formats.huggingface import NUMBERED_FILE, SAFETENSORS, safetensors_header
from bytecheckpoint.formats.meanings import StorageRef, StoredTensor, shape_of
from bytecheckpoint.formats.sharded import ShardedValue, local_parts
from bytecheckpoint.formats.unpickling import MAX_PICKLE_BYTES, read_pickle
from bytecheckpoint.representation.boxes import row_major_of
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.storage import Storage

__all__ = ["METADATA", "RankItems", "describes_safetensors"]

METADATA: Final = "metadata.pkl"
_VERSION: Final = "2.0"


@dataclass(frozen=True, slots=True)
class _RankMesh:
    """A mesh of devices.

    Attributes:
        shape: extent of each dimension.
        positions: position of each rank in row-major order.
    """

    shape: tuple[int, ...]
    positions: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class _Placement:
    """The description of a tensor by the ranks of one mesh.

    Attributes:
        shape: shape of the whole tensor.
        dtype: torch's name of the dtype.
        mesh: mesh of the ranks.
        steps: name and fields of the placement on each dimension of the mesh.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: _RankMesh
    steps: tuple[tuple[str, Mapping[str, Any]], ...]

    @property
    def replicated(self) -> bool:
        """True if every rank has the whole tensor."""
        return all(name == "Replicate" for name, _ in self.steps)

    def place(self, rank: int, local: StoredTensor) -> StoredTensor | ShardedValue:
        """Return the tensor of which a rank stored a part; a replicated one as plain, since plain ones look alike."""
        if f"torch.{local.dtype}" != self.dtype:
            raise ValueError(f"a tensor of {local.dtype} instead of {self.dtype}")
        coordinates = map(int, np.unravel_index(self.mesh.positions[rank], self.mesh.shape))
        parts = local_parts(local, self.shape, zip(self.mesh.shape, coordinates, strict=True), self.steps)
        return local if self.replicated else ShardedValue(local.dtype, self.shape, parts)


def describes_safetensors(names: Sequence[str]) -> bool:
    """Return whether a folder has files of safetensors, and a file that may describe them."""
    return METADATA in names and any(name.endswith(SAFETENSORS) for name in names)


class RankItems:
    """The items of torch_checkpointing that ranks wrote as safetensors, by `metadata.pkl`.

    Args:
        storage: the folder.
        listed: names of its files.

    Attributes:
        ranks: number of ranks.
        files: name of the file of each rank, by item.
        others: files of safetensors that no item has.

    Raises:
        CheckpointNotFoundError: the file of a rank is missing.
        CorruptCheckpointError: `metadata.pkl` is damaged.
        IncompatibleCheckpointError: it has another version, or there are files of another save.
    """

    def __init__(self, storage: Storage, listed: Sequence[str]) -> None:
        self.files: dict[str, dict[int, str]] = {}
        self._tensors: dict[str, dict[str, list[_Placement]]] = {}
        with open_file(storage, METADATA) as file, damage(file, "torch_checkpointing"):
            self._left = file.size
            self._meshes: dict[int, _RankMesh] = {}
            if file.size > MAX_PICKLE_BYTES:
                raise IncompatibleCheckpointError(f"it has {file.size} bytes, more than {MAX_PICKLE_BYTES}")
            content: Any = read_pickle(file.read(0, file.size), file=file.label, meanings={})[0]
            if (version := content.get("version")) != _VERSION:
                raise IncompatibleCheckpointError(f"its version is {version!r}, not {_VERSION!r}")
            self.ranks: int = content["world_size"]
            for state, item in content["metadata"].items():
                self._add(file, state, item)
        self._check_names(storage, listed)
        named = {name for names in self.files.values() for name in names.values()}
        self.others = [name for name in listed if name.endswith(SAFETENSORS) and name not in named]

    def read(
        self, file: RangedFile, state: str, rank: int, columns: ForeignColumns
    ) -> dict[str, StoredTensor | ShardedValue]:
        """Return the tensors in the file of a rank, and add the file to the columns."""
        number = columns.add_file(file.name, file.size, rank, state)
        header = safetensors_header(file)
        stored = {}
        for entry in header.entries:
            fqn, shape = entry.key.fqn, entry.global_shape
            nbytes = math.prod(shape) * itemsize(entry.dtype)
            ref = StorageRef(f"{file.name}/{fqn}", entry.dtype, nbytes, 0, nbytes)
            columns.places[ref.key] = number, header.data_offset + entry.byte_offset
            stored[fqn] = StoredTensor(ref, entry.dtype, 0, shape, row_major_of(shape))
        found = {}
        for fqn, placements in self._tensors[state].items():
            if one := next((one for one in placements if rank in one.mesh.positions), None):
                if fqn not in stored:
                    raise file.damaged(f"{METADATA} says that it has the tensor {fqn!r}, which it lacks")
                with damage(file, "torch_checkpointing"):
                    found[fqn] = one.place(rank, stored.pop(fqn))
        if stored:
            raise IncompatibleCheckpointError(f"{file.label}: {METADATA} does not say the place of {min(stored)!r}")
        return found

    def _add(self, file: RangedFile, state: str, item: Mapping[str, Any]) -> None:
        layouts = item["rank_to_layout_info"]
        self._charge(len(layouts))
        formats = {layout and layout["serialization_format"]["type"] for layout in layouts.values()}
        if "SafetensorsSerialization" not in formats:
            return  # the pickles of an item say the places, too
        if len(formats) > 1:
            raise IncompatibleCheckpointError(f"it has files of several formats, or none, of ranks of {state!r}")
        names = {rank: layout["file_path"] for rank, layout in layouts.items()}
        if self.ranks != len(names) or {*names} != {*range(len(names))} or len({*names.values()}) != len(names):
            raise ValueError(f"not one file of each of {self.ranks} ranks of {state!r}")
        tensors: dict[str, list[_Placement]] = {}
        for path, groups in item["nested_path_to_metadata"].items():
            # What the writer makes of a path; the header has this name.
            fqn = ".".join(map(str, file.decoded_json("the path of a tensor", path, list[str | int])))
            if fqn in tensors:
                raise IncompatibleCheckpointError(f"two tensors of {state!r} have the name {fqn!r}")
            tensors[fqn] = [self._placement(fqn, group["sharding_metadata"]) for group in groups]
            if len({one.replicated for one in tensors[fqn]}) > 1:
                raise IncompatibleCheckpointError(f"{fqn!r} of {state!r} is whole on some ranks, and a part on others")
        self.files[state], self._tensors[state] = names, tensors

    def _placement(self, fqn: str, packed: Mapping[str, Any]) -> _Placement:
        if packed["type"] != "DTensorShardingMetadata":
            raise IncompatibleCheckpointError(f"a description of {fqn!r} by {packed['type']!r} is not supported")
        data = packed["data"]
        mesh, steps = data["mesh_spec"], data["placements"]
        self._charge(1 + len(data["global_shape"]) + len(steps))
        if (known := self._meshes.get(id(mesh))) is None:
            self._charge(len(mesh["mesh_data"]))
            known = _RankMesh(shape_of(mesh["mesh_shape"]), {rank: at for at, rank in enumerate(mesh["mesh_data"])})
            if math.prod(known.shape) != len(known.positions):
                raise ValueError("a mesh of another number of ranks than its shape")
            self._meshes[id(mesh)] = known
        return _Placement(
            shape_of(data["global_shape"]), data["dtype"], known, tuple((step["type"], step) for step in steps)
        )

    def _charge(self, values: int) -> None:
        """Count values, each of which takes a byte of the pickle at least if it is not referred to from many places."""
        self._left -= values
        if self._left < 0:
            raise IncompatibleCheckpointError("its values refer to each other, and are too many")

    def _check_names(self, storage: Storage, listed: Sequence[str]) -> None:
        there = {*listed}
        for state, names in self.files.items():
            if missing := [rank for rank, name in names.items() if name not in there]:
                text = f"the files of ranks {missing[:5]} of {self.ranks} of {state!r}, such as {names[missing[0]]!r}"
                raise CheckpointNotFoundError(f"{storage.url} lacks {text}")
            there.difference_update(names.values())
        for name in sorted(there):
            of_rank = NUMBERED_FILE.fullmatch(name)
            if of_rank and (of_rank[1] in self.files or int(of_rank[2]) >= self.ranks):
                text = f"{name!r}, which {METADATA} does not name: keep the files of one save"
                raise IncompatibleCheckpointError(f"{storage.url} has {text}")
