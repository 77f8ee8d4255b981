"""Show a catalog under the names of another program, and plan its reads in the space of the layout's parts.

A layout says how tensors of two namings consist of the same parts (docs/layouts.md). Stored rows become boxes of parts, and
so do wanted boxes; they are intersected there, and copied by the strides of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError, listed
from bytecheckpoint.layouts import Layout
from bytecheckpoint.layouts.binding import Binding, BoundSide, bind
from bytecheckpoint.layouts.config import flattened
from bytecheckpoint.layouts.layout import builtin_names, find
from bytecheckpoint.layouts.lowering import PartBoxes, to_parts
from bytecheckpoint.layouts.matching import Side, ignored_patterns, scales_of, skeletons
from bytecheckpoint.layouts.names import Template, parse_template
from bytecheckpoint.planning.element_maps import ElementMap, element_maps, in_bytes, in_halves, pairs_of, scale_rows
from bytecheckpoint.planning.read_plan import StoredRows, stored_rows
from bytecheckpoint.planning.shown_tensors import JoinedValue, ShownTensors
from bytecheckpoint.representation.boxes import BoxTable, Int64s, widened
from bytecheckpoint.representation.catalog import SHARED, VALUES_SLOT, Catalog
from bytecheckpoint.representation.catalog_rows import rows_of
from bytecheckpoint.representation.shards import MASTER, TensorKey

__all__ = ["LaidOut", "LiveSide", "choose_layout", "concatenated", "lay_out", "layout_of_model", "stored_side"]


@dataclass(frozen=True, slots=True)
class LiveSide:
    """The tensors into which a checkpoint is loaded, of all ranks.

    Attributes:
        shapes: global shape of each tensor, by state and name; None: names and shapes follow from the checkpoint.
        config: configuration of the program, as {"megatron.num_query_groups": 8}.
        lenient: states of which names that fit no rule of a layout stay as they are.
        left_out: state and name of the tensors that the load does not select.
    """

    shapes: Mapping[str, Mapping[str, tuple[int, ...]]] | None
    config: Mapping[str, Any]
    lenient: Collection[str] = ()
    left_out: Collection[tuple[str, str]] = ()

    def of(self, state: str, *, selected: bool = False) -> Mapping[str, tuple[int, ...]] | None:
        """Return the tensors of a state; of one without modules, such as an optimizer, those of all modules.

        Args:
            state: name of the state.
            selected: return the tensors that the load selects alone.
        """
        if self.shapes is None:
            return None
        if not selected:
            return self.shapes.get(state) or {name: size for own in self.shapes.values() for name, size in own.items()}
        states = [state] if self.shapes.get(state) else [*self.shapes]
        return {name: size for s in states for name, size in self.shapes[s].items() if (s, name) not in self.left_out}


@dataclass(frozen=True, eq=False)
class _LaidGroup:
    """The tensors of one state and slot that a layout connects.

    Attributes:
        state: name of the state that has the tensors.
        shown: number of each tensor of the other side in the catalog that is shown, int64 [t]; -1 for none.
        side: the other side.
        first_part: number of the first of its parts.
    """

    state: str
    shown: Int64s
    side: BoundSide
    first_part: int


@dataclass(frozen=True, eq=False)
class LaidOut:
    """A catalog under other names.

    Attributes:
        catalog: the tensors under these names. Those whose bytes lie in parts have one row each, which no read uses.
        rows: stored rows of all parts; those of tensors that no layout concerns are parts of their own.
        groups: tensors that the layout connects.
        alone: number of the part that each other tensor of `catalog` is, -1 for none, int64 [t].
        stored: number in the checkpoint's catalog of each of these, -1 for the others, int64 [t].
        names: names under which the tensors of each of the checkpoint's names are shown.
        twins: the values that each tensor joins, by its number: the layout joins parameters, and an optimizer has one step
            for the result.
        maps: changes of the elements of some parts, by number.
        notes: facts that a user should know: requirements that no configuration decides, names that are ignored.
    """

    catalog: Catalog
    rows: StoredRows
    groups: Sequence[_LaidGroup]
    alone: Int64s
    stored: Int64s
    names: Mapping[str, Sequence[str]]
    twins: Mapping[int, Sequence[JoinedValue]]
    maps: Mapping[int, ElementMap]
    notes: Sequence[str] = ()

    @property
    def unused(self) -> set[str]:
        """The names of the program's tensors that the layout lets lie, as "model/layers.0.moe.expert_bias"."""
        return {f"{group.state}/{group.side.names[k]}" for group in self.groups for k in group.side.ignored}

    def wanted(self, boxes: BoxTable, strides: Int64s) -> tuple[PartBoxes, PartBoxes]:
        """Cut wanted boxes into boxes of parts.

        Args:
            boxes: boxes of the tensors of `catalog`.
            strides: elements from one element of a box to the next in memory, int64 [n, d].

        Returns:
            The boxes of parts, and those of padding, which has the value 0. Both refer to the wanted boxes by number.
        """
        parts: list[PartBoxes] = []
        padding: list[PartBoxes] = []
        own = np.flatnonzero(self.alone[boxes.tensor] >= 0)
        parts.append(
            PartBoxes(
                BoxTable(self.alone[boxes.tensor[own]], boxes.offsets[own], boxes.lengths[own]),
                own,
                np.zeros(len(own), np.int64),
                strides[own],
            )
        )
        for group in self.groups:
            number = np.full(self.catalog.count, -1, np.int64)
            known = np.flatnonzero(group.shown >= 0)
            number[group.shown[known]] = known
            chosen = np.flatnonzero(number[boxes.tensor] >= 0)
            if not len(chosen):
                continue
            taken = boxes.take(chosen)
            found = to_parts(
                group.side.places,
                BoxTable(number[taken.tensor], taken.offsets, taken.lengths),
                strides[chosen],
                target=True,
            )
            for made, into in zip(found, (parts, padding), strict=True):
                into.append(_renumbered(made, chosen, group.first_part))
        return _joined(parts), _joined(padding)


