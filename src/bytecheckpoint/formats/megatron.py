"""Read checkpoints of Megatron-Core ("torch_dist") as they lie: DCP, whose names and stacked layers become a model's.

Megatron stacks the layers of a model, and the experts of a layer, in one tensor. Here each layer and each expert is a
tensor of its own, which has the name in the whole model, so that it fits live objects at any layout:

    decoder.layers.mlp.experts.experts.linear_fc1.weight        shape [layers, experts, ...]
    decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight

The state "optimizer" has "state.<parameter>.fp32", ".exp_avg" and so on for every parameter; "opt_param_scheduler" has the
scheduler; "extra_states" has the rest of the common values, "args" as a dict.

Until version 0.14, an optimizer's tensor of a weight [X, Y] may be [X / x, Y / y, x * y]: a number for each tensor-parallel
part [x, y] along each dimension, and the elements of the part, of which each data-parallel rank has a range.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from bytecheckpoint.errors import CheckpointNotFoundError, IncompatibleCheckpointError, listed
from bytecheckpoint.formats.dcp import DcpContent, read_content, with_states
from bytecheckpoint.formats.decoded import Decoded
from bytecheckpoint.formats.files import damage, open_file
from bytecheckpoint.formats.foreign import ForeignCheckpoint, ForeignColumns
from bytecheckpoint.formats.inert import CallRecord
from bytecheckpoint.formats.megatron_buckets import BUCKET, ModelWeight, OptimizerBucket, cut, place_parameters
from bytecheckpoint.formats.megatron_names import (
    LAYER,
    PARAM,
    SLOTS,
    add_steps,
    model_or_slot,
    named_groups,
    param_groups,
    unstacked,
)
from bytecheckpoint.formats.rank_parts import DividedTensor, FlatRanges, RankPart
from bytecheckpoint.formats.rows import RowColumns
from bytecheckpoint.formats.torch_save import TorchFiles
from bytecheckpoint.formats.trees import Tree
from bytecheckpoint.representation.boxes import BoxTable, row_major
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.values.tree import TensorRef
from bytecheckpoint.storage import Storage

__all__ = ["COMMON", "MARKER", "SCHEDULER", "read_megatron"]

MARKER: Final = "metadata.json"
"""File that a folder of Megatron has beside the metadata of DCP."""
_COMMON_FILE: Final = "common.pt"
_MOST_MARKER_BYTES: Final = 1 << 20
#: Most tensors into which one stacked tensor is split.
_MOST_PARTS: Final = 1 << 20
COMMON: Final = "common_state/shard_0_1"
"""Name of the values that are the same on all ranks."""
#: Name of a value that one rank has.
_SHARD = re.compile(r".+/shard_[\d.]+_[\d.]+")
_COMMON = re.compile(r"common_state/shard_\d+_\d+")
SCHEDULER: Final = "opt_param_scheduler"
"""Name of the state of the scheduler."""


def read_megatron(storage: Storage, *, has_marker: bool = True) -> ForeignCheckpoint:
    """Read a checkpoint of Megatron-Core; one of DCP that neither a file nor names of values show to be its, as such.

    Args:
        storage: folder of the checkpoint.
        has_marker: False if it has no `metadata.json`.
    """
    is_marked, content = has_marker and _is_marked(storage), read_content(storage)
    if not is_marked and not any(map(_SHARD.fullmatch, content.values)):
        return with_states(storage, content)
    notes = [] if is_marked else [f"{MARKER} of Megatron is missing: it writes it last, and loads nothing without it"]
    with damage(content.file, "Megatron"):
        return _TorchDist(storage, content, notes).read()


def _is_marked(storage: Storage) -> bool:
    """Return whether a file says that a folder is Megatron's; refuse the formats that are not read."""
    with open_file(storage, MARKER) as file, damage(file, "Megatron"):
        if file.size > _MOST_MARKER_BYTES:
            raise IncompatibleCheckpointError(f"{file.label} has {file.size} bytes, which Megatron's has not")
        facts = json.loads(file.read(0, file.size))
        if type(facts) is dict and "sharded_backend" in facts:
            if (backend := facts["sharded_backend"]) != "torch_dist":
                raise IncompatibleCheckpointError(f"{file.label}: the format {backend!r} of Megatron is not read")
            return True
    return False


