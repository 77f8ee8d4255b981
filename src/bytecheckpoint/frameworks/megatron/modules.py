"""Capture and load Megatron modules, in place."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from bytecheckpoint.errors import listed
from bytecheckpoint.frameworks.base import Destination, SavedStates
from bytecheckpoint.frameworks.extra_states import plan_extra_states
from bytecheckpoint.frameworks.megatron.layouts import ShardCollector
from bytecheckpoint.frameworks.megatron.module_scan import MegatronModuleScan, StateDictEntry
from bytecheckpoint.frameworks.megatron.requests import BoxRequests, clip_to_saved_rows
from bytecheckpoint.frameworks.modules import find_saved_parameter
from bytecheckpoint.frameworks.objects.capture import encode_value
from bytecheckpoint.frameworks.optimizers.master_weights import choose_saved_weight
from bytecheckpoint.frameworks.tensors.allocation import make_writable
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name
from bytecheckpoint.representation.shards import LiveState, TensorKey

__all__ = ["capture_megatron_modules", "load_megatron_modules"]

_log = logging.getLogger("bytecheckpoint")
_BYTES_IO = "__bytesio__"


def capture_megatron_modules(state_name: str, scan: MegatronModuleScan, with_masters: Collection[int]) -> LiveState:
    """Describe the shards and values of a scanned state.

    Args:
        state_name: name of the state.
        scan: the scan of its modules.
        with_masters: ids of the parameters that have master weights: a step changes them, also if they are frozen since.
    """
    state = LiveState(state_name, merged=True, entries=True)
    trained, frozen = ShardCollector(), ShardCollector()
    parameters: set[TensorKey] = set()
    for layout in scan.layouts:
        if layout.saved_by_other_stage:
            continue  # the stages may cut the tensor at different places
        tensor = layout.tensor
        collector = trained if tensor.requires_grad else frozen
        ranges = scan.current_ranges.get(id(tensor))
        for box in layout.boxes:
            key = box.key(state_name)
            if isinstance(tensor, nn.Parameter) and id(tensor) not in with_masters:
                parameters.add(key)
            if ranges is None:
                collector.add(box, key, tensor)
                continue
            flat = tensor.detach().view(-1)
            for first, count in ranges:
                collector.add(box, key, flat[first : first + count], first)
    state.shards += trained.shards()
    for shard in state.shards:
        shard.requires_grad = True
        shard.volatile = bool(scan.current_ranges)  # the next forward pass gathers
    not_trained = frozen.shards()
    for shard in not_trained:
        shard.frozen = shard.key in parameters
    state.shards += not_trained
    if scan.values:
        values = {name: _to_stored(entry.value) for name, entry in scan.values.items()}
        state.tree = encode_value(state_name, values, state.shards)
    return state


def load_megatron_modules(
    state_name: str,
    scan: MegatronModuleScan,
    saved: SavedStates,
    destination: Destination,
    master_state: str | None,
    with_masters: Collection[int],
) -> None:
    """Plan the load of a scanned state, in place.

    Args:
        state_name: name of the state.
        scan: the scan of its modules.
        saved: the checkpoint.
        destination: receives the plan.
        master_state: name of the state that holds these modules' master weights; None: unknown.
        with_masters: ids of the parameters whose master weights belong to an optimizer in the states, and are filled by
            its own load. Other master weights are filled here. Either way the weights may be rounded, since the exact
            values go into the master weights.
    """
    for handle in scan.pending_gathers:
        handle.wait()  # or the gather would write old values over the loaded ones
    loaded: list[tuple[StateDictEntry, Callable[[], Any]]] = []
    masters = BoxRequests(destination)
    without_master: list[str] = []
    for layout in scan.layouts:
        tensor = layout.tensor
        is_linked = id(tensor) not in with_masters and _has_linked_master(tensor)
        master = _linked_master(tensor, scan.stepped_ranges) if is_linked else None
        # The copies of an optimizer with offload are linked to no parameter.
        is_stepped = getattr(tensor, "main_param", None) is not None or bool(scan.stepped_ranges.get(id(tensor)))
        if is_linked and master is None and is_stepped:
            without_master.append(layout.names[0])
            is_linked = False  # nothing holds the exact value, so rounding needs a cast
        computed = scan.computed.get(id(layout))
        target = tensor if computed is None else torch.empty_like(tensor)
        for box in layout.boxes:
            found = find_saved_parameter(state_name, (box.names[0], box.names[1:]), saved, destination)
            if found is None:
                continue
            if master is not None:
                exact = choose_saved_weight(saved, found, box.names, dtype_name(master.tensor.dtype), master_state)
                masters.add(box, exact, master.tensor, master.start)
            found = choose_saved_weight(saved, found, box.names, dtype_name(target.dtype), master_state)
            shards = [box.shard(found.key, target)]
            if box.resizable:
                shards = clip_to_saved_rows(shards, box, found, destination)
            for shard in shards:
                shard.converts = is_linked or id(tensor) in with_masters
                if (step := make_writable(shard)) is not None:
                    destination.finish.append(step)
            destination.wanted += shards
        if computed is not None:
            loaded.append((computed, partial(_same, target)))
    masters.finish()
    if without_master:
        note = (
            f"{state_name}: the optimizer's master weights of {len(without_master)} parameters keep their values: "
            f"{listed(without_master)}: load the optimizer too, or call its reload_model_params()"
        )
        _log.warning("%s", note)
        destination.notes.append(note)
    loaded += _plan_values(state_name, scan, saved, destination)
    if loaded:
        destination.finish.append(partial(_load_entries, loaded))


def _load_entries(loaded: Sequence[tuple[StateDictEntry, Callable[[], Any]]]) -> None:
    """Call `load_state_dict` once per model, since each call walks the whole model."""
    models = {id(entry.model): entry.model for entry, _ in loaded}
    for model in models.values():
        values = {entry.state_key: build() for entry, build in loaded if entry.model is model}
        model.load_state_dict(values, strict=False)


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _plan_values(
    state_name: str, scan: MegatronModuleScan, saved: SavedStates, destination: Destination
) -> Iterator[tuple[StateDictEntry, Callable[[], Any]]]:
    """Plan the load of extra states; yield each entry with a function that builds its value."""
    # A module whose extra state is None takes none.
    values = {name: entry.value for name, entry in scan.values.items() if entry.value is not None}
    tensors = [name for layout in scan.layouts for name in layout.names]
    for name, build in plan_extra_states(state_name, values, tensors, saved, destination):
        yield scan.values[name], partial(_from_stored, build)


def _from_stored(build: Callable[[], Any]) -> Any:
    built = build()
    if isinstance(built, dict) and built.keys() == {_BYTES_IO}:
        return io.BytesIO(built[_BYTES_IO])
    return built


def _to_stored(value: Any) -> Any:
    # Transformer Engine keeps its scaling factors in a BytesIO.
    return {_BYTES_IO: value.getvalue()} if type(value) is io.BytesIO else value


class _LinkedMaster(NamedTuple):
    """This rank's master weights of one parameter.

    Attributes:
        tensor: the master weights.
        start: number of the flat range's first element in the parameter; None: the tensor has all elements.
    """

    tensor: torch.Tensor
    start: int | None


def _has_linked_master(parameter: torch.Tensor) -> bool:
    """Return whether the parameter has master weights on any rank."""
    attributes = vars(parameter)
    return attributes.get("main_param") is not None or bool(attributes.get("main_param_sharded", False))


def _linked_master(parameter: torch.Tensor, ranges: Mapping[int, Sequence[tuple[int, int]]]) -> _LinkedMaster | None:
    """Return this rank's master weights of a parameter; None if it has none here, or if their place is uncertain.

    Args:
        parameter: one that `has_linked_master`.
        ranges: id of a parameter -> (first, count) of the elements that this rank steps.
    """
    master = vars(parameter).get("main_param")
    if not isinstance(master, torch.Tensor):
        return None
    master = master.detach()
    if master.shape == parameter.shape and not vars(parameter).get("main_param_sharded", False):
        return _LinkedMaster(master, None)
    own = ranges.get(id(parameter), ())
    if len(own) != 1 or own[0][1] != master.numel():
        return None
    start, count = own[0]
    weights = parameter.detach().reshape(-1)[start : start + count]
    # A range of another place would have other values.
    same = torch.allclose(master.reshape(-1).to(weights.dtype), weights, rtol=0, atol=0, equal_nan=True)
    return _LinkedMaster(master.reshape(-1), start) if same else None