def _renumbered(made: PartBoxes, origin: Int64s, first_part: int) -> PartBoxes:
    boxes = BoxTable(made.boxes.tensor + first_part, made.boxes.offsets, made.boxes.lengths)
    return replace(made, boxes=boxes, origin=origin[made.origin])


def _joined(found: Sequence[PartBoxes]) -> PartBoxes:
    boxes = BoxTable.concat([made.boxes for made in found])
    return PartBoxes(
        boxes,
        np.concatenate([np.zeros(0, np.int64), *(made.origin for made in found)]),
        np.concatenate([np.zeros(0, np.int64), *(made.first for made in found)]),
        np.concatenate(
            [np.zeros((0, boxes.ndim), np.int64), *(widened(made.strides, boxes.ndim, 1) for made in found)]
        ),
    )


def choose_layout(
    catalog: Catalog, live: LiveSide, own: Callable[[], Layout | None] = lambda: None
) -> tuple[Layout] | None:
    """Return the layout for a checkpoint's model and the program's; None if the names are the same.

    Args:
        catalog: catalog of the checkpoint.
        live: tensors to load into.
        own: function that returns the layout that the program's model knows, asked if none that is built in fits, or no
            name is the same.

    Raises:
        IncompatibleCheckpointError: nothing says which model the checkpoint has, or no layout or several are for it.
    """
    keys = catalog.keys()
    wanted = {(state, name) for state, shapes in (live.shapes or {}).items() for name in shapes}
    stored = {(state, name) for state, name, slot in keys if not slot and live.shapes and state in live.shapes}
    equal = wanted & stored
    if equal and equal == wanted:
        known = None if equal == stored else own()
        return None if known is None else (known,)
    saved = _stored_config(catalog)
    config = {**saved, **live.config}
    there, here = ({key.partition(".")[0] for key in config} for config in (saved, live.config))
    found = [layout for layout in map(find, builtin_names()) if here & {*layout.sides} and layout.is_for(config)]
    names = [name for _, name, slot in keys if not slot]
    sides = [stored_side(layout, names) for layout in found]
    # A layout of the model may lead from or to another program than those of the checkpoint and here.
    fits = [
        layout
        for layout, side in zip(found, sides, strict=True)
        if side is not None and layout.sides[1 - side] in here and (not there or layout.sides[side] in there)
    ]
    # Where no name is the same, one of the two may be a base model, and the other one with a head.
    if (len(fits) != 1 or not equal) and (known := own()) is not None:
        return (known,)
    if equal and len(fits) != 1:
        return None
    if not fits and len(found) == 1:
        fits = found  # whose own errors say what does not fit
    return (_only_one(fits, config, f" and a program of {' and '.join(sorted(here)) or 'unknown kind'}"),)


def layout_of_model(catalog: Catalog) -> tuple[Layout]:
    """Return the only layout that is built in for a checkpoint's model, to whichever program.

    Raises:
        IncompatibleCheckpointError: nothing says which model the checkpoint has, or no layout or several are for it.
    """
    config = _stored_config(catalog)
    return (_only_one([layout for layout in map(find, builtin_names()) if layout.is_for(config)], config, ""),)


