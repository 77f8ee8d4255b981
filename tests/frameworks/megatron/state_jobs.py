"""What ranks run in test_states.py. Each returns plain data, mostly what is wrong."""

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
from tests.distributed.fsdp1_jobs import counted
from tests.frameworks.megatron.jobs import stepped, tensors, wrong
from tests.frameworks.megatron.worlds import VOCABULARY, Layout, Trainer, build_chunks, code, fill, plain, prepare


def communication(layout: Layout, path: str) -> dict[str, list[str]]:
    """What captures, saves and a load communicate over process groups; and Megatron's own way."""
    trainer = Trainer(layout)
    trainer.train(1)
    states = trainer.states()
    bytecheckpoint.save(f"{path}/first", states)  # makes connections of its own
    found = {}
    with counted() as found["capture"]:
        MegatronFramework().capture(states)
    with counted() as found["save"]:
        bytecheckpoint.save(f"{path}/second", states)
    with counted() as found["async"]:
        bytecheckpoint.save(f"{path}/third", states, async_checkpoint=True).result(60)
    with counted() as found["load"]:
        bytecheckpoint.load(f"{path}/third", states)
    with counted() as found["own way"]:
        for optimizer in trainer.optimizer.chained_optimizers:
            if layout.distributed:
                optimizer.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    return found


def save_filled(layout: Layout, path: str, seed: int = 5) -> None:
    """Parameters and state by coordinates of this rank's own tensors, in one process."""
    assert layout.world == 1
    trainer = Trainer(layout)
    trainer.train(1)
    fill_by_name(trainer, seed)
    bytecheckpoint.save(path, trainer.states())


def fill_by_name(trainer: Trainer, seed: int) -> None:
    named = {id(p): name for chunk in trainer.bare for name, p in chunk.named_parameters()}
    with torch.no_grad():
        for chunk in trainer.bare:
            for name, parameter in chunk.named_parameters():
                parameter.copy_(code(seed, name, parameter.shape))
        for optimizer in trainer.optimizer.chained_optimizers:
            for name, master, state in stepped(optimizer, named):
                if master is not None:
                    master.copy_(code(seed, f"{name}/master", master.shape))
                for slot in ("exp_avg", "exp_avg_sq"):
                    state[slot].copy_(code(seed, f"{name}/{slot}", state[slot].shape))


# --- vocabularies that are padded ------------------------------------------------------------------------------------


def padded(layout: Layout, source: str, path: str, reported: str = "") -> list[str]:
    """Load a checkpoint of another vocabulary size, and save it with this one."""
    trainer = Trainer(layout, seed=3)
    trainer.train(1)
    before = {n: p.detach().clone() for c in trainer.bare for n, p in c.named_parameters()}
    problems = wrong(bytecheckpoint.load(source, trainer.states()))
    bytecheckpoint.save(path, trainer.states())
    name = "embedding.word_embeddings.weight"
    first = layout.vocabulary // layout.tp * _tensor_rank()
    for chunk in trainer.bare:
        for found, parameter in chunk.named_parameters():
            if found == name:
                rows = min(max(0, VOCABULARY - first), parameter.shape[0])
                want = code(5, name, (VOCABULARY, 16))[first : first + rows].to(parameter.dtype)
                if not torch.equal(parameter[:rows], want):
                    problems.append("rows of the checkpoint")
                if not torch.equal(parameter[rows:], before[name][rows:]):
                    problems.append("rows that it lacks")
    return problems


def _tensor_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_tensor_model_parallel_rank())


# --- weights and master weights --------------------------------------------------------------------------------------


