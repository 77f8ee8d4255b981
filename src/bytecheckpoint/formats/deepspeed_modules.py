"""Join the modules in DeepSpeed's files: those of pipeline stages, of layers, and of tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.formats.deepspeed_ranks import ModelParameters
from bytecheckpoint.formats.files import damage, open_files
from bytecheckpoint.formats.meanings import StoredTensor
from bytecheckpoint.formats.rank_parts import FlatRanges
from bytecheckpoint.formats.rounding import is_rounded
from bytecheckpoint.formats.torch_save import TorchFiles
from bytecheckpoint.representation.boxes import row_major_of
from bytecheckpoint.representation.values.tree import TensorRef
from bytecheckpoint.storage import Storage

__all__ = ["FP32", "JoinedModules", "module_of_layer"]

FP32: Final = "fp32"
"""Slot of the masters of parameters."""
#: Dtypes of masters and weights that are compared, and how many elements at each end of a range.
_ROUNDED: Final = {("float32", dtype) for dtype in ("float32", "bfloat16", "float16")}
_COMPARED: Final = 4096


class JoinedModules:
    """The modules of all ranks.

    Attributes:
        of_ranks: tensors and values of each tensor-parallel rank, by name.
    """

    def __init__(self, files: TorchFiles, parameters: ModelParameters, ranges: FlatRanges) -> None:
        self.of_ranks: list[dict[str, Any]] = []
        self._files, self._parameters, self._ranges = files, parameters, ranges
        self._tied: set[tuple[int, str]] = set()  # rank and name of tensors that were taken for those of tied modules

    def add(self, modules: Sequence[Any], layers: Mapping[tuple[int, int], str]) -> None:
        """Join the modules of the stages of each tensor-parallel rank; those of pipelines are files of layers.

        Args:
            modules: module of each model-parallel rank.
            layers: names of files, by tensor-parallel rank and number of the layer.
        """
        degree = self._parameters.degree
        self.of_ranks += [{} for _ in range(degree)]
        for mp, module in enumerate(modules):
            self.of_ranks[mp % degree].update(module or {})
        for (rank, layer), name in sorted(layers.items()):
            with self._files.open(name, 0) as (file, value), damage(file, "DeepSpeed"):
                place = module_of_layer(layer, value, self._parameters.of_rank(rank))
                for key, item in value.items():
                    if place != str(layer) and type(item) is StoredTensor:
                        self._tied.add((rank, f"{place}.{key}"))
                    known = self.of_ranks[rank].setdefault(f"{place}.{key}", item)
                    if type(item) is StoredTensor and self._content(known) != self._content(item):
                        raise IncompatibleCheckpointError(
                            f"{file.label}: another layer has other values of {place}.{key}"
                        )

    def prove(self, storage: Storage) -> None:
        """Compare weights of the model with their masters, which have to round to them.

        All elements are compared of layers that were taken for tied modules; of other parameters the ends of the longest
        range in each file of the optimizer, because files of several saves differ there.
        """
        columns = self._ranges.columns
        longest: dict[int, tuple[int, StoredTensor, tuple[int, int, int, int]]] = {}
        with open_files(storage, [file.name for file in columns.files]) as opened:

            def is_proven(tensor: StoredTensor, masters: tuple[int, int, int, int], elements: tuple[int, int]) -> bool:
                (at, begin), (start, _, file, first) = columns.places[tensor.storage.key], masters
                high = opened(file), first + 4 * (elements[0] - start)
                return is_rounded(high, (opened(at), begin + tensor.start), tensor.dtype, elements)

            for rank, module in enumerate(self.of_ranks):
                for name, tensor in module.items():
                    for masters in self._masters(name, rank, tensor):
                        start, stop, file, _ = masters
                        if (rank, name) in self._tied and not is_proven(tensor, masters, (start, stop)):
                            text = f"nothing says which layer {name!r} is: other layers have its shape"
                            raise IncompatibleCheckpointError(text)
                        if file not in longest or stop - start > longest[file][0]:
                            longest[file] = stop - start, tensor, masters
            for _, tensor, masters in longest.values():
                start, stop, file, _ = masters
                ends = {(at, min(at + _COMPARED, stop)) for at in (start, max(start, stop - _COMPARED))}
                if not all(is_proven(tensor, masters, elements) for elements in ends):
                    weights = opened(columns.places[tensor.storage.key][0]).label
                    raise IncompatibleCheckpointError(
                        f"{opened(file).label}: its fp32 weights do not round to those in {weights}: the files are of "
                        "several saves, of which one was killed, or weights were changed without the optimizer"
                    )

    def _masters(self, name: str, rank: int, tensor: Any) -> Sequence[tuple[int, int, int, int]]:
        """Return the ranges of the fp32 elements of a rank's tensor; of one that is no weight of a partition, none."""
        fqn, _, own_rank = self._parameters.place(name, rank)
        number = self._ranges.numbers.get(("optimizer", f"state.{fqn}.{FP32}"), -1)
        own = self._ranges.tensors.get((number, own_rank))
        if own is None or type(tensor) is not StoredTensor or tensor.strides != row_major_of(own.shape):
            return ()
        dtypes = self._ranges.columns.dtypes[number], tensor.dtype
        return own.ranges if tensor.shape == own.shape and dtypes in _ROUNDED else ()

    def _content(self, tensor: StoredTensor) -> tuple[Any, ...]:
        """Return facts that are equal only if the bytes of two tensors are."""
        crc = self._files.crcs[tensor.storage.key]
        key = tensor.storage.key if crc is None and tensor.storage.nbytes else None
        return crc, key, tensor.storage.nbytes, tensor.start, tensor.dtype, tensor.shape, tensor.strides

    def tree(self, rest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tree of the model, of which the tensors of parameters are added."""
        parameters, numbers, found = self._parameters, self._ranges.numbers, dict[str, Any]()
        tied = rest.get("shared_params") or {}
        for rank, module in enumerate(self.of_ranks):
            for name, item in module.items():
                own, divided, own_rank = parameters.place(name, rank)
                first, elsewhere = tied.get(name), not (type(item) is StoredTensor and item.span)
                if ("model", own) in numbers and elsewhere:
                    continue  # partitions have it
                if ("model", first) in numbers and elsewhere:
                    self._ranges.columns.aliases.setdefault("model", {})[name] = str(first)
                    found[name] = TensorRef(name)
                elif parameters.degree == 1:
                    found[name] = item
                elif own == name and type(item) is StoredTensor:
                    self._ranges.add_whole(("model", name), divided, own_rank, item)
                elif first in parameters.divided:
                    self._ranges.columns.aliases.setdefault("model", {})[name] = str(first)
                    found[name] = TensorRef(name)
                elif name not in parameters.buffers or not self._is_same_on_all(name):
                    found[f"mp_rank_{rank:02}:{name}"] = item
                else:
                    found.setdefault(name, item)
        return found | {fqn: TensorRef(fqn) for state, fqn in numbers if state == "model"}

    def _is_same_on_all(self, name: str) -> bool:
        held = [item for module in self.of_ranks if type(item := module.get(name)) is StoredTensor]
        return len(held) == len(self.of_ranks) and len({*map(self._content, held)}) == 1


def module_of_layer(layer: int, held: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the name of a pipeline's layer in the model: its number, or that of tied modules.

    Args:
        layer: number of the layer.
        held: content of the layer's file.
        shapes: shapes of parameters of one tensor-parallel rank.

    Raises:
        IncompatibleCheckpointError: the layer may be one of several modules.
    """
    if any(f"{layer}.{name}" in shapes for name in held):
        return str(layer)
    tied: dict[str, dict[str, tuple[int, ...]]] = {}
    for fqn, shape in shapes.items():
        if fqn.startswith("tied_modules.") and len(steps := fqn.split(".", 2)) == 3:
            tied.setdefault(steps[1], {})[steps[2]] = shape
    fitting = [
        key for key, own in tied.items() if all(getattr(held.get(k), "shape", None) == n for k, n in own.items())
    ]
    if len(fitting) > 1:
        raise IncompatibleCheckpointError(f"nothing says which of the tied modules {fitting} layer {layer} is")
    return f"tied_modules.{fitting[0]}" if fitting else str(layer)
