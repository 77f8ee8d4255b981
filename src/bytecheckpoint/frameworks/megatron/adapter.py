"""The adapter of Megatron-Core: native PyTorch except for Megatron's modules and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError, listed
from bytecheckpoint.frameworks.base import Destination, SavedStates, Strict, UserNames
from bytecheckpoint.frameworks.megatron.detection import (
    check_version,
    check_wrappers,
    find_megatron,
    find_schedulers,
    is_megatron_module,
    is_megatron_optimizer,
    is_model_parallel,
    torch_sharding_of,
)
from bytecheckpoint.frameworks.megatron.layouts import ParameterLayout
from bytecheckpoint.frameworks.megatron.main_params import as_megatron_optimizers, main_params, params_with_masters
from bytecheckpoint.frameworks.megatron.module_scan import MegatronModuleScan, scan_megatron_modules
from bytecheckpoint.frameworks.megatron.modules import capture_megatron_modules, load_megatron_modules
from bytecheckpoint.frameworks.megatron.optimizers import capture_megatron_optimizers
from bytecheckpoint.frameworks.megatron.restore import load_megatron_optimizers
from bytecheckpoint.frameworks.native import NativeFramework, Scan
from bytecheckpoint.frameworks.optimizers.master_weights import optimizer_kind
from bytecheckpoint.frameworks.optimizers.names import ParameterNames, as_optimizers
from bytecheckpoint.representation.shards import LiveState

__all__ = ["MegatronFramework"]


@dataclass(slots=True)
class _MegatronScan(Scan):
    """A scan with what Megatron's modules and optimizers need to know of each other.

    Attributes:
        layouts: id of a parameter -> its layout.
        model_kinds: id of a parameter -> the kind of its module.
        with_masters: ids of the parameters that have master weights.
        master_kinds: kind of a module -> the kind that holds its master weights.
    """

    layouts: dict[int, ParameterLayout] = field(default_factory=dict)
    model_kinds: dict[int, str] = field(default_factory=dict)
    with_masters: set[int] = field(default_factory=set)
    master_kinds: dict[str, str] = field(default_factory=dict)


class MegatronFramework(NativeFramework):
    """Megatron-Core, at any tensor, pipeline, expert and data parallelism.

    Models are read by `sharded_state_dict()`, optimizers from the tensors that they step. No state_dict of an optimizer
    is called, and nothing is gathered or sent.
    """

    name = "megatron"

    def matches(self, states: Mapping[str, object]) -> bool:
        """Return whether `states` hold a module or optimizer of Megatron.

        A whole model that torch shards (FSDP1, `fully_shard`) is an ordinary module for Megatron, and for this adapter.
        """
        return bool(find_megatron(states)) and (is_model_parallel() or not torch_sharding_of(states))

    def _scan(self, states: Mapping[str, object], names: UserNames | None) -> _MegatronScan:
        if find_megatron(states):
            check_wrappers(states)
            check_version()
        native = super()._scan(states, names)
        by_id = dict(native.names.by_id)
        scan = _MegatronScan(native.modules, ParameterNames(by_id))
        # A parameter in two states gets its name in "model".
        for kind, found in sorted(scan.modules.items(), key=lambda item: item[0] == "model"):
            if isinstance(found, MegatronModuleScan):
                scan.layouts.update(found.layout_by_id)
                scan.model_kinds.update(dict.fromkeys(found.layout_by_id, kind))
                by_id.update(found.parameters)  # over `names`: the parameters' boxes are saved under these names
        for kind, value in states.items():
            if kind in scan.modules:
                continue
            optimizers = self._as_optimizers(kind, value)
            if optimizers is None:
                if where := find_megatron({kind: value}):
                    raise UsageError(
                        f"{where} is inside a container, where its parallel layout is not visible: give modules and "
                        "optimizers names of their own in the states"
                    )
            elif self._steps_megatron_params(optimizers, scan):
                scan.with_masters.update(map(id, params_with_masters(kind, optimizers)))
                for main in (main for mains in main_params(kind, optimizers) for main in mains):
                    if id(main.model_param) in scan.model_kinds:
                        scan.master_kinds.setdefault(scan.model_kinds[id(main.model_param)], kind)
        return scan

    def destination(
        self,
        states: MutableMapping[str, object],
        saved: SavedStates,
        *,
        strict: Strict = True,
        names: UserNames | None = None,
    ) -> Destination:
        """Plan a load into `states`."""
        into = super().destination(states, saved, strict=strict, names=names)
        if into.left_out:
            weights = [text for key, text in into.left_out.items() if not key.slot]
            left_out = listed(weights or list(into.left_out.values()))
            if strict:
                raise IncompatibleCheckpointError(
                    f"the vocabulary is smaller here: {left_out} would be left out, and a checkpoint does not say which "
                    "rows are padding; if all of these are, load with strict=False"
                )
            into.notes.append(f"the vocabulary is smaller here: {left_out} were left out")
        for kind in states.keys() & set(saved.kinds()):
            # A scheduler's load_state_dict adds the loaded number of steps to its own.
            into.finish[:0] = [partial(_reset_steps, scheduler) for scheduler in find_schedulers(states[kind])]
        return into

    @staticmethod
    def _steps_megatron_params(optimizers: Sequence[Any], scan: _MegatronScan) -> bool:
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
        assert isinstance(scan, _MegatronScan)
        found = scan.modules[kind]
        if isinstance(found, MegatronModuleScan):
            return capture_megatron_modules(kind, found)
        return super()._capture_modules(kind, scan)

    def _capture_optimizers(self, kind: str, optimizers: Sequence[Any], scan: Scan) -> LiveState:
        assert isinstance(scan, _MegatronScan)
        if self._steps_megatron_params(optimizers, scan):
            return capture_megatron_optimizers(kind, optimizers, scan.names, scan.layouts)
        return super()._capture_optimizers(kind, optimizers, scan)

    def _load_modules(self, kind: str, scan: Scan, saved: SavedStates, into: Destination) -> None:
        assert isinstance(scan, _MegatronScan)
        found = scan.modules[kind]
        if isinstance(found, MegatronModuleScan):
            master_kind = scan.master_kinds.get(kind, optimizer_kind(kind))
            load_megatron_modules(kind, found, saved, into, master_kind, scan.with_masters)
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
        assert isinstance(scan, _MegatronScan)
        if self._steps_megatron_params(optimizers, scan):
            load_megatron_optimizers(
                kind, optimizers, scan.names, scan.layouts, scan.model_kinds, saved, into, strict=strict
            )
        else:
            super()._load_optimizers(kind, optimizers, scan, saved, into, strict=strict)

    def _layouts(self, kind: str, scan: Scan) -> Iterable[str]:
        found = scan.modules[kind]
        if isinstance(found, MegatronModuleScan):
            return [layout.describe() for layout in found.layouts]
        return super()._layouts(kind, scan)


def _reset_steps(scheduler: Any) -> None:
    scheduler.num_steps = 0
