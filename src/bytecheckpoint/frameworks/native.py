"""The adapter of native PyTorch: plain modules, DDP, FSDP2, tensor, pipeline and expert parallelism.

Under all of these a tensor is plain or a DTensor, and a DTensor says which boxes this rank holds. Pipeline stages differ
in their names, and experts in their names or along a sharded dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.frameworks.base import (
    Destination,
    SavedStates,
    SavedTensor,
    Strict,
    SupportsStreams,
    UserNames,
    is_strict,
)
from bytecheckpoint.frameworks.detection import nested_objects
from bytecheckpoint.frameworks.load_hooks import LoadHooks
from bytecheckpoint.frameworks.modules import (
    ModuleScan,
    OwnTensors,
    as_modules,
    capture_modules,
    load_modules,
    scan_modules,
)
from bytecheckpoint.frameworks.objects.capture import capture_object
from bytecheckpoint.frameworks.objects.restore import load_object
from bytecheckpoint.frameworks.objects.streams import capture_streams, load_streams, refuse_streams
from bytecheckpoint.frameworks.optimizers.capture import capture_optimizers
from bytecheckpoint.frameworks.optimizers.names import ParameterNames, as_optimizers
from bytecheckpoint.frameworks.optimizers.restore import load_optimizers
from bytecheckpoint.frameworks.providers.base import StateProvider, is_provider
from bytecheckpoint.frameworks.providers.states import capture_provider, load_provider
from bytecheckpoint.frameworks.recapture import again_with_modules, with_layout
from bytecheckpoint.frameworks.tensors.allocation import is_writable
from bytecheckpoint.frameworks.tensors.dtensors import is_dtensor
from bytecheckpoint.frameworks.tensors.dtypes import dtype_named
from bytecheckpoint.garbage_collection import gc_paused
from bytecheckpoint.representation.shards import MASTER, LiveShard, LiveState, each_box

__all__ = ["LoadInputs", "NativeFramework", "Scan", "describe_layout"]


@dataclass(slots=True)
class Scan:
    """The modules and parameter names in the states of one call, found before any state is captured or loaded.

    Attributes:
        modules: state -> the scan of its modules, for each state that holds modules.
        names: names of all parameters, for the optimizers.
    """

    modules: Mapping[str, Any]
    names: ParameterNames


@dataclass(frozen=True, slots=True)
class LoadInputs:
    """The inputs of the hooks that plan a load.

    Attributes:
        scan: modules and parameter names of the live states.
        saved: the checkpoint.
        destination: receives the plan.
        strict: strictness of the load by state.
    """

    scan: Scan
    saved: SavedStates
    destination: Destination
    strict: Strict

    def is_strict(self, state_name: str) -> bool:
        """Return whether the load is strict about a state."""
        return is_strict(self.strict, state_name)


class NativeFramework:
    """The adapter of native PyTorch; `Framework` documents the public methods.

    The adapter of a framework that differs from PyTorch only in its parameters derives from this class and overrides the
    hooks below, which read and fill modules and optimizers. This class handles all other states.
    """

    name = "native"

    def matches(self, states: Mapping[str, object]) -> bool:
        """Return True: objects that no other adapter knows are treated as native PyTorch."""
        return True

    def reason_to_block(self, states: Mapping[str, object]) -> str:
        """Return why a save cannot copy `states` in the background: hooks of torch miss the steps of an optimizer."""
        for optimizer in nested_objects(dict(states), Optimizer):
            name = type(optimizer).__name__
            # A scheduler of torch puts a wrapper of the step on the optimizer, which is marked as the step itself is.
            if not getattr(optimizer.step, "hooked", False):
                return f"hooks do not see the steps of {name}"
            if any(group.get("capturable") for group in optimizer.param_groups):
                return f"steps of {name} may be replayed as a graph (capturable=True)"
        return ""

    def capture(self, states: Mapping[str, object], *, names: UserNames | None = None) -> list[LiveState]:
        """Describe this rank's shards and values, in the order of `states`."""
        out: list[LiveState] = []
        with gc_paused():
            scan = self._scan(states, names)
            for state_name, value in states.items():
                if state_name in scan.modules:
                    state = self._capture_modules(state_name, scan)
                elif (optimizers := self._as_optimizers(state_name, value)) is not None:
                    state = self._capture_optimizers(state_name, optimizers, scan)
                else:
                    state = self._capture_other(state_name, value)
                state.layout = partial(self._layout, state_name, type(value).__name__, scan)
                if state.again is not None:
                    state.again = with_layout(state.again, state.layout())
                out.append(state)
        return out

    def _capture_other(self, state_name: str, value: object) -> LiveState:
        """Describe a state that is neither modules nor optimizers."""
        if isinstance(value, SupportsStreams):
            state = capture_streams(state_name, value)
        elif is_provider(value):
            state = capture_provider(state_name, value)
        else:
            state = capture_object(state_name, value)
        if all(shard.by_content for shard in state.shards):  # else what is known of the shards would differ each time
            state.again = partial(self._capture_other_again, state_name)
        return state

    def _capture_other_again(self, state_name: str, value: object) -> LiveState | None:
        if as_modules(state_name, value) is not None or self._as_optimizers(state_name, value) is not None:
            return None
        state = self._capture_other(state_name, value)
        return None if state.again is None else state

    def destination(
        self,
        states: MutableMapping[str, object],
        saved: SavedStates,
        *,
        strict: Strict = True,
        names: UserNames | None = None,
    ) -> Destination:
        """Plan a load into `states`."""
        destination = Destination()
        with gc_paused():
            scan = self._scan(states, names)
            hooks = LoadHooks(saved, destination)
            for state_name, scanned in scan.modules.items():
                if (found := self._hooked(scanned)) is not None:
                    hooks.run(state_name, found, strict=is_strict(strict, state_name))
            if hooks.ran:
                scan = self._scan(states, names)  # hooks may replace tensors
            load = LoadInputs(scan, saved, destination, strict)
            for state_name, value in states.items():
                if state_name in scan.modules:
                    self._load_modules(state_name, load)
                elif (optimizers := self._as_optimizers(state_name, value)) is not None:
                    self._load_optimizers(state_name, optimizers, load)
                elif isinstance(value, SupportsStreams):
                    load_streams(state_name, value, saved, destination)
                elif isinstance(value, StateProvider):
                    load_provider(state_name, value, saved, destination)
                else:
                    refuse_streams(state_name, value, saved)
                    load_object(state_name, states, saved, destination)
            _compare_tied(destination)
            hooks.fill()
        return destination

    def _layout(self, state_name: str, type_name: str, scan: Scan) -> dict[str, Any]:
        """Return {"type", "tensors", "layouts": {layout: count}} of one state; only modules have tensors and layouts."""
        if state_name not in scan.modules:
            return {"type": type_name}
        layouts = Counter(self._layouts(state_name, scan))
        return {"type": type_name, "tensors": sum(layouts.values()), "layouts": dict(layouts)}

    # --- hooks ------------------------------------------------------------------------------------------------

    def _scan(self, states: Mapping[str, object], names: UserNames | None) -> Scan:
        """Find the names and tensors of all modules in `states`."""
        found = {
            state_name: self._scan_modules(state_name, modules)
            for state_name, value in states.items()
            if (modules := as_modules(state_name, value)) is not None
        }
        # A parameter in two states gets its name in "model".
        ordered = sorted(found, key=lambda state_name: state_name != "model")
        return Scan(found, ParameterNames.build([found[state_name].parameters for state_name in ordered], names))

    def _as_optimizers(self, state_name: str, value: object) -> Sequence[Any] | None:
        """Return `value` as a list of optimizers, or None when it is something else."""
        return as_optimizers(state_name, value)

    def _scan_modules(self, state_name: str, modules: Sequence[nn.Module]) -> Any:
        """Scan the modules of one state; the result has `parameters`, as `ModuleScan` does."""
        return scan_modules(state_name, modules)

    def _hooked(self, found: Any) -> ModuleScan | None:
        """Return the modules of a scanned state whose hooks before load_state_dict a load runs; None: it runs none."""
        return found if isinstance(found, ModuleScan) else None

    def _capture_modules(self, state_name: str, scan: Scan) -> LiveState:
        found = scan.modules[state_name]
        state = capture_modules(state_name, found)
        if type(self) is NativeFramework:
            tensors, modules = [tensor.value for tensor in found.tensors], [one.module for one in found.modules]
            state.again = again_with_modules(state, tensors, partial(as_modules, state_name), modules)
        return state

    def _capture_optimizers(self, state_name: str, optimizers: Sequence[Optimizer], scan: Scan) -> LiveState:
        return capture_optimizers(state_name, optimizers, scan.names, again=type(self) is NativeFramework)

    def _load_modules(self, state_name: str, load: LoadInputs) -> None:
        found, destination = load.scan.modules[state_name], load.destination
        before = len(destination.wanted)
        load_modules(state_name, found, load.saved, destination)
        if len(destination.wanted) > before:
            destination.finish.append(partial(_run_load_hooks, found))

    def _load_optimizers(self, state_name: str, optimizers: Sequence[Optimizer], load: LoadInputs) -> None:
        load_optimizers(
            state_name, optimizers, load.scan.names, load.saved, load.destination, strict=load.is_strict(state_name)
        )

    def _layouts(self, state_name: str, scan: Scan) -> Iterable[str]:
        """Describe the layout of each tensor of one state."""
        return (describe_layout(tensor.value) for tensor in scan.modules[state_name].tensors)


