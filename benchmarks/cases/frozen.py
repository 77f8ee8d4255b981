"""A step of a fine-tuning: frozen parameters, and a fiftieth of their bytes trained."""

from __future__ import annotations

import itertools

import torch

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Arm, Extras

__all__ = ["frozen"]


def frozen(bench: Bench) -> None:
    """Measure full and incremental saves to new paths; extra["written"] is a multiple of the trained bytes."""
    count = bench.options.nbytes // 4 // 64
    base = [torch.nn.Parameter(torch.rand(count), requires_grad=False) for _ in range(64)]
    trained = [torch.nn.Parameter(torch.rand(count // 150)) for _ in range(64)]  # a third of them, beside their moments
    model, optimizer = torch.nn.ParameterList([*base, *trained]), torch.optim.AdamW(trained)
    states = {"model": model, "optimizer": optimizer}
    trained_bytes = 3 * sum(parameter.nbytes for parameter in trained)
    number = itertools.count()

    def step() -> None:
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    def save(incremental: bool) -> Extras:
        path = bench.folder / f"step_{next(number)}"
        report = bytecheckpoint.save(path, states, incremental=incremental).result()
        return {"written": report.bytes_written / trained_bytes}

    step()
    save(True)
    arms = [Arm("bytecheckpoint", lambda: save(False), step), Arm("incremental", lambda: save(True), step)]
    bench.measure("frozen: save", sum(parameter.nbytes for parameter in base) + trained_bytes, arms)
    bench.clear_all()
