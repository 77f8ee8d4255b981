"""Lay out one rank's storage files: places of shards and values in files and in the image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from bytecheckpoint.engine.staging import ImageFile
from bytecheckpoint.engine.writing import WrittenSums
from bytecheckpoint.planning.file_order import file_bounds
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.checksums import block_bytes
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.fingerprints import StoredBox
from bytecheckpoint.representation.header_writer import HeaderTemplate, build_header
from bytecheckpoint.representation.names import escape, file_stem, storage_file_name, values_file_name
from bytecheckpoint.representation.shards import LiveShard
from bytecheckpoint.representation.storage_file import StoredEntry, StoredFragments, ViewTensor
from bytecheckpoint.saving.capture import Value
from bytecheckpoint.saving.messages import FileRecord

__all__ = [
    "FileOrigin",
    "PlannedFile",
    "end_of",
    "lay_out_names",
    "lay_out_rows",
    "lay_out_values",
    "moved",
    "moved_up",
    "place_values",
    "record_of",
]

_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class FileOrigin:
    """The origin of storage files, which their names and headers state.

    Attributes:
        rank: the rank that writes them.
        world_size: number of ranks.
        generation: generation of the save, which no other save has.
        suffix: suffix of their names.
    """

    rank: int
    world_size: int
    generation: str
    suffix: str = "safetensors"

    def file_name(self, state: str, part: int, *, values: bool) -> str:
        """Name a file of planned shards or of values."""
        name = values_file_name if values else storage_file_name
        return name(state, self.rank, self.generation, part, self.suffix)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One storage file of one rank, before it is written.

    Attributes:
        state: name of the state that it holds.
        part: part number; files of values are counted separately.
        values: True if it holds values, not planned shards.
        frozen: True if it holds frozen parameters, so that a file of an earlier save may take its place.
        entries: planned shards in it, by their place.
        header: header without generation and sums.
        image: place of the data section in the image, with the tensors' places.
    """

    state: str
    part: int
    values: bool
    header: HeaderTemplate
    image: ImageFile
    frozen: bool = False
    entries: Sequence[StoredEntry | StoredFragments] = ()

    def boxes(self) -> tuple[StoredBox, ...]:
        """Return the boxes of the planned shards by their place, whose fingerprints make those of the tensors."""
        single = (e.entries() if isinstance(e, StoredFragments) else (e,) for e in self.entries)
        return tuple(
            StoredBox(e.byte_offset, e.byte_length, itemsize(e.dtype), e.global_shape, e.offsets, e.lengths)
            for entries in single
            for e in entries
        )


