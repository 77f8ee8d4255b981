"""Hooks before load_state_dict, which rename, drop, merge and add entries: run before a load has read the entries.

A load reads only what it wants. So hooks run, in the order of load_state_dict, on tensors of the saved shapes and dtypes
without values. A name that gets another saved tensor is loaded from that one. Hooks that compute run again, with the
values of the tensors that they take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor
from bytecheckpoint.frameworks.modules import ModuleScan, ScannedModule
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.dtensors import local_tensor
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name, dtype_named
from bytecheckpoint.frameworks.tensors.plain import lists_own_shards
from bytecheckpoint.frameworks.wrappers import children, known_wrappers
from bytecheckpoint.representation.shards import LiveShard, TensorKey, each_box

__all__ = ["LoadHooks"]

# Modules of torch whose hooks change names. Other ones of torch's gather, shard or compute, which a load does itself.
_PARAMETRIZATIONS = "torch.nn.utils.parametrizations"
_CHECKPOINT_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_FSDP1 = "torch.distributed.fsdp._state_dict_utils"
_SLOT = "//hook"  # of the key that stands for a computed tensor
#: Parts of torch's messages about tensors without values.
_NEEDS_VALUES = ("can't convert meta", "unallocated storage")
_Hook = Callable[..., Any]
_Place = tuple[Any, ...]


class _NeedsValuesError(RuntimeError):
    """An operation depends on the values of tensors."""


class _HookCall(NamedTuple):
    """A call of a hook.

    Attributes:
        hook: function that takes entries.
        before: entries before the call.
        after: entries after it.
        taken: memories with which the hook computes.
        made: memories that the hook makes or changes.
    """

    hook: _Hook
    before: dict[str, Any]
    after: dict[str, Any]
    taken: set[int]
    made: set[int]


class _WithoutValues(TorchDispatchMode):
    """In the `with` block, results of operations on tensors without values have none.

    A tensor with values into which such a tensor is copied stays as it is.

    Attributes:
        sources: tensors without values, with the saved ones for which they stand.
        calls: calls of hooks.
        taken: memories of the tensors in operations of the last one.
        written: memories that operations change, with one of their tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources: dict[_Place, tuple[torch.Tensor, SavedTensor]] = {}
        self.calls: list[_HookCall] = []
        self.taken = set[int]()
        self.written: dict[int, torch.Tensor] = {}

    def stand_in(self, saved: SavedTensor) -> torch.Tensor:
        """Return a tensor without values for a saved one."""
        tensor = torch.empty(saved.global_shape, dtype=dtype_named(saved.dtype), device="meta")
        self.sources[_place(tensor)] = tensor, saved
        return tensor

    def saved(self, value: Any) -> SavedTensor | None:
        """Return the saved tensor for which `value` stands."""
        source = self.sources.get(_place(value))
        return None if source is None or _memory(value) in self.written else source[1]

    def lacks_values(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has no values, or not those that it will have."""
        return tensor.is_meta or _memory(tensor) in self.written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, on shapes alone where it takes a tensor without values."""
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        if not any(map(self.lacks_values, tensors)):
            return func(*args, **kwargs)
        self.taken.update(map(_memory, tensors))
        changed = {argument.name: argument.alias_info for argument in func._schema.arguments}
        given = dict(zip(changed, args, strict=False)) | kwargs
        writes = _tensors([value for name, value in given.items() if (info := changed[name]) and info.is_write])
        self.written.update((_memory(tensor), tensor) for tensor in writes)
        if writes and not writes[0].is_meta:
            return writes[0]
        args, kwargs = tree_map(_without_values, (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = "meta"
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or "meta tensors" in str(error):
                raise _NeedsValuesError(str(error)) from error
            raise


class LoadHooks:
    """The hooks of all modules of one load.

    Args:
        saved: the checkpoint; gets the names under which it holds live tensors.
        destination: plan of the load.

    Attributes:
        ran: True after hooks have run.
    """

    def __init__(self, saved: SavedStates, destination: Destination) -> None:
        self.ran = False
        self._saved = saved
        self._destination = destination
        self._mode = _WithoutValues()
        self._computed: dict[TensorKey, torch.Tensor] = {}

    def run(self, state_name: str, scan: ModuleScan, *, strict: bool) -> None:
        """Run the hooks of one state's modules.

        Args:
            state_name: name of the state.
            scan: its modules.
            strict: True if the load is strict about the state.

        Raises:
            IncompatibleCheckpointError: a hook raises an error.
        """
        hooked = [s for s in scan.modules if any(any(_hooks_of(m, wrappers=False)) for m in s.module.modules())]
        made = {t.fqn for t in scan.tensors if t.hook_entry is not None}
        if not hooked or (made and all(self._saved.find(state_name, (t.fqn, *t.aliases)) for t in scan.tensors)):
            return  # load_state_dict runs the hooks: it takes what hooks of state_dict have made
        for scanned in hooked:
            run = _Run(state_name, scanned, self._saved, self._mode)
            run.load(scanned.module, run.entries, "", "")
            self._carry_over(state_name, run, made, strict=strict)
            self.ran = True

    def _carry_over(self, state_name: str, run: _Run, made: set[str], *, strict: bool) -> None:
        """Tell the checkpoint and the plan what the hooks of one module have changed; `made` are names of other hooks."""
        found: dict[str, SavedTensor | None] = {}
        taken = set[TensorKey]()
        for name in run.final.keys() - made:
            value = run.final[name]
            if (saved := self._mode.saved(value)) is not None:
                taken.add(saved.key)
            elif isinstance(value, torch.Tensor):
                key = TensorKey(state_name, name, _SLOT)
                self._computed[key] = value
                saved = SavedTensor(key, dtype_name(value.dtype), tuple(value.shape))
            elif value is not None:
                raise _error(state_name, f"gives {name} a value that is no tensor: {value!r:.100}")
            if saved != run.shown.get(name):
                found[name] = saved
        lacking = [name for name, value in run.final.items() if value is None and name not in made]
        for hook in run.skipped:
            if strict and lacking:
                raise _error(state_name, f"needs values, and {lacking[0]} is missing if it is not run", hook)
            self._destination.notes.append(str(_error(state_name, "was not run, because it needs values", hook)))
        self._saved.substitute(state_name, found)
        self._destination.recognized.update({saved.key for saved in run.shown.values()} - run.unexpected - taken)
        self._destination.missing += [str(TensorKey(state_name, name)) for name in run.missing]

    def fill(self) -> None:
        """Plan to compute what hooks compute. Call it once, when all else is planned."""
        wanted, computed = self._destination.wanted, self._computed
        boxes = list(each_box(shard for shard in wanted if shard.key in computed))
        wanted[:] = [shard for shard in wanted if shard.key not in computed]
        self._destination.recognized -= computed.keys()
        for box in boxes:
            value = computed[box.key]
            if value.shape != box.global_shape and _memory(value) != _memory(box.data):
                raise IncompatibleCheckpointError(
                    f"{box.key._replace(slot='')} has shape {tuple(value.shape)} after hooks before load_state_dict, and "
                    f"{box.global_shape} here"
                )
        needed = {_memory(computed[box.key]) for box in boxes if self._mode.lacks_values(computed[box.key])}
        calls: list[_HookCall] = []
        for call in reversed(self._mode.calls):
            if not needed.isdisjoint(call.made):
                calls.insert(0, call)
                needed |= call.taken
        loaded: dict[_Place, torch.Tensor] = {}
        for place, (tensor, found) in self._mode.sources.items():
            if _memory(tensor) in needed:
                saved = self._saved.stored(found.key)  # raises if the checkpoint cannot fill that much memory
                assert saved is not None, "hooks see tensors of the checkpoint"
                loaded[place] = torch.empty(saved.global_shape, dtype=dtype_named(saved.dtype), device="cpu")
                add_shards(wanted, saved.key, loaded[place])
        if boxes:
            self._destination.checks.insert(0, partial(self._compute, boxes, calls, loaded))

    @torch.no_grad()
    def _compute(self, boxes: Sequence[LiveShard], calls: Sequence[_HookCall], values: dict[_Place, Any]) -> None:
        """Run hooks again, and copy this rank's boxes of the results into the live tensors."""
        for call in calls:
            entries = OrderedDict((key, values.get(_place(value), value)) for key, value in call.before.items())
            try:
                call.hook(entries)
            except Exception as error:
                # The program's own hook may raise anything.
                raise _error(boxes[0].key.state, f"raised {type(error).__name__} with values: {error}") from error
            values.update((_place(value), entries[key]) for key, value in call.after.items())
        for box in boxes:
            value = values.get(_place(self._computed[box.key]), self._computed[box.key])
            if _memory(value) == _memory(box.data):
                continue  # a hook that gives a tensor its own value
            own: list[LiveShard] = []
            add_shards(own, box.key, value)
            for part in own:
                inside = [
                    slice(a - b, a - b + n) for a, b, n in zip(box.offsets, part.offsets, box.lengths, strict=True)
                ]
                box.data.copy_(part.data[tuple(inside)])


class _Run:
    """One run of the hooks of a module.

    Args:
        state_name: name of the state.
        scanned: the module.
        saved: the checkpoint.
        mode: context of the hooks.

    Attributes:
        shown: FQN -> the saved tensor that the hooks see under the key of that name.
        entries: tensors without values by the keys of the module's state_dict.
        final: FQN of each tensor of the module -> the value that it would load, None for nothing.
        missing: names that hooks miss.
        unexpected: keys of the saved tensors that no module takes.
        skipped: hooks that need values.
    """

    def __init__(self, state_name: str, scanned: ScannedModule, saved: SavedStates, mode: _WithoutValues) -> None:
        keys = {fqn: key for key, fqn in reversed(scanned.names.items())}
        self.shown = saved.tensors_of(state_name, keys)
        stand_ins = {found: mode.stand_in(found) for found in set(self.shown.values())}
        self.entries = {key: value for key, value in scanned.entries.items() if key.endswith("_extra_state")}
        prefixes = {bare: prefix for prefix, bare in scanned.prefixes.items()}
        for name, found in self.shown.items():
            self.entries[keys.get(name) or _key(name, prefixes)] = stand_ins[found]
        self.final: dict[str, Any] = {}
        self.missing: list[str] = []
        self.unexpected = set[TensorKey]()
        self.skipped: list[_Hook] = []
        self._state_name = state_name
        self._mode = mode

    def load(self, module: nn.Module, entries: dict[str, Any], prefix: str, bare: str) -> None:
        """Run the hooks of a module and of those inside of it, in the order and with the entries of load_state_dict.

        Args:
            module: the module.
            entries: entries of its state_dict, and of others at the top.
            prefix: prefix of its entries, wrappers included.
            bare: prefix of its names in the bare model.
        """
        for hook in list(_hooks_of(module)):
            entries = self._call(hook, module, entries, prefix)
        held = (*module._parameters.items(), *module._buffers.items())
        own = {name for name, value in held if value is not None} - module._non_persistent_buffers_set
        for key, value in entries.items():
            name, _, inner = key.removeprefix(prefix).partition(".")
            # FSDP1 keeps the tensors that it has flattened as attributes.
            if not inner and isinstance(module.__dict__.get(name), torch.Tensor):
                own.add(name)
            if name not in module._modules and name not in own and (saved := self._mode.saved(value)) is not None:
                self.unexpected.add(saved.key)
        self.final.update((bare + name, entries.get(prefix + name)) for name in own)
        for name, child, child_bare, _ in children(module, bare, known_wrappers()):
            inner = f"{prefix}{name}."
            self.load(child, {k: v for k, v in entries.items() if k.startswith(inner)}, inner, child_bare)

    def _call(self, hook: _Hook, module: nn.Module, entries: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Call a hook; return the entries after it."""
        metadata, unexpected, errors, after = (
            {"version": module._version},
            list[str](),
            list[str](),
            OrderedDict(entries),
        )
        written, self._mode.taken = dict(self._mode.written), set()
        try:
            with torch.no_grad(), self._mode:
                hook(after, prefix, metadata, True, self.missing, unexpected, errors)
        except Exception as error:
            # The program's own hook may raise anything.
            if not isinstance(error, _NeedsValuesError) and not any(text in str(error) for text in _NEEDS_VALUES):
                raise _error(self._state_name, f"raised {type(error).__name__}: {error}", hook) from error
            self._mode.written = written
            self.skipped.append(hook)
            return entries
        if errors or unexpected:
            raise _error(self._state_name, f"reported {(errors or unexpected)[0]}", hook)
        made = {*map(_memory, _tensors(after))} - {*map(_memory, _tensors(entries))}
        made |= self._mode.taken & self._mode.written.keys()

        def again(found: dict[str, Any]) -> None:
            hook(found, prefix, metadata, True, [], [], [])

        self._mode.calls.append(_HookCall(again, entries, dict(after), self._mode.taken, made))
        return after


def _hooks_of(module: nn.Module, *, wrappers: bool = True) -> Iterator[_Hook]:
    for hook in module._load_state_dict_pre_hooks.values():
        function = getattr(hook, "hook", hook)
        owner = str(getattr(function, "__module__", None) or type(function).__module__)
        if owner == _FSDP1 and wrappers:
            yield _add_fsdp1_prefix  # the hook gathers, too
        elif (
            not owner.startswith("torch.") or owner == _PARAMETRIZATIONS or (wrappers and owner == _CHECKPOINT_WRAPPER)
        ):
            yield hook


def _add_fsdp1_prefix(entries: dict[str, Any], prefix: str, *_: object) -> None:
    for key in [key for key in entries if key.startswith(prefix)]:
        entries[f"{prefix}_fsdp_wrapped_module.{key[len(prefix) :]}"] = entries.pop(key)


def _key(name: str, prefixes: dict[str, str]) -> str:
    """Return the key in state_dict of a name that no live tensor has: below the deepest module that it lies in."""
    bare = name
    while bare and bare not in prefixes:
        bare = bare[: bare.rstrip(".").rfind(".") + 1]
    return prefixes.get(bare, "") + name[len(bare) :]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _without_values(item: Any) -> Any:
    if not isinstance(item, torch.Tensor) or item.is_meta:
        return item
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")


def _memory(tensor: torch.Tensor) -> int:
    if lists_own_shards(type(tensor)):
        return id(tensor)
    return int(local_tensor(tensor).untyped_storage()._cdata)


def _place(value: Any) -> _Place:
    """Return a key that tensors of one place in memory have in common."""
    if not isinstance(value, torch.Tensor):
        return (id(value),)
    return (_memory(value), value.storage_offset(), value.shape, value.stride(), value.dtype)


def _error(state_name: str, what: str, hook: _Hook | None = None) -> IncompatibleCheckpointError:
    function = getattr(hook, "hook", hook)
    name = f" {getattr(function, '__qualname__', type(function).__name__)}" if hook is not None else ""
    return IncompatibleCheckpointError(
        f"{state_name}: a hook before load_state_dict{name} {what}; hooks of a load see keys, shapes and dtypes: "
        "load into a dict, and call load_state_dict with it"
    )
