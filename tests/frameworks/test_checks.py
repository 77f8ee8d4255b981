"""All ranks check the loaded values before any of them installs something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError
from bytecheckpoint.frameworks import registry
from bytecheckpoint.frameworks.base import Destination
from bytecheckpoint.frameworks.native import NativeFramework
from tests.support.settings import using


class Picky(NativeFramework):
    """Rank 1 accepts only a tensor whose sum is 3, which it can check only after the bytes have arrived."""

    def destination(self, states: Any, saved: Any, **options: Any) -> Destination:
        destination = super().destination(states, saved, **options)

        def check() -> None:
            if states["rank"] == 1 and states["model"]["w"].sum() != 3:
                raise IncompatibleCheckpointError("the sum is not 3")

        destination.checks.append(check)
        return destination


@pytest.fixture(autouse=True)
def _picky() -> Iterator[None]:
    registry.register("picky", Picky)
    with using(writer="thread"):
        yield
    registry.unregister("picky")


@pytest.mark.parametrize("fits", [True, False])
def test_no_rank_installs_what_another_rank_rejects(tmp_path: Path, fits: bool) -> None:
    saved = torch.ones(3) if fits else torch.zeros(3)

    def save(collective: Collective) -> None:
        states = {"model": {"w": saved}, "rank": collective.rank, "extra_states": {"step": 7}}
        bytecheckpoint.save(tmp_path / "step", states, timeout=20)

    def load(collective: Collective) -> tuple[str, Any]:
        states = {"model": {"w": torch.full((3,), 5.0)}, "rank": collective.rank, "extra_states": {"step": 0}}
        try:
            bytecheckpoint.load(tmp_path / "step", states, framework="picky", timeout=20)
        except CheckpointError as error:
            return str(error), states["extra_states"]
        return "", states["extra_states"]

    ThreadWorld(2).run(save, timeout=60)
    for message, extra in ThreadWorld(2).run(load, timeout=60):
        assert ("the sum is not 3" in message) == (not fits)
        assert extra == {"step": 7 if fits else 0}
