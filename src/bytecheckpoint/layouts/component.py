"""Bind one component of a rule: group its tensors to instances, solve the sizes of each distinct group of shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.layouts.axes import REST, Dim, affine, axis_texts, dims_of, size_of
from bytecheckpoint.layouts.config import keys_of
from bytecheckpoint.layouts.lowering import Lowering
from bytecheckpoint.layouts.members import Expected, Members, Namer, unknown_number
from bytecheckpoint.layouts.names import Group
from bytecheckpoint.layouts.parts import Component, Variant
from bytecheckpoint.layouts.sizes import Equation, padding_dims, solved, without_rest
from bytecheckpoint.representation.boxes import Int64s, Mask

__all__ = ["BoundComponent", "Instances", "PlaceRows"]


@dataclass(frozen=True, eq=False)
class PlaceRows:
    """PartPlaces of one part, or of padding, in the tensors of a variant.

    Attributes:
        tensor: number of the tensor among those of the side, or among those that the component derives, int64 [n].
        part: number of the part in the component, -1 for padding.
        index: number of the part among those of its name, int64 [n].
        lowering: number of the lowering, int64 [n].
        fixed: coordinates of the part's dims that stand in names, int64 [n, k].
        virtual: mask of the places that the tensors have by second names that are missing, bool [n].
        lowerings: the lowerings.
    """

    tensor: Int64s
    part: int
    index: Int64s
    lowering: Int64s
    fixed: Int64s
    virtual: Mask
    lowerings: Sequence[Lowering]


@dataclass(frozen=True, eq=False)
class BoundComponent:
    """A component, bound to tensors.

    Attributes:
        part_sizes: sizes of the parts of each name, int64 [p, k].
        rows: places, by side.
        names: names of the tensors that are derived.
        shapes: shapes of the tensors that are derived, padded with -1.
    """

    part_sizes: Sequence[Int64s]
    rows: tuple[list[PlaceRows], list[PlaceRows]]
    names: list[str]
    shapes: Int64s


class Instances:
    """The instances of a component, in columns.

    Args:
        component: the component.
        members: tensors of each variant, None for a variant whose tensors are derived.
        namers: makers of the names of each variant.
        known: sizes that are known.
        expected: tensors that may be missing.
    """

    def __init__(
        self,
        component: Component,
        members: Sequence[Members | None],
        namers: Sequence[Namer],
        known: dict[str, int],
        expected: Expected,
    ) -> None:
        self._component, self._members, self._namers, self._known = component, members, namers, known
        self._expected = expected
        given = [m for m in members if m is not None]
        self._keys, inverse = _unique_rows(np.concatenate([m.key for m in given]))
        ends = np.cumsum([len(m.tensor) for m in given])[:-1]
        split = iter(np.split(inverse, ends))
        count = len(self._keys)
        self._instance = [None if m is None else next(split) for m in members]
        # The first row of each instance, -1 for none.
        self._first = [np.full(count, -1 if m else 0) for m in members]
        for first, instance in zip(self._first, self._instance, strict=True):
            if instance is not None:
                first[instance[::-1]] = np.arange(len(instance))[::-1]
        self._groups, self._group = _unique_rows(
            np.concatenate([self._signature(v) for v in range(len(members))], axis=1)
        )
        example = np.full(len(self._groups), -1)
        example[self._group[::-1]] = np.arange(count)[::-1]
        present = [first >= 0 for first in self._first]
        self._check_present(present)
        self._part_variants = [
            [
                v
                for v, variant in enumerate(component.variants)
                if any(part.labels == labels for labels, _ in variant.pieces)
            ]
            for part in component.parts
        ]
        self._masks = [np.logical_and.reduce([present[v] for v in pair]) for pair in self._part_variants]
        self._bound = bound = np.logical_or.reduce(self._masks)
        # Instances that hold no part, as an unused tensor, need no sizes.
        self._sizes = [self._solved(int(instance)) if bound[instance] else {} for instance in example]
        self._rest = [sum(name.startswith("...") for name in sizes) for sizes in self._sizes]

    def bound(self) -> BoundComponent:
        """Return the parts, and their places in the tensors of both sides."""
        for v, member in enumerate(self._members):
            if member is not None and self._component.variants[v].dims:
                self._check_complete(v, member)
        part_sizes = []
        for part, mask in zip(self._component.parts, self._masks, strict=True):
            table = _padded(
                [
                    [sizes.get(name, 1) for name in _expanded(part.dims, rest)]
                    for sizes, rest in zip(self._sizes, self._rest, strict=True)
                ]
            )
            part_sizes.append(table[self._group[mask]])
        rows: tuple[list[PlaceRows], list[PlaceRows]] = ([], [])
        names: list[str] = []
        shapes: list[list[int]] = []
        for v, variant in enumerate(self._component.variants):
            own_parts = [j for j, pair in enumerate(self._part_variants) if v in pair]
            used = (
                np.logical_or.reduce([self._masks[j] for j in own_parts])
                if own_parts
                else np.zeros(len(self._keys), bool)
            )
            member, instance = self._members[v], self._instance[v]
            if member is None or instance is None:
                member, instance = self._derived(v, np.flatnonzero(used), names, shapes)
            rows[variant.family.side].extend(self._places(v, member, instance, used))
        return BoundComponent(part_sizes, rows, names, _padded(shapes, -1))

    def _signature(self, v: int) -> Int64s:
        """Return, for each instance, all numbers of a variant on which sizes depend."""
        member, instance, first = self._members[v], self._instance[v], self._first[v]
        count = len(self._keys)
        if member is None or instance is None or not len(instance):
            return np.zeros((count, 0), np.int64)
        side = self._expected.matched(member.variant)
        shapes = side.shapes[member.tensor]
        differs = np.flatnonzero((shapes != shapes[first[instance]]).any(1))
        if len(differs):
            row, other = int(differs[0]), int(first[instance[differs[0]]])
            names = [side.side.names[member.tensor[r]] for r in (row, other)]
            if (member.own[row] == member.own[first[instance[row]]]).all():
                raise _one_tensor(member, names)
            sizes = [list(side.side.shapes[member.tensor[r]]) for r in (row, other)]
            raise IncompatibleCheckpointError(
                f"{member.variant.family.place}: {names[0]} has shape {sizes[0]}, but {names[1]} has shape {sizes[1]}"
            )
        largest = np.full((count, member.own.shape[1]), -1)
        np.maximum.at(largest, instance, member.own)
        there = first >= 0
        return np.concatenate([np.where(there[:, None], shapes[first], -2), largest], axis=1)

    def _solved(self, instance: int) -> dict[str, int]:
        """Return the sizes of one instance."""
        equations: list[Equation] = []
        counted: list[Equation] = []
        rest = 0
        for v, member in enumerate(self._members):
            row = int(self._first[v][instance])
            if member is None or row < 0:
                continue
            family, side = member.variant.family, self._expected.matched(member.variant)
            tensor = int(member.tensor[row])
            name, shape = side.side.names[tensor], list(side.side.shapes[tensor])
            if REST in family.axes:
                rest = len(shape) - len(family.axes) + 1
            axes = without_rest(family.axes, rest)
            if len(axes) != len(shape):
                raise IncompatibleCheckpointError(
                    f"{family.place}: {name} has {len(shape)} dimensions, but '{axis_texts(family.axes)}' has {len(axes)}"
                )
            equations += [
                Equation(axis, size, f"dim {k} of {name}", family.place)
                for k, (axis, size) in enumerate(zip(axes, shape, strict=True))
            ]
            mine = member.own[(self._instance[v] == instance)]
            (counted if side.side.partial else equations).extend(
                Equation(Dim(dim), int(mine[:, k].max()) + 1, f"numbers of {{{dim}}} in names as {name}", family.place)
                for k, dim in enumerate(member.own_dims)
                if any(hole == Dim(dim) for hole in member.variant.holes)
            )
        sizes = solved(equations, self._known)
        # Some of a side's names say how many there are only if nothing else does, as with 'same'.
        if last := [equation for equation in counted if str(equation.axis) not in sizes]:
            sizes = solved([*equations, *last], self._known)
        for variant, member in zip(self._component.variants, self._members, strict=True):
            axes = without_rest(variant.family.axes, rest)
            if member is None:
                sizes = dict.fromkeys(padding_dims(axes), 0) | sizes
            needed = dict.fromkeys((*(name for axis in axes for name in dims_of(axis)), *variant.dims))
            if unknown := [name for name in needed if name not in sizes and name not in self._component.shared]:
                names = ", ".join(f"'{name}'" for name in unknown)
                several, single = f"the sizes of {names} do not follow", f"the size of {names} does not follow"
                text = f"{several if len(unknown) > 1 else single} from the shapes"
                advice = f"give {'some of them' if len(unknown) > 1 else 'it'} under 'dims'"
                if of := next((name for name in unknown if name in self._expected.dims), None):
                    keys = " or ".join(dict.fromkeys(keys_of(self._expected.dims[of])))
                    advice = (
                        f"no configuration here has {keys} for '{of}': give it a number under 'dims', or by with_sizes"
                    )
                raise IncompatibleCheckpointError(f"{variant.family.place}: {text}: {advice}")
        return sizes

    def _check_present(self, present: Sequence[Mask]) -> None:
        """Refuse an instance in which a tensor is missing that nothing excuses."""
        for v, there in enumerate(present):
            member = self._members[v]
            if member is None or self._expected.matched(member.variant).side.partial:
                continue
            for instance in np.flatnonzero(~there).tolist():
                others: list[tuple[Variant, str, int]] = []
                for u, other in enumerate(self._members):
                    if other is not None and present[u][instance]:
                        row = int(self._first[u][instance])
                        others.append((other.variant, self._name(u, instance, other, row), int(other.tensor[row])))
                values = dict.fromkeys(member.own_dims, 0)
                name = self._namers[v].name(self._keys[instance], values, self._known)
                if not self._expected.excuse(member.variant, name, others):
                    raise self._expected.missing(member.variant, name, others)

    def _name(self, v: int, instance: int, member: Members, row: int) -> str:
        values = dict(zip(member.own_dims, member.own[row].tolist(), strict=True))
        return self._namers[v].name(self._keys[instance], values, self._known)

    def _check_complete(self, v: int, member: Members) -> None:
        """Refuse two names of one tensor, and numbers that are missing inside an instance."""
        instance = self._instance[v]
        assert instance is not None
        side = self._expected.matched(member.variant)
        sizes = _padded([[own.get(name, 1) for name in member.own_dims] for own in self._sizes])
        rows = np.concatenate([instance[:, None], member.own], axis=1)
        distinct, inverse = _unique_rows(rows)
        if len(distinct) < len(rows):
            twice = int(np.flatnonzero(np.bincount(inverse) > 1)[0])
            names = [side.side.names[member.tensor[r]] for r in np.flatnonzero(inverse == twice)[:2]]
            if len(set(names)) == 2:
                raise _one_tensor(member, names)
        if not member.own_dims:
            return
        own = sizes[self._group[instance]][:, : len(member.own_dims)]
        outside = np.flatnonzero((member.own >= own).any(1) & self._bound[instance])
        if len(outside):
            row = int(outside[0])
            k = int(np.flatnonzero(member.own[row] >= own[row])[0])
            raise IncompatibleCheckpointError(
                f"{member.variant.family.place}: {side.side.names[member.tensor[row]]} has number {member.own[row, k]} of "
                f"{{{member.own_dims[k]}}}, but {member.own_dims[k]} is {own[row, k]}"
            )
        if side.side.partial:
            return
        expected = sizes[self._group][:, : len(member.own_dims)].prod(1, dtype=np.float64)  # no overflow
        found = np.bincount(instance, minlength=len(self._keys))
        short = np.flatnonzero((found < expected) & (self._first[v] >= 0) & self._bound)
        if len(short):
            i = int(short[0])
            extents = sizes[self._group[i]][: len(member.own_dims)]
            there = set(map(tuple, member.own[instance == i].tolist()))
            values = next(index for index in np.ndindex(*extents.tolist()) if index not in there)
            name = self._namers[v].name(
                self._keys[i], dict(zip(member.own_dims, values, strict=True)), self._sizes[self._group[i]]
            )
            example = self._name(v, i, member, int(self._first[v][i]))
            raise self._expected.missing(member.variant, name, [(member.variant, example, 0)])

    def _derived(self, v: int, used: Int64s, names: list[str], shapes: list[list[int]]) -> tuple[Members, Int64s]:
        """Make the tensors of a variant whose names are not given; add their names and shapes."""
        variant, namer = self._component.variants[v], self._namers[v]
        own_dims = tuple(name for name in variant.dims if name not in self._component.shared)
        start = len(names)
        found: list[tuple[Int64s, Int64s]] = []
        codes = self._keys[:, 0]
        for group in np.unique(self._group[used]).tolist():
            sizes = self._sizes[group]
            grid = (
                np.array(list(np.ndindex(*(sizes[name] for name in own_dims))), np.int64).reshape(-1, len(own_dims))
                if own_dims
                else np.zeros((1, 0), np.int64)
            )
            of_group = used[self._group[used] == group]
            for code in np.unique(codes[of_group]).tolist():
                chosen = of_group[codes[of_group] == code]
                instance = np.repeat(chosen, len(grid))
                own = np.tile(grid, (len(chosen), 1))
                values = {name: self._keys[instance, k + 1] for k, name in enumerate(self._component.shared)}
                values |= {name: own[:, k] for k, name in enumerate(own_dims)}
                numbers = np.zeros((len(instance), len(variant.holes)), np.int64)
                for k, axis in enumerate(variant.holes):
                    try:
                        base, weights = (0, {axis.name: 1}) if isinstance(axis, Dim) else affine(axis, sizes)
                    except KeyError as error:
                        raise unknown_number(variant, k, error) from None
                    numbers[:, k] = base + sum(weight * values[name] for name, weight in weights.items())
                names += map(namer.writer(code), numbers.tolist())
                axes = without_rest(variant.family.axes, self._rest[group])
                shapes += [[size_of(axis, sizes) for axis in axes]] * len(instance)
                found.append((instance, own))
        instance, own = (
            (np.concatenate(arrays) for arrays in zip(*found, strict=True))
            if found
            else (used, np.zeros((0, len(own_dims)), np.int64))
        )
        return Members(variant, np.arange(start, len(names)), self._keys[instance], own, own_dims), instance

    def _places(self, v: int, member: Members, instance: Int64s, used: Mask) -> Iterator[PlaceRows]:
        """Yield the places of each part, and of padding, in the tensors of a variant."""
        variant = self._component.variants[v]
        numbers = {part.labels: j for j, part in enumerate(self._component.parts)}
        for labels, axes in variant.pieces:
            j = -1 if labels is None else numbers[labels]
            mask = used if j < 0 else self._masks[j]
            rows = np.flatnonzero(mask[instance])
            if not len(rows):
                continue
            part = None if j < 0 else self._component.parts[j]
            lowerings = []
            for sizes, rest in zip(self._sizes, self._rest, strict=True):
                own_axes = without_rest(axes, rest)
                dims = (
                    _expanded(part.dims, rest) if part else tuple(name for axis in own_axes for name in dims_of(axis))
                )
                given = set(dims) if part is None else {*_expanded(tuple(part.given[variant.family.side]), rest)}
                lowerings.append(
                    Lowering(own_axes, dims, sizes, tuple(k for k, name in enumerate(dims) if name not in given))
                )
            width = max(len(lowering.dims) for lowering in lowerings)
            fixed = np.zeros((len(rows), width), np.int64)
            if part:  # a dim in names comes before "...", so that it has one column in all lowerings
                for k, name in enumerate(member.own_dims):
                    fixed[:, lowerings[0].dims.index(name)] = member.own[rows, k]
            index = (np.cumsum(mask) - 1)[instance[rows]] if part else np.full(len(rows), -1)
            virtual = self._virtual(v, member.tensor[rows])
            yield PlaceRows(member.tensor[rows], j, index, self._group[instance[rows]], fixed, virtual, lowerings)

    def _virtual(self, v: int, tensors: Int64s) -> Mask:
        """Return the mask of the tensors whose own names do not fit a variant."""
        side = None if self._members[v] is None else self._expected.matched(self._component.variants[v])
        if side is None or not side.virtual:
            return np.zeros(len(tensors), bool)
        match = self._component.variants[v].family.template.match
        return np.array([match(side.side.names[tensor]) is None for tensor in tensors.tolist()], bool)


def _one_tensor(member: Members, names: Sequence[str]) -> IncompatibleCheckpointError:
    """Return the error of two names of one tensor."""
    family = member.variant.family
    text = f"{family.place}: {names[0]} and {names[1]} name one tensor"
    if any(isinstance(piece, Group) for piece in family.template.pieces):
        text += (
            "; alternatives that not all names of a rule have are spellings: for several tensors write <x>, and 'names'"
        )
    return IncompatibleCheckpointError(text)


def _expanded(dims: Sequence[str], rest: int) -> tuple[str, ...]:
    """Return the dims with one for each dimension that `...` stands for."""
    return tuple(name for dim in dims for name in ([f"...{k}" for k in range(rest)] if dim == "..." else [dim]))


def _padded(rows: Sequence[Sequence[int]], fill: int = 1) -> Int64s:
    """Return rows of different lengths as a matrix."""
    width = max(map(len, rows), default=0)
    return np.array([[*row, *[fill] * (width - len(row))] for row in rows], np.int64).reshape(len(rows), width)


def _unique_rows(rows: Int64s) -> tuple[Int64s, Int64s]:
    """Return the distinct rows in ascending order, and the number of each row among them."""
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    new = np.ones(len(rows), bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(1)
    inverse = np.empty(len(rows), np.int64)
    inverse[order] = np.cumsum(new) - 1
    return ordered[new], inverse
