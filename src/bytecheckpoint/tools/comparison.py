"""Compare two checkpoints tensor by tensor, of any layouts, in bounded memory."""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bytecheckpoint.engine.tensor_bytes import movable
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError, shown
from bytecheckpoint.opening import Entry
from bytecheckpoint.opening.plain_values import UnregisteredInstance
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.representation.fingerprints import stored_fingerprint
from bytecheckpoint.representation.values.codec import equal
from bytecheckpoint.representation.values.numpy_values import TENSOR_DTYPES, array_as_tensor
from bytecheckpoint.representation.values.registry import registration_of
from bytecheckpoint.tools.subject import Subject, opened

__all__ = ["CompareReport", "Difference", "compare"]

_CHUNK_BYTES = 16 << 20


class _Missing:
    """The value of a key that only the other container has."""

    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two checkpoints.

    Attributes:
        kind: "only_a", "only_b", "type" (a tensor in one, a plain value in the other), "dtype", "shape", "tensor"
            (elements differ), "value" (plain values differ), "unreadable" (a value that cannot be read here).
        key: the key that differs.
        rank: the rank that owns the value, None if all ranks share it.
        a, b: dtype, shape, value (of containers, the first inner one that differs) or first differing element of each
            side, as text.
        count: number of differing elements, 0 for other kinds.
        first: coordinate of the first differing element.
        max_abs: largest absolute difference, None if there is no such number (nan, infinity, a dtype without arithmetic).
        message: the difference in one line.
    """

    kind: str
    key: str
    rank: int | None
    a: str
    b: str
    message: str
    count: int = 0
    first: tuple[int, ...] = ()
    max_abs: float | None = None


@dataclass(frozen=True, slots=True)
class CompareReport:
    """The result of a comparison.

    Attributes:
        tensors: number of tensors compared element by element.
        values: number of plain values compared.
        bytes_compared: bytes of the tensors of one side.
        differences: the differences, in the order of the first checkpoint's keys.
        notes: remarks on parts that could not be compared.
    """

    tensors: int
    values: int
    bytes_compared: int
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Return whether there are no differences."""
        return not self.differences


def compare(
    first: Subject, second: Subject, *, rtol: float = 0.0, atol: float = 0.0, fingerprints: bool = True
) -> CompareReport:
    """Compare every tensor and plain value of two checkpoints.

    Without tolerances elements are compared by their bits (so -0.0 differs from 0.0, and a nan equals itself), and
    plain values with their types. With a tolerance, elements differ when |a - b| > atol + rtol * |b|; two nans are
    equal.

    Args:
        first: path, storage or open checkpoint.
        second: path, storage or open checkpoint.
        rtol: relative tolerance.
        atol: absolute tolerance.
        fingerprints: True to take tensors as equal that have equal fingerprints in both catalogs; they are not read then.

    Raises:
        CorruptCheckpointError: a block of either is damaged.
    """
    if not (rtol >= 0 and atol >= 0):
        raise UsageError(f"tolerances must be at least 0, not rtol={rtol}, atol={atol}")
    with opened(first) as a, opened(second) as b:
        one, two = CheckpointView.of(a), CheckpointView.of(b)
        return _compare(one, two, _Comparison(rtol, atol, _same_fingerprints(one, two) if fingerprints else {}))


def _same_fingerprints(a: CheckpointView, b: CheckpointView) -> dict[str, int]:
    """Return the keys of the tensors with equal fingerprints in both catalogs, and the bytes of each."""
    one, two = stored_fingerprint(a.catalog), stored_fingerprint(b.catalog)
    if one is None or two is None:
        return {}
    return {key: a[key].nbytes for key, found in one.tensors.items() if two.tensors.get(key) == found}


def _compare(a: CheckpointView, b: CheckpointView, comparison: _Comparison) -> CompareReport:
    comparison.compare_keys(a, b, None, list(a), set(b))
    both = sorted(set(a.ranks) & set(b.ranks))
    for rank in both:
        one, two = a.for_rank(rank), b.for_rank(rank)
        own = one.own_keys() | two.own_keys()
        comparison.compare_keys(one, two, rank, [key for key in one if key in own], {key for key in two if key in own})
    for side, name, other in ((a, "the first", b), (b, "the second", a)):
        lone = sorted(set(side.ranks) - set(other.ranks))
        if lone:
            comparison.notes.append(
                f"values of their own of ranks {', '.join(map(str, lone))} are only in {name} checkpoint"
            )
    return CompareReport(
        comparison.tensors, comparison.values, comparison.nbytes, tuple(comparison.differences), tuple(comparison.notes)
    )


