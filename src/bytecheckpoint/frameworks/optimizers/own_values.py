"""Save and load the values of an optimizer's state_dict beside its state and groups, such as the count of a subclass.

torch's PostLocalSGDOptimizer counts steps there, and hooks may add anything. Only the optimizer itself knows where these
values belong, so a load hands them to its own load_state_dict.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

from bytecheckpoint.frameworks.base import Destination
from bytecheckpoint.frameworks.optimizer_tree import pack_tensors, unpack_tensors
from bytecheckpoint.frameworks.optimizers.view import live_optimizer

__all__ = ["load_own_values", "loads_itself", "pack_own_values"]

_PATCHED = threading.Lock()


def pack_own_values(optimizer: Optimizer) -> dict[str, Any]:
    """Return the further entries of the optimizer's state_dict, with tensors as plain data."""
    values: dict[str, Any] = pack_tensors(_own_values(live_optimizer(optimizer)))
    return values


def _own_values(live: Optimizer | None) -> dict[str, Any]:
    overridden = _method(live, "state_dict") is not Optimizer.state_dict
    if live is None or not (overridden or getattr(live, "_optimizer_state_dict_post_hooks", None)):
        return {}  # a call would cost time
    with _without_torchs_part(live):
        return {key: value for key, value in live.state_dict().items() if key not in ("state", "param_groups")}


def load_own_values(
    state_name: str,
    optimizers: Sequence[Optimizer],
    saved: Sequence[Mapping[str, Any]],
    destination: Destination,
    *,
    is_foreign: bool,
) -> None:
    """Plan the load of such values, by the optimizer's position. Hooks of load_state_dict run, with or without values.

    A file of another program has all state as a state_dict of the class made it: its load_state_dict undoes that.

    Args:
        state_name: name of the state.
        optimizers: all of the state.
        saved: the values of each optimizer in the checkpoint.
        destination: receives the plan.
        is_foreign: True if another program wrote the checkpoint.
    """
    if len(saved) != len(optimizers):
        saved = [{}] * len(optimizers)
    for optimizer, values in zip(optimizers, saved, strict=True):
        live = live_optimizer(optimizer)
        name = type(optimizer).__name__
        if lacking := _own_values(live).keys() - values.keys():
            destination.notes.append(
                f"{state_name}: {name} keeps {_quoted(lacking)} of its state_dict, which the checkpoint does not have"
            )
        before, after = _load_hooks(live)
        itself = loads_itself(optimizer)
        takes, undoes = before or itself, is_foreign and itself
        if values and not takes:
            destination.notes.append(
                f"{state_name}: {name} has no place for {_quoted(values)}, which the checkpoint has"
            )
        if live is not None and (before or after or undoes or (values and takes)):
            destination.finish.append(partial(_load, live, values, whole=undoes or bool(values)))


def loads_itself(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's class has a load_state_dict of its own."""
    return _method(live_optimizer(optimizer), "load_state_dict") is not Optimizer.load_state_dict


def _method(live: Optimizer | None, name: str) -> object:
    return getattr(getattr(live, name, None), "__func__", getattr(Optimizer, name))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(repr, names)))


def _load(live: Optimizer, values: Mapping[str, Any], *, whole: bool) -> None:
    """Call the optimizer's own load_state_dict with its loaded state and groups, or run its hooks alone."""
    numbers: dict[Any, int] = {}
    groups = [
        {**group, "params": [numbers.setdefault(p, len(numbers)) for p in group["params"]]}
        for group in live.param_groups
    ]
    held: Mapping[Any, Any] = live.state
    state = {numbers.get(key, key): dict(own) if key in numbers else own for key, own in held.items()}
    with _without_torchs_part(live):
        if whole:
            own = live.state_dict() | {"state": state, "param_groups": groups} | unpack_tensors(values)
            live.load_state_dict(own)
        else:
            _run_load_hooks(live, live.state_dict())


@contextlib.contextmanager
def _without_torchs_part(optimizer: Optimizer) -> Iterator[None]:
    """Let torch's state_dict and load_state_dict of an optimizer run hooks, and do nothing else, in this thread.

    State and groups are saved and loaded by other means: torch would cast the state and replace the groups. ZeRO's stage 3
    takes the parameters out of the groups, and torch's state_dict then fails.

    An optimizer inside that has the same state counts as the same one; another one is a value among others.
    """
    base: Any = Optimizer
    own, state = threading.get_ident(), getattr(optimizer, "state", None)

    def is_same(live: Optimizer) -> bool:
        return threading.get_ident() == own and (live is optimizer or live.state is state)

    def state_dict(live: Optimizer) -> dict[str, Any]:
        return _hyperparameters(live) if is_same(live) else save(live)

    def load_state_dict(live: Optimizer, state_dict: dict[str, Any]) -> None:
        (_run_load_hooks if is_same(live) else load)(live, state_dict)

    with _PATCHED:
        save, load = base.state_dict, base.load_state_dict
        base.state_dict, base.load_state_dict = state_dict, load_state_dict
        try:
            yield
        finally:
            base.state_dict, base.load_state_dict = save, load


def _hyperparameters(live: Optimizer) -> dict[str, Any]:
    state_dict: dict[str, Any] = {"state": {}, "param_groups": [{**group, "params": []} for group in live.param_groups]}
    for hook in getattr(live, "_optimizer_state_dict_pre_hooks", {}).values():
        hook(live)
    for hook in getattr(live, "_optimizer_state_dict_post_hooks", {}).values():
        state_dict = hook(live, state_dict) or state_dict
    return state_dict


def _run_load_hooks(live: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Do what torch's load_state_dict does beside the state of parameters and the groups."""
    before, after = _load_hooks(live)
    state_dict = dict(state_dict)
    for hook in before.values():
        state_dict = hook(live, state_dict) or state_dict
    held: dict[Any, Any] = live.state
    held.update({key: value for key, value in state_dict.get("state", {}).items() if isinstance(key, str)})
    for hook in after.values():
        hook(live)


def _load_hooks(live: Optimizer | None) -> tuple[dict[int, Any], dict[int, Any]]:
    before, after = (getattr(live, f"_optimizer_load_state_dict_{when}_hooks", {}) for when in ("pre", "post"))
    return before, after
