"""A save at the beginning of ten training steps: what its call, the fence and the copy beside the steps take."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Arm, Extras
from benchmarks.peers import Peer

__all__ = ["lazy"]

_STEPS = 10
_DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
#: Starts a save; returns the function that waits for its end, which returns its report or something else.
_Save = Callable[[], Callable[[], Any]]


class _Job:
    """Layers of one size, trained by AdamW: three tensors of a weight's size for each layer, and one of a number.

    Args:
        nbytes: bytes of the state.
        layers: number of the layers.
        reads: True to read the loss in each step, for which the host waits on a device.

    Attributes:
        before_step: function that the job calls before each step of the optimizer.
        waited: seconds that these calls have taken.
    """

    def __init__(self, nbytes: int, layers: int, *, reads: bool = False) -> None:
        self._reads = reads
        width = max(int((nbytes / 12 / layers) ** 0.5), 4)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(_DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        # Forward and backward shall take longer than the copy of the state.
        self.rows = torch.rand(min(width, 128) if _DEVICE.type == "cpu" else 4096, width, device=_DEVICE)
        self.before_step: Callable[[], object] = lambda: None
        self.waited = 0.0
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(self.rows).square().mean()
        loss.backward()
        if self._reads:
            loss.item()
        begin = time.perf_counter()
        self.before_step()
        self.waited += time.perf_counter() - begin
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors in one flat dict, for peers."""
        found = {name: value.detach() for name, value in self.model.state_dict().items()}
        for number, state in enumerate(self.optimizer.state.values()):
            found |= {f"optimizer.{number}.{slot}": value for slot, value in state.items()}
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


def lazy(bench: Bench) -> None:
    """Measure the time to the end of the save and of ten steps; extra has the parts that the training sees.

    extra["call"] is the call of `save`, extra["fence"] the wait before the next step of the optimizer, extra["window"] the
    ten steps with both.
    """
    large = bench.options.nbytes
    sizes = [(large, 24)] if bench.options.short else [(large // 4, 24), (large, 24), (large, 225), (large // 8, 2500)]
    jobs = [(nbytes, layers, reads) for nbytes, layers in sizes for reads in (_DEVICE.type != "cpu", False)]
    for nbytes, layers, reads in dict.fromkeys(jobs):
        job = _Job(nbytes, layers, reads=reads)
        path = bench.folder / "lazy"

        saves: dict[str, _Save | None] = {"no save": None}
        for staging in ("blocking", "background"):
            saves[f"bytecheckpoint {staging}"] = partial(_save, path, job, staging)
        for peer in bench.peers:
            if peer.name != "bytecheckpoint" and peer.asynchronous:
                for way in (peer, *peer.async_ways()):
                    saves[way.name] = partial(_save_by_peer, way, path, job)
        place = "" if _DEVICE.type == "cpu" else f", {_DEVICE.type}"
        case = f"10 steps and a save: {nbytes >> 20} MiB, {4 * layers} tensors{place}{', reads' if reads else ''}"
        arms = [
            Arm(name, partial(_window, job, save), after=partial(bench.clear, "lazy")) for name, save in saves.items()
        ]
        bench.measure(case, job.nbytes, arms)
    bench.clear_all()


def _save(path: Path, job: _Job, staging: str) -> Callable[[], Any]:
    states = {"model": job.model, "optimizer": job.optimizer}
    return bytecheckpoint.save(path, states, async_checkpoint=True, staging=staging).result


def _save_by_peer(peer: Peer, path: Path, job: _Job) -> Callable[[], Any]:
    job.before_step = peer.wait_until_staged
    return peer.save_async(path, job.tensors())


def _window(job: _Job, save: _Save | None) -> Extras:
    """Save, train for ten steps, and wait for the save."""
    job.waited = 0.0
    _synchronize()
    begin = time.perf_counter()
    wait = save() if save is not None else None
    call = time.perf_counter() - begin
    for _ in range(_STEPS):
        job.step()
    _synchronize()
    window = time.perf_counter() - begin
    job.before_step = lambda: None
    report = wait() if wait is not None else None
    return {"call": call, "fence": getattr(report, "fence_seconds", job.waited), "window": window}


def _synchronize() -> None:
    if _DEVICE.type != "cpu":
        torch.accelerator.synchronize()
