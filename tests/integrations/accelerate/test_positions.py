"""Losses and data continue exactly with every loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.accelerate.jobs import (
    StatefulStream,
    Stream,
    by_epoch,
    lazy,
    run,
    samples,
    weighted,
    with_generator,
)
from tests.integrations.conformance import after
from tests.support.runs import steps_in
from tests.support.worlds import on_ranks

LOADERS: dict[str, dict[str, Any]] = {
    "seedable": {},
    "random": {"seedable": False},
    "accumulated": {"accumulation": 2},
    "persistent": {"workers": 1, "persistent": True, "seedable": False},
    "stream": {"data": Stream},
    "torchdata": {"stateful": True},
    "torchdata's workers": {"stateful": True, "workers": 1},
    "stateful stream": {"stateful": True, "data": StatefulStream, "dispatch": False},
    "split": {"split": True},
    "weighted": {"loader": weighted},
    "with a generator": {"loader": with_generator, "stateful": True, "seedable": False},
    "by epoch": {"loader": by_epoch},
    "lazy": {"loader": lazy},
    "dispatched": {"dispatch": True, "seedable": False},
}


STEPS = {"persistent": (6, 8), "torchdata's workers": (4,)}  # workers take a while to start


@pytest.mark.parametrize(("kind", "step"), [(kind, step) for kind in LOADERS for step in STEPS.get(kind, (4, 6, 8))])
@on_ranks(1)
def test_every_loader_goes_on(tmp_path: Path, kind: str, step: int) -> None:
    """In the middle of an epoch, at its end, and in a later one."""
    options = LOADERS[kind]
    wanted = run(tmp_path / "whole", every=step, **options)
    assert len(wanted) == 12 and samples(after(6, wanted)) == list(range(48))
    first = run(tmp_path / "run", every=step, stop=step, **options)
    assert {**first, **run(tmp_path / "run", every=step, **options)} == wanted
    assert steps_in(tmp_path / "run")[0] == step and len(first) == step
