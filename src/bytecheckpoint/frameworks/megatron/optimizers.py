"""Optimizers over Megatron's parameters: state, settings and master weights by the parameters' own names.

The distributed optimizer strings the parameters of a model together, cuts the string into equal runs, one for each
data-parallel rank, and steps 1-D tensors that hold a run of one parameter. It keeps a table of these runs; state is taken
out of them as it lies. The other optimizers of Megatron step copies of whole parameters, or the parameters. Either way
a *view* shows the optimizer with whole parameters; names, groups and settings are then handled as for any optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.masters import MASTER
from bytecheckpoint.frameworks.megatron.installed import is_megatron_optimizer, megatron_class
from bytecheckpoint.frameworks.megatron.layouts import Boxes, Layout
from bytecheckpoint.frameworks.optimizers import ParameterNames, capture_optimizers, inline
from bytecheckpoint.frameworks.views import optimizer_view, stand_in
from bytecheckpoint.representation.shards import LiveState

__all__ = [
    "Member",
    "Stepped",
    "View",
    "as_megatron_optimizers",
    "capture_megatron_optimizers",
    "mastered_by",
    "stepped_by",
]

# Settings that say how the parameters are laid out over the ranks.
_LAYOUT_SETTINGS = frozenset({"params", "param_names", "is_expert_parallel"})
_SCALER = "grad_scaler"
_FUSED = ("apex", "transformer_engine")  # their optimizers keep one step per group


@dataclass(slots=True)
class Stepped:
    """One tensor that an inner optimizer steps.

    Attributes:
        inner: the torch optimizer.
        group: its group.
        tensor: what is stepped, and the key of the state.
        parameter: the model's.
        start: number of the first element in the parameter, for a flat run; None: the tensor is the whole.
    """

    inner: Optimizer
    group: dict[str, Any]
    tensor: torch.Tensor
    parameter: torch.Tensor
    start: int | None

    @property
    def master(self) -> bool:
        """Whether the tensor is memory of its own, beside the parameter's."""
        return self.tensor.untyped_storage().data_ptr() != self.parameter.untyped_storage().data_ptr()

    def state(self) -> Mapping[Any, Any]:
        """The live state; empty where there is none."""
        return self.inner.state.get(self.tensor) or {}

    @property
    def steps_of_group(self) -> bool:
        """Whether the optimizer keeps the step in the group."""
        return type(self.inner).__module__.partition(".")[0] in _FUSED


@dataclass(slots=True)
class Member:
    """A parameter of a view.

    Attributes:
        stepped: the tensor behind it.
        layout: of the parameter.
        whole: the parameter as the view has it.
    """

    stepped: Stepped
    layout: Layout
    whole: torch.Tensor

    def add(self, boxes: Boxes, kind: str, slot: str, data: torch.Tensor) -> None:
        """Add state that follows the elements."""
        for piece in self.layout.pieces:
            boxes.add(piece, piece.key(kind, slot), data, self.stepped.start)


def as_megatron_optimizers(kind: str, value: object) -> list[Any] | None:
    """`value` as a list of optimizers of Megatron (and of torch beside them), or None when it is something else."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    ours = [is_megatron_optimizer(item) for item in items]
    if not any(ours):
        return None
    if not all(own or isinstance(item, Optimizer) for own, item in zip(ours, items, strict=True)):
        raise UsageError(f"{kind}: optimizers of Megatron stand beside other things: give them a name of their own")
    return list(items)


def _links(kind: str, optimizers: Iterable[Any]) -> Iterator[Any]:
    """The optimizers themselves, without chains and stubs."""
    for optimizer in optimizers:
        layer_wise = megatron_class("optimizer.layer_wise_optimizer", "LayerWiseDistributedOptimizer")
        if layer_wise is not None and isinstance(optimizer, layer_wise):
            raise UsageError(f"{kind}: LayerWiseDistributedOptimizer is not supported: use the distributed optimizer")
        chain = getattr(optimizer, "chained_optimizers", None)
        if chain is not None:
            yield from _links(kind, chain)
        elif not getattr(optimizer, "is_stub_optimizer", False):
            yield optimizer


def stepped_by(kind: str, optimizers: Iterable[Any]) -> list[list[Stepped]]:
    """What each optimizer steps on this rank, chains taken apart.

    Raises:
        UsageError: an optimizer keeps its state in a form that is not supported.
    """
    return [_stepped(kind, link) for link in _links(kind, optimizers)]


def mastered_by(kind: str, optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The parameters that have master weights, on whatever rank of a distributed optimizer these are."""
    for link in _links(kind, optimizers):
        for item in _stepped(kind, link):
            if item.master:
                yield item.parameter
        for buffer in getattr(link, "buffers", ()):
            yield from (p for p in buffer.param_index_map if p.dtype != torch.float32)


