"""What ranks run in test_edges.py and test_peer_faults.py. Each returns plain data, mostly what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.loading.saved import SavedView
from tests.frameworks.megatron import worlds
from tests.frameworks.megatron.forms import Made
from tests.frameworks.megatron.jobs import stepped, wrong
from tests.frameworks.megatron.worlds import Layout, prepare

FORM = "thirds"


def save_filled(layout: Layout, path: str, *, steps: bool = True) -> None:
    """In one process: every element says which it is, every parameter has a step of its own."""
    assert layout.world == 1
    made = Made(FORM, layout, steps=steps)
    if steps:
        made.fill(5)
    bytecheckpoint.save(path, made.states())


def pass_on(layout: Layout, source: str, path: str) -> list[str]:
    """Load over other state, and save again; steps must not be shared."""
    made = Made(FORM, layout)
    problems = wrong(bytecheckpoint.load(source, made.states()))
    states = [s for o in made.optimizer.chained_optimizers for s in o.optimizer.state.values()]
    if len({s["step"].data_ptr() for s in states}) != len(states):
        problems.append("parameters share a step")
    bytecheckpoint.save(path, made.states())
    return problems


def pass_on_in_groups(layout: Layout, kind: str, source: str, path: str) -> list[str]:
    """As `pass_on`, where the ranks that have the same parameters stand in other groups than usual."""
    from megatron.core import parallel_state

    prepare(layout)
    parallel_state.destroy_model_parallel()
    groups: dict[str, Any] = {"context_parallel_size": 2} if kind == "context" else {}
    parallel = {}
    if kind == "instances":
        groups = parallel = {"num_distributed_optimizer_instances": 2}
    elif kind == "data innermost":
        groups = {"order": "dp-cp-ep-pp-tp"}
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, **groups)
    try:
        made = Made(FORM, layout, parallel=parallel)
        problems = wrong(bytecheckpoint.load(source, made.states()))
        made.step()
        bytecheckpoint.save(f"{path}-stepped", made.states())
        problems += wrong(bytecheckpoint.load(source, made.states()))
        bytecheckpoint.save(path, made.states())
    finally:
        worlds._extents.clear()
    return problems


# --- how much is read ------------------------------------------------------------------------------------------------


def trees_read(layout: Layout, source: str) -> list[int]:
    """How many trees of settings and values this rank reads, for the model and for the optimizer."""
    found: dict[str, int] = {}
    made = Made(FORM, layout)
    about: Callable[..., Any] = SavedView.trees_about

    def counted(self: SavedView, kind: str, names: Sequence[str]) -> Any:
        for tree in about(self, kind, names):
            found[kind] = found.get(kind, 0) + 1
            yield tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedView, "trees_about", counted)
        patch.setattr(SavedView, "trees", None)
        assert not wrong(bytecheckpoint.load(source, made.states()))
    return [found.get("model", 0), found.get("optimizer", 0)]


def save_trained(layout: Layout, path: str) -> None:
    bytecheckpoint.save(path, Made(FORM, layout).states())


# --- gathers that go on ----------------------------------------------------------------------------------------------


class Late:
    """A gather of parameters that arrives when it is waited for, and no sooner."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._arriving = [(tensor, torch.full_like(tensor, 77.0)) for tensor in tensors]

    def wait(self) -> None:
        with torch.no_grad():
            for tensor, value in self._arriving:
                tensor.copy_(value)
        self._arriving = []


def gather_goes_on(layout: Layout, source: str, path: str) -> list[str]:
    """Load while a gather of the old parameters is under way."""
    made = Made(FORM, layout)
    groups = [g for c in made.chunks for g in (*c.bucket_groups, *c.expert_parallel_bucket_groups)]
    for group in groups:
        group.param_gather_handle = Late([p.detach() for bucket in group.buckets for p in bucket.params_list])
    problems = wrong(bytecheckpoint.load(source, made.states()))
    for group in groups:
        group.param_gather_handle.wait()  # as the next forward pass does
        group.param_gather_handle = None
    bytecheckpoint.save(path, made.states())
    whole = [bool((p == 77).any()) for chunk in made.bare for p in chunk.parameters()]
    return problems + (["old values"] if any(whole) else [])


def parameters_gathered_late(layout: Layout, path: str) -> list[str]:
    """Save when a rank has new values only of what it steps itself, and everything else still is to be gathered."""
    made = Made(FORM, layout)  # has stepped: the gather waits for the next forward pass
    stale = sum(int(_stale(made, optimizer)) for optimizer in made.optimizer.chained_optimizers)
    handle = bytecheckpoint.save(path, made.states(), async_checkpoint=True)
    for chunk in made.chunks:
        chunk.start_param_sync()
    handle.result(60)
    for chunk in made.chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None
    with torch.no_grad():
        live = {n: p.detach().clone() for chunk in made.bare for n, p in chunk.named_parameters()}
    bytecheckpoint.load(path, made.states())
    problems = [n for chunk in made.bare for n, p in chunk.named_parameters() if not torch.equal(p, live[n])]
    return problems + ([] if stale else ["nothing was left to gather: the test shows nothing"])


def _stale(made: Made, optimizer: Any) -> bool:
    ranges = [m["param_map"] for b in optimizer.gbuf_ranges for r in b.values() for m in r]
    mine = {id(p): r["param"].size for m in ranges for p, r in m.items()}
    return any(mine.get(id(p), 0) < p.numel() for chunk in made.bare for p in chunk.parameters() if p.requires_grad)


