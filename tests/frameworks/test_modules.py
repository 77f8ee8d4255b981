"""Modules: names without wrappers, tied weights, hooks, unusual tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.native import NativeFramework
from bytecheckpoint.representation.shards import LiveState
from tests.frameworks.memory import MemoryCheckpoint, detached, save
from tests.support.extra_states import LinearWithExtraState


def capture(**states: Any) -> list[LiveState]:
    return NativeFramework().capture(states)


def names(state: LiveState) -> list[str]:
    return [s.key.fqn for s in state.shards]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.lin(x))
        return out


def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(3, 2))


BARE = list(model().state_dict())


def test_a_plain_module_round_trips_in_place() -> None:
    source, target = model(), model()
    memory = [p.data_ptr() for p in target.parameters()]
    found = save({"model": source}).load({"model": target})
    assert not found.missing
    assert memory == [p.data_ptr() for p in target.parameters()]
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name])


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        nn.DataParallel,
        checkpoint_wrapper,
        lambda m: checkpoint_wrapper(torch.compile(m)),
        lambda m: torch.compile(checkpoint_wrapper(m)),
        lambda m: nn.DataParallel(nn.Sequential(*(checkpoint_wrapper(torch.compile(c)) for c in m))),
        lambda m: nn.Sequential(checkpoint_wrapper(torch.compile(checkpoint_wrapper(m[0]))), *m[1:]),
    ],
)
def test_names_do_not_contain_wrappers(wrap: Any) -> None:
    (state,) = capture(model=wrap(model()))
    assert names(state) == BARE


def test_a_submodule_called_module_keeps_its_name() -> None:
    outer = nn.Module()
    outer.module = nn.Linear(1, 1)
    outer._orig_mod = nn.Linear(1, 1)
    (state,) = capture(model=outer)
    assert names(state) == ["module.weight", "module.bias", "_orig_mod.weight", "_orig_mod.bias"]


def test_only_prefixes_of_wrappers_are_removed() -> None:
    wrapped = nn.ModuleDict({"a": checkpoint_wrapper(nn.ModuleDict({"module": nn.DataParallel(nn.Linear(1, 1))}))})
    (state,) = capture(model=wrapped)
    assert names(state) == ["a.module.weight", "a.module.bias"]


def embedding_and_head(*, tied: bool) -> nn.ModuleDict:
    made = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    if tied:
        made["head"].weight = made["embed"].weight
    return made


def test_tied_weights_are_one_tensor_with_all_names() -> None:
    (state,) = capture(model=embedding_and_head(tied=True))
    assert names(state) == ["embed.weight"]
    assert state.shards[0].aliases == ("head.weight",)


def test_tied_and_untied_models_load_from_each_other() -> None:
    source, head_only = embedding_and_head(tied=True), nn.ModuleDict({"head": nn.Linear(3, 4, bias=False)})
    checkpoint = save({"model": source})
    found = checkpoint.load({"model": head_only})
    assert not found.missing and found.recognized == set(checkpoint.keys("model"))
    assert torch.equal(head_only["head"].weight, source["embed"].weight)

    stages = [nn.ModuleDict({"embed": nn.Embedding(4, 3)}), nn.ModuleDict({"head": nn.Linear(3, 4, bias=False)})]
    apart = MemoryCheckpoint([detached(capture(model=stage)) for stage in stages])
    target = embedding_and_head(tied=True)
    found = apart.load({"model": target})
    assert not found.missing and found.recognized == set(apart.keys("model"))
    assert target["head"].weight is target["embed"].weight
    assert torch.equal(target["embed"].weight, stages[0]["embed"].weight)


def test_a_list_of_modules_is_one_namespace() -> None:
    whole = model()
    stages = [nn.ModuleDict({"0": whole[0]}), nn.ModuleDict({"1": whole[1], "2": whole[2]})]
    (state,) = capture(model=stages)
    assert names(state) == BARE
    same = nn.Linear(1, 1)
    (state,) = capture(model=[same, same])
    assert names(state) == ["weight", "bias"]


def with_extra(extra: Any) -> LinearWithExtraState:
    made = LinearWithExtraState(2, 2)
    made.extra = extra
    return made


@pytest.mark.parametrize("extra", [{"scale": torch.arange(3.0), "step": 3}, torch.arange(4), None, (1, "x")])
def test_extra_states_round_trip(extra: Any) -> None:
    source, target = nn.Sequential(with_extra(extra)), nn.Sequential(with_extra("old"))
    found = save({"model": source}).load({"model": target})
    assert not found.missing
    if isinstance(extra, torch.Tensor):
        assert torch.equal(target[0].extra, extra)
    elif isinstance(extra, dict):
        assert torch.equal(target[0].extra["scale"], extra["scale"]) and target[0].extra["step"] == 3
    else:
        assert target[0].extra == extra


def test_an_unsaved_extra_state_is_missing() -> None:
    found = save({"model": nn.Linear(2, 2)}).load({"model": with_extra(1)})
    assert found.missing == ["model/_extra_state"]


def test_entries_made_by_a_hook_are_loaded_through_load_state_dict() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4))
            self._register_state_dict_hook(self._save)
            self._register_load_state_dict_pre_hook(self._load)

        @staticmethod
        def _save(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
            state[prefix + "w2"] = state.pop(prefix + "w").detach() * 2

        def _load(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
            if prefix + "w2" in state:
                state[prefix + "w"] = state.pop(prefix + "w2") / 2

    source, target = nn.Sequential(Fused(), nn.Linear(1, 1)), nn.Sequential(Fused(), nn.Linear(1, 1))
    checkpoint = save({"model": source})
    assert {k.fqn for k in checkpoint.keys("model")} == {"0.w2", "1.weight", "1.bias"}
    checkpoint.load({"model": target})
    assert torch.equal(source[0].w, target[0].w) and torch.equal(source[1].weight, target[1].weight)


class Cached(nn.Module):
    """Keeps the squares of its weights, and makes them again when it is loaded."""

    def __init__(self, *, by_hook: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("ones", torch.ones(1).expand(2))
        self.squares = torch.zeros(0)
        self.loads: list[str] = []
        self.by_hook = by_hook
        if by_hook:
            self.register_load_state_dict_post_hook(lambda module, _: module.refresh("hook"))

    def refresh(self, how: str) -> None:
        self.loads.append(how)
        self.squares = self.weight.detach() ** 2

    def get_extra_state(self) -> int:
        return len(self.loads)

    def set_extra_state(self, state: int) -> None:
        self.extra = state

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if not self.by_hook:
            self.refresh("method")


@pytest.mark.parametrize("by_hook", [True, False])
def test_modules_that_hook_into_load_state_dict_see_a_load(by_hook: bool) -> None:
    def build() -> nn.Module:
        inside = nn.Sequential(Cached(by_hook=by_hook), nn.Linear(3, 3))
        return nn.Sequential(checkpoint_wrapper(inside), nn.BatchNorm1d(3), Cached(by_hook=by_hook))

    source, target = build(), build()
    checkpoint = save({"model": source})
    assert not checkpoint.load({"model": target}).missing
    for name, tensor in source.named_parameters():
        assert torch.equal(target.get_parameter(name), tensor)
    for module in target.modules():
        if isinstance(module, Cached):
            assert module.loads == ["hook" if by_hook else "method"]
            assert torch.equal(module.squares, module.weight.detach() ** 2) and module.extra == 0


class Subclass(torch.Tensor):
    pass


def holder(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("buffer", tensor)
    return nn.Sequential(module)


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (lambda: torch.empty(2, device="meta"), "meta"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised"),
        # A nested tensor imports torch._dynamo, which takes two seconds: not while this file is collected.
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "NestedTensor"),
    ],
)
def test_tensors_without_plain_bytes_are_refused_by_name(tensor: Callable[[], torch.Tensor], what: str) -> None:
    with pytest.raises(UsageError, match=what) as error:
        capture(model=holder(tensor()))
    assert "model/0.buffer" in str(error.value) and "\n" not in str(error.value)


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="lazy"):
        capture(model=nn.LazyLinear(2))
    with pytest.raises(UsageError, match="model/weight is an uninitialised lazy tensor"):
        save({"model": nn.Linear(3, 2)}).load({"model": nn.LazyLinear(2)})


def test_a_subclass_without_a_dispatcher_is_plain() -> None:
    (state,) = capture(model=holder(torch.arange(3.0).as_subclass(Subclass)))
    assert names(state) == ["0.buffer"]


def test_views_of_any_stride_load_in_place() -> None:
    base = torch.zeros(4, 6)
    checkpoint = save({"model": holder(torch.arange(6.0).reshape(3, 2))})
    found = checkpoint.load({"model": holder(base.t()[1:4, ::2])})
    assert not found.missing
    assert torch.equal(base.t()[1:4, ::2], torch.arange(6.0).reshape(3, 2))


def test_expanded_buffers_load_where_their_values_are_equal() -> None:
    live = torch.zeros(1, 3).expand(4, 3)
    save({"model": holder(torch.arange(3.0).expand(4, 3))}).load({"model": holder(live)})
    assert torch.equal(live, torch.arange(3.0).expand(4, 3))
    with pytest.raises(IncompatibleCheckpointError, match="expanded"):
        save({"model": holder(torch.arange(12.0).reshape(4, 3))}).load({"model": holder(live)})


def test_empty_and_scalar_tensors() -> None:
    source = nn.Module()
    source.register_buffer("none", torch.empty(0, 3))
    source.register_buffer("scalar", torch.tensor(4.0))
    (state,) = capture(model=source)
    assert [(s.global_shape, s.offsets, s.lengths) for s in state.shards] == [((0, 3), (0, 0), (0, 3)), ((), (), ())]


def test_a_rank_without_a_stage_has_no_shards() -> None:
    states = capture(model=[], optimizer=[], extra=[])
    assert [s.shards for s in states] == [[], [], []]
    checkpoint = MemoryCheckpoint([detached(capture(model=model(), optimizer=[], extra=[]))])
    assert not checkpoint.load({"model": [], "optimizer": [], "extra": [1]}).missing


def test_tensors_of_several_modules_with_one_name_are_replicas() -> None:
    chunks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    (state,) = capture(model=chunks)
    assert names(state) == ["weight", "bias", "weight", "bias"]
    chunks[1].load_state_dict(chunks[0].state_dict())
    targets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    found = save({"model": chunks}).load({"model": targets})
    assert not found.missing
    for target in targets:
        assert torch.equal(target.weight, chunks[0].weight) and torch.equal(target.bias, chunks[0].bias)


def test_replicas_that_share_a_name_by_ties_are_stored_under_the_first_of_all_names() -> None:
    def module(*tied: str) -> nn.Module:
        made = nn.Module()
        weight = nn.Parameter(torch.ones(2))
        for name in tied:
            setattr(made, name, weight)
        return made

    (state,) = capture(model=[module("a"), module("c", "b"), module("d"), module("b", "a")])
    found = {(s.key.fqn, s.aliases) for s in state.shards}
    assert names(state) == ["a", "a", "d", "a"]
    assert found == {("a", ()), ("a", ("c", "b")), ("d", ()), ("a", ("b",))}


def test_extra_states_of_several_modules_with_one_name_are_replicas() -> None:
    source = [with_extra({"scale": torch.arange(3.0), "step": 3})]
    source.append(copy.deepcopy(source[0]))
    target = [with_extra({}), with_extra({})]
    save({"model": source}).load({"model": target})
    for one in target:
        assert torch.equal(one.extra["scale"], torch.arange(3.0)) and one.extra["step"] == 3
    assert target[0].extra["scale"] is not target[1].extra["scale"]
    source[1].extra["scale"][0] = 1.0
    with pytest.raises(IncompatibleCheckpointError, match="model/_extra_state is held twice"):
        capture(model=source)


def test_what_several_modules_lack_is_missing_once() -> None:
    found = save({"model": nn.Linear(2, 2, bias=False)}).load(
        {"model": [nn.Linear(2, 2), nn.Linear(2, 2)]}, strict=False
    )
    assert set(found.missing) == {"model/bias"}
