"""Decode trees of plain values into values whose tensors a load still has to fill."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, listed
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor
from bytecheckpoint.frameworks.objects.capture import is_stateful
from bytecheckpoint.frameworks.objects.classes import HeldClasses
from bytecheckpoint.frameworks.tensors.allocation import empty_like_layout, is_writable
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.dtensors import is_dtensor, local_tensor
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name, dtype_named
from bytecheckpoint.frameworks.tensors.plain import is_tensor_like, lists_own_shards
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.values.codec import decode, leaves_with_paths
from bytecheckpoint.representation.values.numpy_values import array_of_tensor
from bytecheckpoint.representation.values.registry import registration_of, unregistered_error
from bytecheckpoint.representation.values.tree import parse_state_reference
from bytecheckpoint.representation.values.types import NATIVE_TYPES

__all__ = ["ValueReader", "holds_objects", "missing_tensor_error", "objects_without_value"]

_ABSENT = object()


def missing_tensor_error(state_name: str, name: str) -> CorruptCheckpointError:
    """Return the error for a tree that refers to a tensor that the catalog lacks."""
    return CorruptCheckpointError(f"the values of {state_name} refer to tensor {name!r}, which the catalog lacks")


class ValueReader:
    """Decodes trees of one state into values whose tensors are memory to fill.

    First `read` the trees, then `match_live` them to the live value, then `request_tensors`. After the bytes have
    arrived, `build` returns the finished value and changes the live one.

    Args:
        state_name: name of the state.
        saved: the checkpoint.
        destination: receives the plan.
        live: the live value. Classes of which it holds instances need no registration.
        lenient: read instances of other classes, too; the caller has to call `leave_out_unknown` then.
    """

    def __init__(
        self, state_name: str, saved: SavedStates, destination: Destination, live: object, *, lenient: bool = False
    ) -> None:
        self._state_name = state_name
        self._classes = HeldClasses(live, lenient=lenient, pickled=saved.is_foreign)
        self._saved = saved
        self._destination = destination
        # id of the empty tensor, or of its array -> (the saved tensor, the empty tensor, the destination of its elements).
        self._tensors: dict[int, tuple[SavedTensor, torch.Tensor, Any]] = {}
        self._unwanted: dict[int, tuple[SavedTensor, torch.Tensor, Any]] = {}  # as `_tensors`; keeps the ids in use
        self._by_content: set[TensorKey] = set()
        self._attributes: dict[int, tuple[bool, bool]] = {}  # by id: whether it is a parameter, and requires a gradient
        # Live containers and storages in use: one that is at two places receives one value only.
        self._used: set[int] = set()

    def read(self, blob: bytes, on_tensor: Callable[[str], object] | None = None) -> Any:
        """Decode `blob`.

        Args:
            blob: encoded value.
            on_tensor: name -> the object to put in a tensor's place; by default an empty one of the saved dtype and shape,
                on the CPU. Arrays are always such memory.
        """
        return decode(
            blob,
            on_tensor=on_tensor or self._empty_named,
            on_array=self._empty_array,
            on_unregistered=self._classes,
            on_attributes=self._note_attributes if on_tensor is None else None,
        )

    def _empty_array(self, name: str) -> object:
        empty = self._empty_named(name)
        array = array_of_tensor(empty)
        self._tensors[id(array)] = self._tensors.pop(id(empty))
        return array

    def _note_attributes(self, empty: Any, parameter: bool, requires_grad: bool) -> Any:
        if id(empty) not in self._tensors:
            raise CorruptCheckpointError(
                f"the values of {self._state_name} give attributes of a tensor to another value"
            )
        self._attributes[id(empty)] = parameter, requires_grad
        return empty

    def _empty_named(self, name: str) -> torch.Tensor:
        found = self.find(name)
        if found is None:
            raise missing_tensor_error(self._state_name, name)
        return self.empty(found)

    def find(self, name: str) -> SavedTensor | None:
        """Find the tensor that the values name, in an optimizer's by a `state_reference`."""
        found = self._saved.find_by_content(self._state_name, name)
        if found is not None:
            self._by_content.add(found.key)
            return found
        found = self._saved.stored(TensorKey(self._state_name, name))
        if found is None and name.partition(":")[0].isdecimal():
            found = self._saved.stored(TensorKey(self._state_name, *parse_state_reference(name)))
        return found

    def empty(self, found: SavedTensor) -> torch.Tensor:
        """Allocate a tensor for `found`."""
        # Untouched memory costs nothing, and `match_live` may still replace it by a live tensor.
        empty = torch.empty(found.global_shape, dtype=dtype_named(found.dtype), device="cpu")
        self._tensors[id(empty)] = (found, empty, empty)
        return empty

    def keys(self) -> set[TensorKey]:
        """Return the keys of all tensors read so far."""
        return {found.key for found, _, _ in self._tensors.values()}

    def without(self, value: Any, unwanted: Callable[[TensorKey], bool]) -> Any:
        """Return `value`, its dicts without the tensors that are unwanted."""
        for identity, (found, _, _) in list(self._tensors.items()):
            if unwanted(found.key):
                self._unwanted[identity] = self._tensors.pop(identity)
        return self._pruned(value) if self._unwanted else value

    def leave_out(self, value: Any) -> None:
        """Request no tensor of `value`, except those inside instances of registered classes."""
        for _, leaf in leaves_with_paths(value):
            if id(leaf) in self._tensors:
                self._unwanted[id(leaf)] = self._tensors.pop(id(leaf))

    def leave_out_unknown(self, value: Any, live: Any) -> None:
        """Remove the entries of a dict that hold instances of unknown classes, and note them.

        Raises:
            IncompatibleCheckpointError: `live` has such an entry, or the instance is inside another one.
        """
        unknown = self._classes.unknown
        for key in [key for key in value if key not in live] if unknown and isinstance(value, dict) else ():
            found = {id(leaf) for _, leaf in leaves_with_paths(value[key])} & unknown.keys()
            if names := sorted({unknown.pop(identity) for identity in found}):
                del value[key]
                self._destination.notes.append(
                    f"{self._state_name}: {key!r} is left out: {listed(names)} is not registered here"
                )
        if unknown:
            error = unregistered_error(next(iter(unknown.values())))
            raise IncompatibleCheckpointError(f"values of {self._state_name!r}: {error}")

    def with_numbers(self, value: Any, live: Any) -> Any:
        """Return `value`, its dicts with keys that are numbers where those of `live` are: DCP makes texts of them."""
        if is_stateful(live) and not is_tensor_like(live):
            own = self._classes.state_dict(live)
            if isinstance(live, Optimizer):  # a new one has no state yet
                numbers = [number for group in own["param_groups"] for number in group["params"]]
                own = {**own, "state": {number: {} for number in numbers}}
            live = own
        if isinstance(value, dict) and isinstance(live, dict):
            if live and {type(key) for key in live} == {int} and all(map(_is_number, value)):
                pairs = {int(key): item for key, item in value.items()}
                value.clear()
                value = collections.Counter() if isinstance(live, collections.Counter) else value
                dict.update(value, pairs)
            for key, item in value.items():
                value[key] = self.with_numbers(item, live.get(key))
        elif isinstance(value, list) and isinstance(live, list | tuple):
            value[: len(live)] = map(self.with_numbers, value, live)
        return value

    def _pruned(self, value: Any) -> Any:
        if isinstance(value, dict):
            for key in [key for key, item in value.items() if id(item) in self._unwanted]:
                del value[key]
            for item in value.values():
                self._pruned(item)
        elif isinstance(value, list | tuple):
            for item in value:
                self._pruned(item)
        return value

    def match_live(self, value: Any, live: Any, *, in_place: bool = True) -> None:
        """Fill the tensors of `value` in place where `live` has tensors that fit.

        With `in_place` False, only the distribution of live DTensors is used.
        """
        if isinstance(value, np.ndarray):
            return
        if id(value) in self._tensors and is_tensor_like(live):
            found, empty, _ = self._tensors[id(value)]
            if not isinstance(live, torch.Tensor) or lists_own_shards(type(live)):
                self._tensors[id(value)] = (found, empty, live)
                self._attributes.pop(id(value), None)  # a live tensor keeps its own
            elif _fits(live, found):
                if in_place:
                    if self._is_first_use(local_tensor(live).untyped_storage().data_ptr()):
                        self._tensors[id(value)] = (found, empty, live)
                        self._attributes.pop(id(value), None)  # a live tensor keeps its own
                elif is_dtensor(live):
                    self._tensors[id(value)] = (found, empty, empty_like_layout(live, live.dtype))
        elif is_stateful(live) and not is_tensor_like(live):
            own = self._classes.state_dict(live)
            _check_state(self._state_name, live, value, own, self._destination)
            self.match_live(value, own, in_place=False)
            if isinstance(live, Optimizer) and isinstance(value, dict):
                self._match_parameters(value, live)
        elif isinstance(value, dict) and isinstance(live, dict):
            for key, item in value.items():
                if key in live:
                    self.match_live(item, live[key], in_place=in_place)
        elif isinstance(value, list | tuple) and isinstance(live, list | tuple):
            for item, other in zip(value, live, strict=False):
                self.match_live(item, other, in_place=in_place)
        elif _is_plain_dataclass(value) and type(live) is type(value):
            for field in dataclasses.fields(value):
                self.match_live(getattr(value, field.name), getattr(live, field.name, None), in_place=in_place)

    def _match_parameters(self, value: dict[Any, Any], live: Optimizer) -> None:
        """Distribute state that the optimizer has not made yet as its parameters are, matched by position."""
        parameters = [parameter for group in live.param_groups for parameter in group["params"]]
        numbers = [number for group in value.get("param_groups", ()) for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=False):
            for item in value["state"].get(number, {}).values() if is_dtensor(parameter) else ():
                if id(item) not in self._tensors:
                    continue
                found, empty, target = self._tensors[id(item)]
                if target is empty and found.global_shape == tuple(parameter.shape):
                    made = empty_like_layout(parameter, dtype_named(found.dtype))
                    self._tensors[id(item)] = (found, empty, made)

    def request_tensors(self) -> None:
        """Add the elements of all tensors read so far to the destination."""
        for found, _, target in self._tensors.values():
            self._destination.recognized.add(found.key)
            add_shards(self._destination.wanted, found.key, target, by_content=found.key in self._by_content)

    def build(self, value: Any, live: Any, *, root: bool = False) -> Any:
        """Return the finished value: `live` itself, changed, where it can hold `value`, else a new object.

        At the root, any dict or list keeps its identity; further down only those of the saved type do, and dataclasses
        that are not frozen.
        """
        if id(value) in self._tensors and not isinstance(value, np.ndarray):
            return self._finished(value)
        if is_stateful(live) and not is_tensor_like(live):
            live.load_state_dict(self.build(value, None))
            return live
        if isinstance(value, dict):
            old = live if isinstance(live, dict) else {}
            pairs = {key: self.build(item, old.get(key)) for key, item in value.items()}
            for key, item in old.items():
                if key not in value and holds_objects(item):
                    pairs[key] = item
            result = live if isinstance(live, dict) and self._is_reusable(value, live, root) else value
            if isinstance(result, collections.defaultdict) and isinstance(value, collections.defaultdict):
                result.default_factory = value.default_factory
            result.clear()
            for key, item in pairs.items():  # not by `update`, which means something else to a Counter
                result[key] = item
            return result
        if type(value) is list or type(value) is tuple or _is_named_tuple(value):
            old_items = live if isinstance(live, list | tuple) else ()
            items = [self.build(item, old_items[i] if i < len(old_items) else None) for i, item in enumerate(value)]
            items += filter(holds_objects, old_items[len(items) :])
            if isinstance(value, tuple):
                return type(value)(*items) if _is_named_tuple(value) else tuple(items)
            target: list[Any] = live if isinstance(live, list) and self._is_reusable(value, live, root) else value
            target[:] = items
            return target
        if _is_plain_dataclass(value):
            same = type(live) is type(value) and not type(value).__dataclass_params__.frozen
            filled = live if same and self._is_first_use(id(live)) else value
            for field in dataclasses.fields(value):
                item = self.build(getattr(value, field.name), getattr(live, field.name, None) if same else None)
                object.__setattr__(filled, field.name, item)
            return filled
        return value

    def _finished(self, value: Any) -> Any:
        """Return the tensor that stands in the place of an empty one; a new one gets the attributes of the saved one."""
        target = self._tensors[id(value)][2]
        if (attributes := self._attributes.get(id(value))) is None:
            return target
        parameter, requires_grad = attributes
        requires_grad = requires_grad and (target.is_floating_point() or target.is_complex())
        return torch.nn.Parameter(target, requires_grad) if parameter else target.requires_grad_(requires_grad)

    def _is_reusable(self, value: Any, live: Any, root: bool) -> bool:
        return (root or type(live) is type(value)) and self._is_first_use(id(live))

    def _is_first_use(self, identity: int) -> bool:
        first = identity not in self._used
        self._used.add(identity)
        return first


