"""Rare situations of Megatron-Core: pending gathers, parts of the states, unusual optimizers, how much is read."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.megatron.adapter import MegatronFramework
from tests.frameworks.counted_trees import counted_trees
from tests.frameworks.megatron.variants import VariantModel, save_variant
from tests.support.comparisons import assert_complete, assert_same, assert_same_checkpoints, differences, saved_tensors
from tests.support.megatron.models import Layout, forget_parallel, in_layout, initialize_parallel, main_params
from tests.support.worlds import Worlds, on_ranks

pytestmark = pytest.mark.timeout(600)

VARIANT = "thirds"


# --- how much is read ------------------------------------------------------------------------------------------------


def save_stepped(layout: Layout, path: str) -> None:
    bytecheckpoint.save(path, VariantModel(VARIANT, layout).states())


def trees_read(layout: Layout, source: str) -> list[int]:
    """Return how many trees of settings and values this rank reads, for the model and for the optimizer."""
    trained = VariantModel(VARIANT, layout)
    with counted_trees(MegatronFramework) as found:
        assert_complete(bytecheckpoint.load(source, trained.states(), framework="counted"))
    thread = threading.current_thread().name
    return [found[thread, "model"], found[thread, "optimizer"]]


@pytest.mark.parametrize(
    ("saved", "loaded", "most"),
    [
        # The model's trees have no values; of the optimizer's trees, those of the ranks that stepped what this rank steps.
        (Layout(dp=4, buckets=300), Layout(dp=4, buckets=300), 1),
        (Layout(tp=2, dp=2), Layout(tp=2, dp=2), 1),
        (Layout(dp=4), Layout(dp=2), 3),
        (Layout(pp=3, distributed=False), Layout(pp=3), 2),  # the embedding is on the first stage
        (Layout(tp=2, dp=2, distributed=False), Layout(dp=4), 1),
        (Layout(dp=2), Layout(dp=4), 2),
    ],
    ids=str,
)
def test_few_trees_are_read(worlds: Worlds, saved: Layout, loaded: Layout, most: int, path: str) -> None:
    worlds.run(saved.world, save_stepped, saved, path)
    for model, optimizer in worlds.run(loaded.world, trees_read, loaded, path):
        assert model == 0
        assert 1 <= optimizer <= most


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


def _finish_gathers(trained: VariantModel) -> None:
    """Wait for the pending gathers, as the next forward pass does."""
    for group in _bucket_groups(trained):
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()
            group.param_gather_handle = None


def load_during_gather(layout: Layout, source: str, path: str) -> None:
    """Load while a gather of the old parameters is pending."""
    trained = VariantModel(VARIANT, layout)
    for group in _bucket_groups(trained):
        group.param_gather_handle = PendingGather([p.detach() for bucket in group.buckets for p in bucket.params_list])
    assert_complete(bytecheckpoint.load(source, trained.states()))
    _finish_gathers(trained)
    bytecheckpoint.save(path, trained.states())
    assert not any(bool((p == 77).any()) for _, p in trained.named_parameters()), "old values"


@pytest.mark.parametrize(
    "layout", [Layout(dp=2, overlap=True), Layout(dp=2, overlap=True, bf16=True, buckets=300)], ids=str
)
def test_a_pending_gather_does_not_overwrite_loaded_parameters(
    worlds: Worlds, layout: Layout, first: str, path: str
) -> None:
    worlds.run(1, save_variant, VARIANT, Layout(bf16=layout.bf16), first)
    worlds.run(2, load_during_gather, layout, first, path)
    assert_same_checkpoints(first, path)


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2, overlap=True, bf16=True, buckets=300), Layout(tp=2, dp=2, overlap=True), Layout(dp=3, overlap=True)],
    ids=str,
)
@in_layout
def test_a_save_before_parameters_are_gathered(layout: Layout, path: str) -> None:
    """A rank has new values only of the elements that it steps: the gather waits for the next forward pass."""
    trained = VariantModel(VARIANT, layout)
    assert any(_steps_parts(trained, o) for o in trained.optimizer.chained_optimizers), "nothing is left to gather"
    handle = bytecheckpoint.save(path, trained.states(), async_checkpoint=True)
    for chunk in trained.chunks:
        chunk.start_param_sync()
    handle.result(60)
    _finish_gathers(trained)
    live = {n: p.detach().clone() for n, p in trained.named_parameters()}
    bytecheckpoint.load(path, trained.states())
    assert_same(live, dict(trained.named_parameters()))


def _steps_parts(trained: VariantModel, optimizer: Any) -> bool:
    """Tell whether this rank steps only a part of some parameter."""
    stepped = {id(parameter): param_range.size for parameter, param_range in _param_ranges(optimizer)}
    return any(stepped.get(id(p), 0) < p.numel() for _, p in trained.named_parameters() if p.requires_grad)


def _param_ranges(optimizer: Any) -> list[tuple[Any, Any]]:
    """Return (parameter, range of its elements that this rank steps)."""
    maps = [bucket["param_map"] for gbuf in optimizer.gbuf_ranges for buckets in gbuf.values() for bucket in buckets]
    return [(parameter, ranges["param"]) for found in maps for parameter, ranges in found.items()]


# --- process groups -------------------------------------------------------------------------------------------------


def load_and_save_in_groups(layout: Layout, kind: str, source: str, path: str) -> None:
    """Load and save where the ranks with the same parameters form other process groups than usual."""
    from megatron.core import parallel_state

    initialize_parallel(layout)
    parallel_state.destroy_model_parallel()
    instances = {"num_distributed_optimizer_instances": 2}
    groups: dict[str, Any] = {
        "context": {"context_parallel_size": 2},
        "instances": instances,
        "data innermost": {"order": "dp-cp-ep-pp-tp"},
    }
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, **groups[kind])
    try:
        trained = VariantModel(VARIANT, layout, parallel=instances if kind == "instances" else {})
        assert_complete(bytecheckpoint.load(source, trained.states()))
        trained.step()
        bytecheckpoint.save(f"{path}-stepped", trained.states())
        assert_complete(bytecheckpoint.load(source, trained.states()))
        bytecheckpoint.save(path, trained.states())
    finally:
        forget_parallel()


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (Layout(dp=2, bf16=True), "context"),
        (Layout(tp=2, dp=2, overlap=True), "context"),
        (Layout(dp=4, bf16=True, buckets=300, overlap=True), "instances"),
        (Layout(tp=2, dp=2), "data innermost"),
        (Layout(pp=2, dp=2, distributed=False), "data innermost"),
    ],
    ids=str,
)
def test_other_process_groups(worlds: Worlds, layout: Layout, kind: str, first: str, path: str) -> None:
    """Context parallelism, instances of the distributed optimizer, another order of the ranks."""
    worlds.run(1, save_variant, VARIANT, Layout(bf16=layout.bf16), first)
    worlds.run(layout.world, load_and_save_in_groups, layout, kind, first, path)
    assert_same_checkpoints(first, path)
    key = "optimizer/state/decoder.layers.5.mlp.linear_fc1.weight/exp_avg"
    assert any(x.startswith(key) for x in differences(saved_tensors(first), saved_tensors(f"{path}-stepped")))


# --- parts of the states ---------------------------------------------------------------------------------------------


def load_and_save_model_alone(layout: Layout, source: str, path: str) -> None:
    """Load and save a model without its optimizer, whose master weights the load fills from what the checkpoint has."""
    trained = VariantModel(VARIANT, layout)
    steps = [float(state["step"]) for state in trained.inner_states()]
    alone = {"model": trained.states()["model"]}
    assert_complete(bytecheckpoint.load(source, alone), ("missing", "unexpected", "notes"))
    assert_masters(trained, saved_tensors(source))
    bytecheckpoint.save(path, alone)
    assert steps == [float(state["step"]) for state in trained.inner_states()], "the optimizer was touched"
    fresh = VariantModel(VARIANT, layout)
    assert_complete(bytecheckpoint.load(path, {"model": fresh.states()["model"]}), ("missing", "notes"))
    assert_masters(fresh, saved_tensors(path))
    fresh.step()


def assert_masters(trained: VariantModel, saved: Mapping[str, torch.Tensor]) -> None:
    """Fail unless this rank's master weights are those of the checkpoint or, if it has none, its weights."""
    names = {id(parameter): name for name, parameter in trained.named_parameters()}
    for optimizer in trained.optimizer.chained_optimizers:
        for parameter, master, start in main_params(optimizer):
            name = names[id(parameter)]
            exact = saved.get(f"optimizer/state/{name}/master", saved[f"model/{name}"])
            assert torch.equal(master.reshape(-1), exact.reshape(-1)[start : start + master.numel()].float()), name


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, bf16=True),
        Layout(dp=2, bf16=True, overlap=True, buckets=300),
        Layout(bf16=True, distributed=False),
    ],
    ids=str,
)
def test_a_model_alone(worlds: Worlds, layout: Layout, first: str, path: str) -> None:
    worlds.run(1, save_variant, VARIANT, Layout(bf16=True), first)
    worlds.run(layout.world, load_and_save_model_alone, layout, first, path)
    assert_same({k: v for k, v in saved_tensors(first).items() if k.startswith("model/")}, saved_tensors(path))