def masters_from(layout: Layout, source: str) -> list[str]:
    """Load a checkpoint without master weights: a full-precision one is exact in the masters and rounded in the model."""
    trainer = Trainer(layout, seed=3)
    trainer.train(1)
    states = {kind: trainer.states()[kind] for kind in ("model", "optimizer")}
    problems = [str(x) for x in bytecheckpoint.load(source, states).missing]
    named = {id(p): name for chunk in trainer.bare for name, p in chunk.named_parameters()}
    whole = tensors(source)
    for chunk in trainer.bare:
        for name, parameter in chunk.named_parameters():
            if not torch.equal(parameter, whole[f"model/{name}"].to(parameter.dtype)):
                problems.append(f"weight of {name}")
    for optimizer in trainer.optimizer.chained_optimizers:
        for name, master, state in stepped(optimizer, named):
            exact = whole.get(f"optimizer/state/{name}/master", whole[f"model/{name}"])
            if master is None or not torch.equal(master.reshape(-1), exact.float().reshape(-1)):
                problems.append(f"master weight of {name}")
            for slot in ("exp_avg", "exp_avg_sq"):
                want = whole[f"optimizer/state/{name}/{slot}"].float()
                if state[slot].dtype != torch.float32 or not torch.equal(state[slot].reshape(-1), want.reshape(-1)):
                    problems.append(f"{slot} of {name}")
    return problems


def save_plain(layout: Layout, path: str, dtype: torch.dtype, *, optimizer: bool = True) -> None:
    """A plain module of that dtype, trained by torch."""
    model, adam = plain(layout)
    model.to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    adam.param_groups[0]["lr"] = adam.param_groups[1]["lr"] = 0.1
    adam.step()
    bytecheckpoint.save(path, {"model": model, "optimizer": adam}, framework="torch")


def load_full(layout: Layout, source: str) -> list[str]:
    """A plain module in full precision takes its weights from the master weights, and keeps none."""
    model, adam = plain(layout, seed=2)
    problems = wrong(bytecheckpoint.load(source, {"model": model, "optimizer": adam}, framework="torch"))
    for name, parameter in model.named_parameters():
        slot = "/master" if parameter.requires_grad else ""
        want = code(5, name + slot, parameter.shape)
        want = want if slot else want.bfloat16().float()
        if not torch.equal(parameter, want):
            problems.append(name)
    problems += ["carries masters"] if any("master" in state for state in adam.state.values()) else []
    return problems


# --- experts, one by one and grouped ---------------------------------------------------------------------------------


class Grouped(nn.Module):
    """Experts as Transformer Engine's GroupedLinear keeps them, which needs CUDA: their weights, names and boxes."""

    def __init__(self, experts: Any, rank: int, size: int) -> None:
        super().__init__()
        self.number, self.total = rank * len(experts), size * len(experts)
        self.count = len(experts)
        for layer in ("linear_fc1", "linear_fc2"):
            held = nn.Module()
            for i, expert in enumerate(experts):
                setattr(held, f"weight{i}", getattr(expert, layer).weight)
            setattr(self, layer, held)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

        found = {}
        for layer in ("linear_fc1", "linear_fc2"):
            for i in range(self.count):
                offsets = (*sharded_offsets, (len(sharded_offsets), self.number + i, self.total))
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


def grouped(layout: Layout) -> Trainer:
    from megatron.core import parallel_state

    trainer = Trainer(layout, seed=3)
    trainer.train(1)
    for chunk in trainer.bare:
        for layer in chunk.decoder.layers:
            held = layer.mlp.experts.local_experts
            rank, size = (
                parallel_state.get_expert_model_parallel_rank(),
                parallel_state.get_expert_model_parallel_world_size(),
            )
            layer.mlp.experts = Grouped(held, rank, size)
    return trainer


def pass_on_grouped(layout: Layout, source: str, path: str) -> list[str]:
    trainer = grouped(layout)
    problems = wrong(bytecheckpoint.load(source, trainer.states()))
    bytecheckpoint.save(path, trainer.states())
    return problems


# --- other things ----------------------------------------------------------------------------------------------------


def scaler(layout: Layout, path: str) -> list[Any]:
    """(scale, tracker) of the loss scaler: saved, before the load, after it."""
    trainer = Trainer(layout)
    trainer.train(1)
    (inner,) = trainer.optimizer.chained_optimizers
    inner.grad_scaler._scale.fill_(64.0)
    inner.grad_scaler._growth_tracker = 17
    bytecheckpoint.save(path, trainer.states())
    fresh = Trainer(layout, seed=2)
    (inner,) = fresh.optimizer.chained_optimizers
    before = float(inner.grad_scaler.scale), inner.grad_scaler._growth_tracker
    assert not wrong(bytecheckpoint.load(path, fresh.states()))
    return [before, (float(inner.grad_scaler.scale), inner.grad_scaler._growth_tracker)]


