"""Tell copies of a tensor that drifted apart by rounding from other data."""

from __future__ import annotations

import math

import torch

from bytecheckpoint.engine.tensor_bytes import same_bits

__all__ = ["relative_drift"]

#: Units in the last place by which rounding may change an element; one less than a factor of 2 in float16.
_ROUNDED_UNITS = 1023
#: Part of the usual difference between neighbours by which rounding may change an element. Drift grows in a training, but
#: samples of other data differ by as much as their neighbours do.
_ROUNDED_PART = 0.1
_AT_ONCE = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def relative_drift(first: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far two copies have drifted apart by rounding: the largest difference over the largest element.

    Args:
        first: elements of one copy, on the host.
        other: elements of another copy at the same places, of equal shape and dtype.

    Returns:
        The drift; infinity if the elements are not of one content. Integers never drift.
    """
    if first.is_complex():
        return max(relative_drift(first.real, other.real), relative_drift(first.imag, other.imag))
    pieces = zip(first.reshape(-1).split(_AT_ONCE), other.reshape(-1).split(_AT_ONCE), strict=True)
    return max((_drift_of_piece(*piece) for piece in pieces), default=0.0)


def _drift_of_piece(first: torch.Tensor, other: torch.Tensor) -> float:
    if not first.is_floating_point() or first.dtype == torch.float4_e2m1fn_x2:  # torch does not compute with the latter
        return 0.0 if same_bits(first, other) else math.inf
    a, b = first.double(), other.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return math.inf
    differ = ~a.isnan() & (a != b)
    if not differ.any():
        return 0.0
    units = (_ordered(first) - _ordered(other)).abs()
    most = min(_ROUNDED_UNITS, 1 << (8 * first.element_size() - 2))
    apart = (a - b).abs()
    near = (units <= most) | (apart <= _ROUNDED_PART * min(_usual_step(a), _usual_step(b)))
    if not near[differ].all():
        return math.inf
    finite = apart.isfinite()
    return float(apart[finite].max() / torch.maximum(a.abs(), b.abs())[finite].max()) if finite.any() else 0.0


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Return the positions of floating-point values in their order: neighbours differ by 1, float64."""
    bits = values.view(_BITS[values.element_size()])
    lowest = torch.iinfo(bits.dtype).min
    return torch.where(bits < 0, lowest - bits, bits).double()


def _usual_step(values: torch.Tensor) -> float:
    """Return the root mean square of the differences between neighbours, in runs of two."""
    runs = values[: len(values) // 2 * 2].view(-1, 2)
    step = float((runs[:, 1] - runs[:, 0]).square().mean().sqrt()) if len(runs) else 0.0
    return step if math.isfinite(step) else 0.0
