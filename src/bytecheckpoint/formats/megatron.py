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
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, listed
from bytecheckpoint.formats.dcp import METADATA, DcpContent, read_content, read_dcp
from bytecheckpoint.formats.files import damage, open_file
from bytecheckpoint.formats.foreign import ForeignCheckpoint, ForeignColumns, RowColumns
from bytecheckpoint.formats.inert import CallRecord
from bytecheckpoint.formats.megatron_buckets import BUCKET, ModelWeight, OptimizerBucket, cut, place_parameters
from bytecheckpoint.formats.shown import VALUES_NAME
from bytecheckpoint.formats.torch_save import read_object
from bytecheckpoint.formats.trees import Tree
from bytecheckpoint.representation.boxes import BoxTable, row_major
from bytecheckpoint.representation.decompose import flat_ranges_to_boxes
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.values.tree import TensorRef
from bytecheckpoint.storage import Storage

__all__ = ["COMMON", "MARKER", "SCHEDULER", "block_of", "place_in_stack", "read_megatron"]

MARKER: Final = "metadata.json"
"""File that a folder of Megatron has beside the metadata of DCP."""
_COMMON_FILE: Final = "common.pt"
_MOST_MARKER_BYTES: Final = 1 << 20
#: Most tensors into which one stacked tensor is split.
_MOST_PARTS: Final = 1 << 20
COMMON: Final = "common_state/shard_0_1"
"""Name of the values that are the same on all ranks."""
_COMMON = re.compile(r"common_state/shard_\d+_\d+")
_SLOT = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_EXPERTS = re.compile(r"(?:^|\.)experts\.experts\.")
_EXPERT = re.compile(r"\.local_experts\.(\d{1,9})\.")
#: Names of the masters of parameters in Megatron's optimizers, and elsewhere.
_PARAM: Final = "param"
_SLOTS: Final = {_PARAM: "fp32", "fp32_param": "fp32"}
#: Settings of a param group that say which parameters it has, and are no hyperparameters of the optimizer inside.
_OWN_SETTINGS: Final = ("params", "param_names", "is_expert_parallel", "step")
_STEPS: Final = f"{VALUES_NAME}-steps"
SCHEDULER: Final = "opt_param_scheduler"
"""Name of the state of the scheduler."""


def read_megatron(storage: Storage) -> ForeignCheckpoint:
    """Read a checkpoint of Megatron-Core; one of DCP whose `metadata.json` is of another program is read as such.

    Raises:
        CorruptCheckpointError: a file is missing or damaged.
        IncompatibleCheckpointError: the checkpoint holds what this package does not read; the message says what.
    """
    with open_file(storage, MARKER) as file, damage(file, "Megatron"):
        if file.size > _MOST_MARKER_BYTES:
            raise IncompatibleCheckpointError(f"{file.label} has {file.size} bytes, which Megatron's has not")
        facts = json.loads(file.read(0, file.size))
        if type(facts) is not dict or "sharded_backend" not in facts:
            return read_dcp(storage)
        if facts["sharded_backend"] != "torch_dist":
            backend = facts["sharded_backend"]
            raise IncompatibleCheckpointError(f"{file.label}: the format {backend!r} of Megatron is not read")
    content = read_content(storage)
    with open_file(storage, METADATA) as file, damage(file, "Megatron"):
        return _TorchDist(storage, content).read()


