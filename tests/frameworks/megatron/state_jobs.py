"""What ranks run in test_states.py. Each function returns plain data, mostly the problems that it found."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.megatron.adapter import MegatronFramework
from bytecheckpoint.frameworks.registry import resolve
from tests.distributed.fsdp1_jobs import recorded_communication
from tests.frameworks.megatron.models import (
    VOCABULARY,
    Layout,
    MegatronModel,
    build_chunks,
    coordinate_values,
    fill,
    initialize_parallel,
)
from tests.frameworks.megatron.training import Trainer, plain_run
from tests.frameworks.real_frameworks import report_problems, saved_tensors


def communication(layout: Layout, path: str) -> dict[str, list[str]]:
    """Return what a capture, saves and a load communicate over process groups, and what Megatron's own way does."""
    trainer = Trainer(layout)
    trainer.train(1)
    states = trainer.states()
    bytecheckpoint.save(f"{path}/first", states)  # makes connections of its own
    found = {}
    with recorded_communication() as found["capture"]:
        MegatronFramework().capture(states)
    with recorded_communication() as found["save"]:
        bytecheckpoint.save(f"{path}/second", states)
    with recorded_communication() as found["async"]:
        bytecheckpoint.save(f"{path}/third", states, async_checkpoint=True).result(60)
    with recorded_communication() as found["load"]:
        bytecheckpoint.load(f"{path}/third", states)
    with recorded_communication() as found["own way"]:
        for optimizer in trainer.optimizer.chained_optimizers:
            if layout.distributed:
                optimizer.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    return found


# --- padded vocabularies ------------------------------------------------------------------------------------


def load_padded(layout: Layout, source: str, path: str) -> list[str]:
    """Load a checkpoint of another vocabulary size, and save with this layout's size."""
    trainer = Trainer(layout, seed=3)
    trainer.train(1)
    before = {n: p.detach().clone() for n, p in trainer.named_parameters()}
    problems = report_problems(bytecheckpoint.load(source, trainer.states()))
    bytecheckpoint.save(path, trainer.states())
    name = "embedding.word_embeddings.weight"
    first = layout.vocabulary // layout.tp * _tensor_parallel_rank()
    for found, parameter in trainer.named_parameters():
        if found == name:
            rows = min(max(0, VOCABULARY - first), parameter.shape[0])
            want = coordinate_values(5, name, (VOCABULARY, 16))[first : first + rows].to(parameter.dtype)
            if not torch.equal(parameter[:rows], want):
                problems.append("rows of the checkpoint")
            if not torch.equal(parameter[rows:], before[name][rows:]):
                problems.append("rows that it lacks")
    return problems


def _tensor_parallel_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_tensor_model_parallel_rank())


# --- weights and master weights --------------------------------------------------------------------------------------


def load_masters(layout: Layout, source: str) -> list[str]:
    """Load a checkpoint without master weights; full-precision weights go into them exactly, into the model rounded."""
    trainer = Trainer(layout, seed=3)
    trainer.train(1)
    states = {kind: trainer.states()[kind] for kind in ("model", "optimizer")}
    problems = [str(x) for x in bytecheckpoint.load(source, states).missing]
    saved = saved_tensors(source)
    for name, parameter in trainer.named_parameters():
        if not torch.equal(parameter, saved[f"model/{name}"].to(parameter.dtype)):
            problems.append(f"weight of {name}")
    for name, master, state in trainer.named_states():
        exact = saved.get(f"optimizer/state/{name}/master", saved[f"model/{name}"])
        if master is None or not torch.equal(master.reshape(-1), exact.float().reshape(-1)):
            problems.append(f"master weight of {name}")
        for slot in ("exp_avg", "exp_avg_sq"):
            want = saved[f"optimizer/state/{name}/{slot}"].float()
            if state[slot].dtype != torch.float32 or not torch.equal(state[slot].reshape(-1), want.reshape(-1)):
                problems.append(f"{slot} of {name}")
    return problems


def save_plain(layout: Layout, path: str, dtype: torch.dtype) -> None:
    """Save a plain module of that dtype, stepped by torch."""
    model, adam = plain_run(layout)
    model.to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    adam.param_groups[0]["lr"] = adam.param_groups[1]["lr"] = 0.1
    adam.step()
    bytecheckpoint.save(path, {"model": model, "optimizer": adam}, framework="torch")


def load_plain(layout: Layout, source: str) -> list[str]:
    """Load master weights into a plain module in full precision, which takes them for its weights and keeps none."""
    model, adam = plain_run(layout, seed=2)
    problems = report_problems(bytecheckpoint.load(source, {"model": model, "optimizer": adam}, framework="torch"))
    for name, parameter in model.named_parameters():
        slot = "/master" if parameter.requires_grad else ""
        want = coordinate_values(5, name + slot, parameter.shape)
        want = want if slot else want.bfloat16().float()
        if not torch.equal(parameter, want):
            problems.append(name)
    problems += ["the optimizer has master weights"] if any("master" in state for state in adam.state.values()) else []
    return problems


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


def load_and_save_grouped(layout: Layout, source: str, path: str) -> list[str]:
    """Group the experts of a model, load, and save again."""
    from megatron.core import parallel_state

    trainer = Trainer(layout, seed=3)
    trainer.train(1)
    rank = parallel_state.get_expert_model_parallel_rank()
    size = parallel_state.get_expert_model_parallel_world_size()
    for layer in _layers(trainer):
        layer.mlp.experts = GroupedExperts(layer.mlp.experts.local_experts, rank, size)
    problems = report_problems(bytecheckpoint.load(source, trainer.states()))
    bytecheckpoint.save(path, trainer.states())
    return problems