def describe_layout(tensor: torch.Tensor) -> str:
    """Describe a layout, e.g. "(Replicate(), Shard(dim=0)) on (dp=2, tp=4)"; "plain" if it is not distributed."""
    if not is_dtensor(tensor):
        return "plain"
    mesh = tensor.device_mesh
    dim_names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    extents = ", ".join(f"{name}={size}" for name, size in zip(dim_names, mesh.shape, strict=True))
    return f"({', '.join(map(repr, tensor.placements))}) on ({extents})"


def _run_load_hooks(scan: ModuleScan) -> None:
    """Have modules with such hooks load what they hold already.

    Hooks are post-hooks of load_state_dict, and methods `_load_from_state_dict` that are not torch's.
    """
    for scanned in scan.modules:
        prefixes: list[str] = []
        for prefix, module in scanned.owners.items():
            if _has_load_hooks(module) and not prefix.startswith(tuple(prefixes)):
                prefixes.append(prefix)
        own = OwnTensors(scanned) if prefixes else ()
        entries = {key: value.detach() for key, value in scanned.entries.items() if value in own and is_writable(value)}
        for prefix in prefixes:
            inside = {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}
            scanned.owners[prefix].load_state_dict(inside, strict=False)


def _has_load_hooks(module: nn.Module) -> bool:
    method = type(module)._load_from_state_dict
    return bool(module._load_state_dict_post_hooks) or not getattr(method, "__module__", "").startswith("torch.")


