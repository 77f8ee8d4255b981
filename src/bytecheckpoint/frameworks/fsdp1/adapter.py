"""The FSDP1 adapter: ordinary PyTorch, but for flat parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, Names, SavedStates
from bytecheckpoint.frameworks.fsdp1.flats import find_fsdp1
from bytecheckpoint.frameworks.fsdp1.modules import capture_flat_modules, load_flat_modules, scan_flat_modules
from bytecheckpoint.frameworks.fsdp1.optimizers import FlatTable, capture_flat_optimizers, load_flat_optimizers
from bytecheckpoint.frameworks.native import NativeFramework, Scan, layout_in_words
from bytecheckpoint.frameworks.optimizers import as_optimizers
from bytecheckpoint.representation.shards import LiveState

__all__ = ["FSDP1Framework"]


class FSDP1Framework(NativeFramework):
    """FullyShardedDataParallel of any strategy, wrapping and setting of use_orig_params.

    Flat parameters and their optimizer state are saved as boxes of the original parameters, from where they lie: no
    state_dict, no gathering, no communication.
    """

    name = "fsdp1"

    def matches(self, states: Mapping[str, object]) -> bool:
        """Whether a module in `states` is, or contains, an FSDP1 unit, or an optimizer holds parameters of one."""
        return bool(find_fsdp1(states))

    def _scan(self, states: Mapping[str, object], names: Names | None) -> Scan:
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
        yield from (layout_in_words(tensor.value) for tensor in found.rest.tensors)
        yield from ("plain" for _ in found.buffers)
        for flat in found.flats:
            yield from (flat.layout() for _ in flat.pieces)


def _table(scan: Scan) -> FlatTable:
    return FlatTable.build([flat for found in scan.modules.values() for flat in found.flats])
