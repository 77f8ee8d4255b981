"""Checkpoints of Megatron-Core: communication, dtypes, vocabularies, experts, loss scalers, refusals."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.megatron.adapter import MegatronFramework
from bytecheckpoint.frameworks.registry import resolve
from tests.frameworks.megatron import jobs
from tests.support.communication import check_no_communication
from tests.support.comparisons import assert_complete, assert_same, assert_same_checkpoints, saved_tensors
from tests.support.extra_states import WithExtraState
from tests.support.megatron.models import (
    VOCABULARY,
    Layout,
    MegatronModel,
    build_chunks,
    coordinate_values,
    fill,
    in_layout,
    initialize_parallel,
)
from tests.support.megatron.training import Trainer, plain_run
from tests.support.worlds import Worlds, on_ranks

pytestmark = pytest.mark.timeout(600)


def trained_model(layout: Layout) -> Trainer:
    """Start a run with other values than those of the checkpoint, and with optimizer state."""
    trainer = Trainer(layout, seed=3)
    trainer.train(1)
    return trainer


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
@in_layout
def test_nothing_is_communicated_over_process_groups(layout: Layout, path: str) -> None:
    """Megatron's own way gathers over the data-parallel ranks."""

    def gather(trainer: Trainer) -> None:
        for optimizer in trainer.optimizer.chained_optimizers:
            optimizer.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)

    check_no_communication(MegatronFramework(), lambda: Trainer(layout), path, gather if layout.distributed else None)


# --- padded vocabularies ------------------------------------------------------------------------------------


def load_padded(layout: Layout, source: str, path: str) -> None:
    """Load a checkpoint of another vocabulary size, and save with this layout's size."""
    from megatron.core import parallel_state

    trainer = trained_model(layout)
    before = {n: p.detach().clone() for n, p in trainer.named_parameters()}
    assert_complete(bytecheckpoint.load(source, trainer.states()))
    bytecheckpoint.save(path, trainer.states())
    name = "embedding.word_embeddings.weight"
    begin = layout.vocabulary // layout.tp * parallel_state.get_tensor_model_parallel_rank()
    for found, parameter in trainer.named_parameters():
        if found == name:
            rows = min(max(0, VOCABULARY - begin), parameter.shape[0])
            want = coordinate_values(5, name, (VOCABULARY, 16))[begin : begin + rows].to(parameter.dtype)
            assert torch.equal(parameter[:rows], want), "rows of the checkpoint"
            assert torch.equal(parameter[rows:], before[name][rows:]), "rows that it lacks"


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
def test_padded_vocabularies(worlds: Worlds, layout: Layout, first: str, path: str, tmp_path: Path) -> None:
    small = Layout(bf16=layout.bf16, tied=layout.tied)
    worlds.run(1, jobs.save_coordinates, small, first)
    worlds.run(layout.world, load_padded, layout, first, path)
    # The padding has no moments, and is dropped on the way back.
    name = "embedding.word_embeddings.weight"
    large = saved_tensors(path)
    for slot in ("exp_avg", "exp_avg_sq", "master") if layout.bf16 else ("exp_avg", "exp_avg_sq"):
        found = large[f"optimizer/state/{name}/{slot}"]
        assert torch.equal(found[:VOCABULARY], coordinate_values(5, f"{name}/{slot}", (VOCABULARY, 16)))
        if slot == "master":
            assert torch.equal(found[VOCABULARY:].bfloat16(), large[f"model/{name}"][VOCABULARY:])
        else:
            assert found.shape == (layout.vocabulary, 16)
            assert not found[VOCABULARY:].any()
    worlds.run(1, load_smaller, small, path, str(tmp_path / "back"))
    assert_same_checkpoints(first, tmp_path / "back")


def load_smaller(layout: Layout, source: str, path: str) -> None:
    """Load into a smaller vocabulary, which leaves rows out: only on demand, since they may be real."""
    trainer = Trainer(layout, seed=2)
    with pytest.raises(
        IncompatibleCheckpointError, match=r"rows of model/embedding.word_embeddings.weight.*strict=False"
    ):
        bytecheckpoint.load(source, trainer.states())
    report = bytecheckpoint.load(source, trainer.states(), strict=False)
    assert any("rows of model/embedding.word_embeddings.weight" in n for n in report.notes)
    bytecheckpoint.save(path, trainer.states())


# --- weights and master weights --------------------------------------------------------------------------------------


def save_plain(layout: Layout, path: str, dtype: torch.dtype) -> None:
    """Save a plain module of that dtype, stepped by torch."""
    model, adam = plain_run(layout)
    model.to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    adam.param_groups[0]["lr"] = adam.param_groups[1]["lr"] = 0.1
    adam.step()
    bytecheckpoint.save(path, {"model": model, "optimizer": adam}, framework="torch")


