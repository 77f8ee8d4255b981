"""Capture Megatron optimizers: state, hyperparameters and master weights by the model parameters' names.

Main params may be flat ranges or fp32 copies. An optimizer view stands for the live optimizers and shows whole model
parameters, so that the ordinary code handles names, param groups and hyperparameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.megatron.layouts import ParameterLayout, ShardCollector
from bytecheckpoint.frameworks.megatron.main_params import (
    MainParam,
    finish_hybrid,
    flatten_chain,
    is_hybrid,
    main_params,
)
from bytecheckpoint.frameworks.optimizer_tree import pack_tensors
from bytecheckpoint.frameworks.optimizers.capture import capture_optimizers
from bytecheckpoint.frameworks.optimizers.names import ParameterNames
from bytecheckpoint.frameworks.optimizers.view import optimizer_view, placeholder_parameter
from bytecheckpoint.representation.shards import MASTER, LiveState

__all__ = ["MegatronOptimizerView", "ViewParam", "capture_megatron_optimizers"]

# Keys of a param group that depend on how the parameters are laid out over the ranks and devices.
_LAYOUT_SETTINGS = frozenset(
    {
        "params", "param_names", "is_expert_parallel", "offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls",
        "param_update_in_fp32", "pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d",
    }
)  # fmt: skip
_SCALER = "grad_scaler"


@dataclass(slots=True)
class ViewParam:
    """A parameter of a view, or one of the parameters that it fuses.

    Attributes:
        main: the main param behind it.
        layout: layout of the model parameter, or of its part.
        placeholder: the tensor that stands for the whole of it in the view.
    """

    main: MainParam
    layout: ParameterLayout
    placeholder: torch.Tensor

    def add_state(self, collector: ShardCollector, state_name: str, slot: str, data: torch.Tensor) -> None:
        """Add state with one value per element of the main param."""
        for box in self.layout.boxes:
            collector.add(box, box.key(state_name, slot), data, self.main.start)


class MegatronOptimizerView:
    """All optimizers of one state, shown as one optimizer over whole model parameters.

    Args:
        state_name: name of the state.
        optimizers: the live optimizers.
        names: names of all parameters.
        layouts: id of a parameter -> its layout.
        with_copies: include parameters that another pipeline stage saves.

    Attributes:
        params: the parameters of this rank.
        optimizer: the view.
        names: names of all parameters, the view's included.

    Raises:
        UsageError: a parameter is not in a module in the states, or an optimizer is not supported.
    """

    def __init__(
        self,
        state_name: str,
        optimizers: Sequence[Any],
        names: ParameterNames,
        layouts: Mapping[int, ParameterLayout],
        *,
        with_copies: bool,
    ) -> None:
        flat = list(flatten_chain(state_name, optimizers))
        self._scalers = [s for optimizer in flat if (s := getattr(optimizer, "grad_scaler", None)) is not None]
        self._hybrids = [o.optimizer for o in flat if is_hybrid(getattr(o, "optimizer", None))]
        self.optimizer = optimizer_view(type(flat[0]).__name__ if flat else "Optimizer")
        self.params: list[ViewParam] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []  # (live, in the view)
        by_id = dict(names.by_id)
        scalars: dict[Any, torch.Tensor] = {}
        for mains in main_params(state_name, optimizers):
            groups: dict[int, dict[str, Any]] = {}
            for main in mains:
                layout = layouts.get(id(main.model_param))
                if layout is None:
                    raise UsageError(
                        f"{state_name}: {type(main.inner).__name__} steps a parameter of shape "
                        f"{tuple(main.model_param.shape)}, "
                        "which is not of a module of Megatron in the same states: put the model beside its optimizer"
                    )
                if layout.saved_by_other_stage and not with_copies:
                    continue
                if id(main.settings) not in groups:
                    groups[id(main.settings)] = self._add_group(main)
                form = main.tensor.dtype, main.tensor.device
                if form not in scalars:
                    scalars[form] = main.tensor.detach().new_empty(())
                for part in layout.parts or [layout]:
                    placeholder = placeholder_parameter(tuple(part.tensor.shape), scalars[form])
                    groups[id(main.settings)]["params"].append(placeholder)
                    name = (part.names[0], part.names[1:]) if layout.parts else by_id[id(main.model_param)]
                    by_id[id(placeholder)] = name
                    self.params.append(ViewParam(main, part, placeholder))
        counts = Counter(param.layout.names[0] for param in self.params)
        # The ranges of a distributed optimizer differ between the chunks that hold replicas: these are refused by name.
        replicas = {
            id(param.placeholder)
            for param in self.params
            if counts[param.layout.names[0]] > 1 and param.main.start is None
        }
        self.names = ParameterNames(by_id, frozenset(replicas))

    def _add_group(self, main: MainParam) -> dict[str, Any]:
        """Add the param group of `main`, without parameters, to the view."""
        group = {key: value for key, value in main.settings.items() if key not in _LAYOUT_SETTINGS}
        if main.step_in_group or main.settings is not main.group:
            group.pop("step", None)
        group["params"] = []
        self.optimizer.param_groups.append(group)
        self._groups.append((main.settings, group))
        return group

    def add_scaler(self) -> None:
        """Put the loss scaler's state into the view, as state that belongs to no parameter."""
        state: dict[Any, Any] = self.optimizer.state
        for scaler in self._scalers[:1]:
            state[_SCALER] = pack_tensors(scaler.state_dict())

    def write_back(self) -> None:
        """Complete a load: copy the view's hyperparameters and the loss scaler's state into the live optimizers."""
        for live, shown in self._groups:
            live.update((key, value) for key, value in shown.items() if key not in _LAYOUT_SETTINGS)
        for hybrid in self._hybrids:
            finish_hybrid(hybrid)
        scaler_state: Any = self.optimizer.state.get(_SCALER)  # type: ignore[call-overload]
        for scaler in self._scalers if scaler_state is not None else ():
            scaler.load_state_dict(
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in scaler_state.items()}
            )


def capture_megatron_optimizers(
    state_name: str, optimizers: Sequence[Any], names: ParameterNames, layouts: Mapping[int, ParameterLayout]
) -> LiveState:
    """Describe the shards and values of all optimizers of one state.

    Raises:
        UsageError: state of a parameter is neither one value per element nor one value; names it.
    """
    view = MegatronOptimizerView(state_name, optimizers, names, layouts, with_copies=False)
    view.add_scaler()
    collector = ShardCollector()
    for param in view.params:
        main = param.main
        if main.is_master:
            param.add_state(collector, state_name, MASTER, main.tensor)
        single_values: dict[Any, Any] = {}
        live_state = main.state()
        for slot, value in live_state.items():
            if isinstance(value, torch.Tensor) and value.shape == main.tensor.shape and type(slot) is str and slot:
                param.add_state(collector, state_name, slot, value)
            elif isinstance(value, torch.Tensor) and value.numel() != 1:
                raise UsageError(
                    f"{state_name}/state/{param.layout.names[0]}/{slot} is a tensor of shape {tuple(value.shape)}, and "
                    "what the "
                    f"optimizer steps has shape {tuple(main.tensor.shape)}: state that does not follow the elements is "
                    "not supported"
                )
            else:
                single_values[slot] = value
        if live_state and main.step_in_group and "step" in main.group:
            single_values["step"] = torch.tensor(float(main.group["step"]))
        if single_values:
            state: dict[Any, Any] = view.optimizer.state
            state[param.placeholder] = single_values
    captured = capture_optimizers(state_name, [view.optimizer], view.names)
    for shard in (shards := collector.shards()):
        shard.requires_grad = False
    captured.shards += shards
    return captured