def _layers(trainer: Trainer) -> list[Any]:
    return [layer for chunk in trainer.bare for layer in chunk.decoder.layers]


# --- other state ----------------------------------------------------------------------------------------------------


def loss_scaler(layout: Layout, path: str) -> list[Any]:
    """Return (scale, growth tracker) of the loss scaler before and after a load."""
    trainer = Trainer(layout)
    trainer.train(1)
    (inner,) = trainer.optimizer.chained_optimizers
    inner.grad_scaler._scale.fill_(64.0)
    inner.grad_scaler._growth_tracker = 17
    bytecheckpoint.save(path, trainer.states())
    fresh = Trainer(layout, seed=2)
    (inner,) = fresh.optimizer.chained_optimizers
    before = float(inner.grad_scaler.scale), inner.grad_scaler._growth_tracker
    assert not report_problems(bytecheckpoint.load(path, fresh.states()))
    return [before, (float(inner.grad_scaler.scale), inner.grad_scaler._growth_tracker)]


class WithExtraState(nn.Module):
    """A module with an extra state and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = None
        self.register_buffer("counts", torch.zeros(3))

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def extra_states(layout: Layout, path: str) -> list[str]:
    """Save and load extra states of several types, and buffers, in each layer."""
    problems = []
    values: list[Any] = [{"amax": [1.0, 2.0], "n": 3}, torch.arange(5, dtype=torch.uint8), io.BytesIO(b"scales"), None]

    def make(full: bool) -> Trainer:
        trainer = Trainer(layout, seed=2)
        for layer in _layers(trainer):
            layer.extra = WithExtraState()
            number = layer.layer_number - 1
            if full:
                layer.extra.value = values[number]
                layer.extra.counts.fill_(number)
            elif values[number] is not None:
                layer.extra.value = 0
        return trainer

    trainer = make(True)
    bytecheckpoint.save(path, trainer.states())
    fresh = make(False)
    problems += report_problems(bytecheckpoint.load(path, fresh.states()))
    for layer in _layers(fresh):
        want, got = values[layer.layer_number - 1], layer.extra.value
        if isinstance(want, torch.Tensor):
            equal = torch.equal(want, got)
        elif isinstance(want, io.BytesIO):
            equal = want.getvalue() == got.getvalue()
        else:
            equal = want == got
        if not equal or not (layer.extra.counts == layer.layer_number - 1).all():
            problems.append(f"layer {layer.layer_number}: {got!r}, {layer.extra.counts}")
    return problems


def step_in_group(layout: Layout, source: str, path: str) -> list[Any]:
    """Load into an optimizer that keeps one step per group, as those of Apex and Transformer Engine do; save again."""
    trainer = Trainer(layout, seed=2)
    for optimizer in trainer.optimizer.chained_optimizers:
        kind = type(optimizer.optimizer)
        optimizer.optimizer.__class__ = type("FusedAdam", (kind,), {"__module__": "apex.optimizers.fused_adam"})
    problems: list[Any] = report_problems(bytecheckpoint.load(source, trainer.states()))
    for optimizer in trainer.optimizer.chained_optimizers:
        problems += [f"has {set(s)}" for s in optimizer.optimizer.state.values() if "step" in s]
        problems += [f"step {g.get('step')}" for g in optimizer.optimizer.param_groups if g.get("step") != 3]
    bytecheckpoint.save(path, trainer.states())
    return problems


def refusals(layout: Layout) -> list[str]:
    """Return the messages with which a capture refuses what is not supported."""
    trainer = Trainer(layout)
    states = trainer.states()
    found = []

    def refused(given: dict[str, Any], framework: str = "megatron") -> None:
        with pytest.raises(UsageError) as caught:
            resolve(framework, given).capture(given)
        found.append(str(caught.value))

    refused(states, "torch")
    refused({"optimizer": states["optimizer"]})
    refused({"model": states["model"], "extra_states": {"step": 1, "nested": [states["optimizer"]]}})
    refused({"model": states["model"], "optimizer": [states["optimizer"], 1]})
    first = trainer.optimizer.chained_optimizers[0]
    first.config.use_precision_aware_optimizer = True
    refused(states)
    first.config.use_precision_aware_optimizer = False
    first.optimizer.state[first.optimizer.param_groups[0]["params"][0]]["rows"] = torch.ones(2, 3)
    refused(states)
    return found


def describe(layout: Layout) -> dict[str, Any]:
    trainer = Trainer(layout)
    found = resolve("auto", trainer.states()).describe(trainer.states())
    return {"framework": found["framework"], **found["kinds"]["model"]}


def untrained_stages(layout: Layout, path: str) -> list[str]:
    """Save and load where a stage trains nothing, so that its optimizer has no parameters."""

    def make(seed: int) -> dict[str, Any]:
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

    states = make(1)
    bytecheckpoint.save(path, states)
    want = {n: p.detach().clone() for n, p in states["model"].named_parameters()}
    fresh = make(2)
    problems = report_problems(bytecheckpoint.load(path, fresh))
    problems += [n for n, p in fresh["model"].named_parameters() if not torch.equal(p, want[n])]
    return problems
