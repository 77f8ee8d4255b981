"""Remember in which parameters of an engine's model the parts of each tensor of its checkpoint lie, and sum them there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError, listed
from bytecheckpoint.integrations.engines.lazy_weights import WantedWeight
from bytecheckpoint.layouts.layout import Layout
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.tools.fingerprints import Fingerprint, fingerprint, prove_loaded
from bytecheckpoint.tools.ranks import tool_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["HeldWeights", "engine_fingerprint", "prove_engine"]

_log = logging.getLogger("bytecheckpoint")


@dataclass(frozen=True)
class _HeldPart:
    """The place of a part of a tensor in a parameter.

    Attributes:
        begins: first coordinate of the part along each dimension.
        lengths: extent along each dimension.
        parameter: name of the parameter or buffer.
        shape: shape of the parameter.
        offset: elements from the parameter's first one to the part's.
        strides: elements between two neighbours of the part.
    """

    begins: tuple[int, ...]
    lengths: tuple[int, ...]
    parameter: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class HeldWeights:
    """The weights that a model of an engine holds; its loader leaves them in `model.bytecheckpoint_weights`.

    Attributes:
        state: name of the state that is the model.
        shapes: global shape of each tensor that the model has copied.
        places: places of its parts.
        others: names of tensors of which the model has made something else than a copy.
        ranks: process group of the engine's ranks; None for one rank.
    """

    state: str
    shapes: Mapping[str, tuple[int, ...]]
    places: Mapping[str, tuple[_HeldPart, ...]]
    others: frozenset[str]
    ranks: ProcessGroup | None

    @staticmethod
    def of(
        model: torch.nn.Module, wanted: Mapping[str, WantedWeight], others: Iterable[str], state: str, ranks: Any
    ) -> HeldWeights:
        """Find the parameters to which the memory of the wanted parts belongs, before the engine replaces them.

        Args:
            model: model that has noted what it copies.
            wanted: parts of each tensor.
            others: names of tensors that were read otherwise.
            state: name of the state that is the model.
            ranks: process group of the engine's ranks; None for one rank.
        """
        by_memory = {p.untyped_storage().data_ptr(): (name, p) for name, p in _named(model).items()}
        places, others = {}, set(others)
        for name, weight in wanted.items():
            found = []
            copies = [
                (box, memory) for box, first in weight.boxes.items() for memory, of in weight.copies if of is first
            ]
            for (begins, lengths), memory in (*weight.boxes.items(), *copies):
                if (held := by_memory.get(memory.untyped_storage().data_ptr())) is None:
                    others.add(name)
                    break
                offset = int(memory.storage_offset() - held[1].storage_offset())
                found.append(_HeldPart(begins, lengths, held[0], tuple(held[1].shape), offset, memory.stride()))
            places[name] = tuple(found)
        shapes = {name: weight.shape for name, weight in wanted.items()}
        return HeldWeights(state, shapes, places, frozenset(others), ranks)

    def parts(self, model: torch.nn.Module) -> dict[str, WantedWeight]:
        """Return the memory of the parts of each tensor in the parameters of a model.

        Raises:
            IncompatibleCheckpointError: the model holds a tensor in another form, or two copies of a part differ.
        """
        named, found = _named(model), {}
        others = set(self.others)
        for name, places in self.places.items():
            weight = found[name] = WantedWeight(self.shapes[name])
            for place in places:
                parameter = named.get(place.parameter)
                if parameter is None or tuple(parameter.shape) != place.shape or not parameter.is_contiguous():
                    others.add(name)
                    break
                begin = parameter.storage_offset() + place.offset
                memory = parameter.detach().as_strided(place.lengths, place.strides, begin)
                first = weight.boxes.setdefault((place.begins, place.lengths), memory)
                if first is not memory and not torch.equal(first, memory):
                    raise IncompatibleCheckpointError(f"two copies of a part of {name} differ in the engine")
        if others:
            raise IncompatibleCheckpointError(
                f"{type(model).__name__} does not hold {listed(sorted(others))} as the checkpoint has it: "
                "what it holds has no fingerprint"
            )
        return found

    def samples(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return bytes of some elements of each parameter in which parts lie, by which `unpacked` knows it again."""
        names = {place.parameter for places in self.places.values() for place in places}
        found: Mapping[str, Any] = _named(model)
        # The engine may have removed parameters since, or quantised them.
        plain = [name for name in names if name in found and not is_traceable_wrapper_subclass(found[name])]
        return {name: _sample(found[name]) for name in plain}

    def unpacked(self, model: torch.nn.Module, samples: Mapping[str, torch.Tensor]) -> HeldWeights:
        """Return the same without the tensors in parameters that the engine has packed for a kernel since the load.

        A packed parameter may have its former shape, so that its elements alone show it.

        Args:
            model: the model.
            samples: elements of its parameters after the load.
        """
        now = self.samples(model)
        packed = {name for name, sample in samples.items() if name not in now or not torch.equal(sample, now[name])}
        others = {name for name, places in self.places.items() if any(place.parameter in packed for place in places)}
        return replace(self, others=self.others | others)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    chance = torch.Generator().manual_seed(0)
    places = torch.randint(max(tensor.numel(), 1), (min(tensor.numel(), 1024),), generator=chance)
    return tensor.detach().reshape(-1)[places.to(tensor.device)].view(torch.uint8).cpu()