def objects_without_value(value: Any, live: Any, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Yield the paths of the objects with load_state_dict, in dicts, lists and tuples, for which `value` has nothing."""
    if is_tensor_like(live):
        return
    if is_stateful(live):
        if value is _ABSENT:
            yield path
        return
    pairs: Iterable[tuple[object, Any]] = ()
    saved: dict[object, Any] = {}
    if isinstance(live, dict):
        pairs, saved = live.items(), value if isinstance(value, dict) else {}
    elif isinstance(live, list | tuple):
        pairs, saved = enumerate(live), dict(enumerate(value)) if isinstance(value, list | tuple) else {}
    for key, item in pairs:
        if type(item) not in NATIVE_TYPES:
            yield from objects_without_value(saved.get(key, _ABSENT), item, (*path, key))


def _is_number(key: object) -> bool:
    return type(key) is str and len(key) < 20 and key.isascii() and key.removeprefix("-").isdecimal()


def holds_objects(live: Any) -> bool:
    """Return whether a value is, or has in its dicts, lists and tuples, an object with load_state_dict."""
    return any(True for _ in objects_without_value(_ABSENT, live))


def _is_plain_dataclass(value: Any) -> bool:
    """Return whether `value` is stored by its fields without a registration, whose functions may do otherwise."""
    return (
        dataclasses.is_dataclass(value) and not isinstance(value, type | dict) and registration_of(type(value)) is None
    )


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _fits(live: torch.Tensor, found: SavedTensor) -> bool:
    return tuple(live.shape) == found.global_shape and dtype_name(live.dtype) == found.dtype and is_writable(live)


#: Attributes that depend on the version of torch.
_IGNORED = frozenset({"verbose"})


def _check_state(state_name: str, live: object, saved: object, own: object, destination: Destination) -> None:
    """Report to `destination` if an object would get a list of states, or a scheduler of torch another schedule's.

    Args:
        state_name: name of the state.
        live: any object.
        saved: its state in the checkpoint.
        own: its state_dict now.
        destination: plan that receives a mismatch if the saved state has settings that the scheduler lacks, or a note if
            it lacks some.
    """
    name = type(live).__name__
    if isinstance(saved, list) and isinstance(own, dict):
        destination.mismatches.append(
            f"{state_name}: the checkpoint has a list of {len(saved)} where the program has one {name}: give a list"
        )
    if not isinstance(live, LRScheduler) or not isinstance(saved, dict) or not isinstance(own, dict):
        return
    if more := _settings(saved) - _settings(own):
        destination.mismatches.append(
            f"{state_name}: the checkpoint has the state of another learning rate schedule than {name}, with "
            f"{_quoted(more)}"
        )
    elif less := _settings(own) - _settings(saved):
        destination.notes.append(f"{state_name}: {name} keeps {_quoted(less)}, which the checkpoint does not have")
    inner: list[Any] = list(getattr(live, "_schedulers", ()))  # of a SequentialLR or ChainedScheduler
    states, now = saved.get("_schedulers", ()), own.get("_schedulers", ())
    if len(inner) == len(now) != len(states):
        destination.mismatches.append(
            f"{state_name}: {name} joins {len(inner)} schedules here, and {len(states)} in the checkpoint"
        )
        return
    for schedule, state, current in zip(inner, states, now, strict=False):
        _check_state(state_name, schedule, state, current, destination)


def _settings(state: dict[Any, Any]) -> set[str]:
    return {key for key in state if isinstance(key, str) and not key.startswith("_")} - _IGNORED


def _quoted(names: set[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
