"""Read folders of DeepSpeed's ZeRO 1, 2 and 3 as they lie: flat partitions of ranks become boxes of parameters.

What DeepSpeed's own conversion made of such a folder (its universal form) is read, too: a file for each state of each
parameter.

The state "optimizer" has "state.<parameter>.fp32", ".exp_avg" and so on for every parameter, from the partitions of the
ranks. The state "model" has the parameters of the model: of ZeRO 1 and 2 in the dtype of training, of ZeRO 3, whose ranks
save no such parameters, the fp32 ones of the optimizer. What the files say beside is the state "extra_states".
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, IncompatibleCheckpointError
from bytecheckpoint.formats.files import RangedFile, open_file
from bytecheckpoint.formats.foreign import FileSums, ForeignCheckpoint, ForeignColumns, RowColumns
from bytecheckpoint.formats.inert import CallRecord
from bytecheckpoint.formats.meanings import StoredTensor
from bytecheckpoint.formats.torch_save import read_object
from bytecheckpoint.formats.trees import Tree
from bytecheckpoint.representation.boxes import BoxTable, row_major
from bytecheckpoint.representation.decompose import flat_ranges_to_boxes
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.values.tree import TensorRef
from bytecheckpoint.storage import Storage

__all__ = ["OPTIMIZER_FILE", "UNIVERSAL_FILE", "read_deepspeed"]

OPTIMIZER_FILE: Final = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,7})_mp_rank_(\d+)_optim_states\.pt")
"""Name of a file of optimizer state: data-parallel rank, rank of model parallelism."""
UNIVERSAL_FILE: Final = "zero/optimizer_state.pt"
"""Name of the file of common optimizer state in a folder of the universal form."""
#: States beside the weights; DeepSpeed's conversion knows those of Adam, an export of this package writes the others, too.
_UNIVERSAL_SLOTS: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step")
_MODEL_FILE: Final = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_(\d+)_model_states\.pt")
#: Keys of the file of a model that are no plain values of the program.
_KNOWN: Final = frozenset(
    ("module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "buffer_names")
)
_FP32: Final = "fp32"


@dataclass
class _Ranges:
    """Flat ranges of tensors.

    Attributes:
        numbers: number of each tensor that has ranges, by state and FQN.
        filled: elements of each tensor that the ranges so far have, by number.
        tensor, start, stop: tensor and elements of each range.
        file, begin: place of each range.
    """

    numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    filled: dict[int, int] = field(default_factory=dict)
    tensor: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    stop: list[int] = field(default_factory=list)
    file: list[int] = field(default_factory=list)
    begin: list[int] = field(default_factory=list)


def read_deepspeed(storage: Storage) -> ForeignCheckpoint:
    """Read a folder of one step of DeepSpeed, with its partitioned optimizer.

    Raises:
        CheckpointNotFoundError: files of ranks lack.
        CorruptCheckpointError: a file is damaged, or the partitions do not add up to the parameters.
        IncompatibleCheckpointError: the folder holds what this package does not read; the message says what.
    """
    names = [name for name, _ in storage.list()]
    found = {int(match[1]): match for name in names if (match := OPTIMIZER_FILE.fullmatch(name))}
    # A file without a rank of data comes last: it has the whole model.
    models = {int(m[1] or 0): m for name in sorted(names, reverse=True) if (m := _MODEL_FILE.fullmatch(name))}
    if any(int(match[2]) for match in (*found.values(), *models.values())) or any(
        n.startswith("layer_") for n in names
    ):
        raise IncompatibleCheckpointError(
            f"{storage.url} has tensor or pipeline parallel parts, which are not read yet"
        )
    if UNIVERSAL_FILE in names:
        found = {}
    elif missing := [rank for rank in range(max(found, default=0) + 1) if rank not in found]:
        raise CheckpointNotFoundError(f"{storage.url} lacks the optimizer states of ranks {missing[:5]}")
    if 0 not in models:
        raise CheckpointNotFoundError(f"{storage.url} lacks the states of the model")
    return _FolderOfRanks(storage).read(
        [found[rank][0] for rank in sorted(found)], [models[r][0] for r in sorted(models)]
    )


@contextlib.contextmanager
def _damage(file: RangedFile) -> Iterator[None]:
    """Turn the errors of objects that are not as DeepSpeed makes them into one of damage."""
    try:
        yield
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        text = f"its objects are not those of DeepSpeed ({type(error).__name__}: {str(error)[:200]})"
        raise file.damaged(text) from error


class _FolderOfRanks:
    """The reader of the files of all ranks of one step."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._columns = ForeignColumns()
        self._tree = Tree(storage.url)
        self._ranges = _Ranges()
        self._places: dict[str, tuple[int, int]] = {}
        self._sums: list[tuple[int, int, int, int]] = []
        self._shapes: list[dict[str, tuple[int, ...]]] = []
        self._optimizer: dict[str, Any] = {}
        self._rest: dict[str, Any] = {}

    def read(self, optimizers: Sequence[str], models: Sequence[str]) -> ForeignCheckpoint:
        """Read the files of the optimizer and of the model, each in the order of the ranks."""
        columns, tree = self._columns, self._tree
        module: dict[str, Any] = {}
        for rank, name in enumerate(models):
            with self._object(name, rank) as (file, value), _damage(file):
                if rank == 0:
                    self._shapes = [{k: _shape(size) for k, size in group.items()} for group in value["param_shapes"]]
                    self._rest = {key: item for key, item in value.items() if key not in _KNOWN}
                    module = value["module"]
                if not name.startswith("zero_pp_rank"):  # `module` has the frozen parameters, too
                    continue
                frozen = value.get("frozen_param_fragments") or {}
                for fqn, shape in (value.get("frozen_param_shapes") or {}).items():
                    self._add_share("model", fqn, _shape(shape), frozen[fqn], 0, rank, len(models))
        for rank, name in enumerate(optimizers):
            with self._object(name, rank) as (file, value), _damage(file):
                self._add_optimizer(file, value["optimizer_state_dict"], rank, len(optimizers))
        if not optimizers:
            self._add_universal()
        with open_file(self._storage, models[0]) as file, _damage(file):
            rows = self._rows(file)
        values = {"optimizer": tree.encode(self._optimizer)}
        columns.add_whole("optimizer", tree.tensors, self._places)
        partitioned = {fqn for state, fqn in self._ranges.numbers if state == "model"}
        module = {name: TensorRef(name) if name in partitioned else item for name, item in module.items()}
        for state, content in (("model", module), ("extra_states", self._rest)):
            values[state] = tree.encode(content)
            columns.add_whole(state, tree.tensors, self._places)
        world_size = len(optimizers) or int(self._rest.get("dp_world_size") or 1)
        catalog, strides = columns.build({"format": "deepspeed", "world_size": world_size}, rows)
        return ForeignCheckpoint("deepspeed", catalog, strides, values, FileSums.of(self._sums), tuple(tree.notes))

    @contextlib.contextmanager
    def _object(self, name: str, rank: int) -> Iterator[tuple[RangedFile, Any]]:
        with open_file(self._storage, name) as file:
            found = read_object(file, f"{name}/")
            number = self._columns.add_file(file.name, file.size, rank)
            for key, member in found.storages.items():
                self._places[key] = number, member.offset
                if member.crc is not None:
                    self._sums.append((number, member.offset, member.size, member.crc))
            yield file, found.value

    def _add_optimizer(self, file: RangedFile, saved: Mapping[str, Any], rank: int, count: int) -> None:
        """Add the partitions of one rank."""
        stage = _stage(saved)
        inner = saved["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        flat = saved["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
        partitions = saved["partition_count"]
        if type(inner) is not dict or set(partitions if type(partitions) is list else [partitions]) != {count}:
            text = "elastic, or its number of partitions is not that of the files"
            raise IncompatibleCheckpointError(f"{file.label}: its optimizer is {text}; such folders are not read")
        groups = inner.get("state", {})
        for number, tensor in enumerate(flat):
            held = {_FP32: tensor, **groups.get(number, {})}
            shapes, at = self._shapes[number], 0
            for fqn, shape in shapes.items():
                if stage == 3:
                    share = -(-math.prod(shape) // count)
                    self._add_slots(fqn, shape, held, at, share, (rank, count))
                    self._add_share("model", fqn, shape, tensor, at, rank, count)
                    at += share
                elif (place := saved["param_slice_mappings"][number].get(fqn)) is not None:
                    address = place.state
                    self._add_slots(fqn, shape, held, address["start"], address["numel"], None)
            if stage == 3 and at != tensor.shape[0]:
                raise ValueError(
                    f"the shares of partition {number} have {at} elements, the partition has {tensor.shape[0]}"
                )
        if rank == 0:
            self._optimizer["param_groups"] = self._named_groups(inner.get("param_groups", []), stage)

    def _add_universal(self) -> None:
        """Add the parameters of the universal form, in which each is whole."""
        with self._object(UNIVERSAL_FILE, 0) as (file, value), _damage(file):
            stage = _stage(value)
            self._optimizer["param_groups"] = self._named_groups(value["param_groups"], stage)
            partitions = value["optimizer_state_dict"]["state"] if stage == 3 else {}
            steps = {
                fqn: slots["step"] for n, slots in partitions.items() if "step" in slots for fqn in self._shapes[n]
            }
            shapes = {fqn: shape for group in self._shapes for fqn, shape in group.items()}
            if any(part in ("", ".", "..") for fqn in shapes for part in fqn.split("/")):
                raise ValueError("a parameter's name leads out of the folder")
        content = self._optimizer["state"] = {fqn: {"step": steps[fqn]} if fqn in steps else {} for fqn in shapes}
        first = next(iter(shapes), "")
        slots = [_FP32, *(slot for slot in _UNIVERSAL_SLOTS if self._storage.version(f"zero/{first}/{slot}.pt"))]
        for fqn, slot in itertools.product(shapes, slots):
            with self._object(f"zero/{fqn}/{slot}.pt", 0) as (file, value), _damage(file):
                tensor = value["param"] if type(value) is dict else value
                if type(tensor) is not StoredTensor or not tensor.shape:
                    content[fqn][slot] = tensor
                    continue
                shape = shapes[fqn] if len(tensor.shape) == 1 else tensor.shape
                if tensor.strides != tuple(row_major(np.array([tensor.shape], np.int64))[0].tolist()):
                    raise ValueError(f"the tensor has strides {tensor.strides}")
                content[fqn][slot] = TensorRef(f"state.{fqn}.{slot}")
                flat = msgspec.structs.replace(tensor, shape=(math.prod(tensor.shape),), strides=(1,))
                self._add_range("optimizer", f"state.{fqn}.{slot}", shape, flat, 0, flat.shape[0])
                if slot == _FP32 and stage == 3:
                    self._add_range("model", fqn, shape, flat, 0, flat.shape[0])

    def _named_groups(self, groups: Sequence[Mapping[str, Any]], stage: int) -> list[dict[str, Any]]:
        """Return the groups with the names of their parameters instead of the numbers of the partitions."""
        named = []
        for number, group in enumerate(groups):
            partitions = group["params"] if stage == 3 else [number]
            names = [fqn for partition in partitions for fqn in self._shapes[partition]]
            named.append({**group, "params": names})
        return named

    def _add_slots(
        self,
        fqn: str,
        shape: tuple[int, ...],
        held: Mapping[str, Any],
        first: int,
        count: int,
        share: tuple[int, int] | None,
    ) -> None:
        """Add the part of one parameter in each tensor of a partition; a number is one for the parameter."""
        content = self._optimizer.setdefault("state", {}).setdefault(fqn, {})
        for slot, tensor in held.items():
            if type(tensor) is not StoredTensor or not tensor.shape:
                content.setdefault(slot, tensor)
                continue
            name = f"state.{fqn}.{slot}"
            content[slot] = TensorRef(name)
            if share is None:
                self._add_range("optimizer", name, shape, tensor, first, count)
            else:
                self._add_share("optimizer", name, shape, tensor, first, *share)

    def _add_share(
        self, state: str, fqn: str, shape: tuple[int, ...], tensor: StoredTensor, first: int, rank: int, count: int
    ) -> None:
        """Add the elements of a parameter that a rank of ZeRO 3 has: one of `count` equal shares, the last one padded."""
        size, share = math.prod(shape), -(-math.prod(shape) // count)
        self._add_range(state, fqn, shape, tensor, first, max(min(size - rank * share, share), 0))

    def _add_range(
        self, state: str, fqn: str, shape: tuple[int, ...], tensor: StoredTensor, first: int, count: int
    ) -> None:
        """Add elements of a flat tensor as the next elements of a parameter."""
        if (
            type(tensor) is not StoredTensor
            or tensor.strides != (1,)
            or not 0 <= first <= first + count <= tensor.shape[0]
        ):
            raise ValueError(f"the partition of {fqn!r} has no elements {first} to {first + count}")
        ranges = self._ranges
        number = ranges.numbers.get((state, fqn))
        if number is None:
            number = self._columns.add_tensor(state, fqn, tensor.dtype, shape)
            ranges.numbers[state, fqn] = number
            ranges.filled[number] = 0
        if self._columns.dtypes[number] != tensor.dtype:
            raise ValueError(f"the ranks have different dtypes of {fqn!r}")
        file, begin = self._places[tensor.storage.key]
        done = ranges.filled[number]
        if count:
            ranges.tensor.append(number)
            ranges.start.append(done)
            ranges.stop.append(done + count)
            ranges.file.append(file)
            ranges.begin.append(begin + tensor.start + first * itemsize(tensor.dtype))
        ranges.filled[number] = done + count

    def _rows(self, file: RangedFile) -> RowColumns:
        """Return the boxes of all ranges, whose tensors they have to fill."""
        ranges, shapes = self._ranges, self._columns.shapes
        for number, filled in ranges.filled.items():
            if filled != math.prod(shapes[number]):
                have = f"{filled} of {math.prod(shapes[number])} elements"
                raise file.damaged(f"the partitions of {self._columns.fqns[number]!r} have {have}")
        table = BoxTable.build(range(len(shapes)), shapes, shapes).lengths
        tensor, start = np.array(ranges.tensor, np.int64), np.array(ranges.start, np.int64)
        found = flat_ranges_to_boxes(table[tensor], start, np.array(ranges.stop, np.int64))
        items = np.array([itemsize(name) for name in self._columns.dtypes], np.int64)[tensor[found.source]]
        boxes = BoxTable(tensor[found.source], found.offsets, found.lengths)
        begin = np.array(ranges.begin, np.int64)[found.source] + (found.flat_start - start[found.source]) * items
        files = np.array(ranges.file, np.int32)[found.source]
        return RowColumns(boxes, files, begin, row_major(boxes.lengths))


def _stage(saved: Mapping[str, Any]) -> int:
    stage: Any = saved["zero_stage"]
    return int(stage.args[0] if type(stage) is CallRecord else stage)


def _shape(size: Any) -> tuple[int, ...]:
    shape = tuple(size)
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) >= 1 << 62:
        raise ValueError("a shape that no tensor can have")
    return shape
