"""A state whose every element says which it is, saved and loaded through every layout of Megatron-Core in turn.

Every parameter has a step of its own. tests/frameworks/interchange compares the losses after a load.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.frameworks.megatron import jobs
from tests.support.comparisons import saved_tensors
from tests.support.megatron.layouts import DENSE, HALF, HALF_MOE, MOE
from tests.support.megatron.models import coordinate_values
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)

FAMILIES = {"dense": DENSE, "moe": MOE, "half": HALF, "half-moe": HALF_MOE}


@pytest.mark.parametrize("name", FAMILIES)
def test_coordinates(worlds: Worlds, name: str, tmp_path: Path) -> None:
    """Each layout loads what the one before it saved, and what the one process saved."""
    worlds.close()  # some threads of groups that Megatron forgets stay: only one family's at a time
    last = first = str(tmp_path / "coordinates")
    worlds.run(1, jobs.save_coordinates, FAMILIES[name][0], first, own_steps=True)
    expect_coordinates(first, half=name.startswith("half"))
    for layout in FAMILIES[name]:
        folder = tmp_path / f"through-{layout}"
        sources = {"first": first, "last": last}
        worlds.run(layout.world, jobs.load_and_save, layout, sources, str(folder), timeout=200)
        for source in sources:
            expect_coordinates(str(folder / source), half=name.startswith("half"))
        last = str(folder / "last")


def expect_coordinates(path: str, *, half: bool) -> None:
    """Check that every element of a checkpoint has the value that says which it is."""
    seen = set()
    for key, found in saved_tensors(path).items():
        state, _, name = key.partition("/")
        if state == "model":
            parameter, slot, want = name, "", coordinate_values(5, canonical(name), found.shape)
            want = want.bfloat16() if half else want
        elif state == "optimizer":
            parameter, slot = name.removeprefix("state/").rsplit("/", 1)
            if slot == "step":
                want = torch.tensor(jobs.step_of(canonical(parameter)))
            else:
                want = coordinate_values(5, f"{canonical(parameter)}/{slot}", found.shape)
        else:
            continue
        seen.add((parameter, slot))
        assert found.dtype == want.dtype, key
        assert torch.equal(found, want), key
    slots = {"", "step", "exp_avg", "exp_avg_sq"} | ({"master"} if half else set())
    frozen = "embedding.position_embeddings.weight"
    assert (frozen, "") in seen
    for parameter in {p for p, _ in seen} - {frozen}:
        assert {s for p, s in seen if p == parameter} == slots
    assert len(seen) > 100


def canonical(name: str) -> str:
    """Return the module's name of a parameter that has another name in Megatron's own checkpoints."""
    return name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
        "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
    )
