"""The native PyTorch adapter: plain modules, DDP, FSDP2, tensor, pipeline and expert parallelism, all one way.

Whatever the parallelism, a tensor is plain or a DTensor, and a DTensor says which boxes this rank holds. Pipeline
stages hold names of their own; expert parallelism is names of their own or a sharded dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.frameworks.base import Destination, Names, SavedStates
from bytecheckpoint.frameworks.dtensors import is_dtensor
from bytecheckpoint.frameworks.modules import as_modules, capture_modules, load_modules, scan_modules
from bytecheckpoint.frameworks.objects import capture_object, load_object
from bytecheckpoint.frameworks.optimizer_restore import load_optimizers
from bytecheckpoint.frameworks.optimizers import ParameterNames, as_optimizers, capture_optimizers
from bytecheckpoint.monitoring.collector import collector_paused
from bytecheckpoint.representation.shards import LiveState

__all__ = ["NativeFramework", "Scan", "layout_in_words"]


@dataclass(slots=True)
class Scan:
    """What an adapter found in the states of one call, before it looks at each of them.

    Attributes:
        modules: what stands in each kind that holds modules.
        names: of all parameters, for the optimizers.
    """

    modules: Mapping[str, Any]
    names: ParameterNames


class NativeFramework:
    """See the module's text; `Framework` documents the public methods.

    An adapter of a framework that is PyTorch but for its parameters derives from this class and replaces the hooks
    below: how modules and optimizers are read and filled. Everything else in the states is handled here.
    """

    name = "native"

    def matches(self, states: Mapping[str, object]) -> bool:
        """True: whatever no other adapter knows is taken for ordinary PyTorch."""
        return True

    def capture(self, states: Mapping[str, object], *, names: Names | None = None) -> list[LiveState]:
        """This rank's shards and values, in the order of `states`."""
        out: list[LiveState] = []
        with collector_paused():
            scan = self._scan(states, names)
            for kind, value in states.items():
                if kind in scan.modules:
                    out.append(self._capture_modules(kind, scan))
                elif (optimizers := self._as_optimizers(kind, value)) is not None:
                    out.append(self._capture_optimizers(kind, optimizers, scan))
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
            scan = self._scan(states, names)
            for kind, value in states.items():
                if kind in scan.modules:
                    self._load_modules(kind, scan, saved, into)
                elif (optimizers := self._as_optimizers(kind, value)) is not None:
                    self._load_optimizers(kind, optimizers, scan, saved, into, strict=strict)
                else:
                    load_object(kind, states, saved, into)
        return into

    def describe(self, states: Mapping[str, object]) -> dict[str, Any]:
        """{"framework", "kinds": {kind: {"type", "tensors", "layouts": {layout: count}}}}; layouts of modules only."""
        scan = self._scan(states, None)
        kinds: dict[str, Any] = {}
        for kind, value in states.items():
            kinds[kind] = {"type": type(value).__name__}
            if kind in scan.modules:
                layouts = Counter(self._layouts(kind, scan))
                kinds[kind] |= {"tensors": sum(layouts.values()), "layouts": dict(layouts)}
        return {"framework": self.name, "kinds": kinds}

    # --- hooks ------------------------------------------------------------------------------------------------

    def _scan(self, states: Mapping[str, object], names: Names | None) -> Scan:
        """Names and tensors of all modules in `states`."""
        found = {
            kind: self._scan_modules(kind, modules)
            for kind, value in states.items()
            if (modules := as_modules(kind, value)) is not None
        }
        # A parameter that two states hold goes by its name in "model".
        ordered = sorted(found, key=lambda kind: kind != "model")
        return Scan(found, ParameterNames.build([found[kind].parameters for kind in ordered], names))

    def _as_optimizers(self, kind: str, value: object) -> Sequence[Any] | None:
        """`value` as a list of optimizers, or None when it is something else."""
        return as_optimizers(kind, value)

    def _scan_modules(self, kind: str, modules: Sequence[nn.Module]) -> Any:
        """What stands in one kind; has `parameters` as `ModuleScan` does."""
        return scan_modules(kind, modules)

    def _capture_modules(self, kind: str, scan: Scan) -> LiveState:
        return capture_modules(kind, scan.modules[kind])

    def _capture_optimizers(self, kind: str, optimizers: Sequence[Optimizer], scan: Scan) -> LiveState:
        return capture_optimizers(kind, optimizers, scan.names)

    def _load_modules(self, kind: str, scan: Scan, saved: SavedStates, into: Destination) -> None:
        load_modules(kind, scan.modules[kind], saved, into)

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
        """The layout of each tensor of one kind, in words."""
        return (layout_in_words(tensor.value) for tensor in scan.modules[kind].tensors)


def layout_in_words(tensor: torch.Tensor) -> str:
    """For example "(Replicate(), Shard(dim=0)) on (dp=2, tp=4)"; "plain" for a tensor that is not distributed."""
    if not is_dtensor(tensor):
        return "plain"
    mesh = tensor.device_mesh
    dim_names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    extents = ", ".join(f"{name}={size}" for name, size in zip(dim_names, mesh.shape, strict=True))
    return f"({', '.join(map(repr, tensor.placements))}) on ({extents})"
