"""The strategies of Megatron-Core's `dist_checkpointing` that save and load by this package."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

from bytecheckpoint.errors import CorruptCheckpointError, UsageError
from bytecheckpoint.formats.megatron_names import model_or_slot, named_groups, param_groups, unstacked
from bytecheckpoint.frameworks.optimizer_tree import pack_tensors, unpack_tensors
from bytecheckpoint.handles import LoadReport, SaveHandle
from bytecheckpoint.integrations.dcp.adapter import DCP, TensorParts
from bytecheckpoint.loading import load
from bytecheckpoint.opening import Checkpoint
from bytecheckpoint.opening import open as open_checkpoint
from bytecheckpoint.representation.shards import MASTER, TensorKey
from bytecheckpoint.representation.values.codec import decode, encode
from bytecheckpoint.saving import save

__all__ = ["MegatronLoadStrategy", "MegatronSaveStrategy"]

_COMMON: Final = "common_state"
#: States of Megatron's objects, each as bytes, and of flat buckets of an optimizer ("dp_reshardable").
_OBJECTS, _BUCKETS = "objects", "buckets"
_BYTES: Final = "__bytes_io__"


class MegatronSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves by this package: `dist_checkpointing.save(states, folder, sharded_strategy=SaveStrategy())`.

    Layers and experts get the names that they have in the whole model, so that `bytecheckpoint.load` fills live objects
    at any layout. Megatron reads common values from `common.pt` before it asks a strategy. The checkpoint has the hash of
    this file.

    Args:
        **options: arguments of `bytecheckpoint.save`, such as `timeout`.

    Attributes:
        handle: the last save, None before.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.handle: SaveHandle | None = None
        self._save_options = options

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save and commit."""
        self._start(sharded_state_dict, checkpoint_dir, async_checkpoint=False)

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str], async_strategy: str = ""
    ) -> AsyncRequest:
        """Copy the state, and write in the background. The request's finalization waits for the commit."""
        handle = self._start(sharded_state_dict, checkpoint_dir, async_checkpoint=True)
        return AsyncRequest(None, (), [handle.result])

    def _start(self, states: dict[str, Any], folder: str | os.PathLike[str], *, async_checkpoint: bool) -> SaveHandle:
        found = list(nested_values(states))
        common = next((x.data for x in found if isinstance(x, ShardedObject) and x.key == _COMMON), None)
        if common is None:
            raise UsageError("Megatron-Core gives strategies no common values: use version 0.19")
        data = io.BytesIO()
        torch.save(common, data)  # noqa: TID251  Megatron loads it with torch.load
        if dist.get_rank() == 0:
            Path(folder, COMMON_STATE_FNAME).write_bytes(data.getvalue())
        sums = [hashlib.sha256(data.getvalue()).hexdigest()]
        dist.broadcast_object_list(sums)
        self.handle = save(
            folder, _states_of(found, common), framework=DCP, metadata={COMMON_STATE_FNAME: sums[0]},
            async_checkpoint=async_checkpoint, **self._save_options,
        )  # fmt: skip
        return self.handle


class MegatronLoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads what `SaveStrategy` saved: `dist_checkpointing.load(states, folder, sharded_strategy=LoadStrategy())`.

    Args:
        cast: True to convert dtypes; otherwise a difference is an error.

    Attributes:
        report: this rank's work in the last load, None before.
    """

    def __init__(self, *, cast: bool = False) -> None:
        super().__init__(stream_ckpt_dequant=False)
        self.report: LoadReport | None = None
        self._cast = cast

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str], async_strategy: str = ""
    ) -> Any:
        """Fill the tensors in place, each byte read once for all ranks; return them and the objects.

        Raises:
            CorruptCheckpointError: bytes differ from what was saved, also those of `common.pt`.
            MissingKeyError: the checkpoint lacks a tensor or an object.
        """
        wanted: dict[TensorKey, TensorParts] = {}
        with open_checkpoint(checkpoint_dir) as checkpoint:
            _check_common(checkpoint, Path(checkpoint_dir, COMMON_STATE_FNAME))

            def take(value: Any) -> Any:
                if isinstance(value, ShardedObject):
                    data = checkpoint.tensors[str(TensorKey(_OBJECTS, value.unique_key))][...]
                    return _with_buffers(unpack_tensors(decode(data.numpy().tobytes(), on_tensor=lambda _: None)))
                if not isinstance(value, ShardedTensor):
                    return value
                if value.data is None:
                    value.init_data("cpu")
                for key, shape, offsets, data in _parts_of(value):
                    if value.allow_shape_mismatch:  # a vocabulary that is padded to another size
                        shape = tuple(checkpoint.tensors[str(key)].shape)
                        ends = [max(min(n, s - o), 0) for n, s, o in zip(data.shape, shape, offsets, strict=True)]
                        data = data[tuple(map(slice, ends))]
                    checkpoint.tensors[str(key)]
                    if data.numel():
                        wanted.setdefault(key, TensorParts(shape, [])).parts.append((offsets, data.detach()))
                return value.data

            loaded = dict_list_map_outplace(take, sharded_state_dict)
        self.report = load(
            checkpoint_dir, {DCP: [*wanted.items()]}, framework=DCP, strict=False, cast=self._cast, prepare_save=False
        )
        return loaded


def _states_of(found: list[Any], common: dict[str, Any]) -> dict[str, Any]:
    """Return the states of this rank: of each copy of a tensor or object that Megatron made, the main one."""
    tensors: dict[TensorKey, TensorParts] = {}
    objects: dict[str, TensorParts] = {}
    for value in found:
        if not is_main_replica(value.replica_id):
            continue
        if isinstance(value, ShardedTensor):
            for key, shape, offsets, data in _parts_of(value):
                tensors.setdefault(key, TensorParts(shape, [])).parts.append((offsets, data.detach()))
        elif value.key != _COMMON:
            packed = np.frombuffer(encode(pack_tensors(_without_buffers(value.data)), on_tensor=_refuse), np.uint8)
            objects[value.unique_key] = TensorParts(packed.shape, [((0,), torch.from_numpy(packed.copy()))])
    states: dict[str, Any] = {"model": {}, _OBJECTS: objects, _BUCKETS: {}}
    slots: dict[str, dict[str, Any]] = {}
    for key, parts in tensors.items():
        if key.slot:
            slots.setdefault(key.fqn, {})[key.slot] = parts
        else:
            states[key.state][key.fqn] = parts
    if groups := param_groups(common.get("optimizer")):
        shapes = {fqn: tuple(next(iter(of_parameter.values())).shape) for fqn, of_parameter in slots.items()}
        shapes = shapes or {fqn: tuple(parts.shape) for fqn, parts in states["model"].items()}  # SGD without momentum
        args = vars(common["args"]) if hasattr(common.get("args"), "__dict__") else {}
        named = named_groups(groups, shapes, slots, args)
        for fqn, step in named.steps.items():
            slots[fqn]["step"] = torch.tensor(float(step))
        states["optimizer"] = {"state": slots, "param_groups": named.groups}
    if scheduler := common.get("opt_param_scheduler"):
        states["opt_param_scheduler"] = scheduler
    return states


def _parts_of(value: Any) -> Iterator[tuple[TensorKey, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """Yield the key, shape, offsets and memory of each tensor of the whole model of which a sharded tensor has a part.

    Megatron stacks layers and experts in tensors whose first dimensions count them.
    """
    slot, name = model_or_slot(value.key)
    template, depth = unstacked(name)
    depth = depth if depth <= len(value.global_shape) else 0
    state = "optimizer" if slot else _BUCKETS if name.startswith("optimizer.") else "model"
    data = value.data[(None,) * value.prepend_axis_num]
    for at in itertools.product(*map(range, data.shape[:depth])):
        place = [k + first for k, first in zip(at, value.global_offset, strict=False)]
        key = TensorKey(state, template.format(*place), MASTER if slot == "fp32" else slot)
        yield key, tuple(value.global_shape[depth:]), tuple(value.global_offset[depth:]), data[at]


def _check_common(checkpoint: Checkpoint, file: Path) -> None:
    saved = checkpoint.info.get("metadata", {}).get(COMMON_STATE_FNAME)
    if saved != hashlib.sha256(file.read_bytes()).hexdigest():
        raise CorruptCheckpointError(f"{file} is not the file that was saved with the checkpoint", file=file.name)


def _without_buffers(value: Any) -> Any:
    """Return an object with bytes in the places of buffers, which extra states of modules are."""
    return dict_list_map_outplace(lambda x: {_BYTES: x.getvalue()} if isinstance(x, io.BytesIO) else x, [value])[0]


def _with_buffers(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_BYTES}:
            return io.BytesIO(value[_BYTES])
        return {key: _with_buffers(item) for key, item in value.items()}
    return [*map(_with_buffers, value)] if type(value) is list else value


def _refuse(path: tuple[object, ...], tensor: object) -> str:
    raise AssertionError(f"a tensor at {path} of a tree without tensors")
