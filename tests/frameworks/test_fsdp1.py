"""FSDP1: names, elements, state and settings of original parameters, in worlds of any size (no real communication)."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
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

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks import registry
from bytecheckpoint.frameworks.fsdp1.adapter import FSDP1Framework
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.values import decode
from tests.frameworks.fsdp1_worlds import as_rank, differences, fill, load, save, unit
from tests.frameworks.memory import MemoryCheckpoint
from tests.frameworks.memory import save as save_plain

States = MutableMapping[str, Any]


@torch.no_grad()
def coordinates(module: nn.Module) -> nn.Module:
    """Every element says which element of which parameter it is."""
    for number, (_, tensor) in enumerate([*module.named_parameters(), *module.named_buffers()], 1):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 1000 * number)
    return module


class Odd(nn.Module):
    """Sizes that no world divides; more parameters than a small world has elements for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.middle = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Conv2d(2, 3, 2), nn.LayerNorm(7))
        self.last = nn.Linear(7, 1)
        self.cube = nn.Parameter(torch.empty(2, 3, 5))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def odd() -> Odd:
    model = coordinates(Odd())
    assert isinstance(model, Odd)
    return model


def wrapped(units: str, originals: bool, strategy: str = "FULL_SHARD", model: Odd | None = None) -> nn.Module:
    """Odd under FSDP1; `units` has a letter for each inner unit: first, middle, its Conv2d, last."""
    model = model or odd()
    options: dict[str, Any] = {"use_orig_params": originals, "sharding_strategy": ShardingStrategy[strategy]}
    if "c" in units:
        model.middle[1] = unit(model.middle[1], **options)
    for letter, name in (("f", "first"), ("m", "middle"), ("l", "last")):
        if letter in units:
            setattr(model, name, unit(getattr(model, name), **options))
    return unit(model, **options)


def adam_states(model: nn.Module, *, step: float = 5.0, lr: float = 0.5) -> States:
    """The model with an AdamW whose state follows from the parameters, as training would leave it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.25)
    for p in model.parameters():
        if p.numel():
            like = p.detach().clone()
            optimizer.state[p] = {"step": torch.tensor(step), "exp_avg": like * 2 + 1, "exp_avg_sq": like.float() * 4}
    return {"model": model, "optimizer": optimizer}


def fresh_states(model: nn.Module) -> States:
    """The model zeroed, with an AdamW that has no state yet."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def plain() -> MemoryCheckpoint:
    return save_plain(adam_states(odd()))


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


# --- state of optimizers --------------------------------------------------------------------------------------


def test_steps_are_those_of_the_ranks_that_have_elements() -> None:
    """FSDP1 gives a rank no gradient for a parameter that it has no element of: what step it shows is an old one."""

    def states() -> States:
        made = adam_states(unit(coordinates(nn.Linear(4, 3)), use_orig_params=True))
        for p in made["model"].parameters():
            made["optimizer"].state[p]["step"] = torch.tensor(5.0 if p.numel() else 1.0)
            made["optimizer"].state[p].setdefault("exp_avg", torch.zeros(0))
        return made

    saved = save(states, 3)
    assert saved.whole[TensorKey("optimizer", "bias", "step")] == 5
    with as_rank(0, 3):
        made = adam_states(unit(nn.Linear(4, 3), use_orig_params=True))
        assert made["model"].bias.numel() == 0
        fill(made, saved)
        assert made["model"].bias not in made["optimizer"].state


def test_plain_values_go_by_original_parameter() -> None:
    def states(value: int) -> States:
        made = adam_states(wrapped("f", False))
        for state in made["optimizer"].state.values():
            state["step"] = value
            state["history"] = [value, {"mean": 0.5}]
        return made

    saved = save(partial(states, 3), 3)
    tree: Any = decode(saved.trees("optimizer")[0], on_tensor=lambda name: None)
    assert tree["state"]["first.weight"] == {"step": 3, "history": [3, {"mean": 0.5}]}
    with as_rank(2, 3):
        made = states(0)
        fill(made, saved, 2)
        for state in made["optimizer"].state.values():
            assert state["step"] == 3
            assert state["history"] == [3, {"mean": 0.5}]
            assert set(state) == {"step", "history", "exp_avg", "exp_avg_sq"}


