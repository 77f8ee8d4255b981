"""Names of frameworks and the adapter of each.

A program adds an adapter by `register`. An installed package adds one by an entry point of the group
`bytecheckpoint.frameworks`, whose name is that of the framework and whose object makes the adapter:

    [project.entry-points."bytecheckpoint.frameworks"]
    shared-adam = "my_package.checkpoints:SharedAdamFramework"
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Framework
from bytecheckpoint.frameworks.deepspeed.adapter import DeepSpeedFramework
from bytecheckpoint.frameworks.deepspeed.detection import find_deepspeed
from bytecheckpoint.frameworks.fsdp1.adapter import FSDP1Framework
from bytecheckpoint.frameworks.fsdp1.detection import find_fsdp1
from bytecheckpoint.frameworks.megatron.adapter import MegatronFramework
from bytecheckpoint.frameworks.megatron.detection import find_megatron
from bytecheckpoint.frameworks.native import NativeFramework

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["GROUP", "known", "register", "resolve", "unregister"]

#: Group of the entry points by which installed packages add adapters.
GROUP = "bytecheckpoint.frameworks"

_log = logging.getLogger("bytecheckpoint")
_NATIVE = NativeFramework()
# Tensors that list their own shards (veScale's, say) need no adapter of their own.
_NATIVE_NAMES = ("ddp", "fsdp", "fsdp2", "tp", "torch", "vescale")
_FACTORIES: dict[str, Callable[[], Framework]] = {
    **dict.fromkeys(_NATIVE_NAMES, lambda: _NATIVE),
    "fsdp1": FSDP1Framework,
    "megatron": MegatronFramework,
    "deepspeed": DeepSpeedFramework,
}
_BUILTIN = frozenset({"auto", *_FACTORIES})
_METHODS = ("matches", "capture", "destination")


def register(name: str, factory: Callable[[], Framework]) -> None:
    """Make `framework=name` use the adapter that `factory()` returns.

    framework="auto" asks registered adapters first, the newest before the others, then those of other packages, then
    those of this package.

    Raises:
        UsageError: the name is taken.
    """
    if name in known():
        raise UsageError(f"framework name {name!r} is already in use: choose another")
    _FACTORIES[name] = factory


def unregister(name: str) -> None:
    """Remove an adapter that `register` added.

    Raises:
        UsageError: `register` added no adapter of that name.
    """
    if name in _BUILTIN or name not in _FACTORIES:
        raise UsageError(f"framework name {name!r} was not registered: only registered adapters can be removed")
    del _FACTORIES[name]


def known() -> list[str]:
    """Return the names that `framework=` accepts: built in, registered, and added by other packages."""
    return ["auto", *_FACTORIES, *_entry_points()]


def resolve(framework: str, states: Mapping[str, object]) -> Framework:
    """Return the adapter for `framework`, or for the objects in `states` when it is "auto".

    Raises:
        UsageError: the name is unknown, or the framework of that name does not read the objects.
    """
    if not isinstance(framework, str) or framework not in known():
        raise UsageError(f"unknown framework {framework!r}; known: {', '.join(known())}")
    if framework in _entry_points():
        return _load_entry_point(framework)
    if framework in ("fsdp", "fsdp1", "deepspeed") and (where := find_megatron(states, partitioned_only=True)):
        raise UsageError(
            f"{where} belongs to Megatron-Core, which has split it over the ranks, and framework {framework!r} would take "
            'its part for the whole: use Megatron\'s own data parallelism and framework="megatron"'
        )
    if framework != "auto" and framework not in _NATIVE_NAMES:
        return _FACTORIES[framework]()
    if framework == "auto":
        for adapter in _adapters():
            if adapter.matches(states):
                return adapter
        return _NATIVE
    if where := find_fsdp1(states):
        if framework == "fsdp":
            return FSDP1Framework()
        owner, names = "FSDP1 (FullyShardedDataParallel)", "fsdp"
    elif where := find_deepspeed(states, partitioned_only=True):
        owner, names = "an engine of DeepSpeed", "deepspeed"
    elif where := find_megatron(states, partitioned_only=True):
        owner, names = "Megatron-Core", "megatron"
    else:
        return _NATIVE
    raise UsageError(
        f'{where} belongs to {owner}, which framework {framework!r} does not read: use framework="{names}" or "auto"'
    )


def _adapters() -> Iterator[Framework]:
    """Iterate over all adapters but the native one, in the order in which "auto" asks them."""
    registered = [name for name in _FACTORIES if name not in _BUILTIN]
    yield from (_FACTORIES[name]() for name in reversed(registered))
    for name in _entry_points():
        try:
            yield _load_entry_point(name)
        except UsageError as error:
            # A broken package must not end the saves of programs that do not use it.
            _warn_once(str(error))
    yield from (_FACTORIES[name]() for name in reversed(_FACTORIES) if name in _BUILTIN and name not in _NATIVE_NAMES)


@cache
def _entry_points() -> dict[str, EntryPoint]:
    """Return the entry points by name; those that reuse a built-in name are ignored."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in _BUILTIN}


def _load_entry_point(name: str) -> Framework:
    """Make the adapter of another package.

    Raises:
        UsageError: the adapter cannot be imported, or is not an adapter.
    """
    entry = _entry_points()[name]
    where = f"the adapter {entry.value!r} of {entry.dist.name if entry.dist else 'an unknown package'}"
    try:
        factory = entry.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{where} cannot be imported: {error}") from error
    adapter: Framework = factory()
    if not all(callable(getattr(adapter, method, None)) for method in _METHODS):
        raise UsageError(
            f"{where} made an object of type {type(adapter).__name__}, which is no bytecheckpoint Framework"
        )
    return adapter


@cache
def _warn_once(message: str) -> None:
    _log.warning("%s; it is not asked whether it knows the states", message)
