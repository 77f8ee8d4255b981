"""torchtitan on two ranks: hooks that communicate, other numbers of ranks, and the last model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError
from tests.integrations.torchtitan.jobs import PARALLELISM, after, make, run, steps_in, train
from tests.support.worlds import RankError, Worlds, on_ranks

CLOSE = 1e-5  # of losses whose additions were in another order
FULL = {"last_save_model_only": False}
TP: dict[str, Any] = {"parallelism": {"tensor_parallel_degree": 2}}


@on_ranks(2)
def test_hooks_that_communicate(tmp_path: Path) -> None:
    """Its attention gathers query, key and value in a hook of state_dict: each save hung before all ranks ran it alike."""
    trainer = make(tmp_path, checkpoint={"interval": 3, "keep_latest_k": 0})
    names = [name for name, _ in trainer.model_parts[0].named_parameters()]
    train(trainer)
    assert steps_in(tmp_path) == [3, 6, 9]
    with bytecheckpoint.open(tmp_path / "checkpoint" / "step_00000009") as checkpoint:
        keys = set(checkpoint)
    prefix = "layers.0.attention.qkv_linear"
    assert any(name.endswith("attention.qkv_linear.wqkv.weight") for name in names)
    assert {f"model/{prefix}.{name}.weight" for name in ("wq", "wk", "wv")} <= keys
    assert f"model/{prefix}.wqkv.weight" not in keys


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
def test_another_number_of_ranks(worlds: Worlds, tmp_path: Path, before: int, now: int) -> None:
    """A loader with streams continues at another data-parallel degree; the batch of all ranks is the same."""
    wanted = worlds.run(before, run, tmp_path, checkpoint=FULL, streams=True, batch=8 // before)[0]
    options = {"checkpoint": {"load_step": 4, **FULL}, "streams": True, "batch": 8 // now}
    first, *others = worlds.run(now, run, tmp_path, **options)
    assert first == pytest.approx(after(4, wanted), rel=CLOSE)
    assert all(other == first for other in others)


def refuse(folder: Path) -> None:
    """Fail to load torchtitan's own loader at another degree; then leave it out."""
    trainer = make(folder, checkpoint=FULL, batch=8)
    weights = [p.to_local().clone() for p in trainer.model_parts[0].parameters()]
    with pytest.raises(IncompatibleCheckpointError, match=r"2 ranks saved the states of their .*data-parallel ranks"):
        trainer.train()
    trainer.close()
    assert trainer.step == 0
    assert all(torch.equal(p.to_local(), w) for p, w in zip(trainer.model_parts[0].parameters(), weights, strict=True))
    assert list(run(folder, checkpoint={"exclude_from_loading": ["dataloader"], **FULL}, steps=10, batch=8)) == [9, 10]


def test_torchtitans_own_loader_at_another_degree(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, run, tmp_path, steps=8, checkpoint=FULL)
    worlds.run(1, refuse, tmp_path)


def draws(folder: Path, **options: Any) -> float:
    """Load a step; return what torch draws next."""
    trainer = make(folder, checkpoint=FULL, **options)
    trainer.checkpointer.load()
    trainer.close()
    return torch.rand(1).item()


def test_random_numbers_at_another_layout(worlds: Worlds, tmp_path: Path) -> None:
    """DTensors need ranks that draw alike: they do, also where no rank's numbers can go on."""
    worlds.run(1, run, tmp_path, steps=4, checkpoint=FULL)
    first, second = worlds.run(2, draws, tmp_path, **TP)
    assert first == second


@on_ranks(2)
def test_the_last_model_of_two_ranks(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for options in ({"last_save_in_hf": True}, {"export_dtype": "bfloat16"}):
        folder = tmp_path / min(options)
        trainer = make(folder, checkpoint=options)
        train(trainer)
        wanted = trainer.model_parts[0].norm.weight.full_tensor()
        last = folder / "checkpoint" / "step-12"
        if "last_save_in_hf" in options:
            found = {name: value for file in last.glob("*.safetensors") for name, value in load_file(file).items()}
            assert torch.equal(found["model.norm.weight"], wanted)
        else:
            with bytecheckpoint.open(last) as checkpoint:
                assert torch.equal(checkpoint["model/norm.weight"][:], wanted.bfloat16())


@pytest.mark.parametrize("layouts", [("fsdp", "fsdp"), ("tp", "tp"), ("fsdp", "tp"), ("fsdp", "one")])
def test_a_job_that_runs_is_switched(worlds: Worlds, tmp_path: Path, layouts: tuple[str, str]) -> None:
    """From torchtitan's last folder, whose data go on at the same data-parallel degree only."""
    before, now = ({"fsdp": {}, "one": {}}.get(name, PARALLELISM.get(name)) for name in layouts)
    sizes = {"fsdp": 4, "tp": 8, "one": 8}
    first: dict[str, Any] = {"parallelism": before, "batch": sizes[layouts[0]]}
    then: dict[str, Any] = {"parallelism": now, "batch": sizes[layouts[1]]}
    ranks = 1 if layouts[1] == "one" else 2
    wanted = worlds.run(2, run, tmp_path / "whole", checkpoint={"enable": False}, **first)[0]
    worlds.run(2, run, tmp_path / "run", steps=8, checkpoint={"stock": True, **FULL}, **first)
    exclude = []
    if layouts[0] != layouts[1]:
        with pytest.raises(
            RankError, match=r"torchtitan cannot load .*step-8: dp_degree is inc.*exclude_from_loading="
        ):
            worlds.run(ranks, run, tmp_path / "run", steps=10, checkpoint=FULL, **then)
        exclude = ["dataloader"]
    options = {**FULL, "exclude_from_loading": exclude}
    got = worlds.run(ranks, run, tmp_path / "run", steps=10, checkpoint=options, **then)[0]
    assert got.keys() == {9, 10}
    if not exclude:
        got |= worlds.run(ranks, run, tmp_path / "run", checkpoint=FULL, **then)[0]
        assert got == after(8, wanted)