def test_settings_go_by_original_parameter_and_back() -> None:
    def states(lr: float) -> States:
        model = wrapped("f", False)
        inner, outer = model.module.first.parameters(), [p for n, p in model.named_parameters() if "first" not in n]
        return {
            "model": model,
            "optimizer": torch.optim.SGD(
                [{"params": list(inner), "lr": lr}, {"params": outer, "lr": lr * 10}], momentum=lr / 2
            ),
        }

    saved = save(partial(states, 0.25), 2)
    tree: Any = decode(saved.trees("optimizer")[0], on_tensor=lambda name: None)
    assert [sorted(g["params"])[0] for g in tree["groups"]] == ["first.bias", "cube"]
    assert [(g["lr"], g["momentum"]) for g in tree["groups"]] == [(0.25, 0.125), (2.5, 0.125)]
    with as_rank(1, 2):
        made = states(8.0)
        fill(made, saved, 1)
        assert [(g["lr"], g["momentum"]) for g in made["optimizer"].param_groups] == [(0.25, 0.125), (2.5, 0.125)]
        assert made["optimizer"].param_groups[0]["params"][0] is made["model"].module.first._handle.flat_param


def test_a_flat_parameter_has_one_step() -> None:
    model = odd()
    states = adam_states(model)
    states["optimizer"].state[model.last.weight]["step"] = torch.tensor(3.0)
    saved = save_plain(states)
    message = (
        r"'the root'.*step differs.*5\.0 for 'cube', 'first.weight', 'first.bias' and 6 more; 3\.0 for 'last.weight'"
    )
    with as_rank(0, 4):
        made = adam_states(wrapped("", False))
        before = {key: value.clone() for key, value in next(iter(made["optimizer"].state.values())).items()}
        with pytest.raises(IncompatibleCheckpointError, match=message):
            fill(made, saved)
        assert made["optimizer"].state[next(iter(made["model"].parameters()))]["step"] == before["step"]
    # The parameter in a unit of its own, or original parameters, take it.
    for how in (("l", False), ("", True)):
        if how[1]:
            assert differences(saved, load(lambda how=how: fresh_states(wrapped(*how)), 4, saved)) == []
    expected = pytest.raises(IncompatibleCheckpointError, match=r"3\.0 for 'last.weight'; 5\.0 for 'last.bias'")
    with as_rank(0, 2), expected:
        fill(fresh_states(wrapped("l", False)), saved)


def test_a_flat_parameter_has_one_set_of_settings() -> None:
    model = odd()
    last = list(model.last.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in last)]
    groups = [{"params": rest, "lr": 0.25}, {"params": last, "lr": 0.75}]
    saved = save_plain({"model": model, "optimizer": torch.optim.AdamW(groups)})
    with as_rank(0, 2):
        with pytest.raises(
            IncompatibleCheckpointError, match=r"'lr' differs.*0\.25 for 'cube', 0\.75 for 'last.weight'"
        ):
            fill(fresh_states(wrapped("", False)), saved)
        made = fresh_states(wrapped("l", False))
        params = list(made["model"].parameters())
        made["optimizer"] = torch.optim.AdamW([{"params": [p]} for p in params])
        fill(made, saved)
        assert [g["lr"] for g in made["optimizer"].param_groups] == [0.25, 0.75]


def test_a_flat_parameter_has_one_sort_of_state() -> None:
    model = odd()
    states = adam_states(model)
    del states["optimizer"].state[model.cube]
    expected = pytest.raises(IncompatibleCheckpointError, match=r"state differs.*\{\} for 'cube'.*exp_avg")
    with as_rank(0, 2), expected:
        fill(fresh_states(wrapped("", False)), save_plain(states))
    missing = load(lambda: fresh_states(wrapped("", True)), 2, save_plain(states))
    assert differences(save_plain(states), missing) == []


def test_without_any_state_the_live_one_is_dropped() -> None:
    saved = save_plain(fresh_states(odd()))
    for originals in (True, False):
        with as_rank(0, 2):
            made = adam_states(wrapped("", originals))
            fill(made, saved)
            assert not made["optimizer"].state


def test_state_keeps_the_dtype_that_it_was_saved_with() -> None:
    assert plain().whole[TensorKey("optimizer", "cube", "exp_avg_sq")].dtype == torch.float32

    def low(originals: bool) -> States:
        model = odd().bfloat16()
        return fresh_states(wrapped("f", originals, model=model))

    states = adam_states(odd().bfloat16())
    saved = save_plain(states)
    for originals in (True, False):
        again = load(partial(low, originals), 3, saved)
        assert again.whole[TensorKey("optimizer", "cube", "exp_avg_sq")].dtype == torch.float32
        assert differences(saved, again) == []


