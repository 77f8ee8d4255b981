"""A record of a rank's communication over process groups, and a check that checkpoints communicate nothing there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import bytecheckpoint
from bytecheckpoint.frameworks.base import Framework

__all__ = ["check_no_communication"]

_CALLS = [
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "gather", "gather_object", "all_to_all"),
    *("all_to_all_single", "barrier", "send", "recv", "isend", "irecv", "monitored_barrier", "new_group"),
]


class _Collectives(TorchDispatchMode):
    """Records every operation that reaches a process group in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded_communication() -> Iterator[list[str]]:
    """Record communication through torch.distributed: in this thread by operation, in all threads by call."""
    found: list[str] = []

    def record(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found.append(name)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, _Collectives() as mode:
        for name in _CALLS:
            original = getattr(dist, name)
            patch.setattr(dist, name, partial(record, name, original))
            patch.setattr(dist.distributed_c10d, name, partial(record, name, original))
        yield found
    found += mode.found


def check_no_communication(
    framework: Framework, start: Callable[[], Any], folder: str, peer: Callable[[Any], Any] | None
) -> None:
    """Fail if a capture, a save or a load communicates over process groups.

    Args:
        framework: the adapter whose capture is checked.
        start: starts a training run, which has `train` and `states`.
        folder: folder for the checkpoints.
        peer: gathers the state of a run in the framework's own way, which communicates; None: it has none that does.
    """
    run = start()
    run.train(1)
    bytecheckpoint.save(f"{folder}/first", run.states())  # makes connections of its own
    found = {}
    with recorded_communication() as found["capture"]:
        framework.capture(run.states())
    with recorded_communication() as found["save"]:
        bytecheckpoint.save(f"{folder}/second", run.states())
    run.train(1)
    with recorded_communication() as found["async"]:
        bytecheckpoint.save(f"{folder}/third", run.states(), async_checkpoint=True).result(60)
    fresh = start()
    with recorded_communication() as found["load"]:
        bytecheckpoint.load(f"{folder}/third", fresh.states())
    assert found == {"capture": [], "save": [], "async": [], "load": []}, found
    if peer is not None:
        with recorded_communication() as of_peer:
            peer(run)
        assert of_peer, "the recorder records"
