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
from bytecheckpoint.frameworks.deepspeed.detection import (
    check_engine,
    check_optimizer,
    check_version,
    find_deepspeed,
    is_engine,
    is_partitioned,
    is_placeholder_optimizer,
    is_wrapped_optimizer,
    reason_unsupported,
)
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
from bytecheckpoint.frameworks.deepspeed.partitions import (
    HeldRange,
    has_master_link,
    stepped_parameters,
    zero3_optimizer_of,
)
from bytecheckpoint.frameworks.deepspeed.progress import EngineProgress, engine_state_name
from bytecheckpoint.frameworks.detection import nested_objects
from bytecheckpoint.frameworks.native import LoadInputs, NativeFramework, Scan
from bytecheckpoint.frameworks.optimizers.master_weights import optimizer_state_name
from bytecheckpoint.representation.shards import LiveState

__all__ = ["DeepSpeedFramework"]


@dataclass(slots=True)
class _ZeroScan(Scan):
    """A scan with the engines' optimizers, by state."""

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

    def reason_to_block(self, states: Mapping[str, object]) -> str:
        """Return why a save cannot copy `states` in the background; "" if it can.

        Engines change nothing that is saved before the first step of the optimizers of torch that they wrap. That holds for
        the optimizers that can be saved; ZenFlow and SuperOffload step in other processes.
        """
        found: list[Any] = [
            getattr(value, "optimizer", None) if is_engine(value) else value for value in states.values()
        ]
        wrappers: dict[Any, None] = dict.fromkeys(value for value in found if is_wrapped_optimizer(value))
        stepped = {id(parameter) for wrapper in wrappers for parameter in stepped_parameters(wrapper)}
        for state_name, value in states.items():
            for parameter in (p for module in nested_objects(value, nn.Module) for p in module.parameters()):
                if (wrapper := zero3_optimizer_of(parameter)) is not None:
                    wrappers[wrapper] = None
                elif has_master_link(parameter) and id(parameter) not in stepped:
                    return f"the optimizer of DeepSpeed that steps {state_name} is not in the states"
        for wrapper in wrappers:
            if is_placeholder_optimizer(wrapper):
                continue
            if reason := reason_unsupported(wrapper):
                return reason
            found += [wrapper.optimizer, getattr(wrapper, "backup_optimizer", None)]
        return super().reason_to_block({"steps": found})

    def capture(self, states: Mapping[str, object], *, names: UserNames | None = None) -> list[LiveState]:
        """Describe this rank's shards and values: one `LiveState` per name in `states`, and those of expanded engines.

        Raises:
            UsageError: as in `Framework.capture`; or gradients are being accumulated.
        """
        expanded = _expand_engines(states)
        for state_name, value in expanded.items():
            if isinstance(value, EngineProgress):
                value.check_between_steps(state_name, saves=True)
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
        expanded = _expand_engines(states)
        notes: list[str] = []
        for state_name, value in list(expanded.items()):
            if isinstance(value, EngineProgress):
                value.check_between_steps(state_name, saves=False)
                if state_name not in saved.states():
                    del expanded[state_name]
                    notes.append(
                        f"{state_name}: the checkpoint was not saved from an engine: steps and loss scale stay as they are"
                    )
        before = dict(expanded)
        destination = super().destination(expanded, saved, strict=strict, names=names)
        destination.notes += notes
        destination.states = expanded.keys() - states.keys()

        def replace_values() -> None:
            # The load replaces plain values in the expanded mapping; the caller's mapping gets them too.
            for state_name in states:
                if expanded.get(state_name) is not before.get(state_name):
                    states[state_name] = expanded[state_name]

        destination.finish.append(replace_values)
        return destination

    def _as_optimizers(self, state_name: str, value: object) -> Sequence[Any] | None:
        return [value] if is_wrapped_optimizer(value) else super()._as_optimizers(state_name, value)

    def _scan(self, states: Mapping[str, object], names: UserNames | None) -> Scan:
        scan = super()._scan(states, names)
        parts = {number: part for zero in scan.modules.values() for number, part in zero.parts.items()}
        optimizers = {
            state_name: EngineOptimizer(state_name, value, scan.names, parts)
            for state_name, value in states.items()
            if is_wrapped_optimizer(value) or steps_parts(state_name, self._as_optimizers(state_name, value), parts)
        }
        return _ZeroScan(scan.modules, scan.names, optimizers)

    def _scan_modules(self, state_name: str, modules: Sequence[nn.Module]) -> Any:
        return scan_zero_modules(state_name, modules)

    def _capture_modules(self, state_name: str, scan: Scan) -> LiveState:
        assert isinstance(scan, _ZeroScan)
        state = capture_zero_modules(state_name, scan.modules[state_name])
        # A step changes what an engine was given to train, also if it is frozen since.
        masters = (number for optimizer in scan.engine_optimizers.values() for number in optimizer.masters)
        stepped = {scan.names.by_id[number][0] for number in masters}
        for shard in state.shards:
            shard.frozen = shard.frozen and shard.key.fqn not in stepped
        return state

    def _capture_optimizers(self, state_name: str, optimizers: Sequence[Any], scan: Scan) -> LiveState:
        assert isinstance(scan, _ZeroScan)
        if state_name in scan.engine_optimizers:
            return capture_engine_optimizer(scan.engine_optimizers[state_name])
        _refuse_flat_tensors(state_name, optimizers, scan)
        return super()._capture_optimizers(state_name, optimizers, scan)

    def _load_modules(self, state_name: str, load: LoadInputs) -> None:
        assert isinstance(load.scan, _ZeroScan)
        modules: ZeroModules = load.scan.modules[state_name]
        master_state, masters = None, dict[int, HeldRange]()
        for name, optimizer in load.scan.engine_optimizers.items():
            if optimizer.masters.keys() & modules.parameters.keys():
                master_state, masters = name, optimizer.masters
        load_zero_modules(state_name, modules, load.saved, load.destination, master_state=master_state, masters=masters)

    def _load_optimizers(self, state_name: str, optimizers: Sequence[Any], load: LoadInputs) -> None:
        assert isinstance(load.scan, _ZeroScan)
        optimizer, strict = load.scan.engine_optimizers.get(state_name), load.is_strict(state_name)
        if optimizer is not None:
            load_engine_optimizer(optimizer, load.saved, load.destination, strict=strict)
        else:
            _refuse_flat_tensors(state_name, optimizers, load.scan)
            experts = [(g, g["name"]) for o in optimizers for g in o.param_groups if g.get("moe") and "name" in g]
            super()._load_optimizers(state_name, optimizers, load)
            # The name of a group of experts says which ranks share it now: it is not taken from the checkpoint.
            load.destination.finish += [partial(group.update, {"moe": True, "name": name}) for group, name in experts]

    def _layouts(self, state_name: str, scan: Scan) -> Iterable[str]:
        modules: ZeroModules = scan.modules[state_name]
        return modules.layouts()


