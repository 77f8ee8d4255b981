"""Megatron's states that are saved in the background: what waits for steps, what is copied in the call, what blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.frameworks.megatron.adapter import MegatronFramework
from bytecheckpoint.saving.background import copy_volatile
from tests.support.late_copies import copied_share, save_and_step, staging_under_a_manager
from tests.support.megatron.models import (
    Layout,
    MegatronModel,
    gpt_chunks,
    in_layout,
    initialize_parallel,
    transformer_config,
)
from tests.support.megatron.training import Trainer
from tests.support.modes import MODES
from tests.support.real_frameworks import AFTER, BEFORE
from tests.support.worlds import on_ranks

pytestmark = pytest.mark.timeout(600)

DP2 = Layout(dp=2, bf16=True)
OVERLAP = replace(DP2, overlap=True)


def tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return copies of all tensors of this rank."""
    found = {name: value.detach().clone() for name, value in trainer.named_parameters()}
    for name, master, state in trainer.named_states():
        found |= {f"{name}/{slot}": value.clone() for slot, value in state.items()}
        if master is not None:
            found[f"{name}/master"] = master.detach().clone()
    return found


@pytest.mark.parametrize(
    "layout",
    [
        DP2,
        replace(DP2, buckets=300),
        Layout(dp=2),
        Layout(dp=2, fp16=True),
        Layout(dp=2, bf16=True, distributed=False),
        Layout(moe=True, ep=2, dp=2, bf16=True),
        Layout(pp=2, vpp=2, bf16=True),
        Layout(tp=2, bf16=True, optimizer="sgd", distributed=False),
    ],
    ids=lambda layout: f"{layout}-{layout.buckets or layout.optimizer}",
)
@in_layout
def test_steps_right_after_the_call(layout: Layout, path: str) -> None:
    trainer = Trainer(layout)
    trainer.train(BEFORE)
    before, states, losses = tensors(trainer), trainer.states(), []
    save_and_step(path, states, lambda: losses.extend(trainer.train(AFTER)))
    fresh = Trainer(layout, seed=3)
    fresh.train(1)
    bytecheckpoint.load(f"{path}/behind", fresh.states())
    found = tensors(fresh)
    assert [name for name, value in before.items() if not torch.equal(value, found[name])] == []
    fresh.loaded()
    assert fresh.train(AFTER) == losses
    assert copied_share(MegatronFramework(), trainer.states()) < 0.2


@on_ranks(2)
def test_parameters_that_the_forward_pass_gathers(path: str) -> None:
    """They are copied in the call, the optimizer is not."""
    trainer = Trainer(OVERLAP)
    trainer.train(BEFORE)
    model, optimizer, *_ = MegatronFramework().capture(trainer.states())
    assert copy_volatile([model]) == sum(shard.data.nbytes for shard in model.shards if not shard.frozen) > 0
    assert copy_volatile([optimizer]) < 1000
    save_and_step(path, trainer.states(), lambda: trainer.train(AFTER))


@on_ranks(2)
def test_buffers_and_the_loss_scale_are_those_of_the_call(path: str) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layout = Layout(moe=True, ep=2, dp=2, fp16=True)
    initialize_parallel(layout)
    config = transformer_config(layout, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    spec = get_gpt_layer_local_spec(num_experts=4, normalization="RMSNorm")
    given = {"transformer_layer_spec": spec, "position_embedding_type": "learned_absolute"}
    run = MegatronModel(layout, gpt_chunks(layout, config, lambda _: given))
    buffers = [buffer for name, buffer in run.bare[0].named_buffers() if name.endswith("expert_bias")]
    scalers = [optimizer.grad_scaler for optimizer in run.optimizer.chained_optimizers]
    assert buffers and scalers

    def change() -> None:
        for value in (*buffers, *(scaler._scale for scaler in scalers)):
            value.add_(1)

    save_and_step(path, run.states(), change)


@on_ranks(2)
def test_reasons_to_block(path: str) -> None:
    plain, overlapping = Trainer(DP2), Trainer(OVERLAP)
    reason = MegatronFramework().reason_to_block
    assert reason(plain.states()) == reason(overlapping.states()) == ""
    optimizer, model = plain.optimizer.chained_optimizers[0], plain.chunks[0]
    for trainer, owner, name, value, message in (
        (plain, optimizer.config, "optimizer_cuda_graph", True, "optimizer_cuda_graph"),
        (plain, optimizer.config, "reuse_grad_buf_for_mxfp8_param_ag", True, "memory of gradients"),
        (plain, model.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", True, "memory of gradients"),
        (plain, model.ddp_config, "fp8_param_gather", True, ""),
        (plain, model.config, "fp8", "hybrid", ""),
        (overlapping, overlapping.chunks[0].ddp_config, "fp8_param_gather", True, "8 or 4 bits"),
        (overlapping, overlapping.chunks[0].ddp_config, "fp4_param_gather", True, "8 or 4 bits"),
        (overlapping, overlapping.chunks[0].config, "fp8", "hybrid", "8 or 4 bits"),
        (plain, optimizer.optimizer, "step", lambda: None, "hooks do not see the steps of AdamW"),
        (plain, optimizer.optimizer, "param_groups", [{"params": [], "capturable": True}], "capturable"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            found = reason(trainer.states())
        assert message in found and bool(message) == bool(found), (name, found)
    optimizer.config.optimizer_cuda_graph = True
    plain.train(1)
    save = bytecheckpoint.save(path, plain.states(), **MODES["background"])
    before = tensors(plain)
    plain.train(1)
    assert save.result(60).staging == "blocking: Megatron replays steps as a graph (optimizer_cuda_graph)"
    fresh = Trainer(DP2, seed=3)
    fresh.train(1)
    bytecheckpoint.load(path, fresh.states())
    found = tensors(fresh)
    assert [name for name, value in before.items() if not torch.equal(value, found[name])] == []


@pytest.mark.parametrize("layout", [DP2, OVERLAP], ids=str)
@in_layout
def test_a_manager_copies_behind_the_training(layout: Layout, path: str) -> None:
    trainer = Trainer(layout)
    train = partial(trainer.train, 1)
    assert staging_under_a_manager(path, trainer.states(), train, 4) == ["blocking"] * 2 + ["background"] * 2
