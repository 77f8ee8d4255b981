"""The DeepSpeed adapter: ordinary PyTorch, but for what engines divide and count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, Names, SavedStates
from bytecheckpoint.frameworks.deepspeed.engines import unfold
from bytecheckpoint.frameworks.deepspeed.installed import find_deepspeed, has_divided, is_wrapper
from bytecheckpoint.frameworks.deepspeed.modules import (
    ZeroModules,
    capture_zero_modules,
    load_zero_modules,
    scan_zero_modules,
)
from bytecheckpoint.frameworks.deepspeed.optimizers import WrappedOptimizer, capture_wrapped, load_wrapped
from bytecheckpoint.frameworks.deepspeed.partitions import Run
from bytecheckpoint.frameworks.deepspeed.progress import Progress
from bytecheckpoint.frameworks.native import NativeFramework, Scan, layout_in_words
from bytecheckpoint.representation.shards import LiveState

__all__ = ["DeepSpeedFramework"]


@dataclass(slots=True)
class _ZeroScan(Scan):
    """A scan with the engines' optimizers by kind."""

    wrapped: dict[str, WrappedOptimizer]


class DeepSpeedFramework(NativeFramework):
    """Engines of DeepSpeed: ZeRO of stages 0 to 3, pipelines, mixtures of experts.

    Partitions are saved as boxes of the original parameters, from where they lie: no state_dict, no gathering, no
    communication.
    """

    name = "deepspeed"

    def matches(self, states: Mapping[str, object]) -> bool:
        """Whether an engine, its optimizer, or a module that DeepSpeed has a part in, is in `states`."""
        return bool(find_deepspeed(states))

    def capture(self, states: Mapping[str, object], *, names: Names | None = None) -> list[LiveState]:
        """This rank's shards and values: one `LiveState` per name in `states`, and those that an engine stands for.

        Raises:
            UsageError: as in `Framework.capture`; or gradients are being accumulated.
        """
        unfolded = unfold(states)
        for kind, value in unfolded.items():
            if isinstance(value, Progress):
                value.check_between_steps(kind, saves=True)
        return super().capture(unfolded, names=names)

    def destination(
        self,
        states: MutableMapping[str, object],
        saved: SavedStates,
        *,
        strict: bool = True,
        names: Names | None = None,
    ) -> Destination:
        """Plan a load into `states`, and into what an engine stands for."""
        unfolded = unfold(states)
        notes: list[str] = []
        for kind, value in list(unfolded.items()):
            if isinstance(value, Progress):
                value.check_between_steps(kind, saves=False)
                if kind not in saved.kinds():
                    del unfolded[kind]
                    notes.append(
                        f"{kind}: the checkpoint was not saved from an engine: steps and loss scale stay as they are"
                    )
        before = dict(unfolded)
        into = super().destination(unfolded, saved, strict=strict, names=names)
        into.notes += notes

        def replace_values() -> None:
            # Plain values were replaced in the mapping that was passed on.
            for kind in states:
                if unfolded.get(kind) is not before.get(kind):
                    states[kind] = unfolded[kind]

        into.finish.append(replace_values)
        return into

    def describe(self, states: Mapping[str, object]) -> dict[str, Any]:
        """As for ordinary modules, with what engines stand for."""
        return super().describe(unfold(states))

    def _as_optimizers(self, kind: str, value: object) -> Sequence[Any] | None:
        return [value] if is_wrapper(value) else super()._as_optimizers(kind, value)

    def _scan(self, states: Mapping[str, object], names: Names | None) -> Scan:
        scan = super()._scan(states, names)
        wrapped = {
            kind: WrappedOptimizer(kind, value, scan.names) for kind, value in states.items() if is_wrapper(value)
        }
        return _ZeroScan(scan.modules, scan.names, wrapped)

    def _scan_modules(self, kind: str, modules: Sequence[nn.Module]) -> Any:
        return scan_zero_modules(kind, modules)

    def _capture_modules(self, kind: str, scan: Scan) -> LiveState:
        return capture_zero_modules(kind, scan.modules[kind])

    def _capture_optimizers(self, kind: str, optimizers: Sequence[Any], scan: Scan) -> LiveState:
        assert isinstance(scan, _ZeroScan)
        if kind in scan.wrapped:
            return capture_wrapped(scan.wrapped[kind])
        _refuse_flat(kind, optimizers, scan)
        return super()._capture_optimizers(kind, optimizers, scan)

    def _load_modules(self, kind: str, scan: Scan, saved: SavedStates, into: Destination) -> None:
        assert isinstance(scan, _ZeroScan)
        modules: ZeroModules = scan.modules[kind]
        masters, runs = None, dict[int, Run]()
        for name, wrapped in scan.wrapped.items():
            if wrapped.masters.keys() & modules.parameters.keys():
                masters, runs = name, wrapped.masters
        load_zero_modules(kind, modules, saved, into, masters=masters, runs=runs)

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
        if kind in scan.wrapped:
            load_wrapped(scan.wrapped[kind], saved, into, strict=strict)
        else:
            _refuse_flat(kind, optimizers, scan)
            experts = [(g, g["name"]) for o in optimizers for g in o.param_groups if g.get("moe") and "name" in g]
            super()._load_optimizers(kind, optimizers, scan, saved, into, strict=strict)
            # The name of a group of experts says which ranks share it here.
            into.finish += [partial(group.update, {"moe": True, "name": name}) for group, name in experts]

    def _layouts(self, kind: str, scan: Scan) -> Iterable[str]:
        modules: ZeroModules = scan.modules[kind]
        yield from (layout_in_words(tensor.value) for tensor in modules.rest.tensors)
        yield from ("ZeRO-3" for _ in modules.sharded)


def _refuse_flat(kind: str, optimizers: Sequence[Optimizer], scan: Scan) -> None:
    """Refuse an optimizer of torch that an engine, which is not in the states, has given its flat tensors."""
    known = scan.names.by_id
    for optimizer in optimizers:
        unnamed = any(id(p) not in known for group in optimizer.param_groups for p in group["params"])
        if unnamed and any(any(map(has_divided, m.parameters())) for z in scan.modules.values() for m in z.modules):
            raise UsageError(
                f"{kind}: this {type(optimizer).__name__} steps tensors that are in no module of the states; if an engine "
                "made them, pass engine.optimizer, or the engine alone"
            )