def _refuse_flat_tensors(state_name: str, optimizers: Sequence[Optimizer], scan: Scan) -> None:
    """Refuse a torch optimizer over the flat tensors of an engine that is not in the states."""
    known = scan.names.by_id
    for optimizer in optimizers:
        unnamed = any(id(p) not in known for group in optimizer.param_groups for p in group["params"])
        if unnamed and any(
            any(map(is_partitioned, m.parameters())) for zero in scan.modules.values() for m in zero.modules
        ):
            raise UsageError(
                f"{state_name}: this {type(optimizer).__name__} steps tensors that are in no module of the states; if "
                "an engine made them, pass engine.optimizer, or the engine alone"
            )


def _expand_engines(states: Mapping[str, object]) -> dict[str, object]:
    """Return `states` with each engine replaced by its module, its optimizer and its progress.

    Returns:
        The same names and values, except for engines: the name of an engine has its module, `optimizer_state_name` of it
        has its optimizer (unless `states` hold it already), and `engine_state_name` of it has its progress. A torch
        optimizer that an engine's optimizer wraps is replaced by the wrapping one.

    Raises:
        UsageError: something is not supported, is inside a container, or has a name that is needed.
    """
    check_version()
    expanded: dict[str, object] = dict(states)
    for state_name, value in states.items():
        if not _is_from_engine(value) and any(map(_is_from_engine, nested_objects(value))):
            raise UsageError(
                f"{state_name} holds an engine of DeepSpeed, or its optimizer, inside a container: give each a name of "
                "its own in the states"
            )
    engines: dict[str, Any] = {state_name: value for state_name, value in states.items() if is_engine(value)}
    for state_name, engine in engines.items():
        check_engine(state_name, engine)
        expanded[state_name] = engine.module
        _add_optimizer(state_name, engine, states, expanded)
        _add_progress(state_name, engine, states, expanded)
    for state_name, value in states.items():
        if isinstance(value, Optimizer) and expanded[state_name] is value:
            wrapper = _find_zero3_wrapper(value, expanded)
            if wrapper is not None:
                expanded[state_name] = wrapper
        if is_wrapped_optimizer(expanded[state_name]):
            check_optimizer(state_name, expanded[state_name])
    _add_loss_scales(engines, expanded)
    return expanded