def load_masters(layout: Layout, source: str) -> None:
    """Load a checkpoint without master weights; full-precision weights go into them exactly, into the model rounded."""
    trainer = trained_model(layout)
    states = {state_name: trainer.states()[state_name] for state_name in ("model", "optimizer")}
    assert_complete(bytecheckpoint.load(source, states), ("missing",))
    saved = saved_tensors(source)
    for name, parameter in trainer.named_parameters():
        assert torch.equal(parameter, saved[f"model/{name}"].to(parameter.dtype)), name
    for name, master, state in trainer.named_states():
        exact = saved.get(f"optimizer/state/{name}/master", saved[f"model/{name}"])
        assert master is not None and torch.equal(master.reshape(-1), exact.float().reshape(-1)), name
        for slot in ("exp_avg", "exp_avg_sq"):
            want = saved[f"optimizer/state/{name}/{slot}"].float()
            assert state[slot].dtype == torch.float32, name
            assert torch.equal(state[slot].reshape(-1), want.reshape(-1)), (name, slot)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("distributed", [True, False])
def test_master_weights_from_a_plain_module(worlds: Worlds, dtype: torch.dtype, distributed: bool, path: str) -> None:
    layout = Layout(bf16=True, distributed=distributed, frozen=False)
    worlds.run(1, save_plain, Layout(frozen=False), path, dtype)
    worlds.run(1, load_masters, layout, path)


def load_plain(layout: Layout, source: str) -> None:
    """Load master weights into a plain module in full precision, which takes them for its weights and keeps none."""
    model, adam = plain_run(layout, seed=2)
    assert_complete(bytecheckpoint.load(source, {"model": model, "optimizer": adam}, framework="torch"))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            want = coordinate_values(5, f"{name}/master", parameter.shape)
        else:
            want = coordinate_values(5, name, parameter.shape).bfloat16().float()
        assert torch.equal(parameter, want), name
    assert not any("master" in state for state in adam.state.values()), "the optimizer has master weights"


def test_full_precision_modules_take_the_master_weights(worlds: Worlds, first: str, tmp_path: Path) -> None:
    worlds.run(1, jobs.save_coordinates, Layout(bf16=True, frozen=False), first)
    worlds.run(1, load_plain, Layout(frozen=False), first)
    # So does Megatron's own model, which has no master weights then.
    worlds.run(1, jobs.load_and_save, Layout(frozen=False), {"full": first}, str(tmp_path))
    name = "decoder.layers.2.mlp.linear_fc1.weight"
    full = saved_tensors(tmp_path / "full")
    assert torch.equal(full[f"model/{name}"], coordinate_values(5, f"{name}/master", (48, 16)))
    assert f"optimizer/state/{name}/master" not in full


# --- grouped experts ---------------------------------------------------------------------------------


class GroupedExperts(nn.Module):
    """Experts with the weights, names and boxes of Transformer Engine's GroupedLinear, which needs CUDA."""

    def __init__(self, experts: Any, rank: int, size: int) -> None:
        super().__init__()
        self.count = len(experts)
        self.first, self.total = rank * self.count, size * self.count
        for layer in ("linear_fc1", "linear_fc2"):
            linear = nn.Module()
            for i, expert in enumerate(experts):
                setattr(linear, f"weight{i}", getattr(expert, layer).weight)
            setattr(self, layer, linear)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

        found = {}
        for layer in ("linear_fc1", "linear_fc2"):
            for i in range(self.count):
                offsets = (*sharded_offsets, (len(sharded_offsets), self.first + i, self.total))
                made: Any = ShardedTensor.from_rank_offsets(
                    f"{prefix}experts.{layer}.weight",
                    getattr(getattr(self, layer), f"weight{i}"),
                    *offsets,
                    replica_id=(0, 0, 0),
                    prepend_axis_num=len(offsets),
                )
                if layer == "linear_fc1":
                    made = apply_swiglu_sharded_factory(made, offsets)
                found[f"{prefix}{layer}.weight{i}"] = made
        return found


def layers_of(trainer: Trainer) -> list[Any]:
    return [layer for chunk in trainer.bare for layer in chunk.decoder.layers]


def load_and_save_grouped(layout: Layout, source: str, path: str) -> None:
    """Group the experts of a model, load, and save again."""
    from megatron.core import parallel_state

    trainer = trained_model(layout)
    rank = parallel_state.get_expert_model_parallel_rank()
    size = parallel_state.get_expert_model_parallel_world_size()
    for layer in layers_of(trainer):
        layer.mlp.experts = GroupedExperts(layer.mlp.experts.local_experts, rank, size)
    assert_complete(bytecheckpoint.load(source, trainer.states()))
    bytecheckpoint.save(path, trainer.states())


