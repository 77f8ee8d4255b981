"""Hooks before load_state_dict: they see the names of a checkpoint, and what they do with them holds for the load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError
from tests.support.tiny_model import trained

Hook = Callable[..., None]


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 3)
        self.inner = nn.ModuleDict({"gamma": nn.Linear(3, 2)})
        self.register_buffer("unused", torch.ones(2))


class New(nn.Module):
    """`proj` is `linear` now, `inner.gamma` is `inner.scale`, `unused` is gone, `extra` is new."""

    def __init__(self, outer: Hook | None = None, inner: Hook | None = None, *, extra: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.inner = nn.ModuleDict({"scale": nn.Linear(3, 2)})
        if extra:
            self.register_buffer("extra", torch.zeros(2))
        if outer is not None:
            self.register_load_state_dict_pre_hook(outer)
        if inner is not None:
            self.inner._register_load_state_dict_pre_hook(inner)


def outer(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    for key in list(state_dict):
        if key.startswith(f"{prefix}proj."):
            state_dict[key.replace("proj.", "linear.")] = state_dict.pop(key)
    state_dict.pop(f"{prefix}unused", None)
    if "extra" in module._buffers:
        state_dict.setdefault(f"{prefix}extra", torch.full((2,), 7.0))


def inner(state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    for key in [key for key in state_dict if "gamma" in key]:
        assert key.startswith(f"{prefix}gamma."), "a hook sees the keys below its own module only"
        state_dict[key.replace("gamma", "scale")] = state_dict.pop(key)


@pytest.fixture
def old(path: str) -> Old:
    model = Old()
    bytecheckpoint.save(path, {"model": model, "optimizer": trained(model)})
    return model


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential], ids=["alone", "inside"])
@pytest.mark.parametrize("extra", [False, True])
def test_renamed_dropped_and_added_keys(path: str, wrap: Callable[[nn.Module], nn.Module], extra: bool) -> None:
    """As load_state_dict does it; the optimizer's state goes with the parameters."""
    old = Old()
    saved_model, live = wrap(old), New(outer, inner, extra=extra)
    saved = trained(saved_model)
    bytecheckpoint.save(path, {"model": saved_model, "optimizer": saved})
    reference = New(outer, inner, extra=extra)
    wrap(reference).load_state_dict(saved_model.state_dict())
    model = wrap(live)
    optimizer = torch.optim.AdamW(model.parameters())
    report = bytecheckpoint.load(path, {"optimizer": optimizer, "model": model})
    assert not report.missing and not report.unexpected
    for name, tensor in reference.state_dict().items():
        assert torch.equal(live.state_dict()[name], tensor), name
    for one, other in zip(live.parameters(), old.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], saved.state[other]["exp_avg"])
    # What is saved now has the new names, which the hooks leave alone.
    bytecheckpoint.save(f"{path}-new", {"model": model, "optimizer": optimizer})
    again = wrap(New(outer, inner, extra=extra))
    bytecheckpoint.load(f"{path}-new", {"model": again})
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), model.parameters(), strict=True))


def test_without_the_hooks_the_names_differ(path: str, old: Old) -> None:
    with pytest.raises(IncompatibleCheckpointError, match=r"lacks model/(linear|inner\.scale)"):
        bytecheckpoint.load(path, {"model": New()})
    with pytest.raises(IncompatibleCheckpointError, match=r"lacks model/inner\.scale"):
        bytecheckpoint.load(path, {"model": New(outer)})


