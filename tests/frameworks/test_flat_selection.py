"""A load of some of the parameters that FSDP1 has joined."""

from __future__ import annotations

from pathlib import Path

import torch

import bytecheckpoint
from tests.frameworks.fsdp1_models import trained_states, uneven_model, wrapped
from tests.frameworks.fsdp1_worlds import as_rank


def test_parameters_that_are_left_alone_keep_state_of_another_dtype(tmp_path: Path) -> None:
    """The dtype of the live state holds for the whole flat tensor."""
    saved = trained_states(uneven_model())
    bytecheckpoint.save(tmp_path, saved)
    with as_rank(0, 1):
        live = trained_states(wrapped("", False))
        (state,) = live["optimizer"].state.values()
        before = state["exp_avg"] = torch.arange(state["exp_avg"].numel(), dtype=torch.float64)
        bytecheckpoint.load(tmp_path, live, include=["optimizer/first.weight"])
        (flat,) = live["optimizer"].param_groups[0]["params"]
        after = live["optimizer"].state[flat]["exp_avg"]
        begin = {fqn: sum(flat._numels[:number]) for number, fqn in enumerate(flat._fqns)}["first.weight"]
        inside = slice(begin, begin + 15)
        expected = before.clone()
        expected[inside] = saved["optimizer"].state[saved["model"].first.weight]["exp_avg"].flatten()
        assert after.dtype == torch.float64 and torch.equal(after[: len(expected)], expected)