# --- parts of the states ---------------------------------------------------------------------------------------------


def model_alone(layout: Layout, source: str, path: str) -> list[str]:
    """A model without its optimizer, saved and loaded; the optimizer takes the weights up as Megatron has it do."""
    made = Made(FORM, layout)
    steps = [float(s["step"]) for o in made.optimizer.chained_optimizers for s in o.optimizer.state.values()]
    alone = {"model": made.states()["model"]}
    problems = wrong(bytecheckpoint.load(source, alone, strict=False))
    bytecheckpoint.save(path, alone)
    again = [float(s["step"]) for o in made.optimizer.chained_optimizers for s in o.optimizer.state.values()]
    problems += ["the optimizer was touched"] if steps != again else []
    made.optimizer.reload_model_params()
    named = {id(p): (n, p) for chunk in made.bare for n, p in chunk.named_parameters()}
    for optimizer in made.optimizer.chained_optimizers:
        for parameter, ranges in _runs(optimizer):
            group, place = optimizer.model_param_group_index_map[parameter]
            master = optimizer.optimizer.param_groups[group]["params"][place]
            want = parameter.detach().view(-1)[ranges.start : ranges.end].float()
            problems += [] if torch.equal(master, want) else [f"master of {named[id(parameter)][0]}"]
    return problems


def _runs(optimizer: Any) -> list[tuple[Any, Any]]:
    maps = [m["param_map"] for b in optimizer.gbuf_ranges for r in b.values() for m in r]
    return [(parameter, ranges["param"]) for found in maps for parameter, ranges in found.items()]


def optimizer_as_parts(layout: Layout, source: str, path: str) -> list[str]:
    """What was saved as one chain is loaded as a list, and as a dict, of its links."""
    made = Made("shared expert", layout)
    links = list(made.optimizer.chained_optimizers)
    assert len(links) > 1
    model = made.states()["model"]
    problems = wrong(bytecheckpoint.load(source, {"model": model, "optimizer": links}))
    named = {"dense": links[0], "experts": links[1]}
    problems += wrong(bytecheckpoint.load(source, {"model": model, "optimizer": named}))
    bytecheckpoint.save(path, {"model": model, "optimizer": named})
    return problems


def save_experts(layout: Layout, path: str) -> None:
    made = Made("shared expert", layout)
    made.fill(5)
    bytecheckpoint.save(path, made.states())


def before_the_first_step(layout: Layout, source: str) -> list[str]:
    """A checkpoint of an optimizer without state takes the state away."""
    made = Made(FORM, layout)
    problems = wrong(bytecheckpoint.load(source, made.states()))
    for optimizer in made.optimizer.chained_optimizers:
        problems += ["has state"] if any(optimizer.optimizer.state.values()) else []
    return problems


def steps_of_a_group(layout: Layout, source: str) -> list[str]:
    """An optimizer that keeps one step per group takes no parameters that have made different numbers of steps."""
    made = Made(FORM, layout)
    before = []
    for optimizer in made.optimizer.chained_optimizers:
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
        bytecheckpoint.load(source, made.states())
    problems = [str(caught.value)]
    problems += ["state was exchanged" for now, then in before if now.keys() != then.keys()]
    return problems + ["step" for g in made.optimizer.param_groups if g["step"] != 1]


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(layout: Layout, path: str, what: str) -> str:
    """The message, for an optimizer that is not understood; nothing may be there afterwards."""
    if what == "layer-wise":
        states = _layer_wise(layout)
    elif what == "offload":
        states = Made(FORM, layout, steps=False, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0).states()
    else:
        made = Made(FORM, layout)
        for link in made.optimizer.chained_optimizers:
            link.config.use_precision_aware_optimizer = True
        states = made.states()
    with pytest.raises(UsageError) as saving:
        bytecheckpoint.save(path, states, framework="megatron", async_checkpoint=True).result(60)
    if os.path.exists(path) and os.listdir(path):
        return f"something was written: {os.listdir(path)}"
    return str(saving.value)


def _layer_wise(layout: Layout) -> dict[str, Any]:
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    made = Made(FORM, layout)
    states = made.states()
    kind = type("Stand", (LayerWiseDistributedOptimizer,), {"__init__": lambda self: None})
    wrapper: Any = kind()
    wrapper.chained_optimizers = list(made.optimizer.chained_optimizers)
    return states | {"optimizer": wrapper}


# --- what Megatron itself gets wrong ---------------------------------------------------------------------------------


def own_load_shares_a_step(layout: Layout) -> tuple[int, int]:
    """(steps, distinct ones) after Megatron's own load of its own state."""
    made = Made(FORM, layout)
    for optimizer in made.optimizer.chained_optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
    states = [s for o in made.optimizer.chained_optimizers for s in o.optimizer.state.values()]
    return len(states), len({s["step"].data_ptr() for s in states})


def own_steps(layout: Layout, source: str) -> dict[str, float]:
    """The step of each parameter, by the module's name, after a load and another training step."""
    made = Made(FORM, layout)
    bytecheckpoint.load(source, made.states())
    made.step()
    named = {id(p): name for chunk in made.bare for name, p in chunk.named_parameters()}
    return {
        name: float(state["step"])
        for optimizer in made.optimizer.chained_optimizers
        for name, _, state in stepped(optimizer, named)
    }
