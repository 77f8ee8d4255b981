"""The adapter of FSDP1: native PyTorch except for flat parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import UserNames
from bytecheckpoint.frameworks.fsdp1.detection import find_fsdp1
from bytecheckpoint.frameworks.fsdp1.modules import capture_flat_modules, load_flat_modules, scan_flat_modules
from bytecheckpoint.frameworks.fsdp1.optimizers import FlatParameterTable, capture_flat_optimizers, load_flat_optimizers
from bytecheckpoint.frameworks.modules import ModuleScan
from bytecheckpoint.frameworks.native import LoadInputs, NativeFramework, Scan, describe_layout
from bytecheckpoint.frameworks.optimizers.names import as_optimizers
from bytecheckpoint.representation.shards import LiveState

__all__ = ["FSDP1Framework"]


class FSDP1Framework(NativeFramework):
    """The adapter of FullyShardedDataParallel, with any strategy, wrapping and use_orig_params.

    It saves flat parameters and their optimizer state as boxes of the original parameters, in place: no state_dict, no
    gathering, no communication.
    """

    name = "fsdp1"
    reason_to_block = NativeFramework.reason_to_block

    def matches(self, states: Mapping[str, object]) -> bool:
        """Return whether `states` contain an FSDP1 unit, or an optimizer that holds parameters of one."""
        return bool(find_fsdp1(states))

    def _scan(self, states: Mapping[str, object], names: UserNames | None) -> Scan:
        scan = super()._scan(states, names)
        for state_name, value in states.items():
            if state_name in scan.modules or as_optimizers(state_name, value) is not None:
                continue
            if where := find_fsdp1({state_name: value}):
                raise UsageError(
                    f"{where} belongs to FSDP1 and stands inside a container, where it would be gathered: give modules and "
                    "optimizers names of their own in the states"
                )
        return scan

    def _scan_modules(self, state_name: str, modules: Sequence[nn.Module]) -> Any:
        return scan_flat_modules(state_name, modules)

    def _hooked(self, found: Any) -> ModuleScan | None:
        scan: ModuleScan = found.rest
        return scan

    def _capture_modules(self, state_name: str, scan: Scan) -> LiveState:
        return capture_flat_modules(state_name, scan.modules[state_name])

    def _capture_optimizers(self, state_name: str, optimizers: Sequence[Optimizer], scan: Scan) -> LiveState:
        return capture_flat_optimizers(state_name, optimizers, scan.names, _table(scan))

    def _load_modules(self, state_name: str, load: LoadInputs) -> None:
        load_flat_modules(state_name, load.scan.modules[state_name], load.saved, load.destination)

    def _load_optimizers(self, state_name: str, optimizers: Sequence[Optimizer], load: LoadInputs) -> None:
        load_flat_optimizers(
            state_name, optimizers, load.scan.names, _table(load.scan), load.saved, load.destination,
            strict=load.is_strict(state_name),
        )  # fmt: skip

    def _layouts(self, state_name: str, scan: Scan) -> Iterable[str]:
        found = scan.modules[state_name]
        yield from (describe_layout(tensor.value) for tensor in found.rest.tensors)
        yield from ("plain" for _ in found.buffers)
        for flat in found.flats:
            yield from (flat.layout() for _ in flat.originals)


def _table(scan: Scan) -> FlatParameterTable:
    flats = [flat for found in scan.modules.values() for flat in found.flats]
    scanned = (module for found in scan.modules.values() for module in found.rest.modules)
    return FlatParameterTable.build(flats, [owner for module in scanned for owner in module.owners.values()])