def load_bare_model_alone(layout: Layout, source: str) -> None:
    """Load a model without the wrapper that has the ranges of the parameters that this rank's optimizer steps."""
    trained = VariantModel(VARIANT, layout)
    report = bytecheckpoint.load(source, {"model": trained.bare[0]})
    assert any("master weights of" in note and "reload_model_params" in note for note in report.notes)
    with pytest.raises(IncompatibleCheckpointError, match=r"cast=True converts"):
        bytecheckpoint.load(f"{source}-full", {"model": trained.bare[0]})
    fresh = VariantModel(VARIANT, layout)
    report = bytecheckpoint.load(f"{source}-full", {"model": fresh.states()["model"]})
    assert_complete(report, ("missing", "cast", "notes"))
    assert_masters(fresh, saved_tensors(f"{source}-full"))


def test_master_weights_out_of_reach_are_named(worlds: Worlds, first: str) -> None:
    """Weights in higher precision need a cast if nothing can hold their exact values."""
    worlds.run(1, save_variant, VARIANT, Layout(bf16=True), first)
    worlds.run(1, save_variant, VARIANT, Layout(), f"{first}-full")
    worlds.run(1, load_bare_model_alone, Layout(bf16=True), first)


def load_links(layout: Layout, source: str, path: str) -> None:
    """Load what was saved as one chain into a list, and into a dict, of its links."""
    trained = VariantModel("shared expert", layout)
    links = list(trained.optimizer.chained_optimizers)
    assert len(links) > 1
    model = trained.states()["model"]
    named = {"dense": links[0], "experts": links[1]}
    for optimizer in (links, named):
        assert_complete(bytecheckpoint.load(source, {"model": model, "optimizer": optimizer}))
    bytecheckpoint.save(path, {"model": model, "optimizer": named})


