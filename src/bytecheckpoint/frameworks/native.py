"""The native PyTorch adapter: plain modules, DDP, FSDP2, tensor, pipeline and expert parallelism, all one way.

Whatever the parallelism, a tensor is plain or a DTensor, and a DTensor says which boxes this rank holds. Pipeline
stages hold names of their own; expert parallelism is names of their own or a sharded dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from bytecheckpoint.frameworks.base import Destination, Names, SavedStates
from bytecheckpoint.frameworks.dtensors import is_dtensor
from bytecheckpoint.frameworks.modules import ModuleScan, as_modules, capture_modules, load_modules, scan_modules
from bytecheckpoint.frameworks.objects import capture_object, load_object
from bytecheckpoint.frameworks.optimizer_restore import load_optimizers
from bytecheckpoint.frameworks.optimizers import ParameterNames, as_optimizers, capture_optimizers
from bytecheckpoint.monitoring.collector import collector_paused
from bytecheckpoint.representation.shards import LiveState

__all__ = ["NativeFramework"]


class NativeFramework:
    """See the module's text; `Framework` documents the methods."""

    name = "native"

    def matches(self, states: Mapping[str, object]) -> bool:
        """True: whatever no other adapter knows is taken for ordinary PyTorch."""
        return True

    def capture(self, states: Mapping[str, object], *, names: Names | None = None) -> list[LiveState]:
        """This rank's shards and values, in the order of `states`."""
        out: list[LiveState] = []
        with collector_paused():
            scans, parameters = _scan(states, names)
            for kind, value in states.items():
                if kind in scans:
                    out.append(capture_modules(kind, scans[kind]))
                elif (optimizers := as_optimizers(kind, value)) is not None:
                    out.append(capture_optimizers(kind, optimizers, parameters))
                else:
                    out.append(capture_object(kind, value))
        return out

    def destination(
        self,
        states: MutableMapping[str, object],
        saved: SavedStates,
        *,
        strict: bool = True,
        names: Names | None = None,
    ) -> Destination:
        """Plan a load into `states`."""
        into = Destination()
        with collector_paused():
            scans, parameters = _scan(states, names)
            for kind, value in states.items():
                if kind in scans:
                    load_modules(kind, scans[kind], saved, into)
                elif (optimizers := as_optimizers(kind, value)) is not None:
                    load_optimizers(kind, optimizers, parameters, saved, into, strict=strict)
                else:
                    load_object(kind, states, saved, into)
        return into

    def describe(self, states: Mapping[str, object]) -> dict[str, Any]:
        """{"framework", "kinds": {kind: {"type", "tensors", "layouts": {layout: count}}}}; layouts of modules only."""
        scans, _ = _scan(states, None)
        kinds: dict[str, Any] = {}
        for kind, value in states.items():
            kinds[kind] = {"type": type(value).__name__}
            if kind in scans:
                layouts = Counter(_layout(tensor.value) for tensor in scans[kind].tensors)
                kinds[kind] |= {"tensors": sum(layouts.values()), "layouts": dict(layouts)}
        return {"framework": self.name, "kinds": kinds}


def _scan(states: Mapping[str, object], names: Names | None) -> tuple[dict[str, ModuleScan], ParameterNames]:
    scans: dict[str, ModuleScan] = {}
    for kind, value in states.items():
        if (modules := as_modules(kind, value)) is not None:
            scans[kind] = scan_modules(kind, modules)
    # A parameter that two states hold goes by its name in "model".
    ordered = sorted(scans, key=lambda kind: kind != "model")
    return scans, ParameterNames.build([scans[kind].parameters for kind in ordered], names)


def _layout(tensor: torch.Tensor) -> str:
    """For example "(Replicate(), Shard(dim=0)) on (dp=2, tp=4)"; "plain" for a tensor that is not distributed."""
    if not is_dtensor(tensor):
        return "plain"
    mesh = tensor.device_mesh
    dim_names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    extents = ", ".join(f"{name}={size}" for name, size in zip(dim_names, mesh.shape, strict=True))
    return f"({', '.join(map(repr, tensor.placements))}) on ({extents})"