def lay_out_rows(
    shards: Sequence[LiveShard],
    rows: Int64s,
    origin: FileOrigin,
    *,
    incremental: bool = False,
    siblings: Callable[[Sequence[str]], Sequence[str]] = list,
    named: Sequence[ViewTensor] = (),
) -> tuple[list[PlannedFile], list[tuple[int, int, int]]]:
    """Lay out the files of one rank's part of a plan.

    Args:
        shards: shards of the rank.
        rows: numbers of their boxes, in the order of the plan.
        origin: origin of the files. Each header gets the generation of its own save when it is rendered.
        incremental: True if frozen parameters lie in files of their own.
        siblings: function that returns `names.file_stem` of all files of the rank, given those of these files.
        named: tensors of another program that the last rows make up, in order.

    Returns:
        The files, and the sources of their tensors (`RankImage.sources`).
    """
    files: list[PlannedFile] = []
    sources: list[tuple[int, int, int]] = []
    position = 0
    ends = np.cumsum([shard.rows for shard in shards], dtype=np.int64)
    shard_of = np.searchsorted(ends, rows, "right")
    states = list(dict.fromkeys(shard.key.state for shard in shards))
    codes = {state: code for code, state in enumerate(states)}
    state_of = np.fromiter((codes[shard.key.state] for shard in shards), np.int64, len(shards))
    frozen = np.fromiter((incremental and shard.frozen for shard in shards), bool, len(shards))[shard_of]
    apart, inside, begins_named = frozen.copy(), np.zeros(len(rows), bool), _begins(named, len(rows))
    if named:
        apart[begins_named[0] :] = True
        inside[begins_named[0] :] = True
        inside[begins_named] = False
    bounds = file_bounds(state_of[shard_of], apart, inside)
    # Boxes of one shard that follow each other become one entry of the image.
    new = np.ones(len(rows), bool)
    new[1:] = (np.diff(rows) != 1) | (np.diff(shard_of) != 0)
    new[[first for _, _, first, _ in bounds]] = True
    starts = np.flatnonzero(new)
    counts = np.diff(np.append(starts, len(rows))).tolist()
    numbers = shard_of[starts].tolist()
    begins = (rows - ends[shard_of])[starts].tolist()  # counted from the shard's end: negative
    stems = [file_stem(origin.file_name(states[state], part, values=False)) for state, part, _, _ in bounds]
    all_stems = siblings(stems)
    adoptable = [stem for stem, (_, _, first, _) in zip(stems, bounds, strict=True) if frozen[first]]
    for state, part, first, last in bounds:
        entries: list[StoredEntry | StoredFragments] = []
        sizes = []
        offset = 0
        begin = len(sources)
        for k in range(*np.searchsorted(starts, [first, last]).tolist()):
            shard = shards[numbers[k]]
            low = begins[k] + shard.rows
            entry = _entry(shard, low, low + counts[k], offset)
            entries.append(entry)
            sources.append((numbers[k], low, low + counts[k]))
            sizes.append(entry.byte_length)
            offset += entry.byte_length
        section = _section(position, sizes, list(range(begin, len(sources))))
        held = slice(*np.searchsorted(begins_named, [first, last]).tolist())
        header = _header(entries, states[state], origin, all_stems, adoptable, named[held])
        files.append(PlannedFile(states[state], part, False, header, section, bool(frozen[first]), entries))
        position = end_of(section)
    return files, sources


def _begins(named: Sequence[ViewTensor], rows: int) -> Int64s:
    """Return the first row of each of these tensors, which the last of so many rows make up."""
    counts = np.array([tensor.entries for tensor in named], np.int64)
    return rows - int(counts.sum()) + np.cumsum(counts) - counts


def _entry(shard: LiveShard, first: int, end: int, offset: int) -> StoredEntry | StoredFragments:
    """Describe boxes `first` to `end` of a shard, which lie at byte `offset` of a data section."""
    size, found = shard.data.element_size(), shard.fragments
    if found is None:
        return StoredEntry(
            shard.key,
            shard.dtype,
            shard.global_shape,
            shard.offsets,
            shard.lengths,
            shard.aliases,
            shard.requires_grad,
            -1,
            offset,
            shard.data.numel() * size,
        )
    return StoredFragments(
        shard.key,
        shard.dtype,
        shard.global_shape,
        found.offsets[first:end],
        found.lengths[first:end],
        shard.aliases,
        shard.requires_grad,
        offset,
        found.counts[first:end] * size,
    )


def lay_out_values(
    values: Sequence[Value],
    origin: FileOrigin,
    *,
    first: int,
    position: int,
    part: int,
    siblings: Sequence[str] = (),
    adoptable: Sequence[str] = (),
    pieces: bool = False,
) -> tuple[list[PlannedFile], list[tuple[int, int]]]:
    """Lay out the files of the values that one rank writes in one save.

    Args:
        values: values to write.
        origin: origin of the files.
        first: index of the first value among the image's tensors.
        position: byte of the image where the values begin; a multiple of 4096.
        part: part number of the files.
        siblings: `names.file_stem` of the rank's other files.
        adoptable: `names.file_stem` of those of them that may be files of earlier saves.
        pieces: True for pieces of providers, whose states have no planned shards: their files get the names of those.

    Returns:
        The files; for each value its place: (index of its file, byte offset in the data section).
    """
    files: list[PlannedFile] = []
    places: dict[int, tuple[int, int]] = {}
    by_state: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        by_state.setdefault(value.key.state, []).append(index)
    stems = [*siblings, *(file_stem(origin.file_name(state, part, values=not pieces)) for state in by_state)]
    for state, members in by_state.items():
        members.sort(key=lambda i: (-values[i].data.element_size(), values[i].dtype, i))
        entries = []
        offset = 0
        for i in members:
            value = values[i]
            shape = tuple(value.data.shape)
            entries.append(
                StoredEntry(
                    value.key,
                    value.dtype,
                    shape,
                    (0,) * len(shape),
                    shape,
                    (),
                    False,
                    origin.rank,
                    offset,
                    value.nbytes,
                )
            )
            places[i] = (len(files), offset)
            offset += value.nbytes
        sizes = [values[i].nbytes for i in members]
        section = _section(position, sizes, [first + i for i in members])
        header = _header(entries, state, origin, stems, adoptable)
        files.append(PlannedFile(state, part, True, header, section))
        position = end_of(section)
    return files, [places[i] for i in range(len(values))]


