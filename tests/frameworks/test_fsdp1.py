"""FSDP1: names, elements, state and settings of original parameters, in worlds of any size without communication."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._runtime_utils import _lazy_init

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks import registry
from bytecheckpoint.frameworks.fsdp1.adapter import FSDP1Framework
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.values.codec import decode
from tests.frameworks.fsdp1_models import (
    States,
    UnevenModel,
    coordinates,
    fresh_states,
    trained_states,
    uneven_model,
    unsharded_checkpoint,
    wrapped,
)
from tests.frameworks.fsdp1_worlds import as_rank, differences, fill, load, save, unit
from tests.frameworks.memory import MemoryCheckpoint
from tests.frameworks.memory import save as save_plain
from tests.support.extra_states import LinearWithExtraState

layouts = st.tuples(
    st.integers(1, 7),
    st.sets(st.sampled_from("fmcl")).map(lambda s: "".join(sorted(s))),
    st.booleans(),
    st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
)


@given(st.none() | layouts, layouts, st.booleans())
def test_any_layout_loads_what_any_layout_or_one_process_saves(
    source: tuple[int, str, bool, str] | None, target: tuple[int, str, bool, str], fresh: bool
) -> None:
    """Every layout saves what one process saves, and loads it over a state or without one; so does one process."""

    def states() -> States:
        model = wrapped(*target[1:])
        return fresh_states(model) if fresh else trained_states(model, step=9.0)

    expected = unsharded_checkpoint()
    saved = expected if source is None else save(lambda: trained_states(wrapped(*source[1:])), source[0])
    assert differences(expected, saved) == []
    assert differences(expected, load(states, target[0], saved)) == []
    plain = fresh_states(uneven_model())
    saved.load(plain)
    assert differences(expected, save_plain(plain)) == []


def test_hybrid_sharding_has_equal_replicas_and_cuts_within_groups() -> None:
    def states() -> States:
        hybrid = {"device_mesh": init_device_mesh("cpu", (2, 3)), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        return trained_states(unit(uneven_model(), use_orig_params=True, **hybrid))

    saved = save(states, 6)
    assert differences(unsharded_checkpoint(), saved) == []
    boxes = [{(s.key, s.offsets, s.lengths) for s in rank["model"].shards} for rank in saved.ranks]
    assert boxes[:3] == boxes[3:]
    assert boxes[0] != boxes[1]
    assert differences(unsharded_checkpoint(), load(states, 6, unsharded_checkpoint())) == []


def test_ranks_without_elements_have_no_shards() -> None:
    def states() -> States:
        return trained_states(unit(coordinates(nn.Linear(1, 2, bias=False)), use_orig_params=True))

    saved = save(states, 5)
    held = [len(rank["model"].shards) for rank in saved.ranks]
    assert sum(held) == 2
    assert held[4] == 0
    assert saved.whole[TensorKey("model", "weight")].tolist() == [[1000], [1001]]


# --- memory order of parameters --------------------------------------------------------------------------------------


class MemoryOrders(nn.Module):
    """Parameters whose memory is not row-major, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.empty(7, 4).t())
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.point = nn.Conv2d(4, 3, 1).to(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.plain = nn.Parameter(torch.empty(5))


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_memory_order_does_not_matter(size: int, use_orig_params: bool) -> None:
    def model() -> nn.Module:
        return unit(coordinates(MemoryOrders()), use_orig_params=use_orig_params)

    expected = save_plain(trained_states(coordinates(MemoryOrders())))
    if use_orig_params:  # without elements there is no gradient, and no state
        empty = [key for key in expected.whole if key.fqn == "empty" and key.slot]
        assert not empty
    saved = save(lambda: trained_states(model()), size)
    again = load(lambda: fresh_states(model()), size, expected)
    assert expected.whole.keys() <= saved.whole.keys()
    for key, tensor in expected.whole.items():
        assert torch.equal(saved.whole[key], tensor), key
        assert torch.equal(again.whole[key], tensor), key
    assert saved.whole[TensorKey("model", "empty")].shape == (0, 3)


# --- names ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A model with shared parameters inside one unit, and one module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.block = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.block


def names(saved: MemoryCheckpoint) -> dict[str, set[str]]:
    """Return FQN -> all names, of every parameter of the model."""
    return {
        s.key.fqn: {s.key.fqn, *s.aliases}
        for rank in saved.ranks
        for s in rank["model"].shards
        if s.key.state == "model"
    }


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_shared_parameters_are_saved_once_under_all_their_names(use_orig_params: bool) -> None:
    def model() -> nn.Module:
        return unit(coordinates(Tied()), use_orig_params=use_orig_params)

    saved, expected = save(lambda: trained_states(model()), 3), save_plain(trained_states(coordinates(Tied())))
    assert differences(expected, saved) == []
    assert names(saved) == names(expected)
    assert names(saved)["embed.weight"] == {"embed.weight", "head.weight"}
    assert names(saved)["block.bias"] == {"block.bias", "again.bias"}
    for key in ("exp_avg", "step"):
        shards = [s for rank in saved.ranks for s in rank["optimizer"].shards if s.key.slot == key]
        assert {s.aliases for s in shards if s.key.fqn == "embed.weight"} == {("head.weight",)}
    assert differences(expected, load(lambda: fresh_states(model()), 2, expected)) == []


def test_a_parameter_tied_across_units_has_both_names() -> None:
    def states() -> States:
        model = Tied()
        model.embed = unit(model.embed, use_orig_params=True)
        return {"model": unit(coordinates(model), use_orig_params=True)}

    saved = save(states, 2)
    assert names(saved)["embed.weight"] == {"embed.weight", "head.weight"}
    expected = save_plain({"model": coordinates(Tied())})
    assert saved.whole.keys() == expected.whole.keys()


def test_weights_that_fsdp1_unties_are_both_saved() -> None:
    """FSDP1 without use_orig_params unties weights across units: one unit gets a copy."""

    def states() -> States:
        model = Tied()
        coordinates(model)
        model.embed = unit(model.embed)
        return {"model": unit(model)}

    saved = save(states, 2)
    whole = saved.whole[TensorKey("model", "embed.weight")]
    assert torch.equal(whole, saved.whole[TensorKey("model", "head.weight")])
    tied = Tied()
    saved.load({"model": tied})
    assert torch.equal(tied.head.weight, whole)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_prefixes_of_wrappers_do_not_appear(use_orig_params: bool) -> None:
    def states() -> States:
        model = uneven_model()
        model.first = unit(checkpoint_wrapper(model.first), use_orig_params=use_orig_params)
        model.middle = torch.compile(model.middle, backend="eager")  # type: ignore[assignment]
        whole = unit(model, use_orig_params=use_orig_params)
        model.last = checkpoint_wrapper(model.last)  # after the wrapping, as apply_activation_checkpointing does
        return {"model": torch.compile(whole, backend="eager"), "optimizer": torch.optim.SGD(whole.parameters())}

    saved = save(states, 2)
    assert {k for k in saved.whole if k.state == "model"} == {
        k for k in unsharded_checkpoint().whole if k.state == "model"
    }
    tree: Any = decode(saved.trees("optimizer")[0], on_tensor=lambda name: None)
    assert sorted(tree["groups"][0]["params"]) == sorted(n for n, _ in UnevenModel().named_parameters())


def test_original_parameters_can_get_explicit_names() -> None:
    def states() -> States:
        return trained_states(unit(coordinates(nn.Linear(2, 3)), use_orig_params=True))

    with as_rank(0, 1):
        live = states()
        bias = live["model"].bias
        state = FSDP1Framework().capture(live, names={bias: "renamed"})[1]
    assert {s.key.fqn for s in state.shards} == {"weight", "renamed"}


def test_two_modules_of_a_list_must_not_share_names() -> None:
    with as_rank(0, 2):
        stages = [unit(nn.Linear(2, 2)), unit(nn.Linear(2, 2))]
        with pytest.raises(UsageError, match="model/weight names two different tensors"):
            FSDP1Framework().capture({"model": stages})


# --- tensors that FSDP1 does not flatten ----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_ignored_modules_buffers_and_extra_states(use_orig_params: bool) -> None:
    def states(value: object = 7) -> States:
        model = nn.ModuleDict(
            {"odd": uneven_model(), "extra": LinearWithExtraState(3, 1), "ignored": coordinates(nn.Linear(2, 3))}
        )
        model["extra"].extra = value
        ignored = model["ignored"]
        whole = unit(model, use_orig_params=use_orig_params, ignored_states=list(ignored.parameters()))
        return trained_states(whole)

    saved = save(states, 3)
    assert saved.whole[TensorKey("model", "odd.seen")].shape == (3,)
    assert TensorKey("model", "odd.scratch") not in saved.whole
    assert saved.whole[TensorKey("model", "ignored.weight")][0, 1] == 1001
    assert torch.equal(
        saved.whole[TensorKey("optimizer", "ignored.weight", "exp_avg")],
        saved.whole[TensorKey("model", "ignored.weight")] * 2 + 1,
    )
    with as_rank(1, 3):
        live = states(value=None)
        with torch.no_grad():
            live["model"].ignored.weight.zero_()
        live["optimizer"].state.clear()
        fill(live, saved, 1)
        assert live["model"].extra.extra == 7
        assert live["model"].ignored.weight[0, 1] == 1001
        assert live["optimizer"].state[live["model"].ignored.bias]["exp_avg"].shape == (3,)


def test_ignored_modules() -> None:
    def states() -> States:
        model = uneven_model()
        return trained_states(unit(model, ignored_modules=[model.middle]))

    saved = save(states, 3)
    assert differences(unsharded_checkpoint(), saved) == []
    assert differences(unsharded_checkpoint(), load(states, 2, unsharded_checkpoint())) == []


def test_frozen_parameters_keep_their_flag_and_need_no_state() -> None:
    def states() -> States:
        model = uneven_model()
        model.first.requires_grad_(False)
        whole = unit(model, use_orig_params=True)
        live = trained_states(whole)
        for p in [p for p in live["optimizer"].state if not p.requires_grad]:
            del live["optimizer"].state[p]
        return live

    saved = save(states, 2)
    flags = {s.key.fqn: s.requires_grad for rank in saved.ranks for s in rank["model"].shards if s.key.fqn != "seen"}
    assert {name for name, trained in flags.items() if not trained} == {"first.weight", "first.bias"}
    with as_rank(0, 2):
        live = states()
        notes = fill(live, saved).notes
    assert any("2 parameters have no state" in note for note in notes)


def test_buffers_that_mixed_precision_casts_are_saved_in_the_models_dtype() -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)

    def states() -> States:
        whole = unit(uneven_model(), mixed_precision=low, use_orig_params=True)
        _lazy_init(whole, whole)  # as the first forward pass does
        assert whole.seen.dtype == torch.bfloat16
        return {"model": whole}

    saved = save(states, 2)
    seen = saved.whole[TensorKey("model", "seen")]
    assert seen.dtype == torch.float32
    assert seen.tolist() == uneven_model().seen.bfloat16().tolist()
    assert {t.dtype for t in saved.whole.values()} == {torch.float32}, "shards have full precision"
    seen += 1000
    with as_rank(0, 2):
        live = states()
        fill(live, saved)
        assert torch.equal(live["model"].seen, seen.bfloat16())


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize(
    ("options", "lazy"),
    [
        ({"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)}, False),
        ({"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)}, True),
        ({"mixed_precision": MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)}, False),
        ({"mixed_precision": MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)}, True),
        ({"cpu_offload": CPUOffload(offload_params=True)}, False),
    ],
)
def test_mixed_precision_and_offload_do_not_change_checkpoints(
    use_orig_params: bool, strategy: str, options: dict[str, Any], lazy: bool
) -> None:
    """`lazy`: after the preparations of the first forward pass, which offloaded parameters need CUDA for."""
    options = {**options, "use_orig_params": use_orig_params, "sharding_strategy": ShardingStrategy[strategy]}

    def whole() -> nn.Module:
        model = unit(uneven_model(), **options)
        if lazy:
            _lazy_init(model, model)
        return model

    expected = unsharded_checkpoint()
    for size in (1, 3):
        assert differences(expected, save(lambda: trained_states(whole()), size)) == []
        assert differences(expected, load(lambda: fresh_states(whole()), size, expected)) == []


# --- states of the module ------------------------------------------------------------------------------


def no_state_dict(*_: object) -> None:
    raise AssertionError("state_dict was called")


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_no_state_dict_is_called_where_there_is_fsdp1(use_orig_params: bool) -> None:
    with as_rank(0, 2):
        live = trained_states(wrapped("fc", use_orig_params))
        for module in live["model"].modules():
            module.register_state_dict_pre_hook(no_state_dict)
        live["other"] = nn.Linear(2, 2)
        states = FSDP1Framework().capture(live)
        assert [s.name for s in states] == ["model", "optimizer", "other"]
        del live["other"]
        fill(live, unsharded_checkpoint())


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_shards_are_views_of_live_memory(use_orig_params: bool) -> None:
    with as_rank(1, 3):
        live = trained_states(wrapped("f", use_orig_params))
        flats = [m._handle.flat_param for m in FullyShardedDataParallel.fsdp_modules(live["model"])]
        memory = {t.untyped_storage().data_ptr() for t in flats}
        memory |= {t.untyped_storage().data_ptr() for t in live["model"].buffers()}
        memory |= {t.untyped_storage().data_ptr() for s in live["optimizer"].state.values() for t in s.values()}
        for state in FSDP1Framework().capture(live):
            for shard in state.shards:
                assert shard.data.untyped_storage().data_ptr() in memory, shard.key


def test_parameters_with_replaced_memory_are_saved() -> None:
    """FSDP1 adopts the memory in its next forward pass; a save before that reads it too."""

    def states() -> States:
        model = unit(coordinates(nn.Linear(3, 4)), use_orig_params=True)
        for p in model.parameters():
            p.data = p.detach().clone() + 0.5
        return {"model": model}

    saved = save(states, 2)
    assert saved.whole[TensorKey("model", "weight")].flatten().tolist() == [1000.5 + i for i in range(12)]
    with as_rank(0, 2):
        live = states()
        fill(live, save_plain({"model": coordinates(nn.Linear(3, 4))}))
        assert live["model"].weight[1] == 1001
        shard = live["model"]._handle.flat_param
        assert live["model"].weight.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        live["model"].weight.data = torch.zeros(3)
        with pytest.raises(UsageError, match=r"model/weight.*replaced by a tensor of shape \(3,\)"):
            FSDP1Framework().capture(live)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_saves_inside_summon_full_params_are_refused(use_orig_params: bool) -> None:
    with as_rank(0, 2):
        live = trained_states(wrapped("f", use_orig_params))
        saved = unsharded_checkpoint()
        with FullyShardedDataParallel.summon_full_params(live["model"].module.first):
            for attempt in (FSDP1Framework().capture, partial(fill, saved=saved)):
                with pytest.raises(UsageError, match="model: FSDP1 module 'first' is inside summon_full_params"):
                    attempt(live)
        FSDP1Framework().capture(live)


# --- names of frameworks --------------------------------------------------------------------------------------


def test_fsdp1_is_found_and_other_frameworks_refuse_it() -> None:
    with as_rank(0, 1):
        net = nn.Sequential(unit(nn.Linear(2, 2)))
        for name in ("auto", "fsdp", "fsdp1"):
            for model in (net, [nn.Linear(1, 1), net], torch.compile(net, backend="eager")):
                assert registry.resolve(name, {"model": model}).name == "fsdp1"
        for name in ("ddp", "fsdp2", "tp", "torch", "vescale"):
            with pytest.raises(UsageError, match=r'model: module .0. belongs to FSDP1.*framework="fsdp"'):
                registry.resolve(name, {"model": net})


def test_the_fsdp1_adapter_handles_native_modules_too() -> None:
    model = uneven_model()
    (state,) = FSDP1Framework().capture({"model": model})
    assert {s.key.fqn for s in state.shards} == set(model.state_dict())


def test_describe_shows_the_layout() -> None:
    with as_rank(0, 6):
        mesh = init_device_mesh("cpu", (2, 3))
        model = uneven_model()
        model.first = unit(model.first, use_orig_params=True, process_group=mesh.get_group(1))
        hybrid = unit(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        (found,) = FSDP1Framework().capture({"model": hybrid})
        layout = found.layout()
    assert layout == {
        "type": "FullyShardedDataParallel",
        "tensors": 11,
        "layouts": {
            "plain": 1,
            "HYBRID_SHARD on (replicate=2, shard=3), use_orig_params=False": 8,
            "FULL_SHARD on (shard=3), use_orig_params=True": 2,
        },
    }
