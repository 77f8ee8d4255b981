"""Checkpoints of Megatron-Core: communication, dtypes, vocabularies, experts, loss scalers, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.frameworks.megatron import jobs, state_jobs
from tests.frameworks.megatron.models import VOCABULARY, Layout, coordinate_values
from tests.frameworks.real_frameworks import saved_tensors, unequal_checkpoints
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, bf16=True, buckets=300),
        Layout(tp=2, dp=2, bf16=True, overlap=True),
        Layout(moe=True, ep=2, dp=2),
        Layout(pp=2, vpp=2, dp=2),
        Layout(dp=2, distributed=False),
    ],
    ids=str,
)
def test_nothing_is_communicated_over_process_groups(worlds: Worlds, layout: Layout, tmp_path: Path) -> None:
    for found in worlds.run(layout.world, state_jobs.communication, layout, str(tmp_path), timeout=200):
        assert found.pop("own way") or not layout.distributed, "the counter counts"
        assert found == {"capture": [], "save": [], "async": [], "load": []}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, vocabulary=40),
        Layout(tp=4, vocabulary=48, bf16=True),
        Layout(dp=2, vocabulary=40, bf16=True, buckets=300),
        Layout(pp=2, dp=2, vocabulary=40),
        Layout(tp=2, vocabulary=40, tied=False, distributed=False),
    ],
    ids=str,
)
def test_padded_vocabularies(worlds: Worlds, layout: Layout, tmp_path: Path) -> None:
    small = Layout(bf16=layout.bf16, tied=layout.tied)
    worlds.run(1, jobs.save_coordinates, small, str(tmp_path / "small"))
    for problems in worlds.run(
        layout.world, state_jobs.load_padded, layout, str(tmp_path / "small"), str(tmp_path / "large")
    ):
        assert problems == []
    # The padding has no moments, and is dropped on the way back.
    name = "embedding.word_embeddings.weight"
    large = saved_tensors(tmp_path / "large")
    for slot in ("exp_avg", "exp_avg_sq"):
        found = large[f"optimizer/state/{name}/{slot}"]
        assert torch.equal(found[:VOCABULARY], coordinate_values(5, f"{name}/{slot}", (VOCABULARY, 16)))
        assert found.shape == (layout.vocabulary, 16)
        assert not found[VOCABULARY:].any()
    if layout.bf16:
        found = large[f"optimizer/state/{name}/master"]
        assert torch.equal(found[:VOCABULARY], coordinate_values(5, f"{name}/master", (VOCABULARY, 16)))
        assert torch.equal(found[VOCABULARY:].bfloat16(), large[f"model/{name}"][VOCABULARY:])
    (report,) = worlds.run(1, jobs.load_and_save, small, {"back": str(tmp_path / "large")}, str(tmp_path))
    assert report == {"back": []}
    assert unequal_checkpoints(tmp_path / "small", tmp_path / "back") == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("distributed", [True, False])
def test_master_weights_from_a_plain_module(
    worlds: Worlds, dtype: torch.dtype, distributed: bool, tmp_path: Path
) -> None:
    layout = Layout(bf16=True, distributed=distributed, frozen=False)
    worlds.run(1, state_jobs.save_plain, Layout(frozen=False), str(tmp_path / "plain"), dtype)
    assert worlds.run(1, state_jobs.load_masters, layout, str(tmp_path / "plain")) == [[]]


def test_full_precision_modules_take_the_master_weights(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(1, jobs.save_coordinates, Layout(bf16=True, frozen=False), str(tmp_path / "half"))
    assert worlds.run(1, state_jobs.load_plain, Layout(frozen=False), str(tmp_path / "half")) == [[]]
    # So does Megatron's own model, which has no master weights then.
    (found,) = worlds.run(1, jobs.load_and_save, Layout(frozen=False), {"full": str(tmp_path / "half")}, str(tmp_path))
    assert found == {"full": []}
    name = "decoder.layers.2.mlp.linear_fc1.weight"
    full = saved_tensors(tmp_path / "full")
    assert torch.equal(full[f"model/{name}"], coordinate_values(5, f"{name}/master", (48, 16)))
    assert f"optimizer/state/{name}/master" not in full


@pytest.mark.parametrize("layout", [Layout(moe=True, ep=2, dp=2, bf16=True), Layout(moe=True, ep=4, dp=4)], ids=str)
def test_grouped_experts(worlds: Worlds, layout: Layout, tmp_path: Path) -> None:
    """From single experts to grouped ones, to grouped ones at another expert parallelism, and back to single ones."""
    one = Layout(moe=True, bf16=layout.bf16)
    first, grouped = str(tmp_path / "first"), str(tmp_path / "grouped")
    worlds.run(1, jobs.save_coordinates, one, first)
    for problems in worlds.run(layout.world, state_jobs.load_and_save_grouped, layout, first, grouped):
        assert problems == []
    assert worlds.run(1, state_jobs.load_and_save_grouped, one, grouped, str(tmp_path / "again")) == [[]]
    for source in ("grouped", "again"):
        other = Layout(moe=True, bf16=layout.bf16, ep=2, dp=2, distributed=False)
        for found in worlds.run(
            2, jobs.load_and_save, other, {f"from-{source}": str(tmp_path / source)}, str(tmp_path)
        ):
            assert found == {f"from-{source}": []}
        assert unequal_checkpoints(first, tmp_path / f"from-{source}") == []


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2, tied=False, bias=True, gated=False),
        Layout(dp=2, tied=False, bias=True, gated=False, distributed=False),
        Layout(tp=2, ep=2, dp=2, moe=True, tied=False, sequence=True, etp=1),
    ],
    ids=str,
)
def test_other_models(worlds: Worlds, layout: Layout, tmp_path: Path) -> None:
    one = Layout(tied=False, bias=layout.bias, gated=layout.gated, moe=layout.moe)
    first = str(tmp_path / "first")
    worlds.run(1, jobs.save_coordinates, one, first)
    for found in worlds.run(layout.world, jobs.load_and_save, layout, {"second": first}, str(tmp_path)):
        assert found == {"second": []}
    assert unequal_checkpoints(first, tmp_path / "second") == []


@pytest.mark.parametrize("distributed", [True, False])
def test_the_loss_scaler(worlds: Worlds, distributed: bool, tmp_path: Path) -> None:
    layout = Layout(fp16=True, dp=2, distributed=distributed)
    for before, after in worlds.run(2, state_jobs.loss_scaler, layout, str(tmp_path / "step")):
        assert before == (1024.0, 0)
        assert after == (64.0, 17)


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, dp=2), Layout(pp=2, vpp=2)], ids=str)
def test_extra_states(worlds: Worlds, layout: Layout, tmp_path: Path) -> None:
    assert worlds.run(layout.world, state_jobs.extra_states, layout, str(tmp_path / "step")) == [[]] * layout.world


def test_one_step_per_group(worlds: Worlds, tmp_path: Path) -> None:
    start, source, fused = (str(tmp_path / name) for name in ("start", "source", "fused"))
    worlds.run(1, jobs.save_start, Layout(), start)
    worlds.run(2, jobs.train_and_save, Layout(dp=2), start, source)
    assert worlds.run(2, state_jobs.step_in_group, Layout(dp=2), source, fused) == [[], []]
    assert unequal_checkpoints(source, fused) == []


@pytest.mark.parametrize("tied", [True, False])
def test_stages_that_train_nothing(worlds: Worlds, tied: bool, tmp_path: Path) -> None:
    assert worlds.run(2, state_jobs.untrained_stages, Layout(pp=2, tied=tied), str(tmp_path / "step")) == [[], []]


def test_refusals(worlds: Worlds) -> None:
    for found in worlds.run(2, state_jobs.refusals, Layout(tp=2)):
        whole, alone, inside, beside, aware, rows = found
        assert whole.startswith(
            "model: DistributedDataParallel belongs to Megatron-Core, which framework 'torch' does not"
        )
        assert alone.startswith("optimizer: AdamW steps a parameter of shape ")
        assert inside.startswith("extra_states: ChainedOptimizer is inside a container")
        assert beside.startswith("optimizer holds optimizers of Megatron and other objects")
        assert aware.startswith("optimizer: DistributedOptimizer with use_precision_aware_optimizer keeps scaled state")
        assert rows.startswith("optimizer/state/") and "/rows is a tensor of shape (2, 3)" in rows


def test_a_layout_can_be_described(worlds: Worlds) -> None:
    (found, _) = worlds.run(2, state_jobs.describe, Layout(tp=2))
    assert found["framework"] == "megatron"
    # Per layer: two norms whole, qkv and the gate by rows, projections by columns; embeddings by rows, but positions.
    assert found["layouts"] == {"whole": 10, "dim 0 in 2": 9, "dim 1 in 2": 8}