_PIECE = 32 << 20  # elements that are compared at a time


def _compare_tied(destination: Destination) -> None:
    """Request the other copies of tied tensors, to compare them with what the load has filled. Call it once, at the end.

    Stages of a pipeline save a tied weight twice, with equal content. Weights with different content were not tied, and one
    of them would be lost: `Destination.mismatches` gets their names.
    """
    for found, other in destination.tied:
        if (found.dtype, found.global_shape) != (other.dtype, other.global_shape):
            destination.mismatches.append(_message(found, other))
            continue
        pairs = []
        for shard in _filled(destination.wanted, found):
            first = shard if shard.key == found.key else _buffer(shard, found)
            pairs.append((first.data, (second := _buffer(shard, other)).data))
            destination.wanted += [second] if first is shard else [first, second]
        if pairs:
            destination.checks.append(partial(_compare, destination, found, other, pairs))


def _filled(wanted: list[LiveShard], found: SavedTensor) -> list[LiveShard]:
    """Return the wanted boxes of a tensor, or those of its master weight if the load fills the tensor from that."""
    own = [shard for shard in wanted if shard.key == found.key]
    if not own:
        own = [
            shard
            for shard in wanted
            if shard.key.slot == MASTER and shard.key.fqn == found.key.fqn and shard.global_shape == found.global_shape
        ]
    return list({(shard.offsets, shard.lengths): shard for shard in each_box(own)}.values())


def _buffer(shard: LiveShard, saved: SavedTensor) -> LiveShard:
    """Return the same box of another tensor, with memory of its own."""
    dtype = shard.dtype if shard.key.slot != MASTER else saved.dtype
    data = torch.empty(shard.lengths, dtype=dtype_named(dtype), device="cpu")
    return LiveShard(saved.key, dtype, shard.global_shape, shard.offsets, shard.lengths, data, converts=shard.converts)


def _compare(
    destination: Destination, found: SavedTensor, other: SavedTensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    if not all(_same_bits(first, second) for first, second in pairs):
        destination.mismatches.append(_message(found, other))


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    first, second = first.detach().reshape(-1), second.reshape(-1)
    return all(
        torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(first.split(_PIECE), second.split(_PIECE), strict=True)
    )


def _message(found: SavedTensor, other: SavedTensor) -> str:
    return f"{found.key} and {other.key} are one tensor here, and differ in the checkpoint: {other.key} would be lost"
