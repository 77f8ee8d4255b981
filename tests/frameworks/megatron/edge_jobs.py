"""What ranks run in test_edges.py and test_peer_faults.py. Each function returns plain data, mostly problems."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.loading.saved import SavedView
from tests.frameworks.megatron.models import Layout, forget_parallel, initialize_parallel
from tests.frameworks.megatron.variants import VariantModel
from tests.frameworks.real_frameworks import report_problems

VARIANT = "thirds"


def load_and_save_in_groups(layout: Layout, kind: str, source: str, path: str) -> list[str]:
    """Load and save where the ranks with the same parameters form other process groups than usual."""
    from megatron.core import parallel_state

    initialize_parallel(layout)
    parallel_state.destroy_model_parallel()
    groups: dict[str, Any] = {"context_parallel_size": 2} if kind == "context" else {}
    parallel = {}
    if kind == "instances":
        groups = parallel = {"num_distributed_optimizer_instances": 2}
    elif kind == "data innermost":
        groups = {"order": "dp-cp-ep-pp-tp"}
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, **groups)
    try:
        trained = VariantModel(VARIANT, layout, parallel=parallel)
        problems = report_problems(bytecheckpoint.load(source, trained.states()))
        trained.step()
        bytecheckpoint.save(f"{path}-stepped", trained.states())
        problems += report_problems(bytecheckpoint.load(source, trained.states()))
        bytecheckpoint.save(path, trained.states())
    finally:
        forget_parallel()
    return problems


# --- how much is read ------------------------------------------------------------------------------------------------


def trees_read(layout: Layout, source: str) -> list[int]:
    """Return how many trees of settings and values this rank reads, for the model and for the optimizer."""
    found: dict[str, int] = {}
    trained = VariantModel(VARIANT, layout)
    about: Callable[..., Any] = SavedView.trees_about

    def counted(self: SavedView, kind: str, names: Sequence[str]) -> Any:
        for tree in about(self, kind, names):
            found[kind] = found.get(kind, 0) + 1
            yield tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedView, "trees_about", counted)
        patch.setattr(SavedView, "trees", None)
        assert not report_problems(bytecheckpoint.load(source, trained.states()))
    return [found.get("model", 0), found.get("optimizer", 0)]


def save_stepped(layout: Layout, path: str) -> None:
    bytecheckpoint.save(path, VariantModel(VARIANT, layout).states())


# --- pending gathers ----------------------------------------------------------------------------------------------


class PendingGather:
    """A gather of parameters that completes when it is waited for, and no sooner."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._pending = [(tensor, torch.full_like(tensor, 77.0)) for tensor in tensors]

    def wait(self) -> None:
        with torch.no_grad():
            for tensor, value in self._pending:
                tensor.copy_(value)
        self._pending = []


def _bucket_groups(trained: VariantModel) -> list[Any]:
    return [g for chunk in trained.chunks for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]


def load_during_gather(layout: Layout, source: str, path: str) -> list[str]:
    """Load while a gather of the old parameters is pending."""
    trained = VariantModel(VARIANT, layout)
    groups = _bucket_groups(trained)
    for group in groups:
        group.param_gather_handle = PendingGather([p.detach() for bucket in group.buckets for p in bucket.params_list])
    problems = report_problems(bytecheckpoint.load(source, trained.states()))
    for group in groups:
        group.param_gather_handle.wait()  # as the next forward pass does
        group.param_gather_handle = None
    bytecheckpoint.save(path, trained.states())
    overwritten = any(bool((p == 77).any()) for _, p in trained.named_parameters())
    return problems + (["old values"] if overwritten else [])


def save_before_gather(layout: Layout, path: str) -> list[str]:
    """Save while a rank has new values only of what it steps itself, and has not gathered the rest."""
    trained = VariantModel(VARIANT, layout)  # the gather after its step waits for the next forward pass
    stale = sum(int(_stale(trained, optimizer)) for optimizer in trained.optimizer.chained_optimizers)
    handle = bytecheckpoint.save(path, trained.states(), async_checkpoint=True)
    for chunk in trained.chunks:
        chunk.start_param_sync()
    handle.result(60)
    for group in _bucket_groups(trained):
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()
            group.param_gather_handle = None
    live = {n: p.detach().clone() for n, p in trained.named_parameters()}
    bytecheckpoint.load(path, trained.states())
    problems = [n for n, p in trained.named_parameters() if not torch.equal(p, live[n])]
    return problems + ([] if stale else ["nothing was left to gather: the test shows nothing"])


def _stale(trained: VariantModel, optimizer: Any) -> bool:
    """Tell whether this rank steps only a part of some parameter."""
    stepped = {id(parameter): param_range.size for parameter, param_range in _param_ranges(optimizer)}
    return any(stepped.get(id(p), 0) < p.numel() for _, p in trained.named_parameters() if p.requires_grad)


def _param_ranges(optimizer: Any) -> list[tuple[Any, Any]]:
    """Return (parameter, range of its elements that this rank steps)."""
    maps = [bucket["param_map"] for gbuf in optimizer.gbuf_ranges for buckets in gbuf.values() for bucket in buckets]
    return [(parameter, ranges["param"]) for found in maps for parameter, ranges in found.items()]


