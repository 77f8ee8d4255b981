"""Many small tensors: core time per tensor."""

from __future__ import annotations

import torch

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Arm
from benchmarks.peers import Peer
from benchmarks.state import Tensors, fresh, same, size_of, small

__all__ = ["small_tensors"]


def small_tensors(bench: Bench) -> None:
    """Measure saves and loads; extra["us_per_tensor"] is core time, extra["wall_us_per_tensor"] wall time."""
    state = small(bench.options.tensors)
    target = fresh(state)
    saves, loads, blocks = [], [], []
    waiting: list[object] = []

    def wait() -> None:
        while waiting:
            waiting.pop()()  # type: ignore[operator]

    for peer in bench.peers:
        folder = bench.folder / peer.name

        def save(peer: Peer = peer) -> None:
            peer.save(bench.folder / peer.name, state)

        def block(peer: Peer = peer) -> None:
            waiting.append(peer.save_async(bench.folder / peer.name, state))

        def load(peer: Peer = peer) -> None:
            peer.load(bench.folder / peer.name, target)

        clear = lambda p=peer: bench.clear(p.name)  # noqa: E731
        saves.append(Arm(peer.name, save, clear))  # type: ignore[arg-type]
        if peer.asynchronous:
            blocks.append(Arm(peer.name, block, clear, wait))  # type: ignore[arg-type]
        peer.save(folder, state)
        peer.load(folder, target)
        assert same(state, target), f"{peer.name} loads other values than it saved"
        loads.append(Arm(peer.name, load))

    module, optimizer = trained(state)
    states = {"model": module, "optimizer": optimizer}
    path = str(bench.folder / "module")
    saves.append(Arm("bytecheckpoint module + AdamW (x4)", lambda: _quiet(bytecheckpoint.save(path, states))))
    bytecheckpoint.save(path, states)
    loads.append(Arm("bytecheckpoint module + AdamW (x4)", lambda: _quiet(bytecheckpoint.load(path, states))))
    for name, arms in (("save", saves), ("async blocking", blocks), ("load", loads)):
        if name == "load":
            for peer in bench.peers:
                bench.clear(peer.name)
                peer.save(bench.folder / peer.name, state)
        for result in bench.measure(f"small tensors: {name}", size_of(state), arms):
            # A parameter, two moments and a step each.
            count = len(state) * (4 if "AdamW" in result.arm else 1)
            result.extra["us_per_tensor"] = [c / count * 1e6 for c in result.core]
            result.extra["wall_us_per_tensor"] = [w / count * 1e6 for w in result.wall]
    bench.clear_all()


def _quiet(_: object) -> None:
    return None


def trained(state: Tensors) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a module of these parameters, and an optimizer that has made a step."""
    module = torch.nn.Module()
    for index, tensor in enumerate(state.values()):
        module.register_parameter(f"p{index}", torch.nn.Parameter(tensor.clone()))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return module, optimizer