class _Comparison:
    """Compares views of two checkpoints, and collects counts and differences."""

    def __init__(self, rtol: float, atol: float, same: Mapping[str, int]) -> None:
        self.rtol = rtol
        self.atol = atol
        self._same_fingerprint = same
        self.tensors = self.values = self.nbytes = 0
        self.differences: list[Difference] = []
        self.notes: list[str] = []

    def compare_keys(
        self, a: CheckpointView, b: CheckpointView, rank: int | None, keys: list[str], others: set[str]
    ) -> None:
        """Compare two views, key by key. `rank` is the rank whose own values they show, None for shared ones."""
        elementwise: list[str] = []
        found: dict[str, list[Difference]] = {}
        for key in keys:
            differences = found.setdefault(key, [])
            if key not in others and key not in b:
                differences.append(
                    _difference("only_a", key, rank, _shorten(_value(a, key)), "", "is only in the first checkpoint")
                )
                continue
            one, two = _value(a, key), _value(b, key)
            if isinstance(one, Entry) and isinstance(two, Entry):
                if one.shape != two.shape:
                    differences.append(_mismatch("shape", key, rank, str(list(one.shape)), str(list(two.shape))))
                elif one.dtype != two.dtype:
                    differences.append(_mismatch("dtype", key, rank, _dtype_name(one), _dtype_name(two)))
                else:
                    elementwise.append(key)
                continue
            self.values += 1
            differences.extend(self._compare_plain(key, rank, one, two))
        for key, difference in self._compare_elements(a, b, elementwise, rank):
            found[key].append(difference)
        self.differences += [difference for key in keys for difference in found[key]]
        missing = [key for key in b if key in others and key not in found and key not in a]
        self.differences += [
            _difference("only_b", key, rank, "", _shorten(_value(b, key)), "is only in the second checkpoint")
            for key in missing
        ]

    def _compare_plain(self, key: str, rank: int | None, one: Any, two: Any) -> Iterator[Difference]:
        for side in (one, two):
            if isinstance(side, IncompatibleCheckpointError):
                yield _difference("unreadable", key, rank, "", "", f"cannot be compared: {side}")
                return
        if (isinstance(one, Entry) or isinstance(two, Entry)) and not _are_tensor_and_array(one, two):
            yield _mismatch("type", key, rank, _shorten(one), _shorten(two))
        elif not self._same(one, two):
            place, first, second = self._unlike(one, two)
            yield _mismatch("value", key, rank, _shorten(first), _shorten(second), place)

    def _unlike(self, one: Any, two: Any, place: str = "") -> tuple[str, Any, Any]:
        """Return the place of the first difference inside of two plain values, as "[0]['lr']", and what they have there."""
        pairs: Iterable[tuple[Any, Any, Any]] = ()
        if type(one) is type(two) is dict:
            pairs = ((key, one.get(key, _MISSING), two.get(key, _MISSING)) for key in one | two)
        elif type(one) is type(two) and isinstance(one, list | tuple):
            both = itertools.zip_longest(one, two, fillvalue=_MISSING)
            pairs = ((number, *pair) for number, pair in enumerate(both))
        for key, first, second in pairs:
            if not self._same(first, second):
                return self._unlike(first, second, f"{place}[{key!r}]")
        return place, one, two

    def _same(self, one: Any, two: Any) -> bool:
        """Return whether two plain values are equal. Numbers and tensors inside containers may differ by the tolerance."""
        if (isinstance(one, Entry) and isinstance(two, Entry)) or _are_tensor_and_array(one, two):
            one, two = _elements(one), _elements(two)
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
            alike = one.shape == two.shape and one.dtype == two.dtype
            return alike and not bool(self._differs(one.reshape(-1), two.reshape(-1)).any())
        if type(one) is not type(two):
            return False
        if isinstance(one, UnregisteredInstance):
            return one.name == two.name and self._same(one.saved, two.saved)
        if isinstance(one, float) and (self.rtol or self.atol):
            close = abs(one - two) <= self.atol + self.rtol * abs(two)
            return close or one == two or (math.isnan(one) and math.isnan(two))
        if isinstance(one, dict):
            return one.keys() == two.keys() and all(self._same(one[key], two[key]) for key in one)
        if isinstance(one, list | tuple):
            return len(one) == len(two) and all(map(self._same, one, two))
        content = _content(one)
        return equal(one, two) if content is None else self._same(content, _content(two))

    def _compare_elements(
        self, a: CheckpointView, b: CheckpointView, keys: list[str], rank: int | None
    ) -> Iterator[tuple[str, Difference]]:
        """Compare tensors of equal shape and dtype, chunk by chunk. Yield the key and difference of each unequal pair."""
        self.tensors += len(keys)
        if rank is None and (same := [key for key in keys if key in self._same_fingerprint]):
            self.nbytes += sum(self._same_fingerprint[key] for key in same)
            self.notes.append(f"{len(same)} tensors have equal fingerprints in both catalogs, and were not read")
            keys = [key for key in keys if key not in self._same_fingerprint]
        tallies: dict[str, _Tally] = {}
        # Both sides cut by shape and dtype alone, so their chunks match.
        for (key, slices, one), (_, _, two) in zip(
            a.stream(keys, _CHUNK_BYTES), b.stream(keys, _CHUNK_BYTES), strict=True
        ):
            self.nbytes += one.numel() * one.element_size()
            if not one.numel():
                continue
            differs = self._differs(one.reshape(-1), two.reshape(-1))
            if differs.any():
                tallies.setdefault(key, _Tally()).add(slices, one, two, differs)
        for key, tally in tallies.items():
            yield key, tally.difference(key, rank, math.prod(a[key].shape))

    def _differs(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        """Return a mask [n] of the elements that differ between two flat tensors of one dtype."""
        bits = _bits(one) != _bits(two)
        differs = bits if bits.ndim == 1 else bits.any(dim=1)
        if (self.rtol or self.atol) and differs.any():
            at = differs.nonzero().reshape(-1)
            first, second = _numbers(movable(one)[at].view(one.dtype)), _numbers(movable(two)[at].view(two.dtype))
            if first is not None and second is not None:
                near = torch.isclose(first, second, rtol=self.rtol, atol=self.atol, equal_nan=True)
                differs[at[near]] = False
        return differs


class _Tally:
    """The differing elements of one tensor, counted chunk by chunk."""

    def __init__(self) -> None:
        self.count = 0
        self.first: tuple[int, ...] = ()
        self.pair = ("", "")
        self.largest: float | None = 0.0

    def add(self, slices: tuple[slice, ...], one: torch.Tensor, two: torch.Tensor, differs: torch.Tensor) -> None:
        at = differs.nonzero().reshape(-1)
        values = [movable(side.reshape(-1))[at].view(side.dtype) for side in (one, two)]
        if not self.count:
            inside = np.unravel_index(int(at[0]), tuple(one.shape)) if one.ndim else ()
            self.first = tuple(s.start + int(i) for s, i in zip(slices, inside, strict=True))
            self.pair = (_format_element(values[0][:1]), _format_element(values[1][:1]))
        self.count += len(at)
        first, second = map(_numbers, values)
        if first is None or second is None or self.largest is None:
            self.largest = None
            return
        largest = float((first - second).abs().max())
        self.largest = max(self.largest, largest) if math.isfinite(largest) else None

    def difference(self, key: str, rank: int | None, total: int) -> Difference:
        most = "" if self.largest is None else f", at most by {self.largest:.6g}"
        where = f" at {list(self.first)}" if self.first else ""
        text = f"differs in {self.count} of {total} elements{most}; first{where}: {self.pair[0]} and {self.pair[1]}"
        whose = "" if rank is None else f" of rank {rank}"
        return Difference("tensor", key, rank, *self.pair, f"{key}{whose} {text}", self.count, self.first, self.largest)


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """View elements as integers [n]. Elements of 16 bytes become rows of two integers [n, 2]."""
    size = flat.element_size()
    if size == 16:
        return flat.view(torch.int64).reshape(-1, 2)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def _numbers(flat: torch.Tensor) -> torch.Tensor | None:
    """Convert elements to the widest arithmetic dtype; None for dtypes without arithmetic."""
    try:
        return flat.to(torch.complex128 if flat.dtype.is_complex else torch.float64)
    except (RuntimeError, NotImplementedError):
        return None


def _format_element(one: torch.Tensor) -> str:
    number = _numbers(one)
    if number is None:
        return "0x" + movable(one).view(torch.uint8).numpy().tobytes()[::-1].hex()
    return repr(one.item() if not one.dtype.is_floating_point else number.item())


def _value(checkpoint: CheckpointView, key: str) -> Any:
    try:
        return checkpoint.as_stored(key)
    except IncompatibleCheckpointError as error:
        return error


def _are_tensor_and_array(one: Any, two: Any) -> bool:
    """Return whether one value is a tensor and the other one a numpy array: large arrays became tensors (decision 0067)."""
    return {type(one), type(two)} == {Entry, np.ndarray}


def _content(value: Any) -> object:
    """Return the simple containers that say what an object holds, which may be tensors; None for other objects."""
    if isinstance(value, collections.deque):
        return [value.maxlen, list(value)]
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return vars(value)
    registration = registration_of(type(value))
    return None if registration is None else [registration.encode(value)]


def _elements(value: Any) -> Any:
    if isinstance(value, Entry):
        return value[...]
    return array_as_tensor(value) if value.dtype in TENSOR_DTYPES else value


def _dtype_name(entry: Entry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _shorten(value: Any) -> str:
    text = f"tensor {_dtype_name(value)}{list(value.shape)}" if isinstance(value, Entry) else shown(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _difference(kind: str, key: str, rank: int | None, a: str, b: str, text: str) -> Difference:
    whose = "" if rank is None else f" of rank {rank}"
    return Difference(kind, key, rank, a, b, f"{key}{whose} {text}")


def _mismatch(kind: str, key: str, rank: int | None, a: str, b: str, place: str = "") -> Difference:
    what = {"shape": "has shape", "dtype": "is", "value": f"at {place} is" if place else "is", "type": "is a"}[kind]
    return _difference(kind, key, rank, a, b, f"{what} {a} in the first and {b} in the second checkpoint")
