"""Read checkpoints of Megatron-Core ("torch_dist") as they lie: DCP, whose names and stacked layers become a model's.

Megatron stacks the layers of a model, and the experts of a layer, in one tensor. Here each layer and each expert is a
tensor of its own, which has the name in the whole model, so that it fits live objects at any layout:

    decoder.layers.mlp.experts.experts.linear_fc1.weight        shape [layers, experts, ...]
    decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight

The state "optimizer" has "state.<parameter>.fp32", ".exp_avg" and so on for every parameter; "opt_param_scheduler" has the
scheduler; "extra_states" has the rest of the common values, "args" as a dict.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError, listed
from bytecheckpoint.formats.dcp import METADATA, DcpContent, damage, read_content, read_dcp
from bytecheckpoint.formats.files import open_file
from bytecheckpoint.formats.foreign import ForeignCheckpoint, ForeignColumns, RowColumns
from bytecheckpoint.formats.inert import CallRecord
from bytecheckpoint.formats.shown import VALUES_NAME
from bytecheckpoint.formats.torch_save import read_object
from bytecheckpoint.formats.trees import Tree
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.values.tree import TensorRef
from bytecheckpoint.storage import Storage

__all__ = ["MARKER", "read_megatron"]

MARKER: Final = "metadata.json"
"""File that a folder of Megatron has beside the metadata of DCP."""
_COMMON_FILE: Final = "common.pt"
_MOST_MARKER_BYTES: Final = 1 << 20
#: Most tensors into which one stacked tensor is split.
_MOST_PARTS: Final = 1 << 20
_COMMON = re.compile(r"common_state/shard_\d+_\d+")
_SLOT = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx_.*")
_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")
_EXPERTS = re.compile(r"(?:^|\.)experts\.experts\.")
_EXPERT = re.compile(r"\.local_experts\.")
#: Names of the masters of parameters in Megatron's optimizers, and elsewhere.
_SLOTS: Final = {"param": "fp32", "fp32_param": "fp32"}
#: Settings of a param group that say which parameters it has, and are no hyperparameters of the optimizer inside.
_OWN_SETTINGS: Final = ("params", "param_names", "is_expert_parallel", "step")
_STEPS: Final = f"{VALUES_NAME}-steps"
_SCHEDULER: Final = "opt_param_scheduler"


def read_megatron(storage: Storage) -> ForeignCheckpoint:
    """Read a checkpoint of Megatron-Core; one of DCP whose `metadata.json` is of another program is read as such.

    Raises:
        CorruptCheckpointError: a file is missing or damaged.
        IncompatibleCheckpointError: the checkpoint holds what this package does not read; the message says what.
    """
    with open_file(storage, MARKER) as file, damage(file):
        if file.size > _MOST_MARKER_BYTES:
            raise IncompatibleCheckpointError(f"{file.label} has {file.size} bytes, which Megatron's has not")
        facts = json.loads(file.read(0, file.size))
        if type(facts) is not dict or "sharded_backend" not in facts:
            return read_dcp(storage)
        if facts["sharded_backend"] != "torch_dist":
            backend = facts["sharded_backend"]
            raise IncompatibleCheckpointError(f"{file.label}: the format {backend!r} of Megatron is not read")
    content = read_content(storage)
    with open_file(storage, METADATA) as file, damage(file):
        return _TorchDist(storage, content).read()


class _TorchDist:
    """The reader of one checkpoint, of which the content is known."""

    def __init__(self, storage: Storage, content: DcpContent) -> None:
        self._storage = storage
        self._old = content
        self._columns = ForeignColumns(files=content.columns.files)
        self._tree = Tree(storage.url)
        self._places = dict(content.storages)
        self._notes: list[str] = []
        self._made: dict[str, bytes] = {}
        self._slots: dict[str, dict[str, Any]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def read(self) -> ForeignCheckpoint:
        columns, tree = self._columns, self._tree
        rows = self._add_tensors()
        common, others = self._values()
        states: dict[str, Any] = {"model": {fqn: TensorRef(fqn) for fqn in self._names_of("model")}}
        optimizer = common.pop("optimizer", None)
        if self._slots:
            groups = _param_groups(optimizer) or _param_groups(others)
            states["optimizer"] = {"state": self._slots, "param_groups": self._named_groups(groups)}
        elif optimizer is not None:
            others["optimizer"] = optimizer
        if type(common.get(_SCHEDULER)) is dict:
            states[_SCHEDULER] = common.pop(_SCHEDULER)
        states["extra_states"] = {**common, **others}
        values = {}
        for state, value in states.items():
            values[state] = tree.encode(value)
            columns.add_whole(state, tree.tensors, self._places)
        catalog, strides = columns.build({"format": "megatron"}, rows)
        notes = (*self._notes, *tree.notes)
        return ForeignCheckpoint("megatron", catalog, strides, values, self._old.sums, notes, made=self._made)

    def _names_of(self, state: str) -> list[str]:
        columns = self._columns
        return [fqn for of, fqn in zip(columns.states, columns.fqns, strict=True) if of == state]

    def _add_tensors(self) -> RowColumns:
        """Add the tensors, stacked ones as one for each layer and expert; return their rows."""
        rows, old = self._old.rows, self._old.columns
        boxes = rows.boxes
        tensor, offsets, lengths, strides = (
            np.array(array) for array in (boxes.tensor, boxes.offsets, boxes.lengths, rows.strides)
        )
        buckets: list[str] = []
        kept = np.ones(len(tensor), np.bool_)
        for number, name in enumerate(self._old.names):
            first, stop = np.searchsorted(boxes.tensor, [number, number + 1])
            if _BUCKETS.fullmatch(name):
                buckets.append(name)
                kept[first:stop] = False
                continue
            state, slot, key = "model", "", name
            if found := _SLOT.fullmatch(name):
                state, slot, key = "optimizer", _SLOTS.get(found[1], found[1]), found[2]
            template, depth = _unstacked(key)
            whole = old.shapes[number]
            sizes, shape = whole[:depth], whole[depth:]
            if len(sizes) != depth or math.prod(sizes) > _MOST_PARTS:
                raise ValueError(f"{name!r} of shape {list(whole)} is no stack of tensors")
            if depth and (lengths[first:stop, :depth] != 1).any():
                raise IncompatibleCheckpointError(
                    f"{name!r} has parts of several layers in one item, which is not read"
                )
            numbers = np.array(
                [
                    self._add_tensor(state, slot, template.format(*place), old.dtypes[number], shape)
                    for place in np.ndindex(*sizes)
                ],
                np.int64,
            ).reshape(sizes)
            tensor[first:stop] = numbers[tuple(offsets[first:stop, k] for k in range(depth))] if depth else numbers
            for array, filling in ((offsets, 0), (lengths, 1), (strides, 1)) if depth else ():
                array[first:stop, :-depth] = array[first:stop, depth:]
                array[first:stop, -depth:] = filling
        if buckets:
            self._notes.append(f"the optimizer is left out: {len(buckets)} buckets (dp_reshardable) are not read yet")
        return RowColumns(
            BoxTable(tensor[kept], offsets[kept], lengths[kept]), rows.file[kept], rows.begin[kept], strides[kept]
        )

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
            elif "_extra_state/shard_" not in name and ".distributed.dp_group_idx_" not in name:
                others[name] = value
            elif "_extra_state/" in name and value is not None and value != b"":
                left_out.append(name)
        if left_out:
            self._notes.append(f"{len(left_out)} extra states of modules are left out: {listed(left_out)}")
        if any(name == _COMMON_FILE for name, _ in self._storage.list()):  # until Megatron-Core 0.18
            with open_file(self._storage, _COMMON_FILE) as file, damage(file):
                found = read_object(file, f"{_COMMON_FILE}/")
                number = self._columns.add_file(file.name, file.size)
                self._places |= {key: (number, member.offset) for key, member in found.storages.items()}
                common.update(found.value)
        if type(args := common.get("args")) is CallRecord and type(args.state) is dict:
            common["args"] = args.state
        return common, others

    def _named_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups with the names of their parameters, and add each parameter's step to its state.

        Megatron does not save which parameters a group has. Its rule is that vectors and biases have no weight decay, and
        that experts have groups of their own. A parameter for which that leaves several groups is in none.
        """
        named: list[dict[str, Any]] = [
            {**{key: value for key, value in group.items() if key not in _OWN_SETTINGS}, "params": []}
            for group in groups
        ]
        undecided, steps = [], {}
        with_experts = any(group.get("is_expert_parallel") for group in groups)
        for fqn, slots in self._slots.items():
            is_vector = len(self._shapes[fqn]) == 1 or fqn.endswith(".bias")
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
        if undecided:
            self._notes.append(
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
