"""Save and load optimizers over FSDP1's parameters: their state and hyperparameters by original parameter.

An optimizer holds flat parameters (use_orig_params=False), or original ones of which this rank has a flat range (True).
Either way it gets a view whose parameters are placeholders for the original ones (see `optimizers/flat_tensors.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, ParameterName, SavedStates
from bytecheckpoint.frameworks.fsdp1.detection import is_flattened
from bytecheckpoint.frameworks.fsdp1.flat_parameters import FlatParameter, OriginalParameter
from bytecheckpoint.frameworks.optimizers.flat_capture import capture_flat_tensors
from bytecheckpoint.frameworks.optimizers.flat_restore import load_flat_tensors
from bytecheckpoint.frameworks.optimizers.flat_tensors import ErrorAdvice, FlatOptimizerTensor
from bytecheckpoint.frameworks.optimizers.names import NOT_HYPERPARAMETERS, ParameterNames
from bytecheckpoint.frameworks.optimizers.view import optimizer_view, placeholder_parameter
from bytecheckpoint.representation.shards import LiveState

__all__ = ["FlatParameterTable", "capture_flat_optimizers", "load_flat_optimizers"]


@dataclass(slots=True)
class FlatParameterTable:
    """The parameters of FSDP1 that an optimizer may hold, by their id.

    Attributes:
        flat: flat parameters.
        originals: original parameters of which this rank has a flat range.
        unsharded: original parameters that are whole on every rank (NO_SHARD).
        places: place in the model of a module, and of the module of a parameter that FSDP1 does not flatten.
    """

    flat: dict[int, FlatParameter] = field(default_factory=dict)
    originals: dict[int, tuple[FlatParameter, OriginalParameter]] = field(default_factory=dict)
    unsharded: set[int] = field(default_factory=set)
    places: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def build(flats: Sequence[FlatParameter], owners: Sequence[nn.Module]) -> FlatParameterTable:
        """Build the table of all flat parameters of the modules in the states; `owners` are in the order of the model."""
        table = FlatParameterTable()
        for place, owner in enumerate(owners):
            for held in (owner, *owner._parameters.values()):
                table.places.setdefault(id(held), place)
        for flat in flats:
            if not flat.use_orig_params:
                table.flat[id(flat.tensor)] = flat
            elif flat.sharded:
                table.originals.update((id(o.parameter), (flat, o)) for o in flat.originals)
            else:
                table.unsharded.update(id(o.parameter) for o in flat.originals)
        return table


_ADVICE = ErrorAdvice(
    framework="FSDP1",
    on_save="use an optimizer with one value per element, or fully_shard (FSDP2)",
    on_load="load it into fully_shard (FSDP2), DDP or NO_SHARD with use_orig_params=True",
    on_difference="wrap the module with use_orig_params=True",
)


class _OptimizerViews:
    """The optimizers of one state, by original parameters.

    Args:
        state_name: name of the state.
        optimizers: the live ones.
        names: names of the parameters that FSDP1 does not flatten.
        table: the parameters that it flattens.
        share_state: let the views share the optimizers' state. False: the views hold only the state of parameters that
            FSDP1 does not flatten.

    Attributes:
        optimizers: one view for each optimizer, of a class of the same name.
        names: names of all parameters, the placeholders included.
        flat_tensors: the flattened parameters that the optimizers step.

    Raises:
        UsageError: an optimizer has a parameter of an FSDP1 module that is not in the states.
    """

    def __init__(
        self,
        state_name: str,
        optimizers: Sequence[Optimizer],
        names: ParameterNames,
        table: FlatParameterTable,
        *,
        share_state: bool,
    ) -> None:
        self._state_name = state_name
        self._live = list(optimizers)
        self._table = table
        self._by_id = dict(names.by_id)
        self._elements: dict[int, torch.Tensor] = {}  # id of a flat parameter -> one element like its own
        self._places: dict[int, int] = {}  # id of a placeholder -> place of its module
        self.flat_tensors: list[FlatOptimizerTensor] = []
        self.optimizers: list[Optimizer] = []
        for optimizer in optimizers:
            view = optimizer_view(type(optimizer).__name__, optimizer)
            for group in optimizer.param_groups:
                params = list(self._originals(optimizer, view, group["params"]))
                if table.flat:  # as in other programs, which number parameters; flat ones begin with the outer modules'
                    params.sort(key=lambda p: self._places.get(id(p), table.places.get(id(p), -1)))
                view.param_groups.append({**group, "params": params})
            if share_state:
                view.state = optimizer.state
            else:
                flattened = {id(flat.tensor) for flat in self.flat_tensors}
                view.state.update((k, v) for k, v in optimizer.state.items() if id(k) not in flattened)
            self.optimizers.append(view)
        self.names = ParameterNames(self._by_id)

    def _originals(
        self, optimizer: Optimizer, view: Optimizer, params: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Replace the parameters that FSDP1 flattens by placeholders."""
        for parameter in params:
            if (found := self._table.originals.get(id(parameter))) is not None:
                flat, original = found
                names = [self._by_id.get(id(parameter), original.parameter_name)]
                yield from self._add(optimizer, view, parameter, flat, [original], names)
            elif (whole := self._table.flat.get(id(parameter))) is not None:
                names = [original.parameter_name for original in whole.originals]
                yield from self._add(optimizer, view, parameter, whole, whole.originals, names)
            elif is_flattened(parameter) and id(parameter) not in self._table.unsharded:
                raise UsageError(
                    f"{self._state_name}: {type(optimizer).__name__} has a parameter of an FSDP1 module (shape "
                    f"{tuple(parameter.shape)}) that is not in the states: put the module beside its optimizer"
                )
            elif self._table.flat and id(parameter) not in self._by_id:
                raise UsageError(
                    f"{self._state_name}: {type(optimizer).__name__} has a parameter (shape {tuple(parameter.shape)}) "
                    "that no module in the states has: an optimizer that was made before FSDP1 wrapped the module without "
                    "use_orig_params steps what FSDP1 has replaced; make it from the parameters of the wrapped module, or "
                    "put its module into the states"
                )
            else:
                yield parameter

    def _add(
        self,
        optimizer: Optimizer,
        view: Optimizer,
        parameter: torch.Tensor,
        flat: FlatParameter,
        originals: Sequence[OriginalParameter],
        names: Sequence[ParameterName],
    ) -> Iterator[torch.Tensor]:
        joined = not flat.use_orig_params
        tensor = FlatOptimizerTensor(
            optimizer=optimizer,
            view=view,
            tensor=parameter,
            ranges=originals,
            joined=joined,
            local_shape=tuple(flat.shard_shape) if joined else (originals[0].count,),
            description=f"the flat parameter of {flat.module_name or 'the root'!r}",
            advice=_ADVICE,
        )
        self.flat_tensors.append(tensor)
        element = self._elements.get(id(flat))
        if element is None:
            element = self._elements[id(flat)] = placeholder_parameter((), flat.tensor, requires_grad=False)
        for original, name in zip(originals, names, strict=True):
            placeholder = placeholder_parameter(original.shape, element, requires_grad=original.requires_grad)
            tensor.placeholders.append(placeholder)
            self._by_id[id(placeholder)] = name
            self._places[id(placeholder)] = self._table.places.get(id(original.owner), -1)
            yield placeholder

    def copy_hyperparameters_back(self) -> None:
        """Copy the hyperparameters of the views' groups into the live optimizers."""
        for optimizer, view in zip(self._live, self.optimizers, strict=True):
            for own, group in zip(optimizer.param_groups, view.param_groups, strict=True):
                own.update((key, value) for key, value in group.items() if key not in NOT_HYPERPARAMETERS)


def capture_flat_optimizers(
    state_name: str, optimizers: Sequence[Optimizer], names: ParameterNames, table: FlatParameterTable
) -> LiveState:
    """Describe the shards and values of all optimizers of one state.

    Raises:
        UsageError: state of a flattened parameter is neither one value per element nor one value; names it.
    """
    views = _OptimizerViews(state_name, optimizers, names, table, share_state=False)
    return capture_flat_tensors(state_name, views.optimizers, views.names, views.flat_tensors)


def load_flat_optimizers(
    state_name: str,
    optimizers: Sequence[Optimizer],
    names: ParameterNames,
    table: FlatParameterTable,
    saved: SavedStates,
    destination: Destination,
    *,
    strict: bool,
) -> None:
    """Plan the load of one state; `load_flat_tensors` documents the errors."""
    views = _OptimizerViews(state_name, optimizers, names, table, share_state=True)
    load_flat_tensors(state_name, views.optimizers, views.names, views.flat_tensors, saved, destination, strict=strict)
    destination.finish.append(views.copy_hyperparameters_back)
