"""The adapter of DeepSpeed: native PyTorch except for engines and the tensors that they partition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, SavedStates, Strict, UserNames
from bytecheckpoint.frameworks.deepspeed.detection import find_deepspeed, is_partitioned, is_wrapped_optimizer
from bytecheckpoint.frameworks.deepspeed.engines import expand_engines
from bytecheckpoint.frameworks.deepspeed.modules import (
    ZeroModules,
    capture_zero_modules,
    load_zero_modules,
    scan_zero_modules,
)
from bytecheckpoint.frameworks.deepspeed.optimizers import (
    EngineOptimizer,
    capture_engine_optimizer,
    load_engine_optimizer,
    steps_parts,
)
from bytecheckpoint.frameworks.deepspeed.partitions import Fragment
from bytecheckpoint.frameworks.deepspeed.progress import EngineProgress
from bytecheckpoint.frameworks.native import NativeFramework, Scan
from bytecheckpoint.representation.shards import LiveState

__all__ = ["DeepSpeedFramework"]


@dataclass(slots=True)
class _ZeroScan(Scan):
    """A scan with the engines' optimizers, by kind."""

    engine_optimizers: dict[str, EngineOptimizer]


class DeepSpeedFramework(NativeFramework):
    """Engines of DeepSpeed: ZeRO stages 0 to 3, AutoTP, pipelines, mixtures of experts.

    Partitions are saved as boxes of the original parameters, from where they lie in memory: no state_dict, no gathering,
    no communication.
    """

    name = "deepspeed"

    def matches(self, states: Mapping[str, object]) -> bool:
        """Return whether `states` hold an engine, its optimizer, or a module of DeepSpeed or partitioned by ZeRO."""
        return bool(find_deepspeed(states))

    def capture(self, states: Mapping[str, object], *, names: UserNames | None = None) -> list[LiveState]:
        """Describe this rank's shards and values: one `LiveState` per name in `states`, and those of expanded engines.

        Raises:
            UsageError: as in `Framework.capture`; or gradients are being accumulated.
        """
        expanded = expand_engines(states)
        for kind, value in expanded.items():
            if isinstance(value, EngineProgress):
                value.check_between_steps(kind, saves=True)
        return super().capture(expanded, names=names)

    def destination(
        self,
        states: MutableMapping[str, object],
        saved: SavedStates,
        *,
        strict: Strict = True,
        names: UserNames | None = None,
    ) -> Destination:
        """Plan a load into `states`, engines expanded."""
        expanded = expand_engines(states)
        notes: list[str] = []
        for kind, value in list(expanded.items()):
            if isinstance(value, EngineProgress):
                value.check_between_steps(kind, saves=False)
                if kind not in saved.kinds():
                    del expanded[kind]
                    notes.append(
                        f"{kind}: the checkpoint was not saved from an engine: steps and loss scale stay as they are"
                    )
        before = dict(expanded)
        into = super().destination(expanded, saved, strict=strict, names=names)
        into.notes += notes
        into.kinds = expanded.keys() - states.keys()

        def replace_values() -> None:
            # The load replaces plain values in the expanded mapping; the caller's mapping gets them too.
            for kind in states:
                if expanded.get(kind) is not before.get(kind):
                    states[kind] = expanded[kind]

        into.finish.append(replace_values)
        return into

    def _as_optimizers(self, kind: str, value: object) -> Sequence[Any] | None:
        return [value] if is_wrapped_optimizer(value) else super()._as_optimizers(kind, value)

    def _scan(self, states: Mapping[str, object], names: UserNames | None) -> Scan:
        scan = super()._scan(states, names)
        parts = {number: part for zero in scan.modules.values() for number, part in zero.parts.items()}
        optimizers = {
            kind: EngineOptimizer(kind, value, scan.names, parts)
            for kind, value in states.items()
            if is_wrapped_optimizer(value) or steps_parts(kind, self._as_optimizers(kind, value), parts)
        }
        return _ZeroScan(scan.modules, scan.names, optimizers)

    def _scan_modules(self, kind: str, modules: Sequence[nn.Module]) -> Any:
        return scan_zero_modules(kind, modules)

    def _capture_modules(self, kind: str, scan: Scan) -> LiveState:
        return capture_zero_modules(kind, scan.modules[kind])

    def _capture_optimizers(self, kind: str, optimizers: Sequence[Any], scan: Scan) -> LiveState:
        assert isinstance(scan, _ZeroScan)
        if kind in scan.engine_optimizers:
            return capture_engine_optimizer(scan.engine_optimizers[kind])
        _refuse_flat_tensors(kind, optimizers, scan)
        return super()._capture_optimizers(kind, optimizers, scan)

    def _load_modules(self, kind: str, scan: Scan, saved: SavedStates, into: Destination) -> None:
        assert isinstance(scan, _ZeroScan)
        modules: ZeroModules = scan.modules[kind]
        master_kind, masters = None, dict[int, Fragment]()
        for name, optimizer in scan.engine_optimizers.items():
            if optimizer.masters.keys() & modules.parameters.keys():
                master_kind, masters = name, optimizer.masters
        load_zero_modules(kind, modules, saved, into, master_kind=master_kind, masters=masters)

    def _load_optimizers(
        self,
        kind: str,
        optimizers: Sequence[Any],
        scan: Scan,
        saved: SavedStates,
        into: Destination,
        *,
        strict: bool,
    ) -> None:
        assert isinstance(scan, _ZeroScan)
        if kind in scan.engine_optimizers:
            load_engine_optimizer(scan.engine_optimizers[kind], saved, into, strict=strict)
        else:
            _refuse_flat_tensors(kind, optimizers, scan)
            experts = [(g, g["name"]) for o in optimizers for g in o.param_groups if g.get("moe") and "name" in g]
            super()._load_optimizers(kind, optimizers, scan, saved, into, strict=strict)
            # The name of a group of experts says which ranks share it now: it is not taken from the checkpoint.
            into.finish += [partial(group.update, {"moe": True, "name": name}) for group, name in experts]

    def _layouts(self, kind: str, scan: Scan) -> Iterable[str]:
        modules: ZeroModules = scan.modules[kind]
        return modules.layouts()


def _refuse_flat_tensors(kind: str, optimizers: Sequence[Optimizer], scan: Scan) -> None:
    """Refuse a torch optimizer over the flat tensors of an engine that is not in the states."""
    known = scan.names.by_id
    for optimizer in optimizers:
        unnamed = any(id(p) not in known for group in optimizer.param_groups for p in group["params"])
        if unnamed and any(
            any(map(is_partitioned, m.parameters())) for zero in scan.modules.values() for m in zero.modules
        ):
            raise UsageError(
                f"{kind}: this {type(optimizer).__name__} steps tensors that are in no module of the states; if an engine "
                "made them, pass engine.optimizer, or the engine alone"
            )