def _stepped(kind: str, link: Any) -> list[Stepped]:
    if isinstance(link, Optimizer):
        return [Stepped(link, group, p, p, None) for group in link.param_groups for p in group["params"]]
    inner = link.optimizer
    name = type(link).__name__
    if not isinstance(inner, Optimizer):
        raise UsageError(f"{kind}: {name} around a {type(inner).__name__} is not supported")
    if type(inner).__name__ == "HybridDeviceOptimizer":
        raise UsageError(
            f"{kind}: {name} with optimizer_cpu_offload is not supported: keep the state where the model is"
        )
    if getattr(link.config, "use_precision_aware_optimizer", False):
        raise UsageError(
            f"{kind}: {name} with use_precision_aware_optimizer keeps scaled state, and main weights inside the optimizer, "
            "which is not supported: train without it"
        )
    distributed = megatron_class("optimizer.distrib_optimizer", "DistributedOptimizer")
    if distributed is not None and isinstance(link, distributed):
        return _runs(kind, link, inner)
    if hasattr(link, "fp32_from_float16_groups"):
        models = {
            id(main): parameter
            for low, high in zip(link.float16_groups, link.fp32_from_float16_groups, strict=True)
            for parameter, main in zip(low, high, strict=True)
        }
    elif name == "FP32Optimizer":
        models = {}
    else:
        raise UsageError(
            f"{kind}: {name} is not supported: use DistributedOptimizer, or the float16 and FP32 optimizers"
        )
    return [
        Stepped(inner, group, p, models.get(id(p), p), None) for group in inner.param_groups for p in group["params"]
    ]


def _runs(kind: str, link: Any, inner: Optimizer) -> list[Stepped]:
    """The table of a distributed optimizer. Only the runs of this rank are in it."""
    if link.ddp_config.use_megatron_fsdp:
        raise UsageError(f"{kind}: Megatron-FSDP is not supported: use DistributedDataParallel")
    found: dict[int, Stepped] = {}
    for buffer in link.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    number, place = link.model_param_group_index_map[parameter]
                    group = inner.param_groups[number]
                    tensor = group["params"][place]
                    inside = ranges["param"]
                    assert tensor.ndim == 1 and tensor.numel() == inside.end - inside.start
                    found[id(tensor)] = Stepped(inner, group, tensor, parameter, inside.start)
    return [found[id(tensor)] for group in inner.param_groups for tensor in group["params"]]