def test_live_state_is_filled_in_place_and_the_padding_is_harmless() -> None:
    with as_rank(1, 4):
        made = adam_states(wrapped("", False))
        (flat,) = made["model"].parameters()
        old = made["optimizer"].state[flat]["exp_avg"]
        fill(made, plain(), 1)
        assert made["optimizer"].state[flat]["exp_avg"] is old
    with as_rank(3, 4):
        made = fresh_states(wrapped("", False))
        (flat,) = made["model"].parameters()
        fill(made, plain(), 3)
        padding = made["model"]._handle.flat_param._shard_numel_padded
        assert padding
        assert made["optimizer"].state[flat]["exp_avg"][-padding:].tolist() == [0.0] * padding


def factored(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params)
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p] = {"row_var": torch.zeros(2, 1)}
    return optimizer


def nested(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params)
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p] = {"history": [torch.zeros_like(p)]}
    return optimizer


@pytest.mark.parametrize("originals", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "match"),
    [(factored, r"row_var is a tensor of shape \(2, 1\)"), (nested, "history is a tensor in a list")],
)
def test_state_that_does_not_follow_the_elements_is_refused(
    optimizer: Callable[[Any], torch.optim.Optimizer], match: str, originals: bool
) -> None:
    with as_rank(0, 2):
        model = unit(nn.Linear(4, 6), use_orig_params=originals)
        with pytest.raises(UsageError, match=f"optimizer/state/weight/{match}"):
            FSDP1Framework().capture({"model": model, "optimizer": optimizer(model.parameters())})


def test_factored_state_does_not_load_into_flat_parameters_but_does_without_sharding() -> None:
    model = coordinates(nn.Linear(4, 6))
    optimizer = torch.optim.Adafactor(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = save_plain({"model": model, "optimizer": optimizer})
    for originals in (True, False):
        with as_rank(0, 2):
            made = unit(nn.Linear(4, 6), use_orig_params=originals)
            states: States = {"model": made, "optimizer": torch.optim.Adafactor(made.parameters())}
            with pytest.raises(IncompatibleCheckpointError, match=r"weight/row_var has shape \(6, 1\)"):
                fill(states, saved)

    def unsharded() -> States:
        made = unit(nn.Linear(4, 6), use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)
        return {"model": made, "optimizer": torch.optim.Adafactor(made.parameters())}

    assert differences(saved, load(unsharded, 2, saved)) == []


def test_a_container_of_tensors_does_not_load_into_flat_parameters() -> None:
    model = nn.Linear(4, 6)
    saved = save_plain({"model": model, "optimizer": nested(model.parameters())})
    with as_rank(0, 2):
        made = unit(nn.Linear(4, 6), use_orig_params=True)
        with pytest.raises(IncompatibleCheckpointError, match="stands in a container"):
            fill({"model": made, "optimizer": torch.optim.SGD(made.parameters())}, saved)


def test_parameters_that_the_checkpoint_lacks() -> None:
    model = odd()
    states = adam_states(nn.ModuleDict({"odd": model}))
    saved = save_plain(states)
    for originals in (True, False):
        with as_rank(0, 2):
            grown = nn.ModuleDict({"odd": Odd(), "new": nn.Linear(2, 2)})
            made = adam_states(unit(grown, use_orig_params=originals), step=1.0)
            destination = FSDP1Framework().destination(made, saved, strict=False)
            assert "model/new.weight" in destination.missing
            assert "optimizer/param_groups/new.weight" in destination.missing
            saved.fill(destination)
            destination.apply()
            if not originals:
                assert any("new.bias" in note for note in destination.notes)
            held = [p for p in made["model"].parameters() if p.numel()]
            assert made["optimizer"].state[held[0]]["step"] == 5


def test_an_optimizer_without_its_module_is_refused() -> None:
    with as_rank(0, 2):
        for originals in (True, False):
            model = unit(nn.Linear(4, 6), use_orig_params=originals)
            states: States = {"optimizer": torch.optim.AdamW(model.parameters())}
            assert registry.resolve("auto", states).name == "fsdp1"
            with pytest.raises(UsageError, match=r"AdamW has a parameter of an FSDP1 module.*put the module beside"):
                FSDP1Framework().capture(states)
            # A name does not say which elements these are.
            with pytest.raises(UsageError, match="put the module beside"):
                FSDP1Framework().capture(states, names=dict(model.named_parameters()))


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
