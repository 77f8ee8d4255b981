"""Capture and load states in streams (`SupportsStreams`), any of which any rank may load."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.base import Destination, SavedStates, SupportsStreams
from bytecheckpoint.frameworks.objects.capture import encode_value
from bytecheckpoint.frameworks.objects.reader import missing_tensor_error
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.dtypes import dtype_named
from bytecheckpoint.frameworks.tensors.plain import is_plain
from bytecheckpoint.representation.shards import LiveState, LiveStream, TensorKey
from bytecheckpoint.representation.values.codec import decode

__all__ = ["capture_streams", "load_streams", "refuse_streams"]

_PREFIX = "streams."


def capture_streams(state_name: str, live: SupportsStreams) -> LiveState:
    """Describe the shared state and the streams that this rank saves.

    Raises:
        UsageError: a number is not one of a stream, or something cannot be stored; the message names its place.
    """
    count, take = live.stream_count, getattr(live, "stream_snapshots", None)
    found = {number: (state, None) for number, state in live.stream_states().items()} if take is None else take()
    if count < 1:
        raise UsageError(f"{state_name}: stream_count is {count}; a loader has at least one stream")
    state = LiveState(state_name, merged=True, stream_count=count)
    if found:  # a rank without streams knows nothing that the others do not
        state.tree = _encoded(state_name, live.shared_state(), None)
    for number, (value, fill) in sorted(found.items(), key=itemgetter(0)):
        if type(number) is not int or not 0 <= number < count:
            raise UsageError(f"{state_name}: {number!r} is not the number of one of {count} streams: an int from 0 on")
        part = LiveStream(f"{_PREFIX}{number}", b"", fill=fill)
        part.tree = _encoded(state_name, value, part)
        state.streams.append(part)
    return state


def _encoded(state_name: str, value: Any, part: LiveStream | None) -> bytes:
    """Encode the state of a stream, whose shards go to `part`, or without one the shared state, which has no tensors."""

    def check(name: str, tensor: Any) -> None:
        if part is None or not is_plain(tensor):
            where = "in the shared state" if part is None else "other than a plain one"
            raise UsageError(f"{state_name}/{name} is a tensor {where}: put plain tensors into the states of streams")

    shards, prefix = ([], ()) if part is None else (part.shards, (part.name,))
    return encode_value(state_name, value, shards, arrays=part is not None, prefix=prefix, check=check)


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
    tensors: dict[TensorKey, torch.Tensor] = {}

    def named(name: str) -> torch.Tensor:
        if (key := TensorKey(state_name, name)) not in tensors:
            raise missing_tensor_error(state_name, name)
        return tensors[key]

    shared = decode(blob, on_tensor=named)  # there is no tensor yet, so one in the shared state is an error
    chosen = live.choose_streams(shared, sorted(parts))
    for number in chosen:
        if number not in parts:
            raise IncompatibleCheckpointError(
                f"the checkpoint lacks stream {number} of {state_name}; use another checkpoint"
            )
    wanted = {parts[number].key: parts[number] for number in chosen}
    prefixes = {f"{_PREFIX}{number}" for number in chosen}
    for key in saved.keys(state_name):
        if ".".join(key.fqn.split(".", 2)[:2]) in prefixes:
            tensor = saved.find_by_content(state_name, key.fqn)
            assert tensor is not None
            wanted[key] = tensor
    for key, found in wanted.items():
        tensors[key] = torch.empty(found.global_shape, dtype=dtype_named(found.dtype))
        add_shards(destination.wanted, key, tensors[key], by_content=True)
        destination.recognized.add(key)
    states: dict[int, Any] = {}

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
    """Refuse to load streams into an object without streams: it would get the shared state only.

    Raises:
        IncompatibleCheckpointError: the checkpoint holds the state in streams.
    """
    if parts := saved.streams(state_name):
        raise IncompatibleCheckpointError(
            f"the checkpoint holds {len(parts)} streams of {state_name}, which a {type(live).__name__} cannot take: "
            "load them into a data loader like the one that saved them (SupportsStreams)"
        )