@pytest.mark.parametrize("layout", [Layout(ep=2, dp=2), Layout(ep=3, dp=3, bf16=True)], ids=str)
def test_the_links_of_a_chain(worlds: Worlds, layout: Layout, first: str, path: str) -> None:
    worlds.run(1, save_variant, "shared expert", Layout(bf16=layout.bf16), first)
    worlds.run(layout.world, load_links, layout, first, path)
    assert_same_checkpoints(first, path)


def load_stateless(layout: Layout, source: str) -> None:
    """Load a checkpoint of an optimizer without state, which removes the state."""
    trained = VariantModel(VARIANT, layout)
    assert_complete(bytecheckpoint.load(source, trained.states()))
    assert not any(trained.inner_states())


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, bf16=True), Layout(tp=2, distributed=False)], ids=str)
def test_a_checkpoint_from_before_the_first_step(worlds: Worlds, layout: Layout, path: str) -> None:
    worlds.run(1, save_variant, VARIANT, Layout(bf16=layout.bf16), path, stepped=False)
    worlds.run(2, load_stateless, layout, path)


def load_different_steps(layout: Layout, source: str) -> None:
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
            before.append((state, set(state)))
        for group in optimizer.optimizer.param_groups:
            group["step"] = 1
    match = "optimizer: FusedAdam keeps one step for all parameters of a group"
    with pytest.raises(IncompatibleCheckpointError, match=match):
        bytecheckpoint.load(source, trained.states())
    assert all(state.keys() == slots for state, slots in before), "state was replaced"
    assert all(group["step"] == 1 for group in trained.optimizer.param_groups)


def test_different_steps_in_one_group_are_refused(worlds: Worlds, path: str) -> None:
    worlds.run(1, save_variant, VARIANT, Layout(), path)
    worlds.run(2, load_different_steps, Layout(dp=2), path)


# --- refusals -------------------------------------------------------------------------------------------------


def unsupported_states(layout: Layout, what: str) -> dict[str, Any]:
    trained = VariantModel(VARIANT, layout)
    if what == "layer-wise":
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

        kind = type("LayerWise", (LayerWiseDistributedOptimizer,), {"__init__": lambda self: None})
        wrapper: Any = kind()
        wrapper.chained_optimizers = list(trained.optimizer.chained_optimizers)
        wrapper.overlap_param_gather = True
        return trained.states() | {"optimizer": wrapper}
    for optimizer in trained.optimizer.chained_optimizers:
        optimizer.config.use_precision_aware_optimizer = True
    return trained.states()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("layer-wise", "optimizer: LayerWiseDistributedOptimizer with overlap_param_gather is not supported"),
        ("precision-aware", "optimizer: DistributedOptimizer with use_precision_aware_optimizer"),
    ],
)
@on_ranks(2)
def test_optimizers_that_are_refused(what: str, message: str, path: str) -> None:
    """Nothing is written."""
    states = unsupported_states(Layout(dp=2, bf16=True), what)
    with pytest.raises(UsageError, match=f"^(rank [01], call: )?{message}"):  # the first to fail is named
        bytecheckpoint.save(path, states, framework="megatron", async_checkpoint=True).result(60)
    assert not os.path.exists(path) or os.listdir(path) == []