def lay_out_names(
    state: str,
    origin: FileOrigin,
    siblings: Sequence[str],
    adoptable: Sequence[str],
    *,
    part: int = 0,
    position: int = 0,
    values: bool = True,
) -> PlannedFile:
    """Lay out a file without tensors, where no other is written: its header names the other files of the rank.

    Args:
        state: name of a state of the rank.
        origin: origin of the file.
        siblings: `names.file_stem` of all files of the rank.
        adoptable: `names.file_stem` of the adopted ones.
        part: part number of the file.
        position: byte of the image where it lies.
        values: True for a file in the place of one of values, False in the place of one of planned shards.
    """
    return PlannedFile(state, part, values, _header([], state, origin, siblings, adoptable), _section(position, [], []))


def moved(section: ImageFile, shift: int) -> ImageFile:
    """Return a data section that lies `shift` bytes further on."""
    return replace(section, start=section.start + shift)


def moved_up(files: Sequence[PlannedFile]) -> list[PlannedFile]:
    """Return files whose data sections follow each other in an image from its start."""
    position, moved = 0, []
    for file in files:
        image = replace(file.image, start=position)
        moved.append(replace(file, image=image))
        position = end_of(image)
    return moved


def place_values(values: Sequence[Value], position: int) -> ImageFile:
    """Place values one after the other from byte `position` of an image that has no other tensors."""
    return _section(position, [value.nbytes for value in values], list(range(len(values))))


def record_of(name: str, file: PlannedFile, header: bytes, sums: WrittenSums) -> FileRecord:
    """Describe a finished file, given its name, its header and its sums."""
    return FileRecord(
        name=name,
        state=escape(file.state),
        part=file.part,
        values=file.values,
        size=file.header.data_offset + file.header.data_length,
        data_offset=file.header.data_offset,
        header_sum=xxhash.xxh3_64_intdigest(header),
        block_bytes=file.header.block_bytes,
        sums=(sums.blocks.tobytes(), sums.boxes.tobytes()),
    )


def end_of(section: ImageFile) -> int:
    """Return where the image's next section begins: on the first boundary of 4096 bytes after `section`."""
    return section.start + -(-section.nbytes // _ALIGN) * _ALIGN


def _section(start: int, sizes: Sequence[int], shards: list[int]) -> ImageFile:
    """Place tensors of these sizes one after the other from byte `start` of the image."""
    lengths = np.asarray(sizes, np.int64)
    total = int(lengths.sum())
    return ImageFile(start, total, shards, np.cumsum(lengths) - lengths, lengths)


def _header(
    entries: Sequence[StoredEntry | StoredFragments],
    state: str,
    origin: FileOrigin,
    siblings: Sequence[str],
    adoptable: Sequence[str],
    named: Sequence[ViewTensor] = (),
) -> HeaderTemplate:
    """Build the header of a file whose data section `entries` tile."""
    length = entries[-1].byte_offset + entries[-1].byte_length if entries else 0
    return build_header(
        entries,
        state=state,
        rank=origin.rank,
        world_size=origin.world_size,
        generation=origin.generation,
        data_length=length,
        block_bytes=block_bytes(length),
        siblings=siblings,
        adoptable=adoptable,
        named=named,
    )
