"""States of one rank, in which every value encodes its step, tensor and coordinate."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import bytecheckpoint

ROWS = 24
COLUMNS = 40


def whole(step: int, tensor: int, rows: int = ROWS) -> torch.Tensor:
    """Return tensor number `tensor` at `step`: float64, shape [rows, COLUMNS]; no value occurs twice anywhere."""
    numbers = torch.arange(rows * COLUMNS, dtype=torch.float64).reshape(rows, COLUMNS)
    return numbers + 1e6 * tensor + 1e9 * step


class Rows:
    """One rank's rows of a tensor; the object declares its boxes itself."""

    def __init__(self, rank: int, world: int, step: int | None, tensor: int, rows: int = ROWS) -> None:
        bounds = [rows * r // world for r in range(world + 1)]
        self.shape = (rows, COLUMNS)
        self.offset = bounds[rank]
        count = bounds[rank + 1] - bounds[rank]
        data = torch.full((count, COLUMNS), -1.0, dtype=torch.float64)
        if step is not None:
            data = whole(step, tensor, rows)[self.offset : self.offset + count].clone()
        self.data = torch.nn.Parameter(data)  # which a save in the background copies behind the call

    def __bytecheckpoint_shards__(self) -> Iterable[tuple[Sequence[int], Sequence[int], torch.Tensor]]:
        yield self.shape, (self.offset, 0), self.data


def states(rank: int = 0, world: int = 1, step: int | None = None, rows: int = ROWS) -> dict[str, Any]:
    """Return one rank's states: sharded and replicated tensors, shared and own values. Step None: a blank destination."""
    blank = step is None
    bias = torch.full((COLUMNS,), -1.0, dtype=torch.float64) if blank else whole(step or 0, 2, 1)[0].clone()
    return {
        "model": {
            "w": Rows(rank, world, step, 0, rows),
            "v": Rows(rank, world, step, 1, rows),
            "bias": bias,
        },
        "optimizer": {"momentum": Rows(rank, world, step, 3, rows), "lr": 0.0 if blank else 0.5 + (step or 0)},
        "extra_states": {} if blank else {"step": step, "own": torch.full((8,), 100.0 * (step or 0) + rank)},
    }


def step_of(loaded: dict[str, Any]) -> int:
    """Return the step that `loaded` holds; fail unless every value is that step's."""
    step = int(loaded["extra_states"]["step"])
    for name, tensor in (("w", 0), ("v", 1)):
        check_rows(loaded["model"][name], step, tensor)
    check_rows(loaded["optimizer"]["momentum"], step, 3)
    assert torch.equal(loaded["model"]["bias"], whole(step, 2, 1)[0]), "bias is of another step"
    assert loaded["optimizer"]["lr"] == 0.5 + step
    return step


def check_rows(piece: Rows, step: int, tensor: int) -> None:
    """Fail unless `piece` holds its rows of tensor `tensor` at `step`."""
    wanted = whole(step, tensor, piece.shape[0])[piece.offset : piece.offset + len(piece.data)]
    assert torch.equal(piece.data, wanted), f"tensor {tensor} is not that of step {step}"


def load_step(path: str | Path, *, rows: int = ROWS, **options: Any) -> int:
    """Load the checkpoint at `path` into one process, from any layout; return its step."""
    loaded = states(rows=rows)
    bytecheckpoint.load(path, loaded, **options)
    return step_of(loaded)


def save_steps(root: str | Path, *steps: int) -> None:
    """Save each step from one process to the folder of its number below `root`."""
    for step in steps:
        bytecheckpoint.save(f"{root}/{step}", states(step=step)).result(60)


def check_steps(root: str | Path, *steps: int) -> None:
    """Fail unless the folder of each number below `root` holds that step."""
    assert [load_step(f"{root}/{step}") for step in steps] == list(steps)


def found_step(path: str | Path, **options: Any) -> int:
    """Return the step that the checkpoint at `path` holds, 0 for none; fail on a mixture or damage."""
    try:
        return load_step(path, prepare_save=False, **options)
    except bytecheckpoint.CheckpointNotFoundError:
        return 0


def files_of(path: str | Path) -> list[str]:
    """Return every file below `path`, relative and sorted."""
    return sorted(
        os.path.relpath(os.path.join(folder, name), path) for folder, _, names in os.walk(path) for name in names
    )
