"""Names of frameworks, and which adapter stands behind each.

A program adds an adapter by `register`, an installed package by an entry point of the group `bytecheckpoint.frameworks`
whose name is that of the framework and whose object makes the adapter:

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
from bytecheckpoint.frameworks.deepspeed.installed import find_deepspeed
from bytecheckpoint.frameworks.fsdp1.adapter import FSDP1Framework
from bytecheckpoint.frameworks.fsdp1.flats import find_fsdp1
from bytecheckpoint.frameworks.megatron.adapter import MegatronFramework
from bytecheckpoint.frameworks.megatron.installed import find_megatron
from bytecheckpoint.frameworks.native import NativeFramework

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["GROUP", "known", "register", "resolve"]

GROUP = "bytecheckpoint.frameworks"

_log = logging.getLogger("bytecheckpoint")
_NATIVE = NativeFramework()
# What lists its own boxes (a veScale tensor with `__bytecheckpoint_shards__`, say) needs no adapter.
_NATIVE_NAMES = ("ddp", "fsdp", "fsdp2", "tp", "torch", "vescale")
_FACTORIES: dict[str, Callable[[], Framework]] = {
    **dict.fromkeys(_NATIVE_NAMES, lambda: _NATIVE),
    "fsdp1": FSDP1Framework,
    "megatron": MegatronFramework,
    "deepspeed": DeepSpeedFramework,
}
_BUILTIN = frozenset({"auto", *_FACTORIES})
_METHODS = ("matches", "capture", "destination", "describe")


def register(name: str, factory: Callable[[], Framework]) -> None:
    """Make `framework=name` use the adapter that `factory()` returns.

    Under framework="auto" registered adapters are asked, the newest first, before those of other packages, and these
    before those of this package.

    Raises:
        UsageError: the name is taken.
    """
    if name in known():
        raise UsageError(f"framework name {name!r} is already in use: choose another")
    _FACTORIES[name] = factory


def known() -> list[str]:
    """The names that `framework=` takes: those of this package, those that were registered, those of other packages."""
    return ["auto", *_FACTORIES, *_announced()]


def resolve(framework: str, states: Mapping[str, object]) -> Framework:
    """The adapter for `framework`, or for the objects in `states` when it is "auto".

    Raises:
        UsageError: unknown name, or objects that the framework of that name does not read.
    """
    if not isinstance(framework, str) or framework not in known():
        raise UsageError(f"unknown framework {framework!r}; known: {', '.join(known())}")
    if framework in _announced():
        return _made(framework)
    if framework in ("fsdp", "fsdp1") and (where := find_megatron(states, divided=True)):
        raise UsageError(
            f"{where} belongs to Megatron-Core, which has split it over the ranks, and framework {framework!r} would take "
            'its part for the whole: use Megatron\'s own data parallelism and framework="megatron"'
        )
    if framework != "auto" and framework not in _NATIVE_NAMES:
        return _FACTORIES[framework]()
    if framework == "auto":
        for adapter in _all():
            if adapter.matches(states):
                return adapter
    elif where := find_fsdp1(states):
        if framework == "fsdp":
            return FSDP1Framework()
        raise UsageError(
            f"{where} belongs to FSDP1 (FullyShardedDataParallel), which framework {framework!r} does not read: "
            'use framework="fsdp" or "auto"'
        )
    elif where := find_deepspeed(states, divided=True):
        raise UsageError(
            f"{where} belongs to an engine of DeepSpeed, which framework {framework!r} does not read: use "
            'framework="deepspeed" or "auto"'
        )
    elif where := find_megatron(states, divided=True):
        raise UsageError(
            f"{where} belongs to Megatron-Core, which framework {framework!r} does not read: use "
            'framework="megatron" or "auto"'
        )
    return _NATIVE


def _all() -> Iterator[Framework]:
    """All adapters but the native one, in the order in which "auto" asks them."""
    registered = [name for name in _FACTORIES if name not in _BUILTIN]
    yield from (_FACTORIES[name]() for name in reversed(registered))
    for name in _announced():
        try:
            yield _made(name)
        except UsageError as error:
            # A package that somebody has installed must not end the saves of programs that do not use it.
            _warn_once(str(error))
    yield from (_FACTORIES[name]() for name in reversed(_FACTORIES) if name in _BUILTIN and name not in _NATIVE_NAMES)


@cache
def _announced() -> dict[str, EntryPoint]:
    """Entry points by name; none can take the place of a name of this package."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in _BUILTIN}


def _made(name: str) -> Framework:
    """The adapter of another package.

    Raises:
        UsageError: it cannot be imported, or is none.
    """
    entry = _announced()[name]
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
