"""Checkpoints exported in the universal form: DeepSpeed itself loads them at other stages and sizes, and trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import tools
from tests.support.deepspeed_engines import ENGINES, Named, adamw, build, trained, trained_run
from tests.support.real_frameworks import AFTER, BEFORE, assert_losses
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(300)


def one_group(parameters: Named) -> torch.optim.Optimizer:
    """Make the only kind of optimizer that DeepSpeed loads right at stage 3: there all groups get the settings of one."""
    return torch.optim.AdamW(parameters.values(), lr=3e-3, weight_decay=0.1, foreach=False)


def save(name: str, path: str, make: Any) -> list[float]:
    run = trained_run(name, make)
    bytecheckpoint.save(f"{path}/own", run.states())
    run.engine.save_checkpoint(f"{path}/native")
    return run.train(AFTER)


def load(name: str, path: str, make: Any) -> list[float]:
    # DeepSpeed's own load of this form leaves buffers and frozen parameters alone; those of `trained` are the same.
    run = build(name, trained, make, checkpoint={"load_universal": True})
    _, client = run.engine.load_checkpoint(path)
    if "client" in client:  # of this package's save
        run.client.update(client["client"])
    run.client["step"] = BEFORE
    assert run.engine.global_steps == BEFORE and run.engine.global_samples == 12 * BEFORE
    return run.train(AFTER)


@pytest.mark.parametrize(
    ("source", "targets", "make"),
    [
        ("z2x2", ("z1x3",), adamw),
        ("z3x3", ("z1x3", "z3x2"), one_group),
        ("b2x2", ("b2x2", "b1x3-own"), adamw),
        ("b2x3", ("b3x2",), one_group),
    ],
)
def test_deepspeed_trains_on(worlds: Worlds, source: str, targets: tuple[str, ...], make: Any, tmp_path: Path) -> None:
    losses = worlds.run(ENGINES[source].size, save, source, str(tmp_path), make, timeout=200)[0]
    tools.export(tmp_path / "own", tmp_path / "of own", format="deepspeed-universal")
    (native,) = (path for path in (tmp_path / "native").iterdir() if path.is_dir())
    tools.export(native, tmp_path / "of native", format="deepspeed-universal")
    for target in targets:
        for form in ("of own", "of native"):
            found = worlds.run(ENGINES[target].size, load, target, str(tmp_path / form), make, timeout=200)[0]
            assert_losses(found, losses, 2e-3 if source[0] == "b" else 1e-5)
            if target == source:
                assert found == losses