def test_a_key_that_a_hook_drops_is_missing(path: str, old: Old) -> None:
    def drop(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        del state_dict[f"{prefix}proj.bias"]

    live = Old()
    live.register_load_state_dict_pre_hook(drop)
    with pytest.raises(IncompatibleCheckpointError, match=r"lacks model/proj\.bias"):
        bytecheckpoint.load(path, {"model": live})
    report = bytecheckpoint.load(path, {"model": live}, strict=False)
    assert report.missing == ("model/proj.bias",) and not report.unexpected
    assert torch.equal(live.proj.weight, old.proj.weight) and not torch.equal(live.proj.bias, old.proj.bias)


def scales(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    state_dict[f"{prefix}proj.weight"] = state_dict[f"{prefix}proj.weight"] * 2


def scales_in_place(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    state_dict[f"{prefix}proj.weight"].mul_(2)


def scales_every(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    for key, value in state_dict.items():
        if "proj.weight" in key:
            state_dict[key] = nn.Parameter(value.cpu().clone() + value)


@pytest.mark.parametrize("hook", [scales, scales_in_place, scales_every])
def test_computed_values(path: str, old: Old, hook: Hook) -> None:
    live = Old()
    live.register_load_state_dict_pre_hook(hook)
    bytecheckpoint.load(path, {"model": live})
    assert torch.equal(live.proj.weight, old.proj.weight * 2) and torch.equal(live.proj.bias, old.proj.bias)
    assert torch.equal(live.inner["gamma"].weight, old.inner["gamma"].weight)


def test_a_padded_vocabulary_keeps_the_rows_of_the_live_model(path: str, old: Old) -> None:
    def pad(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        key = f"{prefix}proj.weight"
        state_dict[key] = torch.cat([state_dict[key], module.proj.weight[3:]])

    live = Old()
    live.proj.weight = nn.Parameter(torch.full((5, 4), 9.0))
    live.register_load_state_dict_pre_hook(pad)
    bytecheckpoint.load(path, {"model": live})
    assert torch.equal(live.proj.weight[:3], old.proj.weight) and bool((live.proj.weight[3:] == 9.0).all())
    live.register_load_state_dict_pre_hook(
        lambda m, entries, prefix, *_: entries.update({"proj.weight": torch.ones(2)})
    )
    with pytest.raises(IncompatibleCheckpointError, match=r"model/proj.weight has shape \(2,\) after hooks"):
        bytecheckpoint.load(path, {"model": live})


def looks(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    if state_dict[f"{prefix}proj.weight"].sum() > 0:
        state_dict.clear()


def lists(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    state_dict[f"{prefix}proj.weight"].mul_(2)
    module.seen = state_dict[f"{prefix}proj.weight"].tolist()


def takes_numpy(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    module.seen = state_dict[f"{prefix}proj.weight"].numpy()


@pytest.mark.parametrize("hook", [looks, lists, takes_numpy])
def test_a_hook_that_needs_values_is_left_out_where_names_fit_without_it(path: str, old: Old, hook: Hook) -> None:
    live, other = Old(), New()
    live.register_load_state_dict_pre_hook(hook)
    report = bytecheckpoint.load(path, {"model": live})
    assert [hook.__name__ in note and "needs values" in note for note in report.notes] == [True]
    assert torch.equal(live.proj.weight, old.proj.weight)
    other.register_load_state_dict_pre_hook(lambda module, *rest: hook(old, *rest))
    with pytest.raises(IncompatibleCheckpointError, match=r"model: a hook before load_state_dict .*needs values"):
        bytecheckpoint.load(path, {"model": other})


def reports(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    rest[-1].append("too old")


def sets_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    state_dict[f"{prefix}proj.weight"] = [1, 2]


def raises(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    raise NotImplementedError("too old")


@pytest.mark.parametrize("hook", [reports, sets_values, raises])
def test_hooks_that_refuse(path: str, old: Old, hook: Hook) -> None:
    live = Old()
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    live.register_load_state_dict_pre_hook(hook)
    with pytest.raises(IncompatibleCheckpointError, match="model: a hook before load_state_dict"):
        bytecheckpoint.load(path, {"model": live})
    assert all(torch.equal(before[name], tensor) for name, tensor in live.state_dict().items())


def test_hooks_see_the_version_of_the_live_module_and_keys_of_extra_states(path: str) -> None:
    """A checkpoint has no versions: what it holds counts as up to date."""

    def convert(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: object
    ) -> None:
        del state_dict[f"{prefix}_extra_state"]
        if metadata.get("version") is None or metadata["version"] < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()

    class Versioned(nn.Linear):
        _version = 2

        def get_extra_state(self) -> Any:
            return 3

        def set_extra_state(self, state: Any) -> None:
            assert state == 3

    old, live = Versioned(4, 4), Versioned(4, 4)
    bytecheckpoint.save(path, {"model": old})
    live.register_load_state_dict_pre_hook(convert)
    bytecheckpoint.load(path, {"model": live})
    assert torch.equal(live.weight, old.weight)


def test_a_hook_that_replaces_a_parameter(path: str, old: Old) -> None:
    def resize(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        module.proj.weight = nn.Parameter(torch.zeros(state_dict[f"{prefix}proj.weight"].shape))

    live = Old()
    live.proj.weight = nn.Parameter(torch.zeros(1, 1))
    live.register_load_state_dict_pre_hook(resize)
    bytecheckpoint.load(path, {"model": live})
    assert torch.equal(live.proj.weight, old.proj.weight)


def test_hooks_see_shapes_and_dtypes(path: str, old: Old) -> None:
    seen: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}

    def look(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        seen.update({key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in state_dict.items()})

    live = Old()
    live.register_load_state_dict_pre_hook(look)
    bytecheckpoint.load(path, {"model": live})
    assert seen == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in old.state_dict().items()}


def test_parametrizations_take_old_names(path: str) -> None:
    """Torch's own hook renames the keys of the older weight norm."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = torch.nn.utils.weight_norm(nn.Linear(3, 2))
    bytecheckpoint.save(path, {"model": old})
    live = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    bytecheckpoint.load(path, {"model": live})
    assert torch.allclose(live.weight, old.weight_v * (old.weight_g / old.weight_v.norm(dim=1, keepdim=True)))


def test_tied_weights_and_a_rename_by_the_caller(path: str) -> None:
    old = Old()
    old.twin = old.proj
    bytecheckpoint.save(path, {"model": old})
    live = New(outer, inner)
    live.twin = live.linear
    bytecheckpoint.load(path, {"model": live})
    assert torch.equal(live.twin.weight, old.proj.weight)
    plain = nn.ModuleDict({"body": New(outer, inner)})
    bytecheckpoint.save(path, {"model": Old()})
    bytecheckpoint.load(path, {"model": plain["body"]}, rename={"model/inner.scale.": "model/inner.gamma."})
