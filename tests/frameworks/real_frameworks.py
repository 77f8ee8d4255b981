"""What the tests of installed frameworks share (Megatron-Core, DeepSpeed): skips, worlds, comparisons of checkpoints."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from tests.support.worlds import Worlds

BEFORE, AFTER = 3, 5
"""Training steps before a save, and after it."""


def skip_without(packages: Iterable[str], items: list[pytest.Item], folder: Path) -> None:
    """Skip the tests of `folder`, loudly, if a package is missing and BYTECHECKPOINT_REQUIRE_FRAMEWORKS is not set."""
    if all(map(importlib.util.find_spec, packages)) or os.environ.get("BYTECHECKPOINT_REQUIRE_FRAMEWORKS"):
        return
    reason = f"NOT TESTED HERE: needs {' and '.join(packages)}, which `make test-frameworks` installs"
    for item in items:
        if item.path.parent == folder:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Worlds of processes whose DeepSpeed, if any, runs on the CPU."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    made = Worlds(tmp_path_factory.mktemp("worlds"))
    yield made
    made.close()


def report_problems(report: Any, fields: Iterable[str] = ("missing", "unexpected", "cast")) -> list[str]:
    """Return what the report of a load complains of."""
    return [f"{name}: {found}" for name in fields if (found := getattr(report, name))]


def saved_tensors(path: Any) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, by key."""
    with bytecheckpoint.open(path) as saved:
        entries = {key: saved[key] for key in saved}
        return {key: entry[...] for key, entry in entries.items() if isinstance(entry, bytecheckpoint.Entry)}


def unequal_tensors(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> list[str]:
    """Return the keys that only one has, or whose tensors are not the same bit for bit."""
    return sorted(want.keys() ^ got.keys()) + [
        key
        for key in sorted(want.keys() & got.keys())
        if want[key].dtype != got[key].dtype or not torch.equal(want[key], got[key])
    ]


def unequal_checkpoints(first: Any, second: Any, *, more_than: int = 50) -> list[str]:
    """Return the keys under which two checkpoints, of more than so many tensors, differ."""
    want = saved_tensors(first)
    assert len(want) > more_than
    return unequal_tensors(want, saved_tensors(second))


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
        kind, _, rest = key.partition("/")
        fqn = rest if kind == "model" else rest.removeprefix("state/").rpartition("/")[0]
        want = saved.get(key)
        exact = saved.get(f"optimizer/state/{fqn}/master", saved.get(f"model/{fqn}"))
        if (kind == "model" and want.dtype != got.dtype) or key.endswith("/master"):
            want = exact.to(got.dtype)
        if want is None:
            problems.append(f"{key} is there")
        elif want.dtype != got.dtype or not torch.equal(want, got):
            problems.append(f"{key}: {got} instead of {want}")
    gone = {key for key in saved.keys() - loaded.keys() if not key.endswith("/master")}
    return problems + [f"{key} is not there" for key in sorted(gone)]


def without_tied_head(found: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the tiny transformer with its tied pair under the first name only."""
    return {key: value for key, value in found.items() if value is not None and "/head.weight" not in f"{key}/"}
