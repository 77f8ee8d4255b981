"""FSDP1: names, elements, state and settings of original parameters, in worlds of any size (no real communication)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._runtime_utils import _lazy_init

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks import registry
from bytecheckpoint.frameworks.fsdp1.adapter import FSDP1Framework
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.values import decode
from tests.frameworks.fsdp1_models import Odd, States, adam_states, coordinates, fresh_states, odd, plain, wrapped
from tests.frameworks.fsdp1_worlds import as_rank, differences, fill, load, save, unit
from tests.frameworks.memory import MemoryCheckpoint
from tests.frameworks.memory import save as save_plain

layouts = st.tuples(
    st.integers(1, 7),
    st.sets(st.sampled_from("fmcl")).map(lambda s: "".join(sorted(s))),
    st.booleans(),
    st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
)


@settings(max_examples=25)
@given(layouts)
def test_any_layout_saves_what_one_process_saves(layout: tuple[int, str, bool, str]) -> None:
    size, *how = layout
    saved = save(lambda: adam_states(wrapped(*how)), size)
    assert differences(plain(), saved) == []


@settings(max_examples=15)
@given(layouts, st.booleans())
def test_any_layout_loads_what_one_process_saved(layout: tuple[int, str, bool, str], fresh: bool) -> None:
    size, *how = layout

    def states() -> States:
        model = wrapped(*how)
        return fresh_states(model) if fresh else adam_states(model, step=9.0)

    assert differences(plain(), load(states, size, plain())) == []


@settings(max_examples=15)
@given(layouts, layouts)
def test_any_layout_loads_any_layout(source: tuple[int, str, bool, str], target: tuple[int, str, bool, str]) -> None:
    saved = save(lambda: adam_states(wrapped(*source[1:])), source[0])
    assert differences(plain(), load(lambda: fresh_states(wrapped(*target[1:])), target[0], saved)) == []
    model = odd()
    assert differences(plain(), save_plain(loaded(saved, fresh_states(model)))) == []


def loaded(saved: MemoryCheckpoint, states: States) -> States:
    """Loaded by the native adapter."""
    saved.load(states)
    return states


def test_hybrid_sharding_has_equal_replicas_and_cuts_within_groups() -> None:
    def states() -> States:
        mesh = init_device_mesh("cpu", (2, 3))
        model = unit(odd(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=True)
        return adam_states(model)

    saved = save(states, 6)
    assert differences(plain(), saved) == []
    boxes = [{(s.key, s.offsets, s.lengths) for s in rank["model"].shards} for rank in saved.states]
    assert boxes[:3] == boxes[3:]
    assert boxes[0] != boxes[1]
    assert differences(plain(), load(states, 6, plain())) == []


def test_a_rank_beyond_the_elements_holds_nothing() -> None:
    def states() -> States:
        return adam_states(unit(coordinates(nn.Linear(1, 2, bias=False)), use_orig_params=True))

    saved = save(states, 5)
    held = [len(rank["model"].shards) for rank in saved.states]
    assert sum(held) == 2
    assert held[4] == 0
    assert saved.whole[TensorKey("model", "weight")].tolist() == [[1000], [1001]]


# --- forms of parameters --------------------------------------------------------------------------------------


class Forms(nn.Module):
    """Parameters whose memory is not row-major, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.empty(7, 4).t())
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.point = nn.Conv2d(4, 3, 1).to(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.plain = nn.Parameter(torch.empty(5))


@pytest.mark.parametrize("originals", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_order_of_memory_does_not_matter(size: int, originals: bool) -> None:
    def states() -> States:
        model = unit(coordinates(Forms()), use_orig_params=originals)
        return adam_states(model)

    expected = save_plain(adam_states(coordinates(Forms())))
    if originals:  # without elements there is no gradient, and no state
        empty = [key for key in expected.whole if key.fqn == "empty" and key.slot]
        assert not empty
    saved = save(states, size)
    assert expected.whole.keys() <= saved.whole.keys()
    for key, tensor in expected.whole.items():
        assert torch.equal(saved.whole[key], tensor), key
    assert saved.whole[TensorKey("model", "empty")].shape == (0, 3)
    again = load(lambda: fresh_states(unit(coordinates(Forms()), use_orig_params=originals)), size, expected)
    for key, tensor in expected.whole.items():
        assert torch.equal(again.whole[key], tensor), key


# --- names ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Shared parameters inside one unit, and a module that stands at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.block = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.block


def names(saved: MemoryCheckpoint) -> dict[str, set[str]]:
    """FQN -> all names of every parameter of the model."""
    return {
        s.key.fqn: {s.key.fqn, *s.aliases}
        for rank in saved.states
        for s in rank["model"].shards
        if s.key.kind == "model"
    }


@pytest.mark.parametrize("originals", [True, False])
def test_shared_parameters_are_saved_once_under_all_their_names(originals: bool) -> None:
    def states() -> States:
        return adam_states(unit(coordinates(Tied()), use_orig_params=originals))

    saved, expected = save(states, 3), save_plain(adam_states(coordinates(Tied())))
    assert differences(expected, saved) == []
    assert names(saved) == names(expected)
    assert names(saved)["embed.weight"] == {"embed.weight", "head.weight"}
    assert names(saved)["block.bias"] == {"block.bias", "again.bias"}
    for key in ("exp_avg", "step"):
        shards = [s for rank in saved.states for s in rank["optimizer"].shards if s.key.slot == key]
        assert {s.aliases for s in shards if s.key.fqn == "embed.weight"} == {("head.weight",)}
    again = load(lambda: fresh_states(unit(coordinates(Tied()), use_orig_params=originals)), 2, expected)
    assert differences(expected, again) == []


def test_a_parameter_tied_across_units_has_both_names() -> None:
    def states() -> States:
        model = Tied()
        model.embed = unit(model.embed, use_orig_params=True)
        return {"model": unit(coordinates(model), use_orig_params=True)}

    saved = save(states, 2)
    assert names(saved)["embed.weight"] == {"embed.weight", "head.weight"}
    expected = save_plain({"model": coordinates(Tied())})
    assert saved.whole.keys() == expected.whole.keys()


def test_across_flat_units_the_tie_is_cut_and_both_are_kept() -> None:
    """FSDP1 itself unties them: the unit gets a copy."""

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


@pytest.mark.parametrize("originals", [True, False])
def test_prefixes_of_wrappers_do_not_appear(originals: bool) -> None:
    def states() -> States:
        model = odd()
        model.first = unit(checkpoint_wrapper(model.first), use_orig_params=originals)
        model.middle = torch.compile(model.middle, backend="eager")  # type: ignore[assignment]
        whole = unit(model, use_orig_params=originals)
        model.last = checkpoint_wrapper(model.last)  # after the wrapping, as apply_activation_checkpointing does
        return {"model": torch.compile(whole, backend="eager"), "optimizer": torch.optim.SGD(whole.parameters())}

    saved = save(states, 2)
    assert {k for k in saved.whole if k.kind == "model"} == {k for k in plain().whole if k.kind == "model"}
    tree: Any = decode(saved.trees("optimizer")[0], on_tensor=lambda name: None)
    assert sorted(tree["groups"][0]["params"]) == sorted(n for n, _ in Odd().named_parameters())


def test_names_may_be_given_to_original_parameters() -> None:
    def states() -> States:
        return adam_states(unit(coordinates(nn.Linear(2, 3)), use_orig_params=True))

    with as_rank(0, 1):
        made = states()
        bias = made["model"].bias
        state = FSDP1Framework().capture(made, names={bias: "renamed"})[1]
    assert {s.key.fqn for s in state.shards} == {"weight", "renamed"}


def test_two_modules_of_a_list_must_not_share_names() -> None:
    with as_rank(0, 2):
        stages = [unit(nn.Linear(2, 2)), unit(nn.Linear(2, 2))]
        with pytest.raises(UsageError, match="model/weight names two different tensors"):
            FSDP1Framework().capture({"model": stages})


# --- what FSDP1 leaves alone ----------------------------------------------------------------------------------


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.told: object = None

    def get_extra_state(self) -> object:
        return {"told": self.told}

    def set_extra_state(self, state: Any) -> None:
        self.told = state["told"]


@pytest.mark.parametrize("originals", [True, False])
def test_ignored_modules_buffers_and_extra_states(originals: bool) -> None:
    def states(told: object = 7) -> States:
        model = nn.ModuleDict({"odd": odd(), "extra": WithExtra(), "left": coordinates(nn.Linear(2, 3))})
        model["extra"].told = told
        left = model["left"]
        whole = unit(model, use_orig_params=originals, ignored_states=list(left.parameters()))
        return adam_states(whole)

    saved = save(states, 3)
    assert saved.whole[TensorKey("model", "odd.seen")].shape == (3,)
    assert TensorKey("model", "odd.scratch") not in saved.whole
    assert saved.whole[TensorKey("model", "left.weight")][0, 1] == 1001
    assert torch.equal(
        saved.whole[TensorKey("optimizer", "left.weight", "exp_avg")],
        saved.whole[TensorKey("model", "left.weight")] * 2 + 1,
    )
    with as_rank(1, 3):
        made = states(told=None)
        with torch.no_grad():
            made["model"].left.weight.zero_()
        made["optimizer"].state.clear()
        fill(made, saved, 1)
        assert made["model"].extra.told == 7
        assert made["model"].left.weight[0, 1] == 1001
        assert made["optimizer"].state[made["model"].left.bias]["exp_avg"].shape == (3,)


def test_ignored_modules() -> None:
    def states() -> States:
        model = odd()
        return adam_states(unit(model, ignored_modules=[model.middle]))

    saved = save(states, 3)
    assert differences(plain(), saved) == []
    assert differences(plain(), load(states, 2, plain())) == []


def test_frozen_parameters_keep_their_flag_and_need_no_state() -> None:
    def states() -> States:
        model = odd()
        model.first.requires_grad_(False)
        whole = unit(model, use_orig_params=True)
        made = adam_states(whole)
        for p in [p for p in made["optimizer"].state if not p.requires_grad]:
            del made["optimizer"].state[p]
        return made

    saved = save(states, 2)
    flags = {s.key.fqn: s.requires_grad for rank in saved.states for s in rank["model"].shards if s.key.fqn != "seen"}
    assert {name for name, trained in flags.items() if not trained} == {"first.weight", "first.bias"}
    with as_rank(0, 2):
        made = states()
        notes = fill(made, saved).notes
    assert any("2 parameters have no state" in note for note in notes)


def test_buffers_that_mixed_precision_casts_are_saved_as_the_model_has_them() -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)

    def states() -> States:
        whole = unit(odd(), mixed_precision=low, use_orig_params=True)
        _lazy_init(whole, whole)  # as the first forward pass does
        assert whole.seen.dtype == torch.bfloat16
        return {"model": whole}

    saved = save(states, 2)
    seen = saved.whole[TensorKey("model", "seen")]
    assert seen.dtype == torch.float32
    assert seen.tolist() == odd().seen.bfloat16().tolist()
    assert {t.dtype for t in saved.whole.values()} == {torch.float32}, "shards are whole precision"
    seen += 1000
    with as_rank(0, 2):
        made = states()
        fill(made, saved)
        assert torch.equal(made["model"].seen, seen.bfloat16())


# --- what state the module is in ------------------------------------------------------------------------------


def no_state_dict(*_: object) -> None:
    raise AssertionError("state_dict was called")


@pytest.mark.parametrize("originals", [True, False])
def test_no_state_dict_is_called_where_there_is_fsdp1(originals: bool) -> None:
    with as_rank(0, 2):
        made = adam_states(wrapped("fc", originals))
        for module in made["model"].modules():
            module.register_state_dict_pre_hook(no_state_dict)
        made["other"] = nn.Linear(2, 2)
        states = FSDP1Framework().capture(made)
        assert [s.kind for s in states] == ["model", "optimizer", "other"]
        del made["other"]
        fill(made, plain())
        FSDP1Framework().describe(made)


@pytest.mark.parametrize("originals", [True, False])
def test_shards_are_views_of_live_memory(originals: bool) -> None:
    with as_rank(1, 3):
        made = adam_states(wrapped("f", originals))
        flats = [m._handle.flat_param for m in FullyShardedDataParallel.fsdp_modules(made["model"])]
        memory = {t.untyped_storage().data_ptr() for t in flats}
        memory |= {t.untyped_storage().data_ptr() for t in made["model"].buffers()}
        memory |= {t.untyped_storage().data_ptr() for s in made["optimizer"].state.values() for t in s.values()}
        for state in FSDP1Framework().capture(made):
            for shard in state.shards:
                assert shard.data.untyped_storage().data_ptr() in memory, shard.key


def test_a_parameter_that_was_given_other_memory() -> None:
    """FSDP1 takes it over in the next forward pass; a save takes what the program sees."""

    def states() -> States:
        model = unit(coordinates(nn.Linear(3, 4)), use_orig_params=True)
        for p in model.parameters():
            p.data = p.detach().clone() + 0.5
        return {"model": model}

    saved = save(states, 2)
    assert saved.whole[TensorKey("model", "weight")].flatten().tolist() == [1000.5 + i for i in range(12)]
    with as_rank(0, 2):
        made = states()
        fill(made, save_plain({"model": coordinates(nn.Linear(3, 4))}))
        assert made["model"].weight[1] == 1001
        shard = made["model"]._handle.flat_param
        assert made["model"].weight.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        made["model"].weight.data = torch.zeros(3)
        with pytest.raises(UsageError, match=r"model/weight.*replaced by a tensor of shape \(3,\)"):
            FSDP1Framework().capture(made)


@pytest.mark.parametrize("originals", [True, False])
def test_inside_summon_full_params(originals: bool) -> None:
    with as_rank(0, 2):
        made = adam_states(wrapped("f", originals))
        saved = plain()
        with FullyShardedDataParallel.summon_full_params(made["model"].module.first):
            for attempt in (FSDP1Framework().capture, partial(fill, saved=saved)):
                with pytest.raises(UsageError, match="model: FSDP1 module 'first' is inside summon_full_params"):
                    attempt(made)
        FSDP1Framework().capture(made)


# --- names of frameworks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "fsdp", "fsdp1"])
def test_fsdp1_is_found(name: str) -> None:
    with as_rank(0, 1):
        net = nn.Sequential(unit(nn.Linear(2, 2)))
        assert registry.resolve(name, {"model": net}).name == "fsdp1"
        assert registry.resolve(name, {"model": [nn.Linear(1, 1), net]}).name == "fsdp1"
        assert registry.resolve(name, {"model": torch.compile(net, backend="eager")}).name == "fsdp1"


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tp", "torch", "vescale"])
def test_other_frameworks_do_not_take_fsdp1(name: str) -> None:
    with as_rank(0, 1):
        net = nn.Sequential(unit(nn.Linear(2, 2)))
        with pytest.raises(UsageError, match=r'model: module .0. belongs to FSDP1.*framework="fsdp"'):
            registry.resolve(name, {"model": net})


def test_the_fsdp1_adapter_takes_ordinary_modules_too() -> None:
    model = odd()
    (state,) = FSDP1Framework().capture({"model": model})
    assert {s.key.fqn for s in state.shards} == set(model.state_dict())


def test_the_layout_in_words() -> None:
    with as_rank(0, 6):
        mesh = init_device_mesh("cpu", (2, 3))
        model = odd()
        model.first = unit(model.first, use_orig_params=True, process_group=mesh.get_group(1))
        hybrid = unit(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        found = FSDP1Framework().describe({"model": hybrid, "extra": {}})
    assert found["framework"] == "fsdp1"
    assert found["kinds"]["model"] == {
        "type": "FullyShardedDataParallel",
        "tensors": 11,
        "layouts": {
            "plain": 1,
            "HYBRID_SHARD on (replicate=2, shard=3), use_orig_params=False": 8,
            "FULL_SHARD on (shard=3), use_orig_params=True": 2,
        },
    }