def _only_one(found: Sequence[Layout], config: Mapping[str, Any], program: str) -> Layout:
    if len(found) == 1:
        return found[0]
    kind = config.get("hf.model_type")
    what = "a checkpoint without config.json" if kind is None else f"the model_type {kind!r}"
    names = ", ".join(layout.name for layout in found or map(find, builtin_names()) if layout.fits)
    raise IncompatibleCheckpointError(
        f"layout='auto' finds {listed([layout.name for layout in found], 5) or 'no layout'} for {what}{program}: "
        f"give one of {names}, or a layout of your own"
    )


def lay_out(catalog: Catalog, layout: Layout, live: LiveSide | None = None) -> LaidOut:
    """Show a catalog under the names of the other side of a layout.

    Args:
        catalog: catalog of the checkpoint, with all rows.
        layout: the layout. The names of the checkpoint say which of its sides is stored.
        live: tensors to load into; None to derive their names and shapes.

    Raises:
        IncompatibleCheckpointError: names, shapes or dtypes do not fit the layout.
        UsageError: a requirement of the layout is not met.
    """
    stored = stored_rows(catalog)
    values = catalog.slot.codes == catalog.slot.code_of(VALUES_SLOT)
    shown = ShownTensors(catalog)
    own_values = values | (catalog.owner != SHARED)
    alone = np.flatnonzero(own_values).tolist()
    scalars: list[int] = []  # such as the step of each parameter
    names: dict[str, list[str]] = {}
    rows: list[StoredRows] = []
    groups: list[_LaidGroup] = []
    laid_states: set[str] = set()
    notes: list[str] = []
    maps: dict[int, ElementMap] = {}
    count = 0
    saved, here = _stored_config(catalog), live.config if live else {}
    # Where both programs are of transformers, layers and ties of the files are those of the files' configuration.
    config = {**here, **saved}
    dtype_here = _dtype_here({**saved, **here})
    for state in catalog.states():
        for slot in catalog.slot.values:
            numbers = np.flatnonzero(
                (catalog.state.codes == catalog.state.code_of(state))
                & (catalog.slot.codes == catalog.slot.code_of(slot))
                & ~own_values
            )
            if slot:
                scalars += numbers[catalog.ndims[numbers] == 0].tolist()
                numbers = numbers[catalog.ndims[numbers] > 0]
            if not len(numbers):
                continue
            own_side = stored_side(layout, [catalog.fqn[n] for n in numbers.tolist()])
            if own_side is None:
                alone += numbers.tolist()
                continue
            if not slot:
                laid_states.add(state)
            stored_names, tensors = _names(catalog, state, numbers, _templates(layout, own_side))
            shapes = [catalog.shape(n) for n in tensors.tolist()]
            strict = live is None or state not in live.lenient
            own_tensors = Side(
                stored_names, shapes, partial=live is not None and live.shapes is not None, strict=strict
            )
            try:
                bound = _bound(layout, own_side, own_tensors, live, state, config)
            except IncompatibleCheckpointError as error:
                if not slot:
                    raise
                raise IncompatibleCheckpointError(f"{state} has {slot!r} of its parameters, and {error}") from error
            own, shown_side = (bound.left, bound.right) if own_side == 0 else (bound.right, bound.left)
            notes += [f"the layout cannot compare {what} here" for what in bound.undecided]
            if shown_side.ignored and not slot:
                lying = [shown_side.names[k] for k in shown_side.ignored]
                notes.append(f"the layout leaves {len(lying)} tensors of {state} as they are: {listed(lying, 2)}")
            if own.ignored and not slot:
                names_of = listed([own.names[k] for k in own.ignored], 2)
                notes.append(f"the layout ignores {len(own.ignored)} tensors of {state}: {names_of}")
            if not slot and (twins := _unread_twins(own, tensors)):
                text = f"takes {len(twins)} tensors of {state} for tied ones, and does not read them"
                notes.append(f"the layout {text}: {listed(twins, 2)}")
            if slot and own.scales:
                raise IncompatibleCheckpointError(
                    f"{state} has {slot!r} of quantised parameters, which no layout moves"
                )
            dtypes = _dtypes(catalog, bound, own, tensors)
            if slot not in ("", MASTER) and any(group.rule.mean for group in bound.groups):
                raise IncompatibleCheckpointError(
                    f"{state} has {slot!r} of parameters of which {layout.label} takes a mean: leave the optimizer out"
                )
            changed: dict[int, ElementMap] = {}
            if slot in ("", MASTER):  # other slots are those of gradients, which sums do not change
                changed = element_maps(bound, own, dtypes, catalog, tensors, count, 1 if own_side == 0 else -1)
            rows.append(_in_parts(stored, own, tensors, count, changed))
            for part, change in changed.items():
                if change.scales:
                    dtypes[part - count] = dtype_here
            added = shown.add(state, slot, shown_side, dtypes, stored_names, own, tensors)
            groups.append(_LaidGroup(state, added, shown_side, count))
            _note_names(names, own, shown_side)
            count += len(bound.sizes)
            if own.scales:
                rows.append(scale_rows(own, stored, tensors, count))
                count = int(rows[-1].boxes.tensor.max()) + 1
            maps |= changed
    # The tree of such a state has the names of the checkpoint, and may refer to its tensors by them.
    alone = [n for n in alone if catalog.slot[n] != VALUES_SLOT or catalog.state[n] not in laid_states]
    others = {(catalog.key(n), int(catalog.owner[n])): [n] for n in sorted(alone)}
    for number in scalars:
        state, fqn, slot = catalog.key(number)
        for name in names.get(fqn, (fqn,)):
            others.setdefault((TensorKey(state, name, slot), SHARED), []).append(number)
    done = shown.finish(stored, others, count)
    return LaidOut(
        done.catalog, concatenated([*rows, done.rows]), groups, done.alone, done.stored, names, done.twins,
        maps, list(dict.fromkeys(notes)),
    )  # fmt: skip


