"""Shared by the tests of installed frameworks (Megatron-Core, DeepSpeed): numbers of steps, comparisons of states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import bytecheckpoint
from tests.support.comparisons import assert_complete, assert_same_checkpoints
from tests.support.worlds import Worlds

#: Training steps before a save, and after it: the first loss needs the weights, the second the optimizer's state and
#: settings, the third how both continue.
BEFORE, AFTER = 3, 3


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Return the mean of all ranks' losses. A collective."""
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def state_differences(saved: dict[str, Any], loaded: dict[str, Any]) -> list[str]:
    """Return the tensors that a load has not restored bit for bit, across precisions of the model.

    A loaded parameter in full precision has to be the saved master weight, one in low precision the rounded one.
    """
    problems = []
    for key, got in loaded.items():
        state, _, rest = key.partition("/")
        fqn = rest if state == "model" else rest.removeprefix("state/").rpartition("/")[0]
        want = saved.get(key)
        exact = saved.get(f"optimizer/state/{fqn}/master", saved.get(f"model/{fqn}"))
        if (state == "model" and want.dtype != got.dtype) or key.endswith("/master"):
            want = exact.to(got.dtype)
        if want is None:
            problems.append(f"{key} is there")
        elif want.dtype != got.dtype or not torch.equal(want, got):
            problems.append(f"{key}: {got} instead of {want}")
    gone = {key for key in saved.keys() - loaded.keys() if not _is_weight(key, saved, loaded)}
    return problems + [f"{key} is not there" for key in sorted(gone)]


def _is_weight(key: str, saved: dict[str, Any], loaded: dict[str, Any]) -> bool:
    """Return whether a saved tensor is a master weight that has become the weight of a loaded model in its precision."""
    fqn, _, slot = key.removeprefix("optimizer/state/").rpartition("/")
    return slot == "master" and f"model/{fqn}" in loaded and loaded[f"model/{fqn}"].dtype == saved[key].dtype


def assert_restored(saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Fail if a load has not restored the state."""
    problems = state_differences(saved, loaded)
    assert not problems, problems[:5]


def assert_losses(got: Sequence[float], want: Sequence[float], relative: float) -> None:
    """Fail unless two runs have the same losses; `relative`, to the largest, is for other orders of additions."""
    worst = max(abs(a - b) for a, b in zip(got, want, strict=True)) / max(map(abs, want))
    assert worst <= relative, f"{got} instead of {want}: {worst:.2g} apart"


def without_tied_head(found: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the tiny transformer with its tied pair under the first name only."""
    return {key: value for key, value in found.items() if value is not None and "/head.weight" not in f"{key}/"}


# --- every layout of a feature loads every layout -------------------------------------------------------------------------

#: Number of ranks, and what starts a run of a seed on each of them: an object with `states()`, `train(steps)` and `step`.
Layout = tuple[int, Callable[[int], Any]]


def save_run(start: Callable[[int], Any], path: str) -> list[float]:
    """Train and save, in the background; return the losses of the next steps."""
    run = start(1)
    run.train(BEFORE)
    handle = bytecheckpoint.save(path, run.states(), async_checkpoint=True)
    losses: list[float] = run.train(AFTER)
    handle.result(120)
    return losses


def load_runs(start: Callable[[int], Any], paths: Sequence[str], more_than: int) -> list[list[float]]:
    """Load each checkpoint over other state, save it again, and compare both; return the losses of the next steps."""
    losses = []
    for path in paths:
        run = start(2)
        run.train(1)
        assert_complete(bytecheckpoint.load(path, run.states()))
        bytecheckpoint.save(f"{path}-again", run.states())
        assert_same_checkpoints(path, f"{path}-again", more_than=more_than)
        run.step = BEFORE
        losses.append(run.train(AFTER))
    return losses


def check_every_pair(
    worlds: Worlds, folder: Path, layouts: Sequence[Layout], tolerance: float, more_than: int
) -> list[str]:
    """Fail unless each layout loads what each saved, and trains on with its losses, the same layout bit for bit.

    Args:
        worlds: worlds of processes.
        folder: folder of the checkpoints.
        layouts: the layouts.
        tolerance: relative difference of the losses between layouts.
        more_than: number of tensors that a checkpoint has at least.

    Returns:
        The path of each layout's checkpoint.
    """
    paths = [f"{folder}/{number}" for number in range(len(layouts))]
    after = [
        worlds.run(size, save_run, start, path, timeout=300)[0]
        for (size, start), path in zip(layouts, paths, strict=True)
    ]
    for number, (size, start) in enumerate(layouts):
        losses, *others = worlds.run(size, load_runs, start, paths, more_than, timeout=300)
        assert all(other == losses for other in others)
        assert losses[number] == after[number], "the same layout continues bit for bit"
        for loaded, saved in zip(losses, after, strict=True):
            assert_losses(loaded, saved, tolerance)
    return paths
