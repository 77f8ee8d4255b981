"""The adapter of FSDP1: native PyTorch except for flat parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, SavedStates, UserNames
from bytecheckpoint.frameworks.fsdp1.detection import find_fsdp1
from bytecheckpoint.frameworks.fsdp1.modules import capture_flat_modules, load_flat_modules, scan_flat_modules
from bytecheckpoint.frameworks.fsdp1.optimizers import FlatParameterTable, capture_flat_optimizers, load_flat_optimizers
from bytecheckpoint.frameworks.native import NativeFramework, Scan, describe_layout
from bytecheckpoint.frameworks.optimizers.names import as_optimizers
from bytecheckpoint.representation.shards import LiveState

__all__ = ["FSDP1Framework"]


class FSDP1Framework(NativeFramework):
    """The adapter of FullyShardedDataParallel, with any strategy, wrapping and use_orig_params.

    It saves flat parameters and their optimizer state as boxes of the original parameters, in place: no state_dict, no
    gathering, no communication.
    """

    name = "fsdp1"

    def matches(self, states: Mapping[str, object]) -> bool:
        """Return whether `states` contain an FSDP1 unit, or an optimizer that holds parameters of one."""
        return bool(find_fsdp1(states))

    def _scan(self, states: Mapping[str, object], names: UserNames | None) -> Scan:
        scan = super()._scan(states, names)
        for kind, value in states.items():
            if kind in scan.modules or as_optimizers(kind, value) is not None:
                continue
            if where := find_fsdp1({kind: value}):
                raise UsageError(
                    f"{where} belongs to FSDP1 and stands inside a container, where it would be gathered: give modules and "
                    "optimizers names of their own in the states"
                )
        return scan

    def _scan_modules(self, kind: str, modules: Sequence[nn.Module]) -> Any:
        return scan_flat_modules(kind, modules)

    def _capture_modules(self, kind: str, scan: Scan) -> LiveState:
        return capture_flat_modules(kind, scan.modules[kind])

    def _capture_optimizers(self, kind: str, optimizers: Sequence[Optimizer], scan: Scan) -> LiveState:
        return capture_flat_optimizers(kind, optimizers, scan.names, _table(scan))

    def _load_modules(self, kind: str, scan: Scan, saved: SavedStates, into: Destination) -> None:
        load_flat_modules(kind, scan.modules[kind], saved, into)

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
        load_flat_optimizers(kind, optimizers, scan.names, _table(scan), saved, into, strict=strict)

    def _layouts(self, kind: str, scan: Scan) -> Iterable[str]:
        found = scan.modules[kind]
        yield from (describe_layout(tensor.value) for tensor in found.rest.tensors)
        yield from ("plain" for _ in found.buffers)
        for flat in found.flats:
            yield from (flat.layout() for _ in flat.originals)


def _table(scan: Scan) -> FlatParameterTable:
    return FlatParameterTable.build([flat for found in scan.modules.values() for flat in found.flats])