def _named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(chain(model.named_parameters(), model.named_buffers()))


def engine_fingerprint(model: Any) -> Fingerprint:
    """Return the fingerprint of the weights that an engine holds. All of its ranks call this.

    It equals that of the checkpoint that the engine has loaded, if the engine holds the tensors in the checkpoint's dtypes.

    Args:
        model: model of the engine, which the load format "bytecheckpoint" has loaded.

    Raises:
        UsageError: another load format has loaded it.
        IncompatibleCheckpointError: copies of a tensor differ, or the model holds a tensor in another form, such as a
            quantised one; the message names it.
    """
    held, parts = _held(model)
    return fingerprint({held.state: parts}, process_group=held.ranks)


def prove_engine(model: Any, path: str, layouts: Sequence[Layout] | None) -> int:
    """Compare the weights that an engine holds with the fingerprints of a checkpoint. All of its ranks call this.

    Through layouts, which lead to the names of the model, the ranks read the checkpoint once more for that.

    Args:
        model: model of the engine, which the load format "bytecheckpoint" has loaded.
        path: the checkpoint.
        layouts: layouts that lead to the names of the model, if any do.

    Returns:
        The number of tensors that this rank holds, which are proven.

    Raises:
        UsageError: another load format has loaded the model.
        CorruptCheckpointError: the model holds other elements.
        IncompatibleCheckpointError: the checkpoint lacks fingerprints of some tensors in the model: it was saved without
            them, or the model holds other dtypes or forms.
    """
    held, parts = _held(model)
    proven = prove_loaded(path, {held.state: parts}, LoadOptions(), held.ranks, layouts)
    if proven < len(parts):
        raise IncompatibleCheckpointError(
            f"{path} has fingerprints of {proven} tensors as the model holds them, which are {len(parts)}: "
            "save with configure(fingerprint=True), in the dtype of the engine"
        )
    _log.info("fingerprints prove %d tensors of %s", proven, path)
    return proven


def _held(model: Any) -> tuple[HeldWeights, dict[str, WantedWeight]]:
    """Return what a model of an engine holds, and where; raise the error of any rank on all of them."""
    held = getattr(model, "bytecheckpoint_weights", None)
    if not isinstance(held, HeldWeights):
        raise UsageError(f'{type(model).__name__} was not loaded by the load format "bytecheckpoint"')
    with tool_ranks("hold", held.ranks) as ranks:
        return held, ranks.all_succeed("parts", lambda: held.parts(model))
