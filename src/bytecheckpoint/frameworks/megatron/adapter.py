"""The adapter of Megatron-Core: native PyTorch except for Megatron's modules and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError, listed
from bytecheckpoint.frameworks.base import Destination, SavedStates, Strict, UserNames
from bytecheckpoint.frameworks.detection import nested_objects
from bytecheckpoint.frameworks.megatron.detection import (
    check_version,
    check_wrappers,
    find_megatron,
    find_schedulers,
    is_megatron_module,
    is_megatron_optimizer,
    is_model_parallel,
    reason_parameters_change,
    torch_sharding_of,
    unwrap,
)
from bytecheckpoint.frameworks.megatron.layouts import ParameterLayout
from bytecheckpoint.frameworks.megatron.main_params import (
    as_megatron_optimizers,
    flatten_chain,
    is_layer_wise,
    main_params,
    params_with_masters,
)
from bytecheckpoint.frameworks.megatron.module_scan import MegatronModuleScan, scan_megatron_modules
from bytecheckpoint.frameworks.megatron.modules import capture_megatron_modules, load_megatron_modules
from bytecheckpoint.frameworks.megatron.optimizers import capture_megatron_optimizers
from bytecheckpoint.frameworks.megatron.restore import load_megatron_optimizers
from bytecheckpoint.frameworks.native import LoadInputs, NativeFramework, Scan
from bytecheckpoint.frameworks.optimizers.master_weights import optimizer_state_name
from bytecheckpoint.frameworks.optimizers.names import ParameterNames, as_optimizers
from bytecheckpoint.representation.shards import LiveState

__all__ = ["MegatronFramework"]


@dataclass(slots=True)
class _MegatronScan(Scan):
    """A scan with the facts that Megatron's modules and optimizers share.

    Attributes:
        layouts: id of a parameter -> its layout.
        model_states: state name of the module of each parameter, by the parameter's id.
        with_masters: ids of the parameters that have master weights.
        master_states: name of the state that holds a module's master weights, by the module's state name.
    """

    layouts: dict[int, ParameterLayout] = field(default_factory=dict)
    model_states: dict[int, str] = field(default_factory=dict)
    with_masters: set[int] = field(default_factory=set)
    master_states: dict[str, str] = field(default_factory=dict)


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

    def reason_to_block(self, states: Mapping[str, object]) -> str:
        """Return why a save cannot copy `states` in the background; "" if it can.

        Megatron's optimizers change nothing that is saved, the loss scale excepted, before the first step of the optimizers
        of torch inside of them.
        """
        owners: list[Any] = []
        for state_name, value in states.items():
            for module in nested_objects(value, nn.Module):
                owners += unwrap(module)[1]
            optimizers = as_megatron_optimizers(state_name, value) or ()
            if any(map(is_layer_wise, optimizers)):
                return "ranks of LayerWiseDistributedOptimizer get parameters that they do not step"
            owners += flatten_chain(state_name, optimizers)
        for owner in owners:
            if reason := reason_parameters_change(owner):
                return reason
        return super().reason_to_block({**states, "inside": [getattr(owner, "optimizer", None) for owner in owners]})

    def _scan(self, states: Mapping[str, object], names: UserNames | None) -> _MegatronScan:
        if find_megatron(states):
            check_wrappers(states)
            check_version()
        native = super()._scan(states, names)
        by_id = dict(native.names.by_id)
        scan = _MegatronScan(native.modules, ParameterNames(by_id))
        # A parameter in two states gets its name in "model".
        for state_name, found in sorted(scan.modules.items(), key=lambda item: item[0] == "model"):
            if isinstance(found, MegatronModuleScan):
                scan.layouts.update(found.layout_by_id)
                scan.model_states.update(dict.fromkeys(found.layout_by_id, state_name))
                by_id.update(found.parameters)  # over `names`: the parameters' boxes are saved under these names
        for state_name, value in states.items():
            if state_name in scan.modules:
                continue
            optimizers = self._as_optimizers(state_name, value)
            if optimizers is None:
                if where := find_megatron({state_name: value}):
                    raise UsageError(
                        f"{where} is inside a container, where its parallel layout is not visible: give modules and "
                        "optimizers names of their own in the states"
                    )
            elif self._steps_megatron_params(optimizers, scan):
                scan.with_masters.update(map(id, params_with_masters(state_name, optimizers)))
                for main in (main for mains in main_params(state_name, optimizers) for main in mains):
                    if id(main.model_param) in scan.model_states:
                        scan.master_states.setdefault(scan.model_states[id(main.model_param)], state_name)
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
        destination = super().destination(states, saved, strict=strict, names=names)
        if destination.left_out:
            weights = [text for key, text in destination.left_out.items() if not key.slot]
            left_out = listed(weights or list(destination.left_out.values()))
            if strict:
                raise IncompatibleCheckpointError(
                    f"the vocabulary is smaller here: {left_out} would be left out, and a checkpoint does not say which "
                    "rows are padding; if all of these are, load with strict=False"
                )
            destination.notes.append(f"the vocabulary is smaller here: {left_out} were left out")
        for state_name in states.keys() & set(saved.states()):
            # A scheduler's load_state_dict adds the loaded number of steps to its own.
            destination.finish[:0] = [
                partial(_reset_steps, scheduler) for scheduler in find_schedulers(states[state_name])
            ]
        return destination

    @staticmethod
    def _steps_megatron_params(optimizers: Sequence[Any], scan: _MegatronScan) -> bool:
        return any(
            is_megatron_optimizer(optimizer)
            or any(id(p) in scan.layouts for group in optimizer.param_groups for p in group["params"])
            for optimizer in optimizers
        )

    def _as_optimizers(self, state_name: str, value: object) -> Sequence[Any] | None:
        found = as_megatron_optimizers(state_name, value)
        return as_optimizers(state_name, value) if found is None else found

    def _scan_modules(self, state_name: str, modules: Sequence[nn.Module]) -> Any:
        if any(map(is_megatron_module, modules)):
            return scan_megatron_modules(state_name, modules)
        return super()._scan_modules(state_name, modules)

    def _capture_modules(self, state_name: str, scan: Scan) -> LiveState:
        assert isinstance(scan, _MegatronScan)
        found = scan.modules[state_name]
        if isinstance(found, MegatronModuleScan):
            return capture_megatron_modules(state_name, found, scan.with_masters)
        return super()._capture_modules(state_name, scan)

    def _capture_optimizers(self, state_name: str, optimizers: Sequence[Any], scan: Scan) -> LiveState:
        assert isinstance(scan, _MegatronScan)
        if self._steps_megatron_params(optimizers, scan):
            return capture_megatron_optimizers(state_name, optimizers, scan.names, scan.layouts)
        return super()._capture_optimizers(state_name, optimizers, scan)

    def _load_modules(self, state_name: str, load: LoadInputs) -> None:
        assert isinstance(load.scan, _MegatronScan)
        found = load.scan.modules[state_name]
        if isinstance(found, MegatronModuleScan):
            master_state = load.scan.master_states.get(state_name, optimizer_state_name(state_name))
            load_megatron_modules(state_name, found, load.saved, load.destination, master_state, load.scan.with_masters)
        else:
            super()._load_modules(state_name, load)

    def _load_optimizers(self, state_name: str, optimizers: Sequence[Any], load: LoadInputs) -> None:
        assert isinstance(load.scan, _MegatronScan)
        if self._steps_megatron_params(optimizers, load.scan):
            load_megatron_optimizers(
                state_name, optimizers, load.scan.names, load.scan.layouts, load.scan.model_states, load.saved,
                load.destination, strict=load.is_strict(state_name),
            )  # fmt: skip
        else:
            super()._load_optimizers(state_name, optimizers, load)

    def _layouts(self, state_name: str, scan: Scan) -> Iterable[str]:
        found = scan.modules[state_name]
        if isinstance(found, MegatronModuleScan):
            return [layout.describe() for layout in found.layouts]
        return super()._layouts(state_name, scan)


def _reset_steps(scheduler: Any) -> None:
    scheduler.num_steps = 0
