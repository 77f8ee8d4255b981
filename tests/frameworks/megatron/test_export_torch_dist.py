"""Checkpoints exported as Megatron's own: Megatron loads them at other layouts and trains on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import bytecheckpoint
from bytecheckpoint import tools
from tests.formats.golden.make_megatron import digests
from tests.frameworks.megatron.test_leave_megatron import llama_chunks
from tests.frameworks.megatron.test_load_torch_dist import load as load_ours
from tests.support.llama import Llama
from tests.support.megatron.models import Layout
from tests.support.megatron.torch_dist import load_torch_dist, save_torch_dist, start_with_own_shards
from tests.support.megatron.training import Trainer, tokens
from tests.support.real_frameworks import AFTER, BEFORE, assert_losses
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)

#: Layout of the save, and those of the loads. Megatron itself takes no optimizer between EP 1 and more.
CASES = {
    "dense": (
        Layout(tp=2, dp=2, bf16=True),
        [Layout(tp=2, dp=2, bf16=True), Layout(dp=4, bf16=True), Layout(tp=2, pp=2, bf16=True)],
    ),
    "experts": (Layout(ep=2, dp=2, moe=True), [Layout(ep=2, dp=2, moe=True), Layout(ep=2, dp=2, pp=2, moe=True)]),
    "virtual": (Layout(pp=2, vpp=2, dp=2, tied=False), [Layout(dp=2, tied=False), Layout(tp=2, pp=2, tied=False)]),
}

TOLERANCES = {"dense": 5e-3, "experts": 1e-4, "virtual": 1e-5}


def save(layout: Layout, folder: str) -> list[float]:
    trainer = start_with_own_shards(layout, lr=0.5)
    trainer.train(BEFORE)
    save_torch_dist(trainer, f"{folder}/native", "fully_reshardable")
    bytecheckpoint.save(f"{folder}/own", trainer.states())
    return trainer.train(AFTER)


def load(layout: Layout, path: str) -> list[float]:
    trainer = Trainer(layout, seed=9, lr=0.5)
    trainer.train(1)
    load_torch_dist(trainer, path)
    assert trainer.step == BEFORE
    return trainer.train(AFTER)


@pytest.mark.parametrize("name", CASES)
def test_megatron_trains_on(worlds: Worlds, name: str, tmp_path: Path) -> None:
    source, layouts = CASES[name]
    losses, *_ = worlds.run(source.world, save, source, str(tmp_path), timeout=300)
    for form in ("own", "native"):
        tools.export(tmp_path / form, tmp_path / f"of {form}", format="megatron")
        for layout in layouts:
            found, *_ = worlds.run(layout.world, load, layout, str(tmp_path / f"of {form}"), timeout=300)
            assert_losses(found, losses, TOLERANCES[name])
            if layout == source:
                assert found == losses
    native = digests(str(tmp_path / "native"))
    assert native.items() <= digests(str(tmp_path / "of own")).items()
    found, *_ = worlds.run(layouts[-1].world, load_ours, layouts[-1], str(tmp_path / "of own"), timeout=300)
    assert_losses(found, losses, TOLERANCES[name])


def first_loss(layout: Layout, path: str) -> float:
    trainer = start_with_own_shards(layout, lr=0.5, build=llama_chunks)
    load_torch_dist(trainer, path, optimizer=False)
    return trainer.train(1)[0]


def test_a_model_of_transformers(worlds: Worlds, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Llama()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    with bytecheckpoint.open(tmp_path, layout="llama") as shown:
        tools.export(shown, tmp_path / "megatron", format="megatron")
    expected = model(tokens(0)).item()
    for layout in (Layout(tp=2, pp=2, tied=False), Layout(dp=2, tied=False, bf16=True)):
        found, *_ = worlds.run(layout.world, first_loss, layout, str(tmp_path / "megatron"), timeout=300)
        assert found == pytest.approx(expected, rel=1e-2 if layout.bf16 else 1e-5)