@pytest.mark.parametrize("layout", [Layout(moe=True, ep=2, dp=2, bf16=True), Layout(moe=True, ep=4, dp=4)], ids=str)
def test_grouped_experts(worlds: Worlds, layout: Layout, first: str, tmp_path: Path) -> None:
    """From single experts to grouped ones, to grouped ones at another expert parallelism, and back to single ones."""
    one = Layout(moe=True, bf16=layout.bf16)
    other = Layout(moe=True, bf16=layout.bf16, ep=2, dp=2, distributed=False)
    grouped, again = str(tmp_path / "grouped"), str(tmp_path / "again")
    worlds.run(1, jobs.save_coordinates, one, first)
    worlds.run(layout.world, load_and_save_grouped, layout, first, grouped)
    worlds.run(1, load_and_save_grouped, one, grouped, again)
    worlds.run(2, jobs.load_and_save, other, {"from-grouped": grouped, "from-again": again}, str(tmp_path))
    for name in ("from-grouped", "from-again"):
        assert_same_checkpoints(first, tmp_path / name)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2, tied=False, bias=True, gated=False),
        Layout(dp=2, tied=False, bias=True, gated=False, distributed=False),
        Layout(tp=2, ep=2, dp=2, moe=True, tied=False, sequence=True, etp=1),
    ],
    ids=str,
)
def test_other_models(worlds: Worlds, layout: Layout, first: str, tmp_path: Path) -> None:
    one = Layout(tied=False, bias=layout.bias, gated=layout.gated, moe=layout.moe)
    worlds.run(1, jobs.save_coordinates, one, first)
    worlds.run(layout.world, jobs.load_and_save, layout, {"second": first}, str(tmp_path))
    assert_same_checkpoints(first, tmp_path / "second")


# --- other state ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(fp16=True, dp=2), Layout(fp16=True, dp=2, distributed=False)], ids=str)
@in_layout
def test_the_loss_scaler(layout: Layout, path: str) -> None:
    def scaler_of(trainer: Trainer) -> Any:
        (inner,) = trainer.optimizer.chained_optimizers
        return inner.grad_scaler

    trainer, fresh = Trainer(layout), Trainer(layout, seed=2)
    trainer.train(1)
    saved, loaded = scaler_of(trainer), scaler_of(fresh)
    saved._scale.fill_(64.0)
    saved._growth_tracker = 17
    bytecheckpoint.save(path, trainer.states())
    assert (float(loaded.scale), loaded._growth_tracker) == (1024.0, 0)
    assert_complete(bytecheckpoint.load(path, fresh.states()))
    assert (float(loaded.scale), loaded._growth_tracker) == (64.0, 17)


