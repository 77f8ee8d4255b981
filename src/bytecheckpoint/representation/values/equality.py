"""Compare values deeply, with their exact types."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import math
import struct
import types
from typing import Any

import numpy as np
import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.representation.values.registry import default_registration, registration_of

__all__ = ["equal"]


def equal(a: Any, b: Any) -> bool:
    """Return whether `a` and `b` have equal values and equal types at every level.

    NaN equals NaN, 0.0 differs from -0.0, and 1 differs from True and from 1.0. The order of an OrderedDict matters, that
    of any other dict does not. Tensors and arrays are compared by dtype, shape, device and bits, with all NaNs equal.
    """
    kind = type(a)
    if kind is not type(b):
        return False
    if a is b and kind in (type(None), bool, int, str, bytes):
        return True
    if kind is float:
        return bool(a == b and struct.pack("d", a) == struct.pack("d", b)) or (math.isnan(a) and math.isnan(b))
    if kind is complex:
        return equal(a.real, b.real) and equal(a.imag, b.imag)
    if kind in (list, tuple, collections.deque, torch.Size):
        if kind is collections.deque and a.maxlen != b.maxlen:
            return False
        return len(a) == len(b) and all(map(equal, a, b))
    if kind in (set, frozenset):
        return _same_members(list(a), list(b))
    if kind is collections.defaultdict and a.default_factory is not b.default_factory:
        return False
    if kind is collections.OrderedDict:
        return len(a) == len(b) and all(map(equal, a, b)) and all(map(equal, a.values(), b.values()))
    if kind in (dict, collections.defaultdict, collections.Counter):
        return _same_pairs(a, b)
    if kind in (types.SimpleNamespace, argparse.Namespace):
        return equal(vars(a), vars(b))
    if isinstance(a, torch.Tensor):
        return _same_tensors(a, b)
    if kind is np.str_:
        return str.__eq__(a, b)
    if kind is np.bytes_:
        return bytes.__eq__(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return _same_arrays(np.asarray(a), np.asarray(b))
    return _same_leaves(a, b)


def _same_leaves(a: Any, b: Any) -> bool:
    """Compare values that are no standard containers: times, ranges, instances of registered classes."""
    kind = type(a)
    if kind in (range, slice):
        return equal([a.start, a.stop, a.step], [b.start, b.stop, b.step])
    if kind in (datetime.datetime, datetime.time):
        # Python compares aware times by their instant; this function compares their fields.
        return bool(a.replace(tzinfo=None) == b.replace(tzinfo=None)) and a.fold == b.fold and equal(a.tzinfo, b.tzinfo)
    if kind is datetime.timezone:
        return bool(a.__getinitargs__() == b.__getinitargs__())
    if kind is decimal.Decimal:
        return bool(a.as_tuple() == b.as_tuple())
    if a is b:
        return True
    try:
        registration = registration_of(kind) or default_registration(a)
    except UsageError:
        return bool(a == b)
    return equal(registration.encode(a), registration.encode(b))


def _same_pairs(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    if len(a) != len(b):
        return False
    if set(map(type, a)) | set(map(type, b)) <= {str}:
        return a.keys() == b.keys() and all(equal(value, b[key]) for key, value in a.items())
    return _same_members(list(a.items()), list(b.items()))


def _same_members(a: list[Any], b: list[Any]) -> bool:
    """Return whether two unordered collections have equal members. Hashes cannot tell: those of two NaNs differ."""
    if len(a) != len(b):
        return False
    buckets: dict[str, list[Any]] = {}
    for member in b:
        buckets.setdefault(_bucket_key(member), []).append(member)
    for member in a:
        candidates = buckets.get(_bucket_key(member), [])
        match = next((i for i, other in enumerate(candidates) if equal(member, other)), None)
        if match is None:
            return False
        del candidates[match]
    return True


def _bucket_key(member: Any) -> str:
    """Return a cheap key that equal members share: the type, and the hash where equal values have equal hashes."""
    key = member[0] if type(member) is tuple and member else member
    kind = type(key)
    if kind is float:
        return repr(key)
    return f"{kind.__name__}:{hash(key)}" if kind in (int, str, bytes, bool) else kind.__name__


def _same_tensors(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device or a.layout != b.layout:
        return False
    if a.requires_grad != b.requires_grad:
        return False
    if hasattr(a, "to_local"):
        if a.device_mesh != b.device_mesh or a.placements != b.placements:
            return False
        a, b = a.to_local(), b.to_local()
        if a.shape != b.shape:
            return False
    a, b = _plain(a), _plain(b)
    if a.is_floating_point() and a.element_size() > 1:
        nan_a, nan_b = a.isnan(), b.isnan()
        if not torch.equal(nan_a, nan_b):
            return False
        a, b = a.masked_fill(nan_a, 0), b.masked_fill(nan_b, 0)
    count = (a.numel(),)
    a, b = (part.contiguous().reshape(-1).as_strided(count, (1,)) for part in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _same_arrays(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.names is not None:
        return all(_same_arrays(a[name], b[name]) for name in a.dtype.names)
    if a.dtype.kind == "c":
        return _same_arrays(a.real, b.real) and _same_arrays(a.imag, b.imag)
    if a.dtype.kind == "O":
        return all(map(equal, a.ravel(), b.ravel()))
    if a.dtype.kind == "f":
        nan_a, nan_b = np.isnan(a), np.isnan(b)
        if not np.array_equal(nan_a, nan_b):
            return False
        a, b = np.where(nan_a, 0, a), np.where(nan_b, 0, b)
    return a.tobytes() == b.tobytes()