def _is_from_engine(value: object) -> bool:
    return is_engine(value) or is_wrapped_optimizer(value)


def _add_optimizer(state_name: str, engine: Any, states: Mapping[str, object], expanded: dict[str, object]) -> None:
    """Add the engine's optimizer, under the name that it, or the optimizer that it wraps, has in `states`."""
    optimizer = engine.optimizer
    if is_placeholder_optimizer(optimizer):
        return
    same = [optimizer, optimizer.optimizer] if is_wrapped_optimizer(optimizer) else [optimizer]
    for name, value in states.items():
        if any(value is known for known in same):
            expanded[name] = optimizer
            return
    name = optimizer_state_name(state_name)
    if name in states:
        raise UsageError(
            f"{name} is not the optimizer of the engine in {state_name}: pass engine.optimizer, or the engine alone, "
            "or choose another name"
        )
    if is_wrapped_optimizer(optimizer):
        check_optimizer(name, optimizer)
    expanded[name] = optimizer


def _add_progress(state_name: str, engine: Any, states: Mapping[str, object], expanded: dict[str, object]) -> None:
    name = engine_state_name(state_name)
    if name in states:
        raise UsageError(
            f"{name} is the name under which the steps of the engine in {state_name} are saved: choose another for "
            "your own state"
        )
    scheduler = engine.lr_scheduler
    if any(value is scheduler for value in states.values()) or not hasattr(scheduler, "state_dict"):
        scheduler = None
    wrapper = engine.optimizer if is_wrapped_optimizer(engine.optimizer) else None
    expanded[name] = EngineProgress(engine, wrapper, scheduler)


def _find_zero3_wrapper(optimizer: Optimizer, expanded: Mapping[str, object]) -> Any:
    """Return the stage 3 optimizer that wraps `optimizer`, found through the modules' parameters; else None."""
    for value in expanded.values():
        if isinstance(value, nn.Module):
            first = next(value.parameters(), None)
            wrapper = None if first is None else zero3_optimizer_of(first)
            if wrapper is not None and wrapper.optimizer is optimizer:
                return wrapper
    return None


def _add_loss_scales(engines: Mapping[str, Any], expanded: dict[str, object]) -> None:
    """Add the loss scales of optimizers whose engines are not in the states."""
    known = {id(engine.optimizer) for engine in engines.values()}
    for state_name, value in list(expanded.items()):
        if not is_wrapped_optimizer(value) or id(value) in known:
            continue
        progress = EngineProgress(None, value, None)
        if progress.state_dict():
            model_state = "model" if state_name == "optimizer" else state_name.removesuffix("_optimizer")
            expanded.setdefault(engine_state_name(model_state), progress)
