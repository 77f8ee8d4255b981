"""Names of frameworks, and which adapter stands behind each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Framework
from bytecheckpoint.frameworks.fsdp1.adapter import FSDP1Framework
from bytecheckpoint.frameworks.fsdp1.flats import find_fsdp1
from bytecheckpoint.frameworks.native import NativeFramework

__all__ = ["known", "register", "resolve"]

_NATIVE = NativeFramework()
# What lists its own boxes (a veScale tensor with `__bytecheckpoint_shards__`, say) needs no adapter.
_NATIVE_NAMES = ("ddp", "fsdp", "fsdp2", "tp", "torch", "vescale")
_PLANNED = ("megatron", "deepspeed")
_FACTORIES: dict[str, Callable[[], Framework]] = {
    **dict.fromkeys(_NATIVE_NAMES, lambda: _NATIVE),
    "fsdp1": FSDP1Framework,
}


def register(name: str, factory: Callable[[], Framework]) -> None:
    """Make `framework=name` use the adapter that `factory()` returns.

    Under framework="auto" registered adapters are asked, the newest first, before those of this package.

    Raises:
        UsageError: the name is taken or reserved.
    """
    if name == "auto" or name in _PLANNED or name in _FACTORIES:
        raise UsageError(f"framework name {name!r} is already in use: choose another")
    _FACTORIES[name] = factory


def known() -> list[str]:
    """The names that `framework=` takes."""
    return ["auto", *_FACTORIES]


def resolve(framework: str, states: Mapping[str, object]) -> Framework:
    """The adapter for `framework`, or for the objects in `states` when it is "auto".

    Raises:
        UsageError: unknown or not yet supported name, or objects of a framework that is not supported.
    """
    if framework in _PLANNED:
        raise UsageError(f"framework {framework!r} is planned but not built yet; known now: {', '.join(known())}")
    if framework != "auto" and framework not in _FACTORIES:
        raise UsageError(f"unknown framework {framework!r}; known: {', '.join(known())}")
    if framework != "auto" and framework not in _NATIVE_NAMES:
        return _FACTORIES[framework]()
    if framework == "auto":
        for name in reversed(_FACTORIES):
            if name not in _NATIVE_NAMES and (adapter := _FACTORIES[name]()).matches(states):
                return adapter
        _refuse_planned(states)
    elif where := find_fsdp1(states):
        if framework == "fsdp":
            return FSDP1Framework()
        raise UsageError(
            f"{where} belongs to FSDP1 (FullyShardedDataParallel), which framework {framework!r} does not read: "
            'use framework="fsdp" or "auto"'
        )
    return _NATIVE


def _refuse_planned(states: Mapping[str, object]) -> None:
    """Refuse modules whose parameters the native adapter would read without seeing how they are split."""
    for kind, root in _modules(states):
        for name, module in root.named_modules():
            top = type(module).__module__.partition(".")[0]
            if top in _PLANNED:
                where = f"{kind}: module {name!r}" if name else kind
                raise UsageError(
                    f"{where} is a {top} module, and framework {top!r} is planned but not built yet; "
                    f'framework="torch" saves it as ordinary modules, if its tensors are whole or DTensors'
                )


def _modules(states: Mapping[str, object]) -> Iterator[tuple[str, nn.Module]]:
    for kind, value in states.items():
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, nn.Module):
                yield kind, item
