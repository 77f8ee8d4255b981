"""What all integrations check and do when they are attached to an object of a tool."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager import CheckpointManager

__all__ = ["check_has", "differences", "manager_options", "put_in_front", "refuse_newer"]

_OPTIONS = frozenset({"overlap", "on_error", "grace", "async_checkpoint", "save_options", "load_options"})


def check_has(thing: Any, names: Collection[str], package: str, remedy: str) -> None:
    """Check that an object of a tool has what this package uses of it.

    Args:
        thing: the object.
        names: of its attributes.
        package: that it should be of, a module.
        remedy: what to do.

    Raises:
        UsageError: it lacks something.
    """
    if lacking := [name for name in names if not hasattr(thing, name)]:
        import importlib

        version = importlib.import_module(package).__version__
        raise UsageError(f"a {type(thing).__name__} of {package} {version} has no {lacking[0]}: {remedy}")


def manager_options(given: Mapping[str, Any], *, but: Collection[str] = (), **defaults: Any) -> dict[str, Any]:
    """Return the options of a `CheckpointManager` that saves for a tool. Tools delete old steps at once.

    Args:
        given: by the user.
        but: options that mean nothing for this tool.
        **defaults: further ones.

    Raises:
        UsageError: one is unknown.
    """
    known = _OPTIONS.difference(but)
    if unknown := given.keys() - known:
        raise UsageError(f"unknown option {min(unknown)!r}; there are {', '.join(sorted(known))}")
    return {"grace": 0.0, **defaults, **given}


def put_in_front(thing: Any, kind: type) -> None:
    """Let the methods of a class go before those of an object's own class, which may be a subclass of the tool's."""
    own = type(thing)
    thing.__class__ = type(own.__name__, (kind, own), {"__module__": own.__module__})


def refuse_newer(manager: CheckpointManager, step: int, remedy: str) -> None:
    """Refuse to begin before the end of a run that is in the folder: its steps would count as the newest ones.

    Args:
        manager: of the run that begins.
        step: where it begins.
        remedy: what to do.

    Raises:
        UsageError: there is a newer step; on all ranks.
    """
    newest = manager.ask_rank_0(lambda: info.step if (info := manager.latest()) else -1)
    if newest > step:
        raise UsageError(f"{manager.root} holds a run up to step {newest}: {remedy}")


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return in words in what a checkpoint differs from what is here; "" if in nothing."""
    return "; ".join(f"{saved.get(name)} {name}, now {own[name]}" for name in own if saved.get(name) != own[name])
