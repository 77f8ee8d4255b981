"""Replace each engine in the states of a save or load by its module, its optimizer and its progress.

A program may also pass the module in the engine's place, and the optimizer and the learning-rate schedule beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.deepspeed.detection import (
    check_engine,
    check_optimizer,
    check_version,
    is_engine,
    is_placeholder_optimizer,
    is_wrapped_optimizer,
)
from bytecheckpoint.frameworks.deepspeed.partitions import zero3_optimizer_of
from bytecheckpoint.frameworks.deepspeed.progress import EngineProgress, engine_state_name
from bytecheckpoint.frameworks.detection import nested_objects
from bytecheckpoint.frameworks.optimizers.master_weights import optimizer_state_name

__all__ = ["expand_engines"]


def expand_engines(states: Mapping[str, object]) -> dict[str, object]:
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
