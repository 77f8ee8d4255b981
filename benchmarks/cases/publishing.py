"""Versions of weights that change a little: publish and follow beside a save and a load of all bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Arm
from benchmarks.state import Tensors, dense, size_of
from bytecheckpoint.publishing import Follower, Publisher

__all__ = ["publishing"]

#: Share of the elements that change between two versions, as PULSE reports of reinforcement learning in bfloat16.
_CHANGED = 0.01


def publishing(bench: Bench) -> None:
    """Measure a version of which one element of a hundred has changed, and what takes it over."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in dense(bench.options.nbytes).items()}
    engine, other = ({name: torch.zeros_like(tensor) for name, tensor in state.items()} for _ in range(2))
    plain, root = f"{bench.folder}/plain", f"{bench.folder}/versions"
    follower, steps = Follower(root), iter(range(1, 10_000))
    with Publisher(root, full_every=None) as publisher:

        def publish() -> None:
            _change(state)
            publisher.publish({"model": state}, next(steps)).result()

        def follow() -> None:
            follower.update({"model": engine})

        publish()
        follow()
        arms = [
            Arm("change the elements", lambda: _change(state)),
            Arm("change and save", _save(plain, state)),
            Arm("change and publish", publish),
            Arm("follow", follow, before=publish),
            Arm("load", lambda: bytecheckpoint.load(plain, {"model": other}, prepare_save=False) and None),
        ]
        bench.measure("publishing", size_of(state), arms)
    bench.clear_all()


def _change(state: Tensors) -> None:
    for tensor in state.values():
        tensor.view(torch.int16).bitwise_xor_((torch.rand(tensor.shape) < _CHANGED).to(torch.int16))


def _save(path: str, state: Tensors) -> Callable[[], None]:
    def run() -> None:
        _change(state)
        bytecheckpoint.save(path, {"model": state}).result()

    return run