def _bound(
    layout: Layout, own_side: int, own: Side, live: LiveSide | None, state: str, config: Mapping[str, Any]
) -> Binding:
    """Bind the layout to the tensors of a state: those of the checkpoint, on its side `own_side`, and the live ones.

    A live tensor that the load does not select may have any shape, as the head of another number of classes.
    """
    every = None if live is None else live.of(state)

    def bound(other: Mapping[str, tuple[int, ...]] | None) -> Binding:
        sides: list[Side | None] = [own, own]
        sides[1 - own_side] = (
            None if other is None else Side([*other], [*other.values()], partial=True, strict=own.strict)
        )
        return bind(layout, sides[0], sides[1], config)

    try:
        return bound(every)
    except IncompatibleCheckpointError:
        chosen = None if live is None else live.of(state, selected=True)
        if chosen == every:
            raise
    return bound(chosen)


def _unread_twins(own: BoundSide, tensors: Int64s) -> list[str]:
    """Return the second names of tied tensors under which a checkpoint has tensors of their own.

    Args:
        own: side of the checkpoint.
        tensors: number of the tensor of each of its names in the catalog.
    """
    second = np.unique(own.places.tensor[own.places.copy])
    first = np.setdiff1d(np.arange(len(own.names)), second)
    return [own.names[k] for k in second[~np.isin(tensors[second], tensors[first])].tolist()]


def _note_names(names: dict[str, list[str]], own: BoundSide, shown: BoundSide) -> None:
    """Add the names of the shown tensors that have parts of each stored one."""
    places = [side.places for side in (own, shown)]
    (tensor, part), (other, other_part) = (
        (place.tensor[place.part >= 0], place.part[place.part >= 0]) for place in places
    )
    order = np.argsort(other_part, kind="stable")
    place, row = rows_of(other_part[order], part)
    pairs = np.stack([tensor[place], other[order][row]], axis=1)
    for stored, number in np.unique(pairs, axis=0).tolist():
        known = names.setdefault(own.names[stored], [])
        if shown.names[number] not in known:
            known.append(shown.names[number])


def _stored_config(catalog: Catalog) -> dict[str, Any]:
    """Return the configuration that a foreign folder has, under the name of its side, or that of the modules saved."""
    if catalog.is_foreign:
        found = catalog.info.get("config")
        return flattened("hf", found) if isinstance(found, dict) else {}
    layout = catalog.info.get("layout")
    config = layout.get("config") if isinstance(layout, dict) else None
    return config if isinstance(config, dict) else {}


