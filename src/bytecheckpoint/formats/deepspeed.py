"""Read folders of DeepSpeed's ZeRO 1, 2 and 3 as they lie: flat partitions of ranks become boxes of parameters.

What DeepSpeed's own conversion made of such a folder (its universal form) is read, too: a file for each state of each
parameter.

The state "optimizer" has "state.<parameter>.fp32", ".exp_avg" and so on for every parameter, from the partitions of the
ranks. The state "model" has the parameters of the model: of ZeRO 1 and 2 in the dtype of training, of ZeRO 3, whose ranks
save no such parameters, the fp32 ones of the optimizer. What the files say beside is the state "extra_states".

Tensor-parallel ranks have slices of parameters, which `universal_checkpoint_info` describes. A tensor of which nothing says
how it is divided is one of each rank, called "mp_rank_00:<name>", for a layout to join.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bytecheckpoint.errors import CheckpointNotFoundError, IncompatibleCheckpointError, listed
from bytecheckpoint.formats.deepspeed_modules import FP32, JoinedModules
from bytecheckpoint.formats.deepspeed_ranks import ModelParameters
from bytecheckpoint.formats.files import RangedFile, damage, open_file
from bytecheckpoint.formats.foreign import ForeignCheckpoint, ForeignColumns
from bytecheckpoint.formats.inert import CallRecord
from bytecheckpoint.formats.meanings import StoredTensor, shape_of
from bytecheckpoint.formats.rank_parts import DividedTensor, FlatRanges, replicated
from bytecheckpoint.formats.torch_save import TorchFiles
from bytecheckpoint.formats.trees import Tree
from bytecheckpoint.representation.values.tree import TensorRef
from bytecheckpoint.storage import Storage

__all__ = ["OPTIMIZER_FILE", "UNIVERSAL_FILE", "read_deepspeed"]

OPTIMIZER_FILE: Final = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,7})_mp_rank_(\d{1,7})_optim_states\.pt")
"""Name of a file of optimizer state: data-parallel rank, rank of model parallelism."""
UNIVERSAL_FILE: Final = "zero/optimizer_state.pt"
"""Name of the file of common optimizer state in a folder of the universal form."""
#: States beside the weights; DeepSpeed's conversion knows those of Adam, an export of this package writes the others, too.
_UNIVERSAL_SLOTS: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step")
_MODEL_FILE: Final = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_(\d{1,7})_model_states\.pt")
_LAYER_FILE: Final = re.compile(r"layer_(\d{1,7})-(?:model_(\d{1,7})-)?model_states\.pt")
#: Keys of the file of a model that are no plain values of the program.
_KNOWN: Final = frozenset(
    ("module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "buffer_names")
)

#: Names of files, by rank of model parallelism and another number.
_Files = Mapping[tuple[int, int], str]


def read_deepspeed(storage: Storage) -> ForeignCheckpoint:
    """Read a folder of one step of DeepSpeed, with its partitioned optimizer."""
    names = [name for name, _ in storage.list()]
    found = {(int(m[2]), int(m[1])): name for name in names if (m := OPTIMIZER_FILE.fullmatch(name))}
    # A file without a data-parallel rank comes last: it has the whole model.
    last_first = sorted(names, reverse=True)
    models = {(int(m[2]), int(m[1] or 0)): name for name in last_first if (m := _MODEL_FILE.fullmatch(name))}
    layers = {(int(m[2] or 0), int(m[1])): name for name in names if (m := _LAYER_FILE.fullmatch(name))}
    if other := sorted(name for name in names if name.startswith("layer_") and name not in layers.values()):
        raise IncompatibleCheckpointError(f"{storage.url} has files of experts, which are not read: {listed(other)}")
    if UNIVERSAL_FILE in names:
        found = {}
    grids: dict[str, _Files] = {"optimizer states": found, "states of the model": models}
    for what, grid in grids.items():
        mps, ranks = (range(1 + max((key[k] for key in grid), default=-1)) for k in (0, 1))
        if missing := [key for key in itertools.product(mps, ranks) if key not in grid]:
            mp, rank = missing[0]
            where = f"data-parallel rank {rank} of model-parallel rank {mp}"
            raise CheckpointNotFoundError(
                f"{storage.url} lacks the {what} of {where}: {len(missing)} files are missing"
            )
    if not models or (found and {mp for mp, _ in found} != {mp for mp, _ in models}):
        raise CheckpointNotFoundError(f"{storage.url} lacks the states of the model")
    return _FolderOfRanks(storage, found, models).read(layers)


class _FolderOfRanks:
    """The reader of the files of all ranks of one step.

    Args:
        storage: the folder.
        optimizers: files of the optimizer, by rank of model parallelism and data-parallel rank.
        models: files of the model, by the same.
    """

    def __init__(self, storage: Storage, optimizers: _Files, models: _Files) -> None:
        self._storage = storage
        self._optimizers, self._models = optimizers, models
        self._columns = ForeignColumns()
        self._tree = Tree(storage.url)
        self._files = TorchFiles(storage, self._columns)
        self._ranges = FlatRanges(self._columns)
        self._parameters = ModelParameters()
        self._modules = JoinedModules(self._files, self._parameters, self._ranges)
        self._optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
        self._settings: dict[int, list[dict[str, Any]]] = {}  # of the param groups, by rank of model parallelism

    def read(self, layers: _Files) -> ForeignCheckpoint:
        """Read the files; those of layers have keys of tensor-parallel rank and number of the layer."""
        values: dict[tuple[int, int], Any] = {}
        steps: set[str] = set()
        for key in sorted(self._models):
            with self._files.open(self._models[key], key[1]) as (file, values[key]), damage(file, "DeepSpeed"):
                steps.add(str(values[key].get("global_steps")))
                if key[1] == 0:
                    self._parameters.add_rank(values[key])
        rest = values[0, 0]
        if len(steps) > 1:
            raise IncompatibleCheckpointError(
                f"{self._storage.url} has files of several steps: {listed(sorted(steps))}"
            )
        of_models, ranks = (
            1 + max((rank for _, rank in files), default=-1) for files in (self._models, self._optimizers)
        )
        ranks = ranks or int(rest.get("dp_world_size") or of_models)
        if of_models > ranks or (of_models < ranks and self._models[0, 0].startswith("zero_pp_rank")):
            raise IncompatibleCheckpointError(
                f"{self._storage.url} has states of the model of {of_models} ranks, and an optimizer of {ranks}: files are "
                "missing, or are of several saves"
            )
        with open_file(self._storage, self._models[0, 0]) as file, damage(file, "DeepSpeed"):
            self._parameters.find_stages(rest)
            self._modules.add([values[mp, 0]["module"] for mp, rank in sorted(values) if rank == 0], layers)
            for rank in {rank for rank, _ in layers}:
                held = self._modules.of_ranks[rank]
                if lost := [fqn for fqn in self._parameters.of_rank(rank) if fqn not in held]:
                    raise CheckpointNotFoundError(f"{self._storage.url} lacks files of layers: none has {listed(lost)}")
            self._parameters.divide(rest, self._modules.of_ranks)
            if self._parameters.degree > 1 and (lost := self._parameters.undivided()):
                self._tree.notes.append(
                    f"nothing says how {self._parameters.degree} tensor-parallel ranks divide {listed(lost)}: "
                    'each of them has tensors "mp_rank_00:<name>", which a layout can join'
                )
            for (mp, rank), value in values.items():  # where `module` has the frozen parameters, nothing is left to do
                if self._models[mp, rank].startswith("zero_pp_rank"):
                    self._add_frozen(value, mp, rank)
        for mp, rank in sorted(self._optimizers):
            with self._files.open(self._optimizers[mp, rank], rank) as (file, value), damage(file, "DeepSpeed"):
                self._add_optimizer(file, value["optimizer_state_dict"], mp, rank)
        if not self._optimizers:
            self._add_universal()
        with open_file(self._storage, self._models[0, 0]) as file, damage(file, "DeepSpeed"):
            self._modules.prove(self._storage)
            module = self._modules.tree(rest)
            rows = self._ranges.rows(file)
        states = {"optimizer": self._optimizer, "model": module}
        states["extra_states"] = {key: item for key, item in rest.items() if key not in _KNOWN}
        encoded = self._columns.add_states(states, self._tree)
        facts = {"world_size": len(self._optimizers) or int(rest.get("dp_world_size") or 1)}
        return ForeignCheckpoint(
            "deepspeed", self._columns, encoded, self._tree.notes, rows, self._files.sums(), facts=facts
        )

    def _add_frozen(self, value: Mapping[str, Any], mp: int, rank: int) -> None:
        """Add the shares of frozen parameters that a rank of ZeRO 3 has."""
        fragments = value.get("frozen_param_fragments") or {}
        count = 1 + max(other for _, other in self._models)
        for fqn, shape in (value.get("frozen_param_shapes") or {}).items():
            name, divided, own_rank = self._parameters.place(fqn, mp)
            share = _share(shape_of(shape), rank, count)
            self._ranges.add_part(("model", name), divided, own_rank, fragments[fqn], (0, share))

    def _add_optimizer(self, file: RangedFile, saved: Mapping[str, Any], mp: int, rank: int) -> None:
        """Add the partitions of one rank."""
        stage, count = _stage(saved), 1 + max(other for _, other in self._optimizers)
        inner = saved["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        flat = saved["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
        partitions = saved["partition_count"]
        if (counts := {*partitions} if type(partitions) is list else {partitions}) != {count}:
            raise IncompatibleCheckpointError(
                f"{file.label}: it is of an optimizer of {listed(sorted(map(str, counts)))} ranks, and the folder has "
                f"files of {count}: files are missing, or are of several saves"
            )
        if type(inner) is list:  # of an elastic checkpoint, which has no hyperparameters
            inner = {"state": dict(enumerate(inner)), "param_groups": [{} for _ in inner]}
        settings = [{k: self._content_of(v) for k, v in group.items()} for group in inner.get("param_groups", [])]
        if (known := self._settings.setdefault(mp, settings)) != settings:
            pairs = ((k, old[k], new.get(k)) for old, new in zip(known, settings, strict=False) for k in old)
            unlike = next((f"{k!r}: {a} and {b}" for k, a, b in pairs if a != b), "their number")
            raise IncompatibleCheckpointError(
                f"{file.label}: ranks have different settings ({unlike}): files are of several saves, of which one was "
                "killed, or the optimizer keeps a value for each partition"
            )
        groups, parameters = inner.get("state", {}), self._parameters
        for number, tensor in enumerate(flat):
            held = {FP32: tensor, **groups.get(number, {})}
            for fqn, first, size in self._shares(saved, number, tensor.shape[0], (mp, rank)):
                if parameters.is_copy(fqn, mp):
                    continue
                name, divided, own_rank = parameters.place(fqn, mp)
                self._add_slots(name, divided, own_rank, held, (first, size))
                if stage == 3 or fqn not in self._modules.of_ranks[mp % parameters.degree]:
                    self._ranges.add_part(("model", name), divided, own_rank, tensor, (first, size))
        if rank == 0:
            self._add_groups(inner.get("param_groups", []), stage, mp)

    def _shares(
        self, saved: Mapping[str, Any], number: int, length: int, ranks: tuple[int, int]
    ) -> Iterator[tuple[str, int, int]]:
        """Yield the parameters of which a partition has elements, with their first element in it and their count.

        Args:
            saved: optimizer of a rank.
            number: number of the partition's group.
            length: elements of the partition.
            ranks: model-parallel and data-parallel rank.
        """
        (mp, rank), at = ranks, 0
        shapes = self._parameters.shapes[mp][number]
        if _stage(saved) == 3:
            count = saved["partition_count"]
            count = count[0] if type(count) is list else count
            for fqn, shape in shapes.items():
                yield fqn, at, _share(shape, rank, count)
                at += -(-math.prod(shape) // count)
            if at != length:
                raise ValueError(f"the shares of partition {number} have {at} elements, the partition has {length}")
        # DeepSpeed notes the places without the other order of `round_robin_gradients`, which `param_shapes` has.
        elif self._parameters.dealt and not any(saved.get("param_alignment_paddings", [[]])[number]):
            begin = rank * (length + saved["group_paddings"][number])
            for fqn, shape in shapes.items():
                first, at = max(at - begin, 0), at + math.prod(shape)
                if (size := min(at - begin, length) - first) > 0:
                    yield fqn, first, size
        else:
            places = saved["param_slice_mappings"][number]
            for fqn in filter(places.__contains__, shapes):
                yield fqn, places[fqn].state["start"], places[fqn].state["numel"]

    def _add_universal(self) -> None:
        """Add the parameters of the universal form, in which each is whole."""
        parameters = self._parameters
        with self._files.open(UNIVERSAL_FILE, 0) as (file, value), damage(file, "DeepSpeed"):
            stage = _stage(value)
            paddings = value.get("param_alignment_paddings", ())  # no export of this package has an entry of partitions
            if parameters.dealt and "group_paddings" in value and not any(map(any, paddings)):
                raise IncompatibleCheckpointError(
                    f"{file.label}: DeepSpeed's conversion mixes up parameters of a run with round_robin_gradients: "
                    "take the folder that it was made of"
                )
            for mp in range(len(parameters.shapes)):
                self._add_groups(value["param_groups"], stage, mp)
            partitions = value["optimizer_state_dict"]["state"] if stage == 3 else {}
            steps = {
                fqn: slots["step"]
                for n, slots in partitions.items() if "step" in slots for fqn in parameters.shapes[0][n]
            }  # fmt: skip
            if any(part in ("", ".", "..") for fqn in parameters.stages for part in fqn.split("/")):
                raise ValueError("a parameter's name leads out of the folder")
        state = self._optimizer["state"] = {
            fqn: {"step": steps[fqn]} if fqn in steps else {} for fqn in parameters.stages
        }
        # What one parameter has, the others have too, or a file is lost: the one that is opened and lacks is named.
        two = (*list(state)[:1], *list(state)[-1:])
        slots = [FP32, *(s for s in _UNIVERSAL_SLOTS if any(self._storage.version(f"zero/{f}/{s}.pt") for f in two))]
        if "max_exp_avg_sq" not in slots and any(group.get("amsgrad") for group in self._optimizer["param_groups"]):
            self._tree.notes.append(
                "DeepSpeed's conversion has left out the state max_exp_avg_sq, without which an optimizer with amsgrad "
                "makes no step: take the folder that it was made of"
            )
        masters: dict[str, int] = {}  # number of elements
        for fqn, slot in itertools.product(state, slots):
            with self._files.open(f"zero/{fqn}/{slot}.pt", 0) as (file, value), damage(file, "DeepSpeed"):
                tensor = value["param"] if type(value) is dict else value
                if type(tensor) is not StoredTensor or not tensor.shape:
                    state[fqn][slot] = tensor
                    continue
                known = parameters.place(fqn, 0)[1].shape
                size, own = masters.setdefault(fqn, math.prod(tensor.shape)), math.prod(tensor.shape)
                if size != own:
                    raise ValueError(f"{own} elements of {slot}, and {size} of {FP32}")
                whole = replicated([known if math.prod(known) == math.prod(tensor.shape) else tensor.shape])
                state[fqn][slot] = TensorRef(f"state.{fqn}.{slot}")
                self._ranges.add_whole(("optimizer", f"state.{fqn}.{slot}"), whole, 0, tensor)
                if slot == FP32 and (stage == 3 or fqn not in self._modules.of_ranks[0]):
                    self._ranges.add_whole(("model", fqn), whole, 0, tensor)

    def _add_groups(self, groups: Sequence[Mapping[str, Any]], stage: int, mp: int) -> None:
        """Add the groups of a rank, with the names of their parameters instead of the numbers of the partitions."""
        parameters, known = self._parameters, self._optimizer["param_groups"]
        shapes, before = parameters.shapes[mp], len(known)
        for number, group in enumerate(groups):
            partitions = group["params"] if stage == 3 else [number]
            own = [fqn for partition in partitions if partition < len(shapes) for fqn in shapes[partition]]
            names = [parameters.place(fqn, mp)[0] for fqn in own]
            settings = {key: value for key, value in group.items() if key != "params"}
            # The ranks of a pipeline may lack a group of which they have no parameter.
            alike = [k for k in (number, *range(before)) if k < before and known[k].items() >= settings.items()]
            if alike:
                known[alike[0]]["params"] += [name for name in names if name not in known[alike[0]]["params"]]
            else:
                known.append({**settings, "params": names})

    def _add_slots(
        self, fqn: str, divided: DividedTensor, rank: int, held: Mapping[str, Any], elements: tuple[int, int]
    ) -> None:
        """Add the part of one parameter in each tensor of a partition; a number is one for the parameter."""
        content = self._optimizer["state"].setdefault(fqn, {})
        for slot, tensor in held.items():
            if type(tensor) is not StoredTensor or not tensor.shape:
                known, own = map(self._content_of, (content.setdefault(slot, tensor), tensor))
                if known is not None and own is not None and known != own:
                    raise IncompatibleCheckpointError(
                        f"{self._storage.url}: ranks have different {slot!r} of {fqn}: files are of several saves, of "
                        "which one was killed, or the optimizer keeps a value for each partition"
                    )
                continue
            content[slot] = TensorRef(f"state.{fqn}.{slot}")
            self._ranges.add_part(("optimizer", f"state.{fqn}.{slot}"), divided, rank, tensor, elements)

    def _content_of(self, item: Any) -> Any:
        """Return a number, or the CRC32 of a tensor that is one; None where it is not known."""
        return self._files.crcs[item.storage.key] if type(item) is StoredTensor else item


def _stage(saved: Mapping[str, Any]) -> int:
    stage: Any = saved.get("zero_stage", 1)  # none of an optimizer that keeps all gradients in fp32
    return int(stage.args[0] if type(stage) is CallRecord else stage)


def _share(shape: tuple[int, ...], rank: int, count: int) -> int:
    """Return how many elements of a parameter a rank of ZeRO 3 has: one of `count` equal shares, the last one padded."""
    size, share = math.prod(shape), -(-math.prod(shape) // count)
    return max(min(size - rank * share, share), 0)
