"""torchtitan on two ranks: FSDP2, tensor parallelism, kills, and other layouts."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError
from tests.integrations.torchtitan.jobs import after, die_at_commit, make, run, run_noting_random, steps_in, train
from tests.support.worlds import Worlds, on_ranks

CLOSE = 1e-5  # of losses whose additions were in another order
FULL = {"last_save_model_only": False}
FSDP: dict[str, Any] = {}
TP: dict[str, Any] = {"parallelism": {"tensor_parallel_degree": 2}}
HSDP: dict[str, Any] = {"parallelism": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}}


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


@pytest.mark.parametrize(
    "layout", [FSDP, pytest.param(TP, marks=pytest.mark.slow), pytest.param(HSDP, marks=pytest.mark.slow)],
    ids=["fsdp", "tp", "hsdp"],
)  # fmt: skip
def test_a_killed_rank(worlds: Worlds, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Rank 0 dies in the middle of a commit; losses and random numbers go on on both ranks."""
    options = {**layout, "dropout": layout is not TP}
    wanted = worlds.run(2, run_noting_random, tmp_path / "whole", checkpoint={"enable": False}, **options)
    folder = tmp_path / "run"
    worlds.fresh(2).start(die_at_commit, folder, 2, **options).outcomes(grace=1)
    assert steps_in(folder) == [4]
    assert worlds.run(2, run_noting_random, folder, **options) == [after(4, found) for found in wanted]
    assert steps_in(folder) == [4, 8]


@pytest.mark.parametrize(
    ("before", "now"),
    [((2, TP), (1, {})), ((1, {}), (2, TP)), ((2, FSDP), (2, HSDP))],
    ids=["tp-one", "one-tp", "fsdp-hsdp"],
)
def test_another_layout(
    worlds: Worlds, tmp_path: Path, before: tuple[int, dict[str, Any]], now: tuple[int, dict[str, Any]]
) -> None:
    """At the same data-parallel degree torchtitan's own loader goes on exactly."""
    wanted = worlds.run(before[0], run, tmp_path, checkpoint=FULL, **before[1])[0]
    got = worlds.run(now[0], run, tmp_path, checkpoint={"load_step": 4, **FULL}, **now[1])[0]
    assert got == pytest.approx(after(4, wanted), rel=CLOSE)


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
def test_another_number_of_ranks(worlds: Worlds, tmp_path: Path, before: int, now: int) -> None:
    """A loader with streams goes on at another data-parallel degree; the batch of all ranks is the same."""
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


@on_ranks(2)
def test_one_rank_gets_the_signal(tmp_path: Path) -> None:
    def stop() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)

    trainer = make(tmp_path, steps=100, checkpoint={"interval": 1000, "preemption_grace": 60.0}, at={3: stop})
    losses = train(trainer)
    (step,) = steps_in(tmp_path)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, max(losses))
    assert found == [step, step] and step < 100
