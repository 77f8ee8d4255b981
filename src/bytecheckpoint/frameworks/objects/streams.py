"""Capture and load states in streams (`SupportsStreams`): each is a part of its own, for whichever rank asks for it."""

from __future__ import annotations

from typing import Any

import torch

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor, SupportsStreams
from bytecheckpoint.frameworks.objects.capture import TensorExtractor, tensor_name
from bytecheckpoint.frameworks.objects.reader import missing_tensor_error
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.dtensors import is_dtensor
from bytecheckpoint.frameworks.tensors.dtypes import dtype_named
from bytecheckpoint.frameworks.tensors.plain import lists_own_shards
from bytecheckpoint.representation.shards import LiveState, LiveStream, TensorKey
from bytecheckpoint.representation.values.codec import decode, encode

__all__ = ["capture_streams", "load_streams", "refuse_streams"]

_PREFIX = "streams."


def capture_streams(state_name: str, live: SupportsStreams) -> LiveState:
    """Describe the shared state and the streams that this rank saves.

    Raises:
        UsageError: a number is not one of a stream, or something cannot be stored; the message names its place.
    """
    count, states = live.stream_count, live.stream_states()
    if count < 1:
        raise UsageError(f"{state_name}: stream_count is {count}; a loader has at least one stream")
    state = LiveState(state_name, merged=True, stream_count=count)
    if states:  # a rank without streams knows nothing that the others do not
        state.tree = _encoded(state_name, live.shared_state(), None)
    for number, value in sorted(states.items()):
        if type(number) is not int or not 0 <= number < count:
            raise UsageError(f"{state_name}: {number!r} is not the number of one of {count} streams: an int from 0 on")
        part = LiveStream(f"{_PREFIX}{number}", b"")
        part.tree = _encoded(state_name, value, part)
        state.streams.append(part)
    return state


def _encoded(state_name: str, value: Any, part: LiveStream | None) -> bytes:
    """Encode a state, and append the shards of its tensors to `part`; without one, it may hold none."""
    taken: dict[str, Any] = {}

    def add(path: tuple[object, ...], tensor: Any) -> str:
        name = tensor_name((*(() if part is None else (part.name,)), *(path or ("value",))), taken)
        if part is None or not isinstance(tensor, torch.Tensor) or is_dtensor(tensor) or lists_own_shards(type(tensor)):
            where = "in the shared state" if part is None else "other than a plain one"
            raise UsageError(f"{state_name}/{name} is a tensor {where}: put plain tensors into the states of streams")
        taken[name] = tensor
        add_shards(part.shards, TensorKey(state_name, name), tensor, by_content=True)
        return name

    try:
        return encode(TensorExtractor(add).extract(value), on_tensor=add)
    except UsageError as error:
        place = f"{state_name}/" if part is None else f"{state_name}/{part.name}."
        raise (error if str(error).startswith(f"{state_name}/") else UsageError(f"{place}{error}")) from None


def load_streams(state_name: str, live: SupportsStreams, saved: SavedStates, destination: Destination) -> None:
    """Plan the load of the streams that `live` chooses from those of all ranks."""
    if state_name not in saved.states():
        destination.missing.append(state_name)
        return
    parts = {int(part.key.fqn.removeprefix(_PREFIX)): part for part in saved.streams(state_name)}
    blob = saved.tree(state_name)
    if blob is None or not parts:
        raise IncompatibleCheckpointError(
            f"the checkpoint's {state_name} is not in streams, so a {type(live).__name__} cannot go on from it: load "
            "it into a loader of the kind that saved it"
        )
    shared = decode(blob, on_tensor=lambda name: _raise(missing_tensor_error(state_name, name)))
    chosen = live.choose_streams(shared, sorted(parts))
    for number in chosen:
        if number not in parts:
            raise IncompatibleCheckpointError(
                f"the checkpoint lacks stream {number} of {state_name}; use another checkpoint"
            )
    tensors = _request({part.key: part for part in (parts[n] for n in chosen)}, destination)
    prefixes = {f"{_PREFIX}{number}" for number in chosen}
    wanted = {}
    for key in saved.keys(state_name):
        if ".".join(key.fqn.split(".", 2)[:2]) in prefixes:
            found = saved.find_by_content(state_name, key.fqn)
            assert found is not None
            wanted[key] = found
    tensors |= _request(wanted, destination)
    states: dict[int, Any] = {}

    def named(name: str) -> torch.Tensor:
        if (key := TensorKey(state_name, name)) not in tensors:
            raise missing_tensor_error(state_name, name)
        return tensors[key]

    def check() -> None:
        for number in chosen:
            states[number] = decode(tensors[parts[number].key].numpy().tobytes(), on_tensor=named)

    destination.checks.append(check)
    if not getattr(live, "takes_all_streams", True):
        destination.recognized.update([*saved.keys(state_name), *(part.key for part in parts.values())])

    def install() -> None:
        destination.notes += [f"{state_name}: {note}" for note in live.load_streams(shared, states) or ()]

    destination.finish.append(install)


def refuse_streams(state_name: str, live: object, saved: SavedStates) -> None:
    """Refuse to load streams into an object that knows none: it would get what is beside them, and nothing else.

    Raises:
        IncompatibleCheckpointError: the checkpoint holds the state in streams.
    """
    if parts := saved.streams(state_name):
        raise IncompatibleCheckpointError(
            f"the checkpoint holds {len(parts)} streams of {state_name}, which a {type(live).__name__} cannot take: "
            "load them into a data loader like the one that saved them (SupportsStreams)"
        )


def _request(found: dict[TensorKey, SavedTensor], destination: Destination) -> dict[TensorKey, torch.Tensor]:
    """Ask for tensors, and return the memory that they will fill."""
    tensors = {}
    for key, tensor in found.items():
        tensors[key] = torch.empty(tensor.global_shape, dtype=dtype_named(tensor.dtype))
        add_shards(destination.wanted, key, tensors[key], by_content=True)
        destination.recognized.add(key)
    return tensors


def _raise(error: Exception) -> Any:
    raise error
