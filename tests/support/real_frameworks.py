"""Shared by the tests of installed frameworks (Megatron-Core, DeepSpeed): numbers of steps, comparisons of states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

BEFORE, AFTER = 3, 5
"""Training steps before a save, and after it."""


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
