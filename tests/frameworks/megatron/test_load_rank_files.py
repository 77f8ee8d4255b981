"""Files of Megatron's ranks, loaded with their optimizers at other layouts: the losses are those of the saving run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from tests.formats.golden.make_megatron import digests
from tests.frameworks.megatron.test_load_torch_dist import load, load_plain
from tests.support.megatron.models import Layout
from tests.support.megatron.rank_files import save_rank_files
from tests.support.megatron.torch_dist import start_with_own_shards
from tests.support.real_frameworks import AFTER, BEFORE, assert_losses
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)

WHOLE: dict[str, Any] = {"distributed": False}
#: Layout of the save, and those of the loads, of which one may be an ordinary module in one process.
CASES = {
    "fp32": (Layout(tp=2, bias=True, **WHOLE), [Layout(tp=2, bias=True, **WHOLE), Layout(dp=2, bias=True)]),
    "bf16": (Layout(tp=2, pp=2, bf16=True, **WHOLE), [Layout(tp=2, pp=2, bf16=True, **WHOLE), Layout(dp=2, bf16=True)]),
    "distributed": (Layout(tp=2, dp=2, bf16=True), [Layout(tp=2, dp=2, bf16=True), Layout(pp=2, bf16=True)]),
    "buckets": (Layout(pp=2, dp=2, buckets=1000), [Layout(pp=2, dp=2, buckets=1000), Layout()]),
    "virtual": (Layout(pp=2, vpp=2, dp=2, tied=False), [Layout(pp=2, vpp=2, dp=2, tied=False), Layout(tied=False)]),
    "experts": (Layout(ep=2, dp=2, moe=True, **WHOLE), [Layout(ep=2, dp=2, moe=True, **WHOLE), Layout(pp=2, moe=True)]),
    "flat-experts": (
        Layout(ep=2, dp=4, moe=True, bf16=True),
        [Layout(ep=2, dp=4, moe=True, bf16=True), Layout(dp=2, moe=True, bf16=True)],
    ),
    "sgd": (
        Layout(tp=2, bf16=True, optimizer="sgd", **WHOLE),
        [Layout(tp=2, bf16=True, optimizer="sgd", **WHOLE), Layout(pp=2, bf16=True, optimizer="sgd", **WHOLE)],
    ),
}


def save(layout: Layout, folder: str) -> list[float]:
    trainer = start_with_own_shards(layout, lr=0.5)
    trainer.train(BEFORE)
    save_rank_files(trainer, folder)
    states = trainer.states()
    bytecheckpoint.save(f"{folder}/own", {name: states[name] for name in ("model", "optimizer")})
    return trainer.train(AFTER)


@pytest.mark.parametrize("name", CASES)
def test_any_layout_trains_on(worlds: Worlds, name: str, tmp_path: Path) -> None:
    source, layouts = CASES[name]
    losses, *_ = worlds.run(source.world, save, source, str(tmp_path), timeout=300)
    folder = f"{tmp_path}/iter_{BEFORE:07}"
    own, held = digests(f"{tmp_path}/own"), digests(folder)
    held |= {key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"): value for key, value in held.items()}
    assert {key: held.get(key) for key in own} == own
    for layout in layouts:
        found, *_ = worlds.run(layout.world, load, layout, folder, timeout=300)
        if layout == source:
            assert found == losses
        assert_losses(found, losses, 1e-2 if source.bf16 else 1e-4 if source.moe else 1e-5)
    if name == "virtual":
        (found,) = worlds.run(1, load_plain, Layout(tied=False), folder, timeout=300)
        assert_losses(found, losses, 1e-5)
