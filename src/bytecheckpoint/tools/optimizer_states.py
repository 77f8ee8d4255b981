"""Read the state of an optimizer by parameters, for programs that keep one step and one form for all of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.opening.entry import Entry
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.tools.state_dicts import state_dict_of

__all__ = ["Parameter", "names_beside", "parameters_of"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter with the state that an optimizer has for it.

    Attributes:
        weight: its value in full precision, or else in that of the model.
        slots: elementwise state by name.
        step: number of steps, None if the optimizer counts none.
    """

    weight: Entry
    slots: Mapping[str, Entry]
    step: Any


def names_beside(model: str) -> tuple[str, str]:
    """Return the names that a save gives to the states of the optimizer and of the engine of a model."""
    prefix = "" if model == "model" else f"{model}_"
    return f"{prefix}optimizer", f"{prefix}engine"


def parameters_of(
    view: CheckpointView, model: str, optimizer: str, program: str
) -> tuple[dict[str, Parameter], list[dict[str, Any]]]:
    """Return the parameters of a model that its optimizer steps, by name, and the param groups with these names.

    Frozen parameters in the groups, which have no state, are left out.

    Args:
        view: the checkpoint.
        model: name of the state of the model.
        optimizer: name of the state of its optimizer.
        program: program to write for, for the messages.

    Raises:
        UsageError: there is no such model or optimizer.
        IncompatibleCheckpointError: the state is not elementwise, or differs between parameters.
    """
    for state in (model, optimizer):
        if state not in view.states:
            raise UsageError(f"{view.path} has no {state!r}, which {program} needs; it holds {', '.join(view.states)}")
    if f"{optimizer}/param_groups" not in view:
        raise UsageError(f"{view.path}: {optimizer!r} has no param groups: it is no optimizer")
    saved = state_dict_of(view, optimizer)
    trained = {
        fqn: saved["state"][fqn] for group in saved["param_groups"] for fqn in group["params"] if fqn in saved["state"]
    }
    steps = _steps(view, f"{optimizer}/state/", trained)
    parameters: dict[str, Parameter] = {}
    groups: list[dict[str, Any]] = []
    for group in saved["param_groups"]:
        names = [fqn for fqn in group["params"] if fqn in saved["state"] or not _is_frozen(view, model, fqn)]
        found = {fqn: _parameter(view, model, fqn, saved["state"].get(fqn, {}), steps.get(fqn)) for fqn in names}
        parameters |= found
        where = f"{view.path}: {program} has no parameters with different"
        _check_alike(parameters, lambda one: sorted(one.slots), f"{where} states")
        _check_alike(found, lambda one: None if one.step is None else float(one.step), f"{where} steps in one group")
        groups.append({**group, "params": names})
    if not parameters:
        raise UsageError(f"{view.path}: the groups of {optimizer!r} have no parameters")
    return parameters, groups


def _steps(view: CheckpointView, prefix: str, state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of steps of each parameter that has one; all are read together."""
    steps = {f"{prefix}{fqn}/step": slots["step"] for fqn, slots in state.items() if slots.get("step") is not None}
    read = {key: data for key, _, data in view.stream(key for key, step in steps.items() if isinstance(step, Entry))}
    return {key.removeprefix(prefix).removesuffix("/step"): read.get(key, step) for key, step in steps.items()}


def _is_frozen(view: CheckpointView, model: str, fqn: str) -> bool:
    return f"{model}/{fqn}" in view.tensors and not view.tensors[f"{model}/{fqn}"].requires_grad


def _parameter(view: CheckpointView, model: str, fqn: str, state: Mapping[str, Any], step: Any) -> Parameter:
    where = f"{view.path}: {fqn!r}"
    if (key := f"{model}/{fqn}") not in view.tensors:
        raise IncompatibleCheckpointError(f"{where} is in a param group, and no tensor of {model!r} has the name")
    weight = view.tensors[key]
    slots = {slot: value for slot, value in state.items() if value is not None and slot != "step"}
    for slot, value in slots.items():
        if not isinstance(value, Entry) or value.shape != weight.shape:
            raise IncompatibleCheckpointError(f"{where} has a state {slot!r} that has not the parameter's shape")
    return Parameter(slots.pop("master", weight), slots, step)


def _check_alike(found: Mapping[str, Parameter], fact: Callable[[Parameter], Any], problem: str) -> None:
    first = next(iter(found), "")
    for fqn, one in found.items():
        if fact(one) != fact(found[first]):
            text = f"{fqn!r} has {fact(one)}, {first!r} has {fact(found[first])}"
            raise IncompatibleCheckpointError(f"{problem}: {text}")
