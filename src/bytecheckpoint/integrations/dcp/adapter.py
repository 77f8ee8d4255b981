"""Turn the state_dicts of torch.distributed.checkpoint (DCP) into shards, and fill the tensors that its plans name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bytecheckpoint.formats.optimizer_dicts import names_of_parameters, nested_optimizer
from bytecheckpoint.frameworks.base import Destination, SavedStates, Strict, UserNames
from bytecheckpoint.frameworks.native import NativeFramework
from bytecheckpoint.frameworks.objects.capture import STATES_BY_NAME
from bytecheckpoint.frameworks.objects.reader import missing_tensor_error
from bytecheckpoint.frameworks.optimizer_tree import comparable_bytes, pack_tensors
from bytecheckpoint.frameworks.registry import register
from bytecheckpoint.frameworks.tensors.allocation import make_writable
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.plain import is_tensor_like
from bytecheckpoint.representation.shards import LiveState, TensorKey
from bytecheckpoint.representation.values.codec import encode, key_of_path
from bytecheckpoint.representation.values.tree import state_reference

__all__ = ["DCP", "TensorParts"]

#: Name of the adapter, for `framework=`.
DCP = "dcp"


@dataclass(frozen=True, slots=True)
class TensorParts:
    """The parts of one tensor that this rank saves, or that a plan of DCP reads on it.

    Attributes:
        shape: shape of the whole tensor.
        parts: offsets and live memory of each part.
    """

    shape: Sequence[int]
    parts: list[tuple[Sequence[int], torch.Tensor]]

    def __bytecheckpoint_shards__(self) -> Iterator[tuple[Sequence[int], Sequence[int], torch.Tensor]]:
        """Yield (global shape, offsets, memory) of each part."""
        return ((self.shape, offsets, tensor) for offsets, tensor in self.parts)


class DcpFramework(NativeFramework):
    """The adapter of state_dicts as DCP gets them; `Framework` documents the public methods.

    A save gets nested values by state; those with the form of an optimizer's state_dict are saved as an optimizer is. A
    load gets one state, of pairs of a key and `TensorParts`; tied tensors have one key.
    """

    name = DCP

    def matches(self, states: Mapping[str, object]) -> bool:
        """Return False: only `Writer` and `Reader` ask for this adapter, by its name."""
        return False

    def _capture_other(self, state_name: str, value: object) -> LiveState:
        if (optimizer := _capture_optimizer(state_name, value)) is not None:
            return optimizer
        state = super()._capture_other(state_name, value)
        whole = [shard for shard in state.shards if shard.lengths == shard.global_shape]
        if len(whole) < len(state.shards):  # beside parts of parameters, these are buffers
            for shard in whole:
                shard.from_lowest = not shard.by_content
        return state

    def destination(
        self,
        states: MutableMapping[str, object],
        saved: SavedStates,
        *,
        strict: Strict = True,
        names: UserNames | None = None,
    ) -> Destination:
        """Plan a load into the parts of a plan of DCP."""
        destination = Destination()
        wanted: Sequence[tuple[TensorKey, TensorParts]] = states[DCP]  # type: ignore[assignment]
        for key, tensor in wanted:
            found = None if key.slot else saved.find_by_content(key.state, key.fqn)
            if (found := found or saved.stored(key)) is None:
                raise missing_tensor_error(key.state, key.fqn)
            first = len(destination.wanted)
            add_shards(destination.wanted, found.key, tensor, by_content=key.state not in STATES_BY_NAME)
            destination.recognized.add(found.key)
            steps = map(make_writable, destination.wanted[first:])
            destination.finish += [step for step in steps if step is not None]
        return destination


register(DCP, DcpFramework)


def _capture_optimizer(state_name: str, value: Any) -> LiveState | None:
    """Describe an optimizer's state_dict as the optimizer is described; None if the value is none, by parameters' names."""
    tree = nested_optimizer(value, lambda settings: comparable_bytes(pack_tensors(settings)))
    if not isinstance(tree, dict) or "param_groups" not in tree:
        return None
    slots_of: Any = tree.get("state", {})
    names = names_of_parameters({"state": slots_of, "param_groups": tree["param_groups"]})
    if names is None or any(name.startswith("#") for name in names.values()) or tree.keys() - {"state", "param_groups"}:
        return None
    state, plain = LiveState(state_name, merged=True), dict[str, dict[str, Any]]()
    if slots_of.keys() - names.keys():
        return None
    for parameter, slots in slots_of.items():
        for slot, item in slots.items():
            if is_tensor_like(item):
                add_shards(state.shards, TensorKey(state_name, names[parameter], slot), item)
            else:
                plain.setdefault(names[parameter], {})[slot] = item
    groups = [{**pack_tensors(group), "params": [names[p] for p in group["params"]]} for group in tree["param_groups"]]
    found = {
        "groups": groups, "state": plain, "aliases": {}, "globals": [{}], "optimizers": [], "complete": True,
    }  # fmt: skip

    def add_nested(path: tuple[object, ...], tensor: Any) -> str:
        fqn, slot = str(path[1]), key_of_path(path[2:])
        add_shards(state.shards, TensorKey(state_name, fqn, slot), tensor)
        return state_reference(fqn, slot)

    state.tree = encode(found, on_tensor=add_nested)
    return state
