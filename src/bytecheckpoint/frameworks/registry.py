"""Names of frameworks, and which adapter stands behind each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Framework
from bytecheckpoint.frameworks.deepspeed.adapter import DeepSpeedFramework
from bytecheckpoint.frameworks.deepspeed.installed import find_deepspeed
from bytecheckpoint.frameworks.fsdp1.adapter import FSDP1Framework
from bytecheckpoint.frameworks.fsdp1.flats import find_fsdp1
from bytecheckpoint.frameworks.megatron.adapter import MegatronFramework
from bytecheckpoint.frameworks.megatron.installed import find_megatron
from bytecheckpoint.frameworks.native import NativeFramework

__all__ = ["known", "register", "resolve"]

_NATIVE = NativeFramework()
# What lists its own boxes (a veScale tensor with `__bytecheckpoint_shards__`, say) needs no adapter.
_NATIVE_NAMES = ("ddp", "fsdp", "fsdp2", "tp", "torch", "vescale")
_FACTORIES: dict[str, Callable[[], Framework]] = {
    **dict.fromkeys(_NATIVE_NAMES, lambda: _NATIVE),
    "fsdp1": FSDP1Framework,
    "megatron": MegatronFramework,
    "deepspeed": DeepSpeedFramework,
}


def register(name: str, factory: Callable[[], Framework]) -> None:
    """Make `framework=name` use the adapter that `factory()` returns.

    Under framework="auto" registered adapters are asked, the newest first, before those of this package.

    Raises:
        UsageError: the name is taken.
    """
    if name == "auto" or name in _FACTORIES:
        raise UsageError(f"framework name {name!r} is already in use: choose another")
    _FACTORIES[name] = factory


def known() -> list[str]:
    """The names that `framework=` takes."""
    return ["auto", *_FACTORIES]


def resolve(framework: str, states: Mapping[str, object]) -> Framework:
    """The adapter for `framework`, or for the objects in `states` when it is "auto".

    Raises:
        UsageError: unknown name, or objects that the framework of that name does not read.
    """
    if framework != "auto" and framework not in _FACTORIES:
        raise UsageError(f"unknown framework {framework!r}; known: {', '.join(known())}")
    if framework != "auto" and framework not in _NATIVE_NAMES:
        return _FACTORIES[framework]()
    if framework == "auto":
        for name in reversed(_FACTORIES):
            if name not in _NATIVE_NAMES and (adapter := _FACTORIES[name]()).matches(states):
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
