"""Checks that an engine's optimizer is built as this package expects of the versions that it supports.

The elements of a parameter are found through attributes that DeepSpeed does not document. If a version, a configuration or
the program changes what they mean, a save would store the wrong elements under the right names. So the partitions must
tile their flat tensors, and master weights must round to the weights at their places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.deepspeed.partitions import FlatPartition, Fragment, is_zero3_param, weight_fragment

__all__ = ["check_masters", "check_tiling"]

_LARGEST_GAP = 15  # elements: `parameter_alignment` lets parameters begin at multiples of 16 bytes
_SAMPLED = 16  # parameters of each flat tensor

_sampled: WeakSet[Any] = WeakSet()  # optimizers whose master weights were compared


def check_tiling(state_name: str, wrapper: Any, partitions: Sequence[FlatPartition]) -> None:
    """Check that the parameters follow each other in each flat tensor, without overlaps and without gaps.

    Raises:
        UsageError: they do not; names the flat tensor and the parameter's number in it.
    """
    seen: set[int] = set()
    for number, partition in enumerate(partitions):
        size, end = partition.data.numel(), 0
        where = f"{state_name}: flat tensor {number} of {type(wrapper).__name__}"
        if partition.data.ndim != 1:
            raise _changed(f"{where} has shape {tuple(partition.data.shape)}, not one dimension")
        found = [(f.offset, f.count, f.start, p) for p, f in partition.fragments if f.count]
        for offset, count, start, parameter in sorted(found, key=lambda item: item[0]):
            zero3 = is_zero3_param(parameter)
            whole = int(parameter.ds_numel) if zero3 else parameter.numel()  # type: ignore[attr-defined]
            # A partition of stage 3 ends with the padding of its last rank.
            gap = max(int(parameter.ds_tensor.ds_numel), _LARGEST_GAP) if zero3 else _LARGEST_GAP  # type: ignore[attr-defined]
            if not end <= offset <= end + gap or offset + count > size or start + count > whole:
                raise _changed(
                    f"{where} has {size} elements, of which {count} from place {offset} would be the elements from number "
                    f"{start} of a parameter of {whole}, after the previous one's end at {end}"
                )
            if not zero3 and start + count < whole and offset + count < size:
                raise _changed(f"{where} leaves out the end of a parameter of {whole} elements after {start + count}")
            if id(parameter) in seen:
                raise _changed(f"{where} holds a parameter that another one holds too")
            seen.add(id(parameter))
            end = offset + count


def check_masters(state_name: str, wrapper: Any, partitions: Sequence[FlatPartition]) -> None:
    """Check once for each optimizer that some of its master weights round to the weights.

    Samples the first and the last element of some parameters in each flat tensor: a fraction of a millisecond on the CPU.

    Raises:
        UsageError: they do not.
    """
    if wrapper in _sampled:
        return
    for number, partition in enumerate(partitions):
        fragments = [pair for pair in partition.fragments if pair[1].count]
        lows: list[torch.Tensor] = []
        places: list[int] = []
        for parameter, fragment in fragments[:: -(-len(fragments) // _SAMPLED) or 1]:
            for place, low in _first_and_last(state_name, parameter, fragment):
                places.append(place)
                lows.append(low)
        if not lows:
            continue
        low = torch.stack(lows).cpu()
        high = partition.data.detach()[torch.tensor(places, device=partition.data.device)].cpu()
        if not torch.equal(high.to(low.dtype).nan_to_num(), low.nan_to_num()):
            raise _changed(
                f"{state_name}: the master weights in flat tensor {number} of {type(wrapper).__name__} do not round to the "
                "weights",
                "; or the weights were changed since the last step, and the next step would undo that: save before they "
                "are changed, or pass engine.module alone",
            )
    _sampled.add(wrapper)


def _first_and_last(state_name: str, parameter: torch.Tensor, fragment: Fragment) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (place in the flat tensor, weight) of the first and the last element of a fragment."""
    if is_zero3_param(parameter):
        partition = weight_fragment(state_name, parameter)
        weights, first = partition.data, partition.offset
    else:
        weights, first = parameter.detach().view(-1), fragment.start
    for k in {0, fragment.count - 1}:
        yield fragment.offset + k, weights[first + k]


def _changed(what: str, also: str = "") -> UsageError:
    return UsageError(
        f"{what}: this DeepSpeed does not lay its partitions out as the versions that are supported{also}"
    )