class _TorchDist:
    """The reader of one checkpoint, of which the content is known."""

    def __init__(self, storage: Storage, content: DcpContent, notes: Sequence[str] = ()) -> None:
        self._storage, self._old = storage, content
        self._columns = ForeignColumns(files=content.columns.files, places=content.columns.places)
        self._tree = Tree(storage.url, content.file.size)
        self._tree.notes += notes
        self._slots: dict[str, dict[str, Any]] = {}  # by parameter
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the parameters that have slots

    def read(self) -> ForeignCheckpoint:
        rows = self.add_tensors()
        common, others = self._values()
        names = [key.fqn for key in self._columns.keys if key.state == "model"]
        states: dict[str, Any] = {"model": {fqn: TensorRef(fqn) for fqn in names}}
        optimizer = common.pop("optimizer", None)
        made: dict[str, bytes | Decoded] = {}
        facts: dict[str, Any] = {}
        groups = param_groups(optimizer)
        if groups and not self._slots:  # SGD without momentum, which has every parameter of the model
            keys = zip(self._columns.keys, self._columns.shapes, strict=True)
            self._shapes = {key.fqn: shape for key, shape in keys if key.state == "model"}
        if groups or self._slots:
            of_groups = {name: others.pop(name) for name in list(others) if ".distributed.dp_group_idx_" in name}
            args = common.get("args")
            args = args if type(args) is dict else {}
            named = named_groups(groups or param_groups(of_groups), self._shapes, self._slots, args)
            self._tree.notes += named.notes
            facts = {"left_out": named.undecided} if named.undecided else {}
            made |= add_steps(self._columns, self._slots, named.steps)
            states["optimizer"] = {"state": self._slots, "param_groups": named.groups}
        elif optimizer is not None:
            others["optimizer"] = optimizer
        if type(common.get(SCHEDULER)) is dict:
            states[SCHEDULER] = common.pop(SCHEDULER)
        states["extra_states"] = {**common, **others}
        values = self._columns.add_states(states, self._tree)
        made |= self._old.made
        notes, sums = self._tree.notes, self._old.sums
        return ForeignCheckpoint("megatron", self._columns, values, notes, rows, sums, made, facts)

    def add_tensors(self) -> RowColumns:
        """Add the tensors, stacked ones as one for each layer and expert; return their rows."""
        rows, shapes = without_flat_ranges(self._old)
        rows = rows.take(np.arange(len(rows.file)))  # a copy, for `_add_stack`
        bounds = np.searchsorted(rows.boxes.tensor, np.arange(len(shapes) + 1)).tolist()
        buckets: dict[tuple[str, str, int], OptimizerBucket] = {}
        kept = np.ones(len(rows.file), np.bool_)
        for number, name in enumerate(self._old.names):
            own = slice(bounds[number], bounds[number + 1])
            if found := BUCKET.fullmatch(name):
                columns = rows.boxes.offsets[:, 0], rows.boxes.lengths[:, 0], rows.file, rows.begin
                runs = list(zip(*(column[own].tolist() for column in columns), strict=True))
                place = found[1], f"{found[2]}.{found[3]}", int(found[4])
                bucket = buckets.setdefault(place, OptimizerBucket(*place))
                bucket.slots[found[5]] = self._old.columns.dtypes[number], runs
                kept[own] = False
            else:
                self._add_stack(number, name, shapes[number], rows, own)
        rows = rows.take(kept)
        return RowColumns.concat([rows, self._rows_in(list(buckets.values()), rows)]) if buckets else rows

    def _add_stack(self, number: int, name: str, whole: tuple[int, ...], rows: RowColumns, own: slice) -> None:
        """Add the tensors of a stack, and change its rows into theirs."""
        slot, key = model_or_slot(name)
        template, depth = unstacked(key)
        sizes, shape = whole[:depth], whole[depth:]
        if len(sizes) != depth or math.prod(sizes) > _MOST_PARTS:
            raise ValueError(f"{name!r} of shape {list(whole)} is no stack of tensors")
        boxes = rows.boxes
        if depth and (boxes.lengths[own, :depth] != 1).any():
            raise IncompatibleCheckpointError(f"{name!r} has parts of several layers in one item, which is not read")
        added = []
        for indices in np.ndindex(*sizes):
            fqn = template.format(*indices)
            state, fqn = ("optimizer", self._note_slot(fqn, slot, shape)) if slot else ("model", fqn)
            added.append(self._columns.add_tensor(state, fqn, self._old.columns.dtypes[number], shape))
        places = tuple(boxes.offsets[own, k] for k in range(depth))
        boxes.tensor[own] = np.array(added, np.int64).reshape(sizes)[places]
        for array, filling in ((boxes.offsets, 0), (boxes.lengths, 1), (rows.strides, 1)) if depth else ():
            array[own, :-depth] = array[own, depth:]
            array[own, -depth:] = filling

    def _note_slot(self, fqn: str, slot: str, shape: tuple[int, ...]) -> str:
        """Note that a parameter has a tensor of the optimizer; return the tensor's name."""
        self._slots.setdefault(fqn, {})[slot] = TensorRef(f"state.{fqn}.{slot}")
        self._shapes[fqn] = shape
        return f"state.{fqn}.{slot}"

    def _rows_in(self, buckets: Sequence[OptimizerBucket], rows: RowColumns) -> RowColumns:
        """Add the optimizer's state in buckets, each parameter with boxes of its own; return the rows."""
        columns = self._columns
        shapes = {key.fqn: shape for key, shape in zip(columns.keys, columns.shapes, strict=True)}
        ranges, files = FlatRanges(columns), [file.name for file in columns.files]
        for one in place_parameters(self._storage, files, self._weights(rows), buckets, PARAM):
            weight = one.found[0].weight
            shape, start = shapes[weight.fqn], (0,) * len(shapes[weight.fqn])
            parts = [RankPart(k, start, lengths, offsets) for k, (offsets, lengths, _, _) in enumerate(weight.boxes)]
            divided = DividedTensor(shape, tuple(part.lengths for part in parts), tuple(parts))
            for slot, (dtype, runs) in one.bucket.slots.items():
                key = "optimizer", self._note_slot(weight.fqn, SLOTS.get(slot, slot), shape)
                for k, first, size in one.boxes():
                    for _, count, *place in cut(runs, first, size, itemsize(dtype)):
                        ranges.add(key, dtype, divided, k, (place[0], place[1]), count)
        return ranges.rows(self._old.file)

    def _weights(self, rows: RowColumns) -> list[ModelWeight]:
        """Return the tensors of the model with their parts, which have to be dense, in the order of the model."""
        columns, boxes = self._columns, rows.boxes
        if (np.where(boxes.lengths > 1, rows.strides - row_major(boxes.lengths), 0)).any():
            raise ValueError("a part of a tensor is not dense")
        parts: dict[int, list[tuple[tuple[int, ...], tuple[int, ...], int, int]]] = {}
        for number, offsets, lengths, file, begin in zip(
            *(a.tolist() for a in (boxes.tensor, boxes.offsets, boxes.lengths, rows.file, rows.begin)), strict=True
        ):
            ndim = len(columns.shapes[number])
            parts.setdefault(number, []).append((tuple(offsets[:ndim]), tuple(lengths[:ndim]), file, begin))
        weights, behind_layers = [], False
        for number, (state, fqn, _) in enumerate(columns.keys):
            if state != "model":
                continue
            layer = LAYER.search(fqn)
            behind_layers = behind_layers or layer is not None
            order = (1, int(layer[1]), number) if layer else (2 * behind_layers, 0, number)
            weights.append(ModelWeight(fqn, columns.dtypes[number], order, tuple(sorted(parts[number]))))
        return weights

    def _values(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the common values, and those of single ranks by name, without Transformer Engine's extra states."""
        common: dict[str, Any] = {}
        others: dict[str, Any] = {}
        left_out, found = [], False
        for name, value in self._old.values.items():
            value = value[0] if type(value) is list and len(value) == 1 else value
            if _COMMON.fullmatch(name):
                found = True
                common.update(value)
            elif "_extra_state/shard_" not in name:
                others[name] = value
            elif value is not None and value != b"":
                left_out.append(name)
        if left_out:
            self._tree.notes.append(f"{len(left_out)} extra states of modules are left out: {listed(left_out)}")
        if any(name == _COMMON_FILE for name, _ in self._storage.list()):  # until Megatron-Core 0.18
            files = TorchFiles(self._storage, self._columns)
            with files.open(_COMMON_FILE) as (file, value), damage(file, "Megatron"):
                common.update(value)
        elif not found:
            raise CheckpointNotFoundError(
                f"{self._storage.url} lacks {_COMMON_FILE}, with the settings of the optimizer"
            )
        if type(args := common.get("args")) is CallRecord and type(args.state) is dict:
            common["args"] = args.state
        return common, others


def without_flat_ranges(content: DcpContent) -> tuple[RowColumns, list[tuple[int, ...]]]:
    """Return the rows and the shapes of tensors, those of optimizers with the shapes of their weights."""
    rows, shapes, names = content.rows, list(content.columns.shapes), content.names
    weights = dict(zip(names, shapes, strict=True))
    flat: dict[int, tuple[int, ...]] = {}  # shape of a tensor-parallel part
    lost: list[str] = []
    for number, name in enumerate(names):
        slot, fqn = model_or_slot(name)
        weight = weights.get(fqn) if slot else None
        if slot and weight is None:
            lost.append(name)
        if weight is None or len(weight) + 1 != len(shapes[number]):
            continue
        *counts, size = shapes[number]
        flat[number] = tuple(n // count if count else 0 for n, count in zip(weight, counts, strict=True))
        if math.prod(flat[number]) != size or math.prod(counts) * size != math.prod(weight):
            raise ValueError(f"{name!r} of shape {list(shapes[number])} is not in parts of {list(weight)}")
        shapes[number] = weight
    if not flat:
        return rows, shapes
    if lost:
        raise IncompatibleCheckpointError(
            f"no weight says which shapes these tensors of the optimizer have: {listed(lost)}"
        )
    chosen = np.isin(rows.boxes.tensor, list(flat))
    ranged, boxes = rows.take(chosen), rows.boxes.take(chosen)
    at, each = np.searchsorted(list(flat), boxes.tensor), np.arange(len(boxes))
    last = np.array([*map(len, flat.values())], np.int64)[at]
    start, count = boxes.offsets[each, last], boxes.lengths[each, last]
    if (boxes.volumes() != count).any():
        raise ValueError("an optimizer's item has ranges of several parts")
    boxes.offsets[each, last] = 0
    parts = BoxTable.build([*flat], [*flat.values()], [*flat.values()], boxes.ndim).lengths[at]
    found, _ = RowColumns.of_ranges(
        BoxTable(boxes.tensor, boxes.offsets * parts, parts),
        (start, start + count), ranged.file, ranged.begin, content.columns.items(boxes.tensor),
    )  # fmt: skip
    whole = RowColumns.concat([rows.take(~chosen), found])
    return whole.take(np.argsort(whole.boxes.tensor, kind="stable")), shapes