def stored_side(layout: Layout, names: Sequence[str]) -> int | None:
    """Return the side of a layout whose names a checkpoint has, None if it has those of neither.

    Raises:
        UsageError: the names fit both sides.
    """
    kinds = skeletons(names)
    fits = []
    for side in (0, 1):
        templates = _templates(layout, side)
        of_kind = {kind: [t for t in templates if t.skeleton.fullmatch(kind)] for kind in set(kinds)}
        fits.append(sum(any(t.match(n) for t in of_kind[kind]) for n, kind in zip(names, kinds, strict=True)))
        scales = [parse_template(s.name) for s in scales_of(layout, side)]
        fits[-1] += sum(t.match(name) is not None for t in scales for name in names)
    if not any(fits):
        return None
    if layout.stored:
        return layout.sides.index(layout.stored)
    if fits[0] == fits[1]:  # names that one side ignores are of that side
        patterns = [ignored_patterns(layout, side, {}) for side in (0, 1)]
        fits = [sum(any(p.fullmatch(name) for p in own) for name in names) for own in patterns]
    if fits[0] == fits[1]:
        raise UsageError(
            f"{layout.label}: the names of the checkpoint ({listed(names, 3)}) fit both sides: state whose they are, as in "
            f"layout='{layout.label}:{layout.left}' or '{layout.label}:{layout.right}' (stored= of a Layout)"
        )
    return int(fits[1] > fits[0])


def _templates(layout: Layout, side: int) -> list[Template]:
    return [f.template for parsed in layout.parsed for f in parsed.families if f.side == side]


def _names(catalog: Catalog, state: str, numbers: Int64s, templates: Sequence[Template]) -> tuple[list[str], Int64s]:
    """Return the names of some tensors and the number of each, with the further names of tied ones.

    A further name that stands beside the first in the same rule, as an alternative, says nothing more.
    """
    names = [catalog.fqn[n] for n in numbers.tolist()]
    of = dict(zip(names, numbers.tolist(), strict=True))
    more = [
        (name, of[first])
        for name, first in catalog.aliases.get(state, {}).items()
        if first in of and not any(t.match(name) is not None and t.match(name) == t.match(first) for t in templates)
    ]
    return [*names, *(name for name, _ in more)], np.append(numbers, [number for _, number in more]).astype(np.int64)


def _in_parts(
    stored: StoredRows, side: BoundSide, tensors: Int64s, first_part: int, maps: Mapping[int, ElementMap]
) -> StoredRows:
    """Return the stored rows of a side's tensors as rows of parts."""
    number, row = rows_of(stored.boxes.tensor, tensors)
    rows = stored.take(row)
    assert rows.strides is not None
    boxes, strides = in_halves(side, BoxTable(number, rows.boxes.offsets, rows.boxes.lengths), rows.strides)
    found, _ = to_parts(side.places, boxes, strides, target=False)
    boxes = BoxTable(found.boxes.tensor + first_part, found.boxes.offsets, found.boxes.lengths)
    pairs = pairs_of(maps, boxes.tensor)
    halves, whole = pairs >= 0, np.arange(boxes.ndim) != pairs[:, None]
    strides = np.where(halves[:, None] & whole, found.strides // 2, found.strides)
    at = rows.take(found.origin)
    first = found.first // np.where(halves, 2, 1)
    return replace(at, boxes=in_bytes(boxes, pairs), start=at.start + first * at.element, strides=strides)


def _dtype_here(config: Mapping[str, Any]) -> str:
    """Return the dtype in which quantised weights are shown: that of the model, if its configuration says so."""
    found = config.get("hf.dtype") or config.get("hf.torch_dtype")
    return found if found in ("float32", "float16") else "bfloat16"


def _dtypes(catalog: Catalog, bound: Binding, side: BoundSide, tensors: Int64s) -> list[str]:
    """Return the stored dtype of each part, "" for parts that are not stored.

    Raises:
        IncompatibleCheckpointError: a part has several dtypes.
    """
    places = side.places
    real = np.flatnonzero(places.part >= 0)
    part, code = places.part[real], catalog.dtype.codes[tensors[places.tensor[real]]].astype(np.int64)
    found = np.full(len(bound.sizes), -1, np.int64)
    found[part] = code
    differ = np.flatnonzero(found[part] != code)
    if len(differ):
        number = int(part[differ[0]])
        names = [catalog.dtype.values[c] for c in {int(found[number]), int(code[differ[0]])}]
        raise IncompatibleCheckpointError(f"{bound.group(number)} is stored as {' and '.join(names)}")
    return ["" if code < 0 else catalog.dtype.values[code] for code in found.tolist()]


def concatenated(rows: Sequence[StoredRows]) -> StoredRows:
    """Return all rows of some tables, sorted by part."""
    boxes = BoxTable.concat([r.boxes for r in rows])
    order = np.argsort(boxes.tensor, kind="stable")
    strides = [widened(r.strides, boxes.ndim, 1) for r in rows if r.strides is not None]
    return replace(
        rows[0],
        boxes=boxes.take(order),
        file=np.concatenate([r.file for r in rows])[order],
        start=np.concatenate([r.start for r in rows])[order],
        element=np.concatenate([r.element for r in rows])[order],
        strides=np.concatenate(strides)[order],
    )