class _TorchDist:
    """The reader of one checkpoint, of which the content is known."""

    def __init__(self, storage: Storage, content: DcpContent) -> None:
        self._storage = storage
        self._old = content
        self._columns = ForeignColumns(files=content.columns.files)
        self._tree = Tree(storage.url)
        self._places = dict(content.storages)
        self._made: dict[str, bytes] = {}
        self._orders: dict[int, tuple[int, ...]] = {}
        self._slots: dict[str, dict[str, Any]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def read(self) -> ForeignCheckpoint:
        rows = self._add_tensors()
        common, others = self._values()
        states: dict[str, Any] = {"model": {fqn: TensorRef(fqn) for fqn in self._names_of("model")}}
        optimizer = common.pop("optimizer", None)
        if self._slots:
            of_groups = {name: others.pop(name) for name in list(others) if ".distributed.dp_group_idx_" in name}
            groups = _param_groups(optimizer) or _param_groups(of_groups)
            args = common.get("args")
            decayed_norms = args.get("apply_wd_to_qk_layernorm") if type(args) is dict else None
            states["optimizer"] = {"state": self._slots, "param_groups": self._named_groups(groups, decayed_norms)}
        elif optimizer is not None:
            others["optimizer"] = optimizer
        if type(common.get(SCHEDULER)) is dict:
            states[SCHEDULER] = common.pop(SCHEDULER)
        states["extra_states"] = {**common, **others}
        values = self._columns.add_states(states, self._tree, self._places)
        return ForeignCheckpoint(
            "megatron", self._columns, values, self._tree.notes, rows, self._old.sums, made=self._made
        )

    def _names_of(self, state: str) -> list[str]:
        columns = self._columns
        return [fqn for of, fqn in zip(columns.states, columns.fqns, strict=True) if of == state]

    def _add_tensors(self) -> RowColumns:
        """Add the tensors, stacked ones as one for each layer and expert; return their rows."""
        old = self._old.columns
        rows, shapes = _without_flat_ranges(self._old)
        boxes = rows.boxes
        tensor, offsets, lengths, strides = (
            np.array(array) for array in (boxes.tensor, boxes.offsets, boxes.lengths, rows.strides)
        )
        buckets: dict[tuple[str, str, int], OptimizerBucket] = {}
        kept = np.ones(len(tensor), np.bool_)
        layered = False
        boxes_of_one = boxes.offsets[:, 0], boxes.lengths[:, 0]
        for number, name in enumerate(self._old.names):
            first, stop = np.searchsorted(boxes.tensor, [number, number + 1])
            if found := BUCKET.fullmatch(name):
                place = found[1], f"{found[2]}.{found[3]}", int(found[4])
                runs = list(zip(*(a[first:stop].tolist() for a in (*boxes_of_one, rows.file, rows.begin)), strict=True))
                buckets.setdefault(place, OptimizerBucket(*place)).slots[found[5]] = old.dtypes[number], runs
                kept[first:stop] = False
                continue
            state, slot, key = "model", "", name
            if found := _SLOT.fullmatch(name):
                state, slot, key = "optimizer", _SLOTS.get(found[1], found[1]), found[2]
            template, depth = _unstacked(key)
            whole = shapes[number]
            sizes, shape = whole[:depth], whole[depth:]
            if len(sizes) != depth or math.prod(sizes) > _MOST_PARTS:
                raise ValueError(f"{name!r} of shape {list(whole)} is no stack of tensors")
            if depth and (lengths[first:stop, :depth] != 1).any():
                raise IncompatibleCheckpointError(
                    f"{name!r} has parts of several layers in one item, which is not read"
                )
            numbers = np.array(
                [
                    self._add_tensor(state, slot, template.format(*indices), old.dtypes[number], shape)
                    for indices in np.ndindex(*sizes)
                ],
                np.int64,
            ).reshape(sizes)
            for new in numbers.flat if state == "model" else ():
                fqn = self._columns.fqns[new]
                layer, expert = _LAYER.search(fqn), _EXPERT.search(fqn)
                layered = layered or layer is not None
                part, within = (1, int(layer[1])) if layer else (2 * layered, 0)
                self._orders[int(new)] = part, within, number, int(expert[1]) if expert else 0
            tensor[first:stop] = numbers[tuple(offsets[first:stop, k] for k in range(depth))] if depth else numbers
            for array, filling in ((offsets, 0), (lengths, 1), (strides, 1)) if depth else ():
                array[first:stop, :-depth] = array[first:stop, depth:]
                array[first:stop, -depth:] = filling
        found_rows = RowColumns(
            BoxTable(tensor[kept], offsets[kept], lengths[kept]), rows.file[kept], rows.begin[kept], strides[kept]
        )
        return self._with_buckets(found_rows, list(buckets.values())) if buckets else found_rows

    def _with_buckets(self, rows: RowColumns, buckets: Sequence[OptimizerBucket]) -> RowColumns:
        """Add the optimizer's state in buckets, each parameter with boxes of its own; return all rows."""
        columns = self._columns
        numbers = {fqn: number for number, fqn in enumerate(columns.fqns)}
        files = [file.name for file in columns.files]
        placed = place_parameters(self._storage, files, self._weights(rows), buckets, _PARAM)
        ranges: list[tuple[int, int, int, int, int, int]] = []  # tensor, range in its box, file, first byte, box
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        filled: dict[int, int] = {}
        for one in placed:
            fqn = one.found[0].weight.fqn
            for slot, (dtype, runs) in one.bucket.slots.items():
                slot = _SLOTS.get(slot, slot)
                shape = columns.shapes[numbers[fqn]]
                key = f"state.{fqn}.{slot}"
                if key not in numbers:
                    numbers[key] = self._add_tensor("optimizer", slot, fqn, dtype, shape)
                for offsets, lengths, start in one.boxes():
                    for first, count, file, begin in cut(runs, start, math.prod(lengths), itemsize(dtype)):
                        ranges.append((numbers[key], first - start, first - start + count, file, begin, len(boxes)))
                        filled[numbers[key]] = filled.get(numbers[key], 0) + count
                    boxes.append((offsets, lengths))
        for number, count in filled.items():
            if count != (size := math.prod(columns.shapes[number])):
                name = f"{columns.fqns[number]!r}"
                raise CorruptCheckpointError(
                    f"{self._storage.url}: the buckets have {count} of {size} elements of {name}"
                )
        tensor, first_of, stop_of, at, begin_of, box_of = np.array(ranges, np.int64).reshape(-1, 6).T
        table = BoxTable.build(range(len(boxes)), [box[0] for box in boxes], [box[1] for box in boxes], rows.boxes.ndim)
        found = flat_ranges_to_boxes(table.lengths[box_of], first_of, stop_of)
        of = found.source
        items = np.array([itemsize(name) for name in columns.dtypes], np.int64)[tensor[of]]
        more = BoxTable(tensor[of], found.offsets + table.offsets[box_of[of]], found.lengths)
        return RowColumns(
            BoxTable.concat([rows.boxes, more]),
            np.concatenate([rows.file, at[of].astype(np.int32)]),
            np.concatenate([rows.begin, begin_of[of] + (found.flat_start - first_of[of]) * items]),
            np.concatenate([rows.strides, row_major(more.lengths)]),
        )

    def _weights(self, rows: RowColumns) -> list[ModelWeight]:
        """Return the tensors of the model with their parts, which have to be dense."""
        columns, boxes = self._columns, rows.boxes
        if (np.where(boxes.lengths > 1, rows.strides - row_major(boxes.lengths), 0)).any():
            raise ValueError("a part of a tensor is not dense")
        parts: dict[int, list[tuple[tuple[int, ...], tuple[int, ...], int, int]]] = {}
        for number, offsets, lengths, file, begin in zip(
            *(a.tolist() for a in (boxes.tensor, boxes.offsets, boxes.lengths, rows.file, rows.begin)), strict=True
        ):
            ndim = len(columns.shapes[number])
            parts.setdefault(number, []).append((tuple(offsets[:ndim]), tuple(lengths[:ndim]), file, begin))
        return [
            ModelWeight(
                columns.fqns[number], columns.dtypes[number], self._orders[number], tuple(sorted(parts[number]))
            )
            for number in sorted(self._orders)
        ]

    def _add_tensor(self, state: str, slot: str, fqn: str, dtype: str, shape: tuple[int, ...]) -> int:
        if not slot:
            return self._columns.add_tensor(state, fqn, dtype, shape)
        name = f"state.{fqn}.{slot}"
        self._slots.setdefault(fqn, {})[slot] = TensorRef(name)
        self._shapes[fqn] = shape
        return self._columns.add_tensor(state, name, dtype, shape)

    def _values(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the common values, and those of single ranks by name, without Transformer Engine's extra states."""
        common: dict[str, Any] = {}
        others: dict[str, Any] = {}
        left_out = []
        for name, value in self._old.values.items():
            value = value[0] if type(value) is list and len(value) == 1 else value
            if _COMMON.fullmatch(name):
                common.update(value)
            elif "_extra_state/shard_" not in name:
                others[name] = value
            elif value is not None and value != b"":
                left_out.append(name)
        if left_out:
            self._tree.notes.append(f"{len(left_out)} extra states of modules are left out: {listed(left_out)}")
        if any(name == _COMMON_FILE for name, _ in self._storage.list()):  # until Megatron-Core 0.18
            with open_file(self._storage, _COMMON_FILE) as file, damage(file, "Megatron"):
                found = read_object(file, f"{_COMMON_FILE}/")
                number = self._columns.add_file(file.name, file.size)
                self._places |= {key: (number, member.offset) for key, member in found.storages.items()}
                common.update(found.value)
        if type(args := common.get("args")) is CallRecord and type(args.state) is dict:
            common["args"] = args.state
        return common, others

    def _named_groups(self, groups: Sequence[Mapping[str, Any]], decayed_norms: object) -> list[dict[str, Any]]:
        """Return the groups with the names of their parameters, and add each parameter's step to its state.

        Megatron does not save which parameters a group has. Its rule is that vectors and biases have no weight decay, and
        that experts have groups of their own. A parameter for which that leaves several groups is in none.

        Args:
            groups: hyperparameters of the groups.
            decayed_norms: true if the norms of queries and keys have weight decay; None if nothing says it.
        """
        named: list[dict[str, Any]] = [
            {**{key: value for key, value in group.items() if key not in _OWN_SETTINGS}, "params": []}
            for group in groups
        ]
        undecided, steps = [], {}
        with_experts = any(group.get("is_expert_parallel") for group in groups)
        for fqn, slots in self._slots.items():
            is_vector = (len(self._shapes[fqn]) == 1 or fqn.endswith(".bias")) and not (
                decayed_norms and _is_qk_norm(fqn)
            )
            is_expert = with_experts and _EXPERT.search(fqn) is not None
            chosen = [k for k, group in enumerate(groups) if bool(group.get("is_expert_parallel")) == is_expert]
            if len(chosen) > 1:
                chosen = [k for k in chosen if (groups[k].get("wd_mult", 1) == 0) == is_vector]
            if len(chosen) != 1:
                undecided.append(fqn)
                continue
            named[chosen[0]]["params"].append(fqn)
            if (step := groups[chosen[0]].get("step")) is not None:
                slots["step"] = TensorRef(f"state.{fqn}.step")
                steps[fqn] = float(step)
        if decayed_norms is None and len(groups) > 1 and any(map(_is_qk_norm, self._slots)):
            self._tree.notes.append(
                "nothing says whether the norms of queries and keys have weight decay: they are taken to have none"
            )
        if undecided:
            self._tree.notes.append(
                f"nothing says which of {len(groups)} groups of hyperparameters {len(undecided)} parameters have: "
                f"{listed(undecided)}"
            )
        if steps:
            self._add_steps(steps)
        return named

    def _add_steps(self, steps: Mapping[str, float]) -> None:
        """Add a step for each parameter, as torch's optimizers have: Megatron saves one for a group."""
        data = self._made[_STEPS] = np.fromiter(steps.values(), "<f4", len(steps)).tobytes()
        file = self._columns.add_file(_STEPS, len(data))
        for k, fqn in enumerate(steps):
            number = self._columns.add_tensor("optimizer", f"state.{fqn}.step", "float32", ())
            self._columns.rows.append((number, (), (), file, 4 * k, ()))


def _without_flat_ranges(content: DcpContent) -> tuple[RowColumns, list[tuple[int, ...]]]:
    """Return the rows and the shapes of tensors, those of optimizers with the shapes of their weights."""
    rows, shapes, names = content.rows, list(content.columns.shapes), content.names
    weights = dict(zip(names, shapes, strict=True))
    flat: dict[int, tuple[int, ...]] = {}
    lost: list[str] = []
    for number, name in enumerate(names):
        found = _SLOT.fullmatch(name)
        weight = weights.get(found[2]) if found else None
        if found and weight is None:
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
    boxes, begin = rows.boxes.take(chosen), rows.begin[chosen]
    numbers, ndim = list(flat), boxes.ndim
    parts = BoxTable.build(numbers, [flat[k] for k in numbers], [flat[k] for k in numbers], ndim).lengths
    part = parts[np.searchsorted(numbers, boxes.tensor)]
    last = np.array([len(flat[k]) for k in numbers], np.int64)[np.searchsorted(numbers, boxes.tensor)]
    at = np.arange(len(boxes))
    start, count = boxes.offsets[at, last], boxes.lengths[at, last]
    if (boxes.volumes() != count).any():
        raise ValueError("an optimizer's item has ranges of several parts")
    found_boxes = flat_ranges_to_boxes(part, start, start + count)
    of = found_boxes.source
    boxes.offsets[at, last] = 0
    items = np.array([itemsize(name) for name in content.columns.dtypes], np.int64)[boxes.tensor[of]]
    offsets = (boxes.offsets * part)[of] + found_boxes.offsets
    whole = RowColumns(
        BoxTable.concat([rows.boxes.take(~chosen), BoxTable(boxes.tensor[of], offsets, found_boxes.lengths)]),
        np.concatenate([rows.file[~chosen], rows.file[chosen][of]]),
        np.concatenate([rows.begin[~chosen], begin[of] + (found_boxes.flat_start - start[of]) * items]),
        np.concatenate([rows.strides[~chosen], row_major(found_boxes.lengths)]),
    )
    order = np.argsort(whole.boxes.tensor, kind="stable")
    return RowColumns(whole.boxes.take(order), whole.file[order], whole.begin[order], whole.strides[order]), shapes


def _unstacked(key: str) -> tuple[str, int]:
    """Return the pattern of the names of a stacked tensor's parts, and the number of its stacked dimensions.

    >>> _unstacked("decoder.layers.mlp.experts.experts.linear_fc1.weight")
    ('decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight', 2)
    """
    template, depth = key.replace("{", "{{").replace("}", "}}"), 0
    if found := _LAYERS.search(template):
        template, depth = f"{template[: found.end()]}{{}}.{template[found.end() :]}", 1
    if found := _EXPERTS.search(template):
        begin = found.end() - len("experts.")
        template, depth = f"{template[:begin]}local_experts.{{}}.{template[found.end() :]}", depth + 1
    return template, depth


def place_in_stack(fqn: str, by_layer: bool) -> tuple[str, tuple[int, ...]]:
    """Return the name of the stacked tensor of which a tensor is a part, and the place there: layer, expert.

    Args:
        fqn: name of a tensor.
        by_layer: true if layers are stacked; experts always are.

    >>> place_in_stack("decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight", by_layer=True)
    ('decoder.layers.mlp.experts.experts.linear_fc1.weight', (3, 12))
    """
    at: list[int] = []
    if by_layer and (found := _LAYER.search(fqn)):
        fqn = f"{fqn[: found.start(1)]}{fqn[found.end() :]}"
        at.append(int(found[1]))
    if found := _EXPERT.search(fqn):
        fqn = f"{fqn[: found.start()]}.experts.{fqn[found.end() :]}"
        at.append(int(found[1]))
    return fqn, tuple(at)


def block_of(fqn: str) -> str | None:
    """Return the beginning of a tensor's name that is the same for all layers of a model, None for a tensor of no layer.

    >>> block_of("decoder.layers.3.mlp.linear_fc1.weight")
    'decoder.layers.'
    """
    found = _LAYER.search(fqn)
    return None if found is None else fqn[: found.start(1)]


def _is_qk_norm(fqn: str) -> bool:
    return "q_layernorm." in fqn or "k_layernorm." in fqn


def _param_groups(value: Any) -> list[dict[str, Any]]:
    """Return the param groups in an optimizer's tree, those of all chained optimizers, each once."""
    groups: list[dict[str, Any]] = []
    waiting = [value]
    while waiting:
        found = waiting.pop(0)
        if type(found) is not dict:
            continue
        step = (found.get("state") or {}).get("common_step") if type(found.get("state")) is dict else None
        for group in found.get("param_groups") or ():
            whole = {"step": step, **group}
            settings = {key: whole[key] for key in whole if key not in ("params", "param_names")}
            if settings not in groups:
                groups.append(settings)
        waiting += [item for key, item in found.items() if key not in ("param_groups", "state")]
    return groups
