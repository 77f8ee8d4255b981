"""Hooks before load_state_dict, which rename old keys, drop keys and add defaults: run on the names of a checkpoint.

A load reads only what it wants, so hooks see tensors of the saved shapes and dtypes that hold no values. What they do with
keys is carried over to the load. A hook that computes with values is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor
from bytecheckpoint.frameworks.modules import ModuleScan, ScannedModule
from bytecheckpoint.frameworks.tensors.dtypes import dtype_named
from bytecheckpoint.representation.shards import TensorKey

__all__ = ["run_load_pre_hooks"]

#: Modules of torch whose hooks rename keys. Other ones of torch's gather, shard or compute, which a load does itself.
_RENAMES = ("torch.nn.utils.parametrizations",)


def run_load_pre_hooks(state_name: str, scan: ModuleScan, saved: SavedStates, destination: Destination) -> None:
    """Run the hooks before load_state_dict of the modules of one state, and carry over what they change.

    Args:
        state_name: name of the state.
        scan: its modules; gets the defaults that hooks add.
        saved: the checkpoint; gets the names under which it holds live tensors.
        destination: plan of the load; gets the keys that hooks drop, and what they report as missing.

    Raises:
        IncompatibleCheckpointError: a hook computes with values, changes an entry that is no tensor, or raises an error.
    """
    for scanned in scan.modules:
        if any(True for module in scanned.module.modules() for _ in _hooks_of(module)):
            _Keys(state_name, scanned, saved, destination).carry_over(scan)


def _hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    for hook in module._load_state_dict_pre_hooks.values():
        function = getattr(hook, "hook", hook)
        owner = str(getattr(function, "__module__", None) or type(function).__module__)
        if not owner.startswith("torch.") or owner in _RENAMES:
            yield hook


class _Keys:
    """The keys of one module's checkpoint, as its hooks see and change them.

    Args:
        state_name: name of the state.
        scanned: the module.
        saved: the checkpoint.
        destination: plan of the load.
    """

    def __init__(self, state_name: str, scanned: ScannedModule, saved: SavedStates, destination: Destination) -> None:
        self._state_name = state_name
        self._scanned = scanned
        self._saved = saved
        self._destination = destination
        self._tensors: dict[int, tuple[torch.Tensor, TensorKey]] = {}  # by id: those without values
        self._final: dict[str, Any] = {}  # state_dict key -> what its own module would load
        self._unexpected: set[int] = set()  # ids of tensors that no module takes
        self._entries = self._saved_entries()

    def carry_over(self, scan: ModuleScan) -> None:
        """Run the hooks, and carry over what they change."""
        self._load(self._scanned.module, dict(self._entries), "")
        # These are loaded through load_state_dict, which runs the hooks with their values.
        entries = [tensor.hook_entry for tensor in scan.tensors if tensor.hook_entry is not None]
        through_hooks = {key for scanned, key in entries if scanned is self._scanned}
        renamed: dict[str, str] = {}
        taken = set[int]()
        for key, fqn in self._scanned.names.items():
            value, before = self._final.get(key), self._entries.get(key)
            taken.add(id(value))
            if value is before or fqn in scan.values or key in through_hooks:
                continue
            if value is None:
                renamed[fqn] = f"{fqn} (dropped by a hook)"
            elif (known := self._tensors.get(id(value))) is not None:
                renamed[fqn] = known[1].fqn
            elif isinstance(value, torch.Tensor) and not value.is_meta:
                scan.defaults[fqn] = value.detach().clone()
            else:
                raise self._error(f"of {key!r}, computes a value or sets one that is no tensor")
        self._saved.rename(self._state_name, renamed)
        dropped = self._tensors.keys() - taken - self._unexpected
        self._destination.recognized.update(self._tensors[number][1] for number in dropped)

    def _saved_entries(self) -> dict[str, Any]:
        """Return a tensor without values for each saved tensor, under the key that load_state_dict would find it."""
        prefixes = {bare: prefix for prefix, bare in self._scanned.prefixes.items()}
        keys = {fqn: key for key, fqn in reversed(self._scanned.names.items())}
        entries: dict[str, Any] = {}
        live = [(fqn, self._saved.find(self._state_name, (fqn,))) for fqn in keys]
        found: list[tuple[str, SavedTensor | None]] = [(fqn, tensor) for fqn, tensor in live if tensor is not None]
        known = {tensor.key for _, tensor in found if tensor is not None}
        others = (key for key in self._saved.keys(self._state_name) if not key.slot and key not in known)
        found += [(key.fqn, self._saved.stored(key)) for key in others]
        by_key: dict[TensorKey, torch.Tensor] = {}
        for fqn, tensor in found:
            if tensor is None:
                continue
            empty = by_key.get(tensor.key)
            if empty is None:
                empty = torch.empty(tensor.global_shape, dtype=dtype_named(tensor.dtype), device="meta")
                by_key[tensor.key] = empty
                self._tensors[id(empty)] = (empty, tensor.key)
            entries.setdefault(keys.get(fqn) or self._key(fqn, prefixes), empty)
        return entries

    def _key(self, fqn: str, prefixes: dict[str, str]) -> str:
        """Return the state_dict key of a name that no live tensor has: below the deepest module that it lies in."""
        bare = fqn
        while bare and bare not in prefixes:
            bare = bare[: bare.rstrip(".").rfind(".") + 1]
        return prefixes.get(bare, "") + fqn[len(bare) :]

    def _load(self, module: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        """Run the hooks of a module and of those inside of it, in the order and with the entries of load_state_dict."""
        missing, unexpected, errors = list[str](), list[str](), list[str]()
        for hook in _hooks_of(module):
            try:
                hook(entries, prefix, {}, True, missing, unexpected, errors)
            except Exception as error:
                # The program's own hook may raise anything; one that needs values fails in many ways.
                raise self._error(f"raised {type(error).__name__}: {error}", hook) from error
            if errors:
                raise self._error(f"reported {errors[0]}", hook)
        self._destination.missing += [str(TensorKey(self._state_name, name)) for name in missing]
        names = {*module._modules, *module._parameters, *module._buffers}
        for key, value in entries.items():
            inside = key.removeprefix(prefix)
            if "." not in inside:
                self._final[key] = value
            if key.startswith(prefix) and inside.partition(".")[0] not in names:
                self._unexpected.add(id(value))
        for name, child in module._modules.items():
            if child is not None:
                inner = f"{prefix}{name}."
                self._load(child, {key: value for key, value in entries.items() if key.startswith(inner)}, inner)

    def _error(self, what: str, hook: Callable[..., Any] | None = None) -> IncompatibleCheckpointError:
        function = getattr(hook, "hook", hook)
        name = f" {getattr(function, '__qualname__', type(function).__name__)}" if hook is not None else ""
        return IncompatibleCheckpointError(
            f"{self._state_name}: a hook before load_state_dict{name} {what}: a load runs such hooks on keys, shapes and "
            "dtypes without values; load into a dict, and call load_state_dict with it"
        )