class Extra(nn.Module):
    """A part with values that are not tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = None
        self.register_buffer("counts", torch.zeros(3))

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def extra_states(layout: Layout, path: str) -> list[str]:
    """Extra states and buffers of any form, by layer."""
    problems = []
    values: list[Any] = [{"amax": [1.0, 2.0], "n": 3}, torch.arange(5, dtype=torch.uint8), io.BytesIO(b"scales"), None]

    def make(full: bool) -> Trainer:
        trainer = Trainer(layout, seed=2)
        for chunk in trainer.bare:
            for layer in chunk.decoder.layers:
                layer.extra = Extra()
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
    problems += wrong(bytecheckpoint.load(path, fresh.states()))
    for chunk in fresh.bare:
        for layer in chunk.decoder.layers:
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


def steps_of_groups(layout: Layout, source: str, path: str) -> list[Any]:
    """An optimizer that keeps one step per group, as those of Apex and Transformer Engine do."""
    trainer = Trainer(layout, seed=2)
    for optimizer in trainer.optimizer.chained_optimizers:
        kind = type(optimizer.optimizer)
        optimizer.optimizer.__class__ = type("FusedAdam", (kind,), {"__module__": "apex.optimizers.fused_adam"})
    problems: list[Any] = wrong(bytecheckpoint.load(source, trainer.states()))
    for optimizer in trainer.optimizer.chained_optimizers:
        problems += [f"has {set(s)}" for s in optimizer.optimizer.state.values() if "step" in s]
        problems += [f"step {g.get('step')}" for g in optimizer.optimizer.param_groups if g.get("step") != 3]
    bytecheckpoint.save(path, trainer.states())
    return problems


def refusals(layout: Layout) -> list[str]:
    """What cannot be read is refused, by name."""
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
    link = trainer.optimizer.chained_optimizers[0]
    link.config.use_precision_aware_optimizer = True
    refused(states)
    link.config.use_precision_aware_optimizer = False
    link.optimizer.state[link.optimizer.param_groups[0]["params"][0]]["rows"] = torch.ones(2, 3)
    refused(states)
    return found


def describe(layout: Layout) -> dict[str, Any]:
    trainer = Trainer(layout)
    found = resolve("auto", trainer.states()).describe(trainer.states())
    return {"framework": found["framework"], **found["kinds"]["model"]}


def unused(layout: Layout, path: str) -> list[str]:
    """Stages of which nothing is trained have optimizers without anything in them."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    def make(seed: int) -> dict[str, Any]:
        trainer = Trainer(layout, seed=seed)
        prepare(layout)
        chunks = build_chunks(layout)
        for chunk in chunks:
            fill(chunk, seed)
            for layer in chunk.decoder.layers:
                layer.requires_grad_(False)
            if hasattr(chunk.decoder, "final_layernorm") and chunk.decoder.final_layernorm is not None:
                chunk.decoder.final_layernorm.requires_grad_(False)
            if chunk.post_process and not chunk.pre_process and not layout.tied:
                chunk.output_layer.requires_grad_(False)
        kind = type(trainer.chunks[0])
        wrapped = [kind(chunk.config, trainer.chunks[0].ddp_config, chunk) for chunk in chunks]
        config = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=layout.distributed)
        return {"model": wrapped[0], "optimizer": get_megatron_optimizer(config, wrapped)}

    states = make(1)
    bytecheckpoint.save(path, states)
    want = {n: p.detach().clone() for n, p in states["model"].named_parameters()}
    fresh = make(2)
    problems = wrong(bytecheckpoint.load(path, fresh))
    problems += [n for n, p in fresh["model"].named_parameters() if not torch.equal(p, want[n])]
    return problems
