"""The Megatron-Core adapter: models, chunks and optimizers of Megatron; everything else is ordinary PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, Names, SavedStates
from bytecheckpoint.frameworks.masters import optimizer_kind
from bytecheckpoint.frameworks.megatron.installed import (
    check_version,
    find_megatron,
    is_megatron_module,
    is_megatron_optimizer,
    model_parallel,
    schedulers,
    sharded_by_torch,
)
from bytecheckpoint.frameworks.megatron.layouts import Layout
from bytecheckpoint.frameworks.megatron.modules import (
    MegatronScan,
    capture_megatron_modules,
    load_megatron_modules,
    scan_megatron_modules,
)
from bytecheckpoint.frameworks.megatron.optimizers import (
    as_megatron_optimizers,
    capture_megatron_optimizers,
    mastered_by,
    stepped_by,
)
from bytecheckpoint.frameworks.megatron.restore import load_megatron_optimizers
from bytecheckpoint.frameworks.native import NativeFramework, Scan
from bytecheckpoint.frameworks.optimizers import ParameterNames, as_optimizers
from bytecheckpoint.representation.shards import LiveState

__all__ = ["MegatronFramework"]


def _rewind(scheduler: Any) -> None:
    scheduler.num_steps = 0


@dataclass(slots=True)
class _Scan(Scan):
    """As `Scan`, with what the modules and optimizers of Megatron have to know of each other.

    Attributes:
        layouts: id of a parameter -> what it is in a checkpoint.
        models: id of a parameter -> the kind of its module.
        mastered: ids of parameters that have master weights here.
        masters: kind of a module -> the kind that has its master weights.
    """

    layouts: dict[int, Layout] = field(default_factory=dict)
    models: dict[int, str] = field(default_factory=dict)
    mastered: set[int] = field(default_factory=set)
    masters: dict[str, str] = field(default_factory=dict)


class MegatronFramework(NativeFramework):
    """Megatron-Core, at any tensor, pipeline, expert and data parallelism.

    Models are read by `sharded_state_dict()`, optimizers from the tensors that they step: no state_dict of an optimizer is
    asked for, and nothing is gathered or sent.
    """

    name = "megatron"

    def matches(self, states: Mapping[str, object]) -> bool:
        """Whether a module or optimizer of Megatron stands in `states`.

        A whole model that torch shards (FSDP1, `fully_shard`) is an ordinary module to Megatron, and so it is here.
        """
        return bool(find_megatron(states)) and (model_parallel() or not sharded_by_torch(states))

    def _scan(self, states: Mapping[str, object], names: Names | None) -> _Scan:
        if find_megatron(states):
            check_version()
        plain = super()._scan(states, names)
        by_id = dict(plain.names.by_id)
        scan = _Scan(plain.modules, ParameterNames(by_id))
        # A parameter that two states hold goes by its name in "model".
        for kind, found in sorted(scan.modules.items(), key=lambda item: item[0] == "model"):
            if isinstance(found, MegatronScan):
                scan.layouts.update(found.by_id)
                scan.models.update(dict.fromkeys(found.by_id, kind))
                by_id.update(found.parameters)  # their boxes have these names, whatever `names` says
        for kind, value in states.items():
            if kind in scan.modules:
                continue
            optimizers = self._as_optimizers(kind, value)
            if optimizers is None:
                if where := find_megatron({kind: value}):
                    raise UsageError(
                        f"{where} stands inside a container, where how it is split is not seen: give modules and "
                        "optimizers names of their own in the states"
                    )
            elif self._is_ours(optimizers, scan):
                scan.mastered.update(map(id, mastered_by(kind, optimizers)))
                for item in (item for items in stepped_by(kind, optimizers) for item in items):
                    if id(item.parameter) in scan.models:
                        scan.masters.setdefault(scan.models[id(item.parameter)], kind)
        return scan

    def destination(
        self,
        states: MutableMapping[str, object],
        saved: SavedStates,
        *,
        strict: bool = True,
        names: Names | None = None,
    ) -> Destination:
        """Plan a load into `states`."""
        into = super().destination(states, saved, strict=strict, names=names)
        for kind in states.keys() & set(saved.kinds()):
            # Its load_state_dict adds the steps that it loads to those that it has.
            into.finish[:0] = [partial(_rewind, scheduler) for scheduler in schedulers(states[kind])]
        return into

    @staticmethod
    def _is_ours(optimizers: Sequence[Any], scan: _Scan) -> bool:
        return any(
            is_megatron_optimizer(optimizer)
            or any(id(p) in scan.layouts for group in optimizer.param_groups for p in group["params"])
            for optimizer in optimizers
        )

    def _as_optimizers(self, kind: str, value: object) -> Sequence[Any] | None:
        found = as_megatron_optimizers(kind, value)
        return as_optimizers(kind, value) if found is None else found

    def _scan_modules(self, kind: str, modules: Sequence[nn.Module]) -> Any:
        if any(map(is_megatron_module, modules)):
            return scan_megatron_modules(kind, modules)
        return super()._scan_modules(kind, modules)

    def _capture_modules(self, kind: str, scan: Scan) -> LiveState:
        assert isinstance(scan, _Scan)
        found = scan.modules[kind]
        if isinstance(found, MegatronScan):
            return capture_megatron_modules(kind, found)
        return super()._capture_modules(kind, scan)

    def _capture_optimizers(self, kind: str, optimizers: Sequence[Any], scan: Scan) -> LiveState:
        assert isinstance(scan, _Scan)
        if self._is_ours(optimizers, scan):
            return capture_megatron_optimizers(kind, optimizers, scan.names, scan.layouts)
        return super()._capture_optimizers(kind, optimizers, scan)

    def _load_modules(self, kind: str, scan: Scan, saved: SavedStates, into: Destination) -> None:
        assert isinstance(scan, _Scan)
        found = scan.modules[kind]
        if isinstance(found, MegatronScan):
            masters = scan.masters.get(kind, optimizer_kind(kind))
            load_megatron_modules(kind, found, saved, into, masters, scan.mastered)
        else:
            super()._load_modules(kind, scan, saved, into)

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
        assert isinstance(scan, _Scan)
        if self._is_ours(optimizers, scan):
            load_megatron_optimizers(
                kind, optimizers, scan.names, scan.layouts, scan.models, saved, into, strict=strict
            )
        else:
            super()._load_optimizers(kind, optimizers, scan, saved, into, strict=strict)

    def _layouts(self, kind: str, scan: Scan) -> Iterable[str]:
        found = scan.modules[kind]
        if isinstance(found, MegatronScan):
            return [layout.in_words() for layout in found.layouts]
        return super()._layouts(kind, scan)