# --- parts of the states ---------------------------------------------------------------------------------------------


def model_alone(layout: Layout, source: str, path: str) -> list[str]:
    """Load and save a model without its optimizer; then have Megatron copy the weights into the optimizer."""
    trained = VariantModel(VARIANT, layout)
    steps = [float(state["step"]) for state in trained.inner_states()]
    alone = {"model": trained.states()["model"]}
    problems = report_problems(bytecheckpoint.load(source, alone, strict=False))
    bytecheckpoint.save(path, alone)
    again = [float(state["step"]) for state in trained.inner_states()]
    problems += ["the optimizer was touched"] if steps != again else []
    trained.optimizer.reload_model_params()
    names = {id(p): name for name, p in trained.named_parameters()}
    for optimizer in trained.optimizer.chained_optimizers:
        for parameter, param_range in _param_ranges(optimizer):
            group, index = optimizer.model_param_group_index_map[parameter]
            master = optimizer.optimizer.param_groups[group]["params"][index]
            want = parameter.detach().view(-1)[param_range.start : param_range.end].float()
            problems += [] if torch.equal(master, want) else [f"master of {names[id(parameter)]}"]
    return problems


def load_links(layout: Layout, source: str, path: str) -> list[str]:
    """Load what was saved as one chain into a list, and into a dict, of its links."""
    trained = VariantModel("shared expert", layout)
    links = list(trained.optimizer.chained_optimizers)
    assert len(links) > 1
    model = trained.states()["model"]
    problems = report_problems(bytecheckpoint.load(source, {"model": model, "optimizer": links}))
    named = {"dense": links[0], "experts": links[1]}
    problems += report_problems(bytecheckpoint.load(source, {"model": model, "optimizer": named}))
    bytecheckpoint.save(path, {"model": model, "optimizer": named})
    return problems


def load_stateless(layout: Layout, source: str) -> list[str]:
    """Load a checkpoint of an optimizer without state, which removes the state."""
    trained = VariantModel(VARIANT, layout)
    problems = report_problems(bytecheckpoint.load(source, trained.states()))
    return problems + (["has state"] if any(trained.inner_states()) else [])


def load_different_steps(layout: Layout, source: str) -> list[str]:
    """An optimizer that keeps one step per group takes no parameters that have trained different numbers of steps."""
    trained = VariantModel(VARIANT, layout)
    before = []
    for optimizer in trained.optimizer.chained_optimizers:
        kind = type(optimizer.optimizer)
        optimizer.optimizer.__class__ = type(
            "FusedAdam", (kind,), {"__module__": "transformer_engine.pytorch.optimizers"}
        )
        for state in optimizer.optimizer.state.values():
            del state["step"]
            before.append((state, dict(state)))
        for group in optimizer.optimizer.param_groups:
            group["step"] = 1
    with pytest.raises(IncompatibleCheckpointError) as caught:
        bytecheckpoint.load(source, trained.states())
    problems = [str(caught.value)]
    problems += ["state was replaced" for state, copy in before if state.keys() != copy.keys()]
    return problems + ["step" for g in trained.optimizer.param_groups if g["step"] != 1]


# --- refusals -------------------------------------------------------------------------------------------------


def refusal(layout: Layout, path: str, what: str) -> str:
    """Return the message for an optimizer that is not supported; nothing may be written."""
    if what == "layer-wise":
        states = _layer_wise(layout)
    elif what == "offload":
        states = VariantModel(
            VARIANT, layout, stepped=False, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0
        ).states()
    else:
        trained = VariantModel(VARIANT, layout)
        for optimizer in trained.optimizer.chained_optimizers:
            optimizer.config.use_precision_aware_optimizer = True
        states = trained.states()
    with pytest.raises(UsageError) as saving:
        bytecheckpoint.save(path, states, framework="megatron", async_checkpoint=True).result(60)
    if os.path.exists(path) and os.listdir(path):
        return f"something was written: {os.listdir(path)}"
    return str(saving.value)


def _layer_wise(layout: Layout) -> dict[str, Any]:
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    trained = VariantModel(VARIANT, layout)
    states = trained.states()
    kind = type("LayerWise", (LayerWiseDistributedOptimizer,), {"__init__": lambda self: None})
    wrapper: Any = kind()
    wrapper.chained_optimizers = list(trained.optimizer.chained_optimizers)
    return states | {"optimizer": wrapper}


# --- faults of Megatron's own checkpoints ---------------------------------------------------------------------------------


def shared_steps_of_own_load(layout: Layout) -> tuple[int, int]:
    """Return the number of steps, and of distinct step tensors, after Megatron's own load of its own state."""
    trained = VariantModel(VARIANT, layout)
    for optimizer in trained.optimizer.chained_optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
    states = trained.inner_states()
    return len(states), len({s["step"].data_ptr() for s in states})


def steps_after_load(layout: Layout, source: str) -> dict[str, float]:
    """Return the step of each parameter, by its local name, after a load and another training step."""
    trained = VariantModel(VARIANT, layout)
    bytecheckpoint.load(source, trained.states())
    trained.step()
    return {name: float(state["step"]) for name, _, state in trained.named_states()}