class View:
    """All optimizers of one kind as one optimizer of whole parameters.

    Args:
        kind: name of the state.
        optimizers: the live ones.
        names: of all parameters.
        layouts: id of a parameter -> its layout.
        copies: take parameters that another pipeline stage saves, too.

    Attributes:
        members: the parameters of this rank.
        optimizer: the view.
        names: with the view's parameters.

    Raises:
        UsageError: a parameter is not of a module in the states, or an optimizer is not supported.
    """

    def __init__(
        self,
        kind: str,
        optimizers: Sequence[Any],
        names: ParameterNames,
        layouts: Mapping[int, Layout],
        *,
        copies: bool,
    ) -> None:
        links = list(_links(kind, optimizers))
        self._scalers = [s for link in links if (s := getattr(link, "grad_scaler", None)) is not None]
        self.optimizer = optimizer_view(type(links[0]).__name__ if links else "Optimizer")
        self.members: list[Member] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        by_id = dict(names.by_id)
        near: dict[Any, torch.Tensor] = {}
        for stepped in stepped_by(kind, optimizers):
            groups: dict[int, dict[str, Any]] = {}
            for item in stepped:
                layout = layouts.get(id(item.parameter))
                if layout is None:
                    raise UsageError(
                        f"{kind}: {type(item.inner).__name__} steps a parameter of shape {tuple(item.parameter.shape)}, "
                        "which is not of a module of Megatron in the same states: put the model beside its optimizer"
                    )
                if layout.copy and not copies:
                    continue
                if id(item.group) not in groups:
                    shown = {key: value for key, value in item.group.items() if key not in _LAYOUT_SETTINGS}
                    if item.steps_of_group:
                        shown.pop("step", None)
                    groups[id(item.group)] = shown
                    shown["params"] = []
                    self.optimizer.param_groups.append(shown)
                    self._groups.append((item.group, shown))
                form = item.tensor.dtype, item.tensor.device
                if form not in near:
                    near[form] = item.tensor.detach().new_empty(())
                whole = stand_in(tuple(layout.tensor.shape), near[form])
                groups[id(item.group)]["params"].append(whole)
                by_id[id(whole)] = by_id[id(item.parameter)]
                self.members.append(Member(item, layout, whole))
        self.names = ParameterNames(by_id)

    def show_scaler(self) -> None:
        """Put the state of the loss scaler into the view, as state that belongs to no parameter."""
        state: dict[Any, Any] = self.optimizer.state
        for scaler in self._scalers[:1]:
            state[_SCALER] = inline(scaler.state_dict())

    def hand_back(self) -> None:
        """Put the settings of the view's groups, and the scaler's state, into the optimizers' own."""
        for own, shown in self._groups:
            own.update((key, value) for key, value in shown.items() if key not in _LAYOUT_SETTINGS)
        scaled: Any = self.optimizer.state.get(_SCALER)  # type: ignore[call-overload]
        for scaler in self._scalers if scaled is not None else ():
            scaler.load_state_dict({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in scaled.items()})


def capture_megatron_optimizers(
    kind: str, optimizers: Sequence[Any], names: ParameterNames, layouts: Mapping[int, Layout]
) -> LiveState:
    """The shards and values of all optimizers of one kind.

    Raises:
        UsageError: state of a parameter is neither one value per element nor one value; names it.
    """
    view = View(kind, optimizers, names, layouts, copies=False)
    view.show_scaler()
    boxes = Boxes()
    for member in view.members:
        stepped = member.stepped
        if stepped.master:
            member.add(boxes, kind, MASTER, stepped.tensor)
        rest: dict[Any, Any] = {}
        own = stepped.state()
        for slot, value in own.items():
            if isinstance(value, torch.Tensor) and value.shape == stepped.tensor.shape and type(slot) is str and slot:
                member.add(boxes, kind, slot, value)
            elif isinstance(value, torch.Tensor) and value.numel() != 1:
                raise UsageError(
                    f"{kind}/state/{member.layout.names[0]}/{slot} is a tensor of shape {tuple(value.shape)}, and what the "
                    f"optimizer steps has shape {tuple(stepped.tensor.shape)}: state that does not follow the elements is "
                    "not supported"
                )
            else:
                rest[slot] = value
        if own and stepped.steps_of_group and "step" in stepped.group:
            rest["step"] = torch.tensor(float(stepped.group["step"]))
        if rest:
            state: dict[Any, Any] = view.optimizer.state
            state[member.whole] = rest
    captured = capture_optimizers(kind, [view.optimizer], view.names)
    for shard in (shards := boxes.shards()):
        shard.requires_grad = False
    captured.shards += shards
    return captured
