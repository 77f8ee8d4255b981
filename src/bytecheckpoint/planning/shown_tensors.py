"""Collect the tensors that a layout shows under the names of its other side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.layouts.binding import BoundSide
from bytecheckpoint.planning.read_plan import StoredRows
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import SHARED, Catalog, TensorTable
from bytecheckpoint.representation.catalog_rows import rows_of
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.shards import TensorKey

__all__ = ["JoinedValue", "Shown", "ShownTensors"]


@dataclass(frozen=True, slots=True)
class JoinedValue:
    """A stored value that has to be that of another one, because a layout joins both.

    Attributes:
        part: number of the part that it is.
        stored: number of its tensor in the checkpoint's catalog.
        name: its name in the checkpoint, for messages.
    """

    part: int
    stored: int
    name: str


@dataclass(frozen=True, eq=False)
class Shown:
    """The tensors of a catalog under other names.

    Attributes:
        catalog: the tensors. Those whose bytes lie in parts have one row each, which no read uses.
        rows: stored rows of those that are parts of their own.
        alone: number of the part that each of these is, -1 for the others, int64 [t].
        stored: number in the checkpoint's catalog of each of these, -1 for the others, int64 [t].
        twins: the values that each tensor joins, the first of which it shows, by the tensor's number.
    """

    catalog: Catalog
    rows: StoredRows
    alone: Int64s
    stored: Int64s
    twins: Mapping[int, Sequence[JoinedValue]]


class ShownTensors:
    """A collector of the tensors to show.

    Args:
        catalog: catalog of the checkpoint.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._keys: list[tuple[str, str, str]] = []
        self._dtypes: list[str] = []
        self._shapes: list[tuple[int, ...]] = []
        self._files: list[int] = []
        self._grads: list[bool] = []

    def add(
        self,
        state: str,
        slot: str,
        side: BoundSide,
        dtypes: Sequence[str],
        names: Sequence[str],
        own: BoundSide,
        tensors: Int64s,
    ) -> Int64s:
        """Add the tensors of a side of which parts are stored, and those stored tensors of which no part has a place there.

        Args:
            state: name of the state.
            slot: slot of the tensors.
            side: the side to show.
            dtypes: dtype of each part as it is shown, "" for parts that are not stored.
            names: names of the stored tensors.
            own: the stored side.
            tensors: number of each stored tensor in the catalog.

        Returns:
            The number of each tensor of the side, -1 for one of which nothing is stored.
        """
        catalog, places = self._catalog, side.places
        numbers = np.full(len(side.names), -1, np.int64)
        by_tensor: dict[int, set[str]] = {}
        for tensor, part in zip(places.tensor.tolist(), places.part.tolist(), strict=True):
            if part >= 0 and dtypes[part]:
                by_tensor.setdefault(tensor, set()).add(dtypes[part])
        used = np.zeros(len(names), bool)
        used[[*own.ignored, *own.scale_tensors]] = True
        here = np.unique(places.part[places.part >= 0])
        used[own.places.tensor[np.isin(own.places.part, here)]] = True
        file = int(catalog.file[np.searchsorted(catalog.boxes.tensor, tensors[0])])
        for tensor, found in sorted(by_tensor.items()):
            kinds = sorted(found)
            if len(kinds) > 1:
                raise IncompatibleCheckpointError(
                    f"{state}/{side.names[tensor]} consists of parts that are stored as {' and '.join(kinds)}"
                )
            numbers[tensor] = len(self._keys)
            shape = tuple(n for n in side.shapes[tensor].tolist() if n >= 0)
            self._append((state, side.names[tensor], slot), kinds[0], shape, file)
        # What has no place here is shown under its own name, as something that the program does not want.
        for number in np.flatnonzero(~used).tolist():
            tensor = int(tensors[number])
            if catalog.fqn[tensor] == names[number]:
                self._append((state, names[number], slot), catalog.dtype[tensor], catalog.shape(tensor), file)
        return numbers

    def _append(self, key: tuple[str, str, str], dtype: str, shape: tuple[int, ...], file: int) -> None:
        self._keys.append(key)
        self._dtypes.append(dtype)
        self._shapes.append(shape)
        self._files.append(file)
        self._grads.append(True)

    def finish(
        self,
        stored: StoredRows,
        others: Mapping[tuple[TensorKey, int], Sequence[int]],
        count: int,
    ) -> Shown:
        """Return the result.

        Args:
            stored: rows of the checkpoint.
            others: key and owner of each other tensor to show, and the stored tensors of which each has the value.
            count: number of parts of the tensors that were added.
        """
        catalog, own = self._catalog, len(self._keys)
        alone = np.unique([n for numbers in others.values() for n in numbers]).astype(np.int64)
        part_of = np.full(catalog.count, -1, np.int64)
        part_of[alone] = count + np.arange(len(alone))
        first = np.array([numbers[0] for numbers in others.values()], np.int64)
        twins = {}
        for shown, ((key, _), numbers) in enumerate(others.items(), own):
            kinds = sorted({catalog.dtype[n] for n in numbers})
            if len(kinds) > 1:
                raise IncompatibleCheckpointError(f"{key} joins values that are stored as {' and '.join(kinds)}")
            if len(numbers) > 1:
                twins[shown] = [JoinedValue(int(part_of[n]), n, str(catalog.key(n))) for n in numbers]
        keys = [*self._keys, *(tuple(key) for key, _ in others)]
        shapes = [*self._shapes, *(catalog.shape(n) for n in first.tolist())]
        dtypes = [*self._dtypes, *(catalog.dtype[n] for n in first.tolist())]
        number, kept = rows_of(catalog.boxes.tensor, first)
        whole = BoxTable.build(range(own), [(0,) * len(shape) for shape in self._shapes], self._shapes)
        boxes = catalog.boxes.take(kept)
        boxes = BoxTable(own + number, boxes.offsets, boxes.lengths)
        nbytes = whole.volumes() * np.array([itemsize(name) for name in self._dtypes], np.int64).reshape(own)
        tensors = TensorTable.of(
            states=[key[0] for key in keys],
            fqns=[key[1] for key in keys],
            slots=[key[2] for key in keys],
            dtypes=dtypes,
            shapes=BoxTable.build(range(len(shapes)), shapes, shapes).lengths,
            ndims=np.array([len(shape) for shape in shapes], np.int64),
            owner=np.concatenate([np.full(own, SHARED, np.int32), catalog.owner[first]]),
            requires_grad=np.concatenate([np.array(self._grads, bool), catalog.requires_grad[first]]),
        )
        built = Catalog.build(
            tensors,
            boxes=BoxTable.concat([whole, boxes]),
            file=np.concatenate([np.array(self._files, np.int32), catalog.file[kept]]),
            byte_offset=np.concatenate([np.zeros(own, np.int64), catalog.byte_offset[kept]]),
            byte_length=np.concatenate([nbytes, catalog.byte_length[kept]]),
            files=catalog.files,
            sums=catalog.file_sums,
            info=catalog.info,
        )
        parts = np.full(len(keys), -1, np.int64)
        parts[own:] = part_of[first]
        number, kept = rows_of(catalog.boxes.tensor, alone)
        more = stored.take(kept)
        more = replace(more, boxes=BoxTable(count + number, more.boxes.offsets, more.boxes.lengths))
        return Shown(built, more, parts, np.concatenate([np.full(own, -1, np.int64), first]), twins)
