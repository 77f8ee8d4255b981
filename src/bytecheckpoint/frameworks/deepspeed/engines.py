"""What a program passes when it trains with DeepSpeed, and what that stands for.

An engine stands for its module, its optimizer, and its progress. The module may be passed in its place, the optimizer and
the learning rate's schedule beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.deepspeed.installed import (
    check_engine,
    check_optimizer,
    check_version,
    is_engine,
    is_wrapper,
    steps_nothing,
)
from bytecheckpoint.frameworks.deepspeed.partitions import optimizer_behind
from bytecheckpoint.frameworks.deepspeed.progress import Progress, engine_kind
from bytecheckpoint.frameworks.masters import optimizer_kind
from bytecheckpoint.frameworks.nested import inside

__all__ = ["unfold"]


def unfold(states: Mapping[str, object]) -> dict[str, object]:
    """`states` with each engine as its module, its optimizer and its progress.

    Returns:
        The same names and values, but for engines: under an engine's name its module, under `optimizer_kind` of it
        the optimizer, unless that is in `states`, and under `engine_kind` the progress. An optimizer that an engine
        steps stands for the engine's.

    Raises:
        UsageError: something is not supported, stands inside a container, or has a name that is needed.
    """
    check_version()
    out: dict[str, object] = dict(states)
    for kind, value in states.items():
        if not is_engine(value) and not is_wrapper(value) and any(is_engine(v) or is_wrapper(v) for v in inside(value)):
            raise UsageError(
                f"{kind} holds an engine of DeepSpeed, or its optimizer, inside a container: give each a name of its own"
                " in the states"
            )
    engines: dict[str, Any] = {kind: value for kind, value in states.items() if is_engine(value)}
    for kind, engine in engines.items():
        check_engine(kind, engine)
        out[kind] = engine.module
        _add_optimizer(kind, engine, states, out)
        _add_progress(kind, engine, states, out)
    for kind, value in states.items():
        if isinstance(value, Optimizer) and out[kind] is value and (wrapper := _steps(value, out)) is not None:
            out[kind] = wrapper
        if is_wrapper(out[kind]):
            check_optimizer(kind, out[kind])
    _add_scales(engines, out)
    return out


def _add_optimizer(kind: str, engine: Any, states: Mapping[str, object], out: dict[str, object]) -> None:
    optimizer = engine.optimizer
    if steps_nothing(optimizer):
        return
    stands_for = [optimizer, optimizer.optimizer] if is_wrapper(optimizer) else [optimizer]
    for name, value in states.items():
        if any(value is one for one in stands_for):
            out[name] = optimizer
            return
    name = optimizer_kind(kind)
    if name in states:
        raise UsageError(
            f"{name} is not the optimizer of the engine in {kind}: pass engine.optimizer, or the engine alone, or choose "
            "another name"
        )
    if is_wrapper(optimizer):
        check_optimizer(name, optimizer)
    out[name] = optimizer


def _add_progress(kind: str, engine: Any, states: Mapping[str, object], out: dict[str, object]) -> None:
    name = engine_kind(kind)
    if name in states:
        raise UsageError(
            f"{name} is the name under which the steps of the engine in {kind} are saved: choose another for your own state"
        )
    scheduler = engine.lr_scheduler
    if any(value is scheduler for value in states.values()) or not hasattr(scheduler, "state_dict"):
        scheduler = None
    out[name] = Progress(engine, engine.optimizer if is_wrapper(engine.optimizer) else None, scheduler)


def _steps(optimizer: Optimizer, out: Mapping[str, object]) -> Any:
    """The optimizer of stage 3 that steps `optimizer`, found through the modules."""
    for value in out.values():
        if isinstance(value, nn.Module):
            for parameter in value.parameters():
                wrapper = optimizer_behind(parameter)
                if wrapper is not None and wrapper.optimizer is optimizer:
                    return wrapper
                break
    return None


def _add_scales(engines: Mapping[str, Any], out: dict[str, object]) -> None:
    """The loss scales of optimizers whose engines are not in the states."""
    known = {id(engine.optimizer) for engine in engines.values()}
    for kind, value in list(out.items()):
        if not is_wrapper(value) or id(value) in known:
            continue
        progress = Progress(None, value, None)
        if progress.state_dict():
            model = "model" if kind == "optimizer" else kind.removesuffix("_optimizer")
            out.setdefault(engine_kind(model), progress)
