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

from bytecheckpoint.frameworks.base import Destination, SavedStates, Strict, SupportsStreams, UserNames, is_strict
from bytecheckpoint.frameworks.load_hooks import run_load_hooks
from bytecheckpoint.frameworks.modules import as_modules, capture_modules, load_modules, scan_modules
from bytecheckpoint.frameworks.objects.capture import capture_object
from bytecheckpoint.frameworks.objects.restore import load_object
from bytecheckpoint.frameworks.objects.streams import capture_streams, load_streams, refuse_streams
from bytecheckpoint.frameworks.optimizers.capture import capture_optimizers
from bytecheckpoint.frameworks.optimizers.names import ParameterNames, as_optimizers
from bytecheckpoint.frameworks.optimizers.restore import load_optimizers
from bytecheckpoint.frameworks.tensors.dtensors import is_dtensor
from bytecheckpoint.frameworks.tied import compare_tied
from bytecheckpoint.garbage_collection import gc_paused
from bytecheckpoint.representation.shards import LiveState

__all__ = ["NativeFramework", "Scan", "describe_layout"]


@dataclass(slots=True)
class Scan:
    """The modules and parameter names in the states of one call, found before any state is captured or loaded.

    Attributes:
        modules: kind -> the scan of its modules, for each kind that holds modules.
        names: names of all parameters, for the optimizers.
    """

    modules: Mapping[str, Any]
    names: ParameterNames


class NativeFramework:
    """The adapter of native PyTorch; `Framework` documents the public methods.

    The adapter of a framework that differs from PyTorch only in its parameters derives from this class and overrides the
    hooks below, which read and fill modules and optimizers. This class handles all other states.
    """

    name = "native"

    def matches(self, states: Mapping[str, object]) -> bool:
        """Return True: objects that no other adapter knows are treated as native PyTorch."""
        return True

    def capture(self, states: Mapping[str, object], *, names: UserNames | None = None) -> list[LiveState]:
        """Describe this rank's shards and values, in the order of `states`."""
        out: list[LiveState] = []
        with gc_paused():
            scan = self._scan(states, names)
            for kind, value in states.items():
                if kind in scan.modules:
                    state = self._capture_modules(kind, scan)
                elif (optimizers := self._as_optimizers(kind, value)) is not None:
                    state = self._capture_optimizers(kind, optimizers, scan)
                elif isinstance(value, SupportsStreams):
                    state = capture_streams(kind, value)
                else:
                    state = capture_object(kind, value)
                state.layout = partial(self._layout, kind, type(value).__name__, scan)
                out.append(state)
        return out

    def destination(
        self,
        states: MutableMapping[str, object],
        saved: SavedStates,
        *,
        strict: Strict = True,
        names: UserNames | None = None,
    ) -> Destination:
        """Plan a load into `states`."""
        into = Destination()
        with gc_paused():
            scan = self._scan(states, names)
            for kind, value in states.items():
                if kind in scan.modules:
                    self._load_modules(kind, scan, saved, into)
                elif (optimizers := self._as_optimizers(kind, value)) is not None:
                    self._load_optimizers(kind, optimizers, scan, saved, into, strict=is_strict(strict, kind))
                elif isinstance(value, SupportsStreams):
                    load_streams(kind, value, saved, into)
                else:
                    refuse_streams(kind, value, saved)
                    load_object(kind, states, saved, into)
            compare_tied(into)
        return into

    def _layout(self, kind: str, type_name: str, scan: Scan) -> dict[str, Any]:
        """Return {"type", "tensors", "layouts": {layout: count}} of one kind; only modules have tensors and layouts."""
        if kind not in scan.modules:
            return {"type": type_name}
        layouts = Counter(self._layouts(kind, scan))
        return {"type": type_name, "tensors": sum(layouts.values()), "layouts": dict(layouts)}

    # --- hooks ------------------------------------------------------------------------------------------------

    def _scan(self, states: Mapping[str, object], names: UserNames | None) -> Scan:
        """Find the names and tensors of all modules in `states`."""
        found = {
            kind: self._scan_modules(kind, modules)
            for kind, value in states.items()
            if (modules := as_modules(kind, value)) is not None
        }
        # A parameter in two states gets its name in "model".
        ordered = sorted(found, key=lambda kind: kind != "model")
        return Scan(found, ParameterNames.build([found[kind].parameters for kind in ordered], names))

    def _as_optimizers(self, kind: str, value: object) -> Sequence[Any] | None:
        """Return `value` as a list of optimizers, or None when it is something else."""
        return as_optimizers(kind, value)

    def _scan_modules(self, kind: str, modules: Sequence[nn.Module]) -> Any:
        """Scan the modules of one kind; the result has `parameters`, as `ModuleScan` does."""
        return scan_modules(kind, modules)

    def _capture_modules(self, kind: str, scan: Scan) -> LiveState:
        return capture_modules(kind, scan.modules[kind])

    def _capture_optimizers(self, kind: str, optimizers: Sequence[Optimizer], scan: Scan) -> LiveState:
        return capture_optimizers(kind, optimizers, scan.names)

    def _load_modules(self, kind: str, scan: Scan, saved: SavedStates, into: Destination) -> None:
        before = len(into.wanted)
        load_modules(kind, scan.modules[kind], saved, into)
        if len(into.wanted) > before:
            into.finish.append(partial(run_load_hooks, scan.modules[kind]))

    def _load_optimizers(
        self,
        kind: str,
        optimizers: Sequence[Optimizer],
        scan: Scan,
        saved: SavedStates,
        into: Destination,
        *,
        strict: bool,
    ) -> None:
        load_optimizers(kind, optimizers, scan.names, saved, into, strict=strict)

    def _layouts(self, kind: str, scan: Scan) -> Iterable[str]:
        """Describe the layout of each tensor of one kind."""
        return (describe_layout(tensor.value) for tensor in scan.modules[kind].tensors)


def describe_layout(tensor: torch.Tensor) -> str:
    """Describe a layout, e.g. "(Replicate(), Shard(dim=0)) on (dp=2, tp=4)"; "plain" if it is not distributed."""
    if not is_dtensor(tensor):
        return "plain"
    mesh = tensor.device_mesh
    dim_names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    extents = ", ".join(f"{name}={size}" for name, size in zip(dim_names, mesh.shape, strict=True))
    return f"({', '.join(map(repr, tensor.placements))}) on ({extents})"
