"""Extra states of modules: a load finds them by name in the trees of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from bytecheckpoint.frameworks.base import Destination, SavedStates
from bytecheckpoint.frameworks.objects.reader import ValueReader
from bytecheckpoint.representation.shards import TensorKey

__all__ = ["plan_extra_states"]


def plan_extra_states(
    state_name: str,
    live: Mapping[str, object],
    tensors: Collection[str],
    saved: SavedStates,
    destination: Destination,
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Plan the load of the extra states of one state; yield the name of each with a function that builds its value.

    Args:
        state_name: name of the state.
        live: name -> the live value. Classes of which it holds instances need no registration.
        tensors: names of this rank's parameters and buffers, which tell what trees to read first.
        saved: the checkpoint.
        destination: receives the plan.
    """
    wanted = {saved_name: name for name in live for saved_name in saved.names_of(state_name, (name,))}
    destination.extra_states.setdefault(state_name, set()).update(wanted)
    if not wanted:
        return
    reader = ValueReader(state_name, saved, destination, list(live.values()))
    found: dict[str, Any] = {}
    # The trees of the ranks that saved these tensors come first: they hold the values of the same layers.
    for blob in saved.trees_about(state_name, tensors):
        tree = reader.read(blob)
        if isinstance(tree, dict):
            found = {**tree, **found}
        if wanted.keys() <= found.keys():
            break
    reader.leave_out([value for name, value in found.items() if name not in wanted])
    reader.request_tensors()
    for saved_name, name in wanted.items():
        if saved_name in found:
            yield name, partial(reader.build, found[saved_name], None)
        else:
            destination.missing.append(str(TensorKey(state_name, name)))
