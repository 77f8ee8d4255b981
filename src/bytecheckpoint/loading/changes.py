"""Bring live objects from one version to the next by the elements that changed, instead of a load.

A rank finds where the changed elements of a version lie in its memory by the plan of an ordinary load. Nothing is changed
before all ranks have proven together, from the old and the new elements, that the version's fingerprints will hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.engine.reading import read_all
from bytecheckpoint.engine.scatter import BoxTarget, ScatterPlan
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, listed
from bytecheckpoint.loading.decision import FitDecision
from bytecheckpoint.loading.steps import FilledStates, FittedLoad, Load
from bytecheckpoint.representation.boxes import Int64s, row_major
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.fingerprints import Sums, change_sums
from bytecheckpoint.representation.names import is_of_values
from bytecheckpoint.representation.plans import Copies
from bytecheckpoint.settings import Settings
from bytecheckpoint.storage.deltas.coding import Changes, held_sum
from bytecheckpoint.storage.deltas.reading import DeltaReader

__all__ = ["CONVERTED", "ChangesReport", "NeedsWholeLoad", "ProvenLoad", "VersionLoad"]

#: Share of changed elements of a large file beyond which a load takes less time and memory.
_MOST_CHANGED = 0.25
_LARGE_FILE = 256 << 20
#: Segments that are decoded once for copies that follow each other.
_KEPT_SEGMENTS = 64
#: Reason for which no version of a model can be applied as changes.
CONVERTED = "elements are converted on the way, so their bits before are not known"
_MEMORY = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_NUMBERS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class NeedsWholeLoad(CheckpointError):
    """A version cannot be applied as changes, or not well; nothing was changed. The message says why."""


class ChangesReport(msgspec.Struct, frozen=True):
    """The changes of a version that one rank holds.

    Attributes:
        files: numbers of the files that it has read.
        counts: numbers of changed elements that it holds of each segment of these files, int64, as bytes.
        held: `held_sum` of their places, by segment, uint64, as bytes.
        sums: change of the sums of tensors by its elements, by the tensor's number.
        refusal: why the version has to be loaded whole; "" if it need not.
    """

    files: list[int]
    counts: list[bytes]
    held: list[bytes]
    sums: dict[int, tuple[int, int]]
    refusal: str = ""


class _MemoryOfTensors:
    """Memory of tensors, as integers of one size.

    Args:
        data: a tensor in it.
        unit: bytes of an integer.
    """

    def __init__(self, data: torch.Tensor, unit: int) -> None:
        storage = data.untyped_storage()
        empty = torch.empty(0, dtype=_MEMORY[unit], device=data.device)
        self._tensor = empty.set_(storage, 0, (storage.nbytes() // unit,), (1,))
        # Here torch would wake its threads for a few thousand elements.
        self._array = self._tensor.numpy().view(_NUMBERS[unit]) if data.is_cpu else None
        self._number = _NUMBERS[unit]

    def take(self, places: Int64s) -> NDArray[np.unsignedinteger]:
        """Return the integers at some places."""
        if self._array is not None:
            return self._array[places]
        found: NDArray[np.unsignedinteger] = self._tensor[self._moved(places)].cpu().numpy().view(self._number)
        return found

    def put(self, places: Int64s, new: NDArray[np.unsignedinteger]) -> None:
        """Replace the integers at some places."""
        if self._array is not None:
            self._array[places] = new
        else:
            signed = new.view(np.uint8 if new.itemsize == 1 else f"i{new.itemsize}")
            self._tensor[self._moved(places)] = self._moved(signed)

    def _moved(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._tensor.device)


class _Write(NamedTuple):
    """Elements to replace in one memory.

    Attributes:
        memory: the memory.
        places: their numbers, int64 [n].
        new: their new bits, [n].
    """

    memory: _MemoryOfTensors
    places: Int64s
    new: NDArray[np.unsignedinteger]


@dataclass
class _FoundChanges:
    """The changes of a version that one rank holds, and where they lie in its memory.

    Attributes:
        writes: elements to replace.
        nbytes: bytes that were read.
        counts: number of changed elements of each segment, by file.
        held: `held_sum` of their places, by file.
        sums: change of the sums of tensors, by the tensor's number.
    """

    writes: list[_Write] = field(default_factory=list)
    nbytes: int = 0
    counts: dict[int, Int64s] = field(default_factory=dict)
    held: dict[int, NDArray[np.uint64]] = field(default_factory=dict)
    sums: dict[int, Sums] = field(default_factory=dict)

    def report(self) -> ChangesReport:
        files = sorted(self.counts)
        return ChangesReport(
            files,
            [self.counts[file].tobytes() for file in files],
            [self.held[file].tobytes() for file in files],
            {tensor: (int(sums[0]), int(sums[1])) for tensor, sums in self.sums.items()},
        )


class VersionLoad(Load):
    """Replaces the elements that changed since the version that the live objects hold.

    Attributes:
        base: fingerprints of that version by key of the tensor, which rank 0 has.
        reached: fingerprints of the version that is applied, on rank 0.
        outcome: number of elements that were changed here, and keys of the tensors whose changes nothing proves.
    """

    base: Mapping[str, tuple[int, int]]
    reached: Mapping[str, tuple[int, int]]
    outcome: tuple[int, list[str]] = (0, [])

    def read(self, fitted: FittedLoad, decision: FitDecision) -> FilledStates:
        """Find, prove and make the changes.

        Raises:
            NeedsWholeLoad: the version has to be loaded whole.
            CorruptCheckpointError: the changes are damaged, or the live tensors are not those of the version before.
        """
        self._operation.phase = "read"
        values = self._of_values(fitted)

        def find() -> tuple[_FoundChanges, ChangesReport]:
            try:
                with torch.no_grad(), fitted.checkpoint.detect_replacement():
                    held = _Finder(fitted).run()
                    verify(fitted, values, self._settings)
            except NeedsWholeLoad as error:
                return _FoundChanges(), ChangesReport([], [], [], {}, str(error))
            return held, held.report()

        held, (refusal, unproven) = self._agree(
            "changes", find, lambda _, reports: self._prove(fitted, reports), ChangesReport, tuple[str, list[str]]
        )
        if refusal:
            raise NeedsWholeLoad(refusal)

        def change() -> tuple[None, bool]:
            files, scatter = fitted.checkpoint.files, ScatterPlan(fitted.fit.plan, fitted.fit.targets)
            threads, chunk_bytes = self._settings.storage.read_threads, fitted.fit.chunk_bytes
            read_all(files, scatter, values, threads=threads, chunk_bytes=chunk_bytes)
            with torch.no_grad():
                for write in held.writes:
                    write.memory.put(write.places, write.new)
            fitted.destination.check()
            return None, False

        self._agree("change", change, lambda _, __: None, bool, type(None))
        self.outcome = (sum(len(write.new) for write in held.writes), unproven)
        self._operation.mark("read")
        return FilledStates(fitted, held.nbytes, 0, [], True, False, self._collective.rank)

    @staticmethod
    def _of_values(fitted: FittedLoad) -> list[int]:
        """Return the ranges of tensors among plain values, which a load may read into new memory."""
        names = [file.name for file in fitted.checkpoint.files.catalog.files]
        return [n for n, file in enumerate(fitted.fit.plan.file.tolist()) if is_of_values(names[file])]

    def _prove(self, fitted: FittedLoad, reports: list[ChangesReport]) -> tuple[str, list[str]]:
        """Compare the changes of all ranks with the fingerprints, on rank 0; return a refusal and unproven tensors."""
        if refusal := next((report.refusal for report in reports if report.refusal), ""):
            return refusal, []
        files = fitted.checkpoint.files
        catalog = files.catalog if fitted.checkpoint.reader.groups is None else read_catalog(files.storage)[0]
        new = self.reached = fingerprints_by_key(catalog)
        if not new or not self.base:
            return "", ["all, since no fingerprints are there"]
        found = _Holders(catalog, files.differences, reports)
        differing, unproven = [], []
        for number in range(catalog.count):
            key = str(catalog.key(number))
            if key not in new:
                continue
            if (times := found.times(number)) is None:
                unproven.append(key)
                continue
            due = [(a - b) * times % (1 << 64) for a, b in zip(new[key], self.base.get(key, (0, 0)), strict=True)]
            if due != found.sums(number):
                differing.append(key)
        if differing:
            raise CorruptCheckpointError(
                f"{files.url}: with its changes {listed(differing)} would not be what was published: the version is "
                "damaged, or the live tensors are not those of the version before; nothing was changed",
                tensors=tuple(differing),
            )
        return "", unproven


def fingerprints_by_key(catalog: Catalog) -> dict[str, tuple[int, int]]:
    """Return the fingerprints in a catalog by key of the tensor."""
    found = [] if catalog.fingerprints is None else catalog.fingerprints.tolist()
    return {str(catalog.key(number)): (sums[0], sums[1]) for number, sums in enumerate(found)}


class _RowsOfFiles:
    """Rows of a catalog that hold bytes, by their file.

    Args:
        catalog: the catalog.
    """

    def __init__(self, catalog: Catalog) -> None:
        order = np.lexsort((catalog.byte_offset, catalog.file))
        self._order = order[catalog.byte_length[order] > 0]  # an empty row begins where another one does
        self._ends = np.searchsorted(catalog.file[self._order], np.arange(len(catalog.files)), "right")
        self._begins = catalog.byte_offset

    def holding(self, file: int, places: Int64s) -> Int64s:
        """Return the row that holds each byte of a file, int64 [n]; -1 for bytes of the header."""
        rows = self._order[self._ends[file - 1] if file else 0 : self._ends[file]]
        found = np.searchsorted(self._begins[rows], places, "right") - 1
        return np.where(found >= 0, rows[found], -1) if len(rows) else np.full(len(places), -1, np.int64)


class _Finder:
    """Finds the changed elements in the memory of one rank.

    Args:
        fitted: load of the version, planned.
    """

    def __init__(self, fitted: FittedLoad) -> None:
        self._fitted, self._files = fitted, fitted.checkpoint.files
        self._catalog = self._files.catalog
        self._rows = _RowsOfFiles(self._catalog)
        self._found = _FoundChanges()
        self._memories: dict[tuple[int, int, int], _MemoryOfTensors] = {}

    def run(self) -> _FoundChanges:
        """Return the changes.

        Raises:
            NeedsWholeLoad: a load is needed, or quicker.
        """
        fit, destination = self._fitted.fit, self._fitted.destination
        if fit.converted or destination.streamed or (fit.parts and (fit.parts.changed or fit.parts.twins)):
            raise NeedsWholeLoad(CONVERTED)
        copies, plan = fit.plan.copies, fit.plan
        count = np.diff(plan.first_copy)
        file_of = np.repeat(plan.file, count)
        order = np.lexsort((copies.source, file_of))
        copies, file_of = copies.take(order), file_of[order]
        borders = np.flatnonzero(np.diff(file_of, prepend=-1, append=-2))
        for low, high in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            self._file(int(file_of[low]), copies.take(np.arange(low, high)))
        return self._found

    def _file(self, file: int, copies: Copies) -> None:
        entry = self._catalog.files[file]
        if is_of_values(entry.name):
            return
        reader = self._files.differences(file)
        try:
            if not reader.head.base:
                raise NeedsWholeLoad(f"{entry.name} builds on no file")
            if reader.head.moved:
                raise NeedsWholeLoad(f"{entry.name} holds other tensors than the file before, or at other places")
            segments = reader.segments
            changed = int((segments["count"].astype(np.int64) * segments["unit"]).sum())
            if entry.size > _LARGE_FILE and changed > _MOST_CHANGED * entry.size:
                raise NeedsWholeLoad(f"most elements in {entry.name} have changed")
            self._found.counts[file] = np.zeros(len(segments), np.int64)
            self._found.held[file] = np.zeros(len(segments), np.uint64)
            starts = segments["start"].astype(np.int64)
            row_of = self._rows.holding(file, starts).tolist()
            ends = starts + segments["nbytes"]
            spans = np.where(
                copies.flat, copies.elements, ((copies.lengths - 1) * copies.source_strides).sum(axis=1) + 1
            )
            decode = functools.lru_cache(_KEPT_SEGMENTS)(reader.changes)
            read: set[int] = set()
            for number, span in enumerate(spans.tolist()):
                target = self._fitted.fit.targets[int(copies.wanted[number])]
                begin = entry.data_offset + int(copies.source[number])
                end = begin + span * target.dtype.itemsize
                for n in range(int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(starts, end))):
                    read.add(n)
                    self._copy(file, n, decode(n), int(starts[n]), begin, target, copies, number, row_of[n])
            self._found.nbytes += int(segments["length"][sorted(read)].sum()) + len(reader.head.index)
        finally:
            reader.close()

    def _copy(
        self, file: int, segment: int, changes: Changes, start: int, begin: int, target: BoxTarget, copies: Copies,
        number: int, row: int,
    ) -> None:  # fmt: skip
        """Find the changes of one segment among the elements of one copy."""
        size, unit = target.dtype.itemsize, changes.bits.dtype.itemsize
        if size % unit:
            raise NeedsWholeLoad("elements are of another size than those that were published")
        low = int(np.searchsorted(changes.places, begin - start))
        element, inside = np.divmod(changes.places[low:] + (start - begin), size)
        place, chosen = _places(element, target.data, copies, number)
        element, inside, places = element[chosen], inside[chosen], changes.places[low:][chosen]
        if not len(places):
            return
        memory = self._memory(target.data, unit)
        at = (place * size + inside) // unit
        old = memory.take(at)
        bits = changes.bits[low:][chosen]
        new = bits if changes.whole else old ^ bits
        self._found.writes.append(_Write(memory, at, new))
        self._found.counts[file][segment] += len(places)
        held = self._found.held[file][segment : segment + 1]
        held += np.uint64(held_sum(places))  # of an array, whose sums wrap around
        tensor = int(self._catalog.boxes.tensor[row])
        shape, dtype = self._catalog.shape(tensor), self._catalog.dtype[tensor]
        where = self._global_bytes(row, places + (start - int(self._catalog.byte_offset[row])), itemsize(dtype))
        sums = change_sums(shape, itemsize(dtype), where, old, new)
        self._found.sums[tensor] = self._found.sums.get(tensor, np.zeros(2, np.uint64)) + sums

    def _global_bytes(self, row: int, places: Int64s, size: int) -> Int64s:
        """Return the places of bytes of a row in the whole tensor."""
        boxes, tensor = self._catalog.boxes, int(self._catalog.boxes.tensor[row])
        dims = len(self._catalog.shape(tensor))
        lengths, offsets = boxes.lengths[row, :dims], boxes.offsets[row, :dims]
        steps = row_major(np.array([self._catalog.shape(tensor)], np.int64))[0]
        element, inside = np.divmod(places, size)
        found = np.zeros(len(places), np.int64)
        for dim in range(dims - 1, -1, -1):
            element, at = np.divmod(element, int(lengths[dim])) if dim else (element, element)
            found += (at + int(offsets[dim])) * int(steps[dim])
        return found * size + inside

    def _memory(self, data: torch.Tensor, unit: int) -> _MemoryOfTensors:
        """Return the memory in which a tensor lies."""
        storage = data.untyped_storage()  # one of NumPy's memory may be a part of another one
        key = (storage.data_ptr(), storage.nbytes(), unit)
        if key not in self._memories:
            self._memories[key] = _MemoryOfTensors(data, unit)
        return self._memories[key]


def _places(element: Int64s, data: torch.Tensor, copies: Copies, number: int) -> tuple[Int64s, Int64s]:
    """Find source elements of a copy in memory.

    Args:
        element: number of each from the copy's first one, in the file.
        data: memory of the copy's target.
        copies: all copies.
        number: number of the copy.

    Returns:
        Number of the place in the memory of each that the copy has, and which these are.
    """
    if copies.flat[number]:
        chosen = np.flatnonzero((element >= 0) & (element < copies.elements[number]))
        return int(data.storage_offset()) + int(copies.target[number]) + element[chosen], chosen
    lengths, strides = copies.lengths[number], copies.source_strides[number]
    rest, inside = element, element >= 0
    offsets = copies.target_offsets[number, : data.ndim].tolist()
    first = sum(offset * stride for offset, stride in zip(offsets, data.stride(), strict=True))
    place = np.full(len(element), int(data.storage_offset()) + first, np.int64)
    for dim in np.argsort(-strides, kind="stable").tolist():
        if lengths[dim] > 1:
            index, rest = np.divmod(rest, int(strides[dim]))
            inside &= index < lengths[dim]
            place += index * int(data.stride(dim))
    chosen = np.flatnonzero(inside & (rest == 0))
    return place[chosen], chosen


class _Holders:
    """Numbers of ranks that hold the changed elements of each tensor, as far as their reports show it.

    Args:
        catalog: catalog of the version, with all rows.
        differences: function that opens a file of differences by its number.
        reports: reports of all ranks.
    """

    def __init__(
        self, catalog: Catalog, differences: Callable[[int], DeltaReader], reports: list[ChangesReport]
    ) -> None:
        self._sums: dict[int, Sums] = {}
        for report in reports:
            for tensor, sums in report.sums.items():
                self._sums[tensor] = self._sums.get(tensor, np.zeros(2, np.uint64)) + np.array(sums, np.uint64)
        self._times: dict[int, set[int | None]] = {}
        rows = _RowsOfFiles(catalog)
        for file, entry in enumerate(catalog.files):
            if is_of_values(entry.name):  # they have no fingerprints
                continue
            reader = differences(file)
            reader.close()
            segments = reader.segments
            counts, held = np.zeros(len(segments), np.int64), np.zeros(len(segments), np.uint64)
            for report in reports:
                if file in report.files:
                    at = report.files.index(file)
                    counts += np.frombuffer(report.counts[at], np.int64)
                    held += np.frombuffer(report.held[at], np.uint64)
            row = rows.holding(file, segments["start"])
            self._note(np.where(row >= 0, catalog.boxes.tensor[row], -1), segments, counts, held)

    def _note(self, tensors: Int64s, segments: NDArray[np.void], counts: Int64s, held: NDArray[np.uint64]) -> None:
        """Note for the tensor of each segment, -1 for none, how many ranks hold its changed elements."""
        times = counts // np.maximum(segments["count"], 1)
        even = (times * segments["count"] == counts) & (times.astype(np.uint64) * segments["held"] == held)
        for n in np.flatnonzero(tensors >= 0).tolist():
            self._times.setdefault(int(tensors[n]), set()).add(int(times[n]) if even[n] else None)

    def times(self, tensor: int) -> int | None:
        """Return how many ranks hold each changed element of a tensor; None if not all are held equally often."""
        found = self._times.get(tensor, {1})
        only = next(iter(found))
        return only if len(found) == 1 else None

    def sums(self, tensor: int) -> list[int]:
        """Return by how much the changes that the ranks hold change the sums of a tensor."""
        return [int(value) for value in self._sums.get(tensor, np.zeros(2, np.uint64))]


def verify(fitted: FittedLoad, ranges: Sequence[int], settings: Settings) -> None:
    """Read ranges of a load's plan, and verify them.

    Raises:
        CorruptCheckpointError: bytes do not match their checksums.
    """
    plan, files = fitted.fit.plan, fitted.checkpoint.files

    def fetch(index: int) -> None:
        start, stop = int(plan.start[index]), int(plan.stop[index])
        files.fetch(int(plan.file[index]), start, stop, [memoryview(bytearray(stop - start))])

    parallel_map(fetch, ranges, files.threads(settings.storage.read_threads), "bytecheckpoint-verify")


class ProvenLoad(Load):
    """A load that reads and verifies all that it wants before it changes anything, so all is read twice."""

    def read(self, fitted: FittedLoad, decision: FitDecision) -> FilledStates:
        """Verify, and read the planned ranges into the live objects. Raises as `Load.read`, before anything is changed."""

        def check() -> tuple[None, bool]:
            with fitted.checkpoint.detect_replacement():
                verify(fitted, range(len(fitted.fit.plan.file)), self._settings)
            return None, False

        self._agree("verify", check, lambda _, __: None, bool, type(None))
        return super().read(fitted, decision)
