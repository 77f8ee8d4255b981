"""Look through wrappers around modules (DDP, FSDP, torch.compile, ...) and optimizers (accelerate, timm)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, overload

from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.detection import loaded_class

__all__ = [
    "BY_STATE_DICT",
    "bare_name",
    "children",
    "known_wrappers",
    "optimizers_inside",
    "unwrap_states",
    "unwrapped",
    "walk_modules",
    "without_wrappers",
]

# (module, class, attribute of the wrapped module, whether state_dict hides the attribute already)
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod", False),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
        True,
    ),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module", True),
    ("deepspeed.runtime.data_pipeline.data_routing.basic_layer", "RandomLayerTokenDrop", "random_ltd_layer", False),
)

# Attributes of torch's own wrappers that no other module has. DDP's is not among them: modules of users may have it.
_IN_NAMES = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

# (module, class, attribute of the wrapped object) of wrappers that have the methods of the object, but not its type
_OBJECT_WRAPPERS = (
    ("accelerate.optimizer", "AcceleratedOptimizer", "optimizer"),
    ("accelerate.scheduler", "AcceleratedScheduler", "scheduler"),
)


BY_STATE_DICT = "save its state_dict() as a state, load into that of the new one, and call load_state_dict"
"""Advice about optimizers that only their own methods can save."""


class _UnwrappedStates(dict[str, Any]):
    """States without wrappers. A load that replaces a state replaces the caller's too."""

    def __init__(self, states: Mapping[str, Any], unwrapped: Mapping[str, Any]) -> None:
        super().__init__(states)
        self.update(unwrapped)
        self._states = states

    def __setitem__(self, state_name: str, value: Any) -> None:
        super().__setitem__(state_name, value)
        assert isinstance(self._states, MutableMapping)
        self._states[state_name] = value


@overload
def unwrap_states(states: MutableMapping[str, Any]) -> MutableMapping[str, Any]: ...


@overload
def unwrap_states(states: Mapping[str, Any]) -> Mapping[str, Any]: ...


def unwrap_states(states: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `states` with the optimizers and schedulers inside wrappers in the wrappers' places.

    A state may be a wrapper, or a list, tuple or dict of wrapped optimizers.
    """
    wrappers = [(c, attribute) for place, name, attribute in _OBJECT_WRAPPERS if (c := loaded_class(place, name))]
    unwrapped: dict[str, Any] = {}
    for state_name, value in states.items():
        found: Any = _unwrap(value, wrappers)
        # Other containers are values of their own, which a load fills in place; an empty one is such a container.
        if type(value) is dict and value and all(isinstance(item, Optimizer) for item in value.values()):
            found = {key: _unwrap(item, wrappers) for key, item in value.items()}
        elif type(value) in (list, tuple) and value and all(isinstance(item, Optimizer) for item in value):
            found = type(value)(_unwrap(item, wrappers) for item in value)
        if found is not value:
            unwrapped[state_name] = found
    return _UnwrappedStates(states, unwrapped) if unwrapped else states


def _unwrap(value: Any, wrappers: list[tuple[type, str]]) -> Any:
    for cls, attribute in wrappers:
        while isinstance(value, cls):
            value = getattr(value, attribute)
    if isinstance(value, Optimizer) and not hasattr(value, "param_groups"):
        raise UsageError(
            f"{type(value).__name__} has no param_groups, which an optimizer of torch has: {BY_STATE_DICT}"
        )
    # An optimizer around another one (Lookahead of timm), whose state is all in that one.
    while isinstance(value, Optimizer) and not getattr(value, "state", True):
        inside = optimizers_inside(value)
        if len(inside) != 1 or inside[0].param_groups is not value.param_groups or inside[0].state is value.state:
            break
        if value.state_dict().keys() - {"state", "param_groups"}:
            break  # it will have a state of its own (LookSAM of pytorch_optimizer)
        value = inside[0]
    return value


def walk_modules(module: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Iterate over the modules inside `module`, in the order of a state_dict.

    Yields:
        (prefix in the state_dict, prefix in the bare model, module) for each. A module at two places comes twice.
    """
    return _walk(module, "", "", known_wrappers())


def known_wrappers() -> list[tuple[type, str, bool]]:
    """Return (class, attribute of the wrapped module, whether state_dict hides the attribute already) of all wrappers."""
    wrappers: list[tuple[type, str, bool]] = [
        (nn.parallel.DistributedDataParallel, "module", False),
        (nn.DataParallel, "module", False),
    ]
    for place, name, attribute, hidden in _WRAPPERS:
        if (cls := loaded_class(place, name)) is not None:
            wrappers.append((cls, attribute, hidden))
    return wrappers


def unwrapped(module: nn.Module) -> nn.Module:
    """Return a module without the wrappers around it, or without its engine."""
    wrappers = known_wrappers()
    if (engine := loaded_class("deepspeed.runtime.engine", "DeepSpeedEngine")) is not None:
        wrappers.append((engine, "module", False))
    while (name := next((name for cls, name, _ in wrappers if isinstance(module, cls)), "")) != "":
        module = getattr(module, name)
    return module


def _walk(
    module: nn.Module, prefix: str, bare: str, wrappers: list[tuple[type, str, bool]]
) -> Iterator[tuple[str, str, nn.Module]]:
    yield prefix, bare, module
    for name, child, child_bare, hidden in children(module, bare, wrappers):
        child_prefix = prefix if hidden else f"{prefix}{name}."
        if child._modules:
            yield from _walk(child, child_prefix, child_bare, wrappers)
        else:
            yield child_prefix, child_bare, child


def children(
    module: nn.Module, bare: str, wrappers: list[tuple[type, str, bool]]
) -> Iterator[tuple[str, nn.Module, str, bool]]:
    """Iterate over the modules directly inside `module`.

    Args:
        module: the module.
        bare: its prefix in the bare model.
        wrappers: result of `known_wrappers`.

    Yields:
        (name, child, prefix of the child in the bare model, whether state_dict hides the name).
    """
    for name, child in module._modules.items():
        if child is None:
            continue
        for cls, attribute, hidden in wrappers:
            if name == attribute and isinstance(module, cls):
                yield name, child, bare, hidden
                break
        else:
            yield name, child, f"{bare}{name}.", False


def optimizers_inside(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that another one, which is around them, has as attributes."""
    return [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]


def without_wrappers(name: str) -> str:
    """Return an FQN without the parts that torch's own wrappers, other than DDP, put into it."""
    return _IN_NAMES.sub("", name)


def bare_name(key: str, prefixes: dict[str, str]) -> str:
    """Return the FQN in the bare model of a state_dict key.

    Args:
        key: the key.
        prefixes: prefix in the state_dict -> prefix in the bare model, as `walk_modules` gives them.
    """
    end = key.rfind(".") + 1
    while (bare := prefixes.get(key[:end])) is None:
        # No module has this prefix, since a hook made the key: use the module above it.
        end = key.rfind(".", 0, end - 1) + 1
    return bare + key[end:]