class WithCounts(WithExtraState):
    """A module with an extra state and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(3))


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, dp=2), Layout(pp=2, vpp=2)], ids=str)
@in_layout
def test_extra_states(layout: Layout, path: str) -> None:
    """Extra states of several types, and buffers, in each layer."""
    values: list[Any] = [{"amax": [1.0, 2.0], "n": 3}, torch.arange(5, dtype=torch.uint8), io.BytesIO(b"scales"), None]

    def start(*, full: bool) -> Trainer:
        trainer = Trainer(layout, seed=2)
        for layer in layers_of(trainer):
            layer.own = WithCounts()
            number = layer.layer_number - 1
            if full:
                layer.own.extra = values[number]
                layer.own.counts.fill_(number)
            elif values[number] is not None:
                layer.own.extra = 0
        return trainer

    bytecheckpoint.save(path, start(full=True).states())
    fresh = start(full=False)
    assert_complete(bytecheckpoint.load(path, fresh.states()))
    for layer in layers_of(fresh):
        want, got = values[layer.layer_number - 1], layer.own.extra
        if isinstance(want, torch.Tensor):
            assert torch.equal(want, got), got
        elif isinstance(want, io.BytesIO):
            assert want.getvalue() == got.getvalue(), got
        else:
            assert want == got, got
        assert (layer.own.counts == layer.layer_number - 1).all()


def step_in_group(layout: Layout, source: str, path: str) -> None:
    """Load into an optimizer that keeps one step per group, as those of Apex and Transformer Engine do; save again."""
    trainer = Trainer(layout, seed=2)
    optimizers = [chained.optimizer for chained in trainer.optimizer.chained_optimizers]
    for optimizer in optimizers:
        optimizer.__class__ = type("FusedAdam", (type(optimizer),), {"__module__": "apex.optimizers.fused_adam"})
    assert_complete(bytecheckpoint.load(source, trainer.states()))
    for optimizer in optimizers:
        assert not any("step" in state for state in optimizer.state.values())
        assert all(group["step"] == 3 for group in optimizer.param_groups)
    bytecheckpoint.save(path, trainer.states())


def test_one_step_per_group(worlds: Worlds, tmp_path: Path) -> None:
    start, source, fused = (str(tmp_path / name) for name in ("start", "source", "fused"))
    worlds.run(1, jobs.save_start, Layout(), start)
    worlds.run(2, jobs.train_and_save, Layout(dp=2), start, source)
    worlds.run(2, step_in_group, Layout(dp=2), source, fused)
    assert_same_checkpoints(source, fused)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, tied=False)], ids=["tied", "untied"])
@in_layout
def test_stages_that_train_nothing(layout: Layout, path: str) -> None:
    """The optimizer of such a stage has no parameters."""

    def start(seed: int) -> dict[str, Any]:
        initialize_parallel(layout)
        chunks = build_chunks(layout)
        for chunk in chunks:
            fill(chunk, seed)
            for layer in chunk.decoder.layers:
                layer.requires_grad_(False)
            if hasattr(chunk.decoder, "final_layernorm") and chunk.decoder.final_layernorm is not None:
                chunk.decoder.final_layernorm.requires_grad_(False)
            if chunk.post_process and not chunk.pre_process and not layout.tied:
                chunk.output_layer.requires_grad_(False)
        return MegatronModel(layout, chunks).states()

    states = start(1)
    bytecheckpoint.save(path, states)
    want = {n: p.detach().clone() for n, p in states["model"].named_parameters()}
    fresh = start(2)
    assert_complete(bytecheckpoint.load(path, fresh))
    assert_same(want, dict(fresh["model"].named_parameters()))


@on_ranks(2)
def test_refusals() -> None:
    trainer = Trainer(Layout(tp=2))
    states = trainer.states()
    model, optimizer = states["model"], states["optimizer"]

    def refused(given: dict[str, Any], message: str, framework: str = "megatron") -> None:
        with pytest.raises(UsageError, match=f"^{message}"):
            resolve(framework, given).capture(given)

    refused(
        states, "model: DistributedDataParallel belongs to Megatron-Core, which framework 'torch' does not", "torch"
    )
    refused({"optimizer": optimizer}, "optimizer: AdamW steps a parameter of shape ")
    refused(
        {"model": model, "extra_states": {"step": 1, "nested": [optimizer]}},
        "extra_states: ChainedOptimizer is inside a container",
    )
    refused({"model": model, "optimizer": [optimizer, 1]}, "optimizer holds optimizers of Megatron and other objects")
    first = trainer.optimizer.chained_optimizers[0]
    first.config.use_precision_aware_optimizer = True
    refused(states, "optimizer: DistributedOptimizer with use_precision_aware_optimizer keeps scaled state")
    first.config.use_precision_aware_optimizer = False
    first.optimizer.state[first.optimizer.param_groups[0]["params"][0]]["rows"] = torch.ones(2, 3)
    refused(states, r"optimizer/state/.*/rows is a tensor of shape \(2, 3\)")


@on_ranks(2)
def test_a_layout_can_be_described() -> None:
    states = Trainer(Layout(tp=2)).states()
    found = resolve("auto", states).capture(states)[0]
    # Per layer: two norms whole, qkv and the gate by rows, projections by columns; embeddings by rows, but positions.
    assert found.name == "model" and found.layout()["layouts"] == {"whole": 10, "dim 0 in 2": 9, "dim 1 in 2": 8}


def test_random_numbers(worlds: Worlds, tmp_path: Path) -> None:
    """Another layout is seeded anew. Ranks that Megatron wants to draw the same numbers do so, and no others."""

    def draws(layout: Layout, *, save: bool = False) -> tuple[list[dict[str, float]], list[tuple[str, ...]]]:
        found = worlds.run(layout.world, jobs.draw_random_numbers, layout, str(tmp_path / "c"), save=save)
        return [numbers for numbers, _ in found], [notes for _, notes in found]

    saved, _ = draws(Layout(tp=2, dp=2), save=True)
    assert draws(Layout(tp=2, dp=2)) == (saved, [()] * 4)
    known = {number for numbers in saved for number in numbers.values()}
    for layout in (Layout(tp=2, pp=2), Layout(dp=4), Layout(dp=2)):
        numbers, notes = draws(layout)
        assert all("are seeded anew" in note for (note,) in notes)
        assert draws(layout)[0] == numbers
        assert not known & {number for found in numbers for number in found.values()}
        counts = {name: len({found[name] for found in numbers}) for name in numbers[0]}
        assert counts["torch"] == counts["python"] == counts["data-parallel-rng"] == layout.pp
        assert counts["model-parallel-rng"] == layout.tp * layout.pp
