"""Verify one copy of a checkpoint: every byte of every file against the catalog, in constant memory, without torch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.engine.file_set import parallel_reads
from bytecheckpoint.engine.view_files import VIEW_INDEX, VIEW_KEY, sum_of, view_names, view_sums
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, StorageError
from bytecheckpoint.planning.coverage import overlapping
from bytecheckpoint.representation.catalog import FOREIGN, VALUES_SLOT, Catalog
from bytecheckpoint.representation.checksums import block_sums
from bytecheckpoint.representation.header_reader import StorageHeader, parse_header
from bytecheckpoint.representation.names import CATALOG_NAME, METRICS_FOLDER, companions, escape, generation_of
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import FileReader, Storage, open_stored
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.tools.progress import Counted, Progress

__all__ = ["NO_VIEW", "VerifyFinding", "VerifyReport", "coverage_findings", "finding_in", "verify_catalog"]

#: Bytes of one read, and of the reads for which a thread opens a file once.
_CHUNK, _SECTION = 8 << 20, 64 << 20
_MAX_NAMED_TENSORS = 20
#: Note on a checkpoint without the view that it should have.
NO_VIEW = (
    "its view for other programs is not there, or not yet: a run that resumes it writes it, `export` one elsewhere"
)


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    """One fault of a checkpoint.

    Attributes:
        kind: "missing" (no such file), "size" (truncated or extended), "header" (its bytes differ or contradict the
            catalog), "block" (checksum mismatch), "sum" (mismatch with a checksum of another program), "unreadable" (the
            storage fails), "hole" (elements that no file stores), "overlap" (elements that are stored twice).
        file: name of the file, "" for holes and overlaps.
        block: the first damaged block, -1 if the finding is not about a block.
        blocks: number of consecutive damaged blocks, 0 if the finding is not about a block.
        tensors: keys of the affected tensors, at most 20.
        tensor_count: number of affected tensors.
        message: the finding in one line.
        copy: "hot" or "durable" for a tiered path (`tier+...`), else "".
    """

    kind: str
    file: str
    block: int
    blocks: int
    tensors: tuple[str, ...]
    tensor_count: int
    message: str
    copy: str = ""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of verifying a checkpoint.

    Attributes:
        path: the checkpoint.
        files: number of storage files that the catalog names.
        bytes_read: bytes read and checked.
        tensors: number of tensors, encoded plain values not counted.
        findings: the faults; empty for a sound checkpoint.
        notes: harmless observations, such as files that do not belong to the checkpoint.
        restorable: True if a load would find sound bytes for every tensor, if need be in another copy.
        verdict: `restorable` in words, if a tiered path has findings.
    """

    path: str
    files: int
    bytes_read: int
    tensors: int
    findings: tuple[VerifyFinding, ...]
    notes: tuple[str, ...]
    restorable: bool = True
    verdict: str = ""

    @property
    def ok(self) -> bool:
        """Return whether there are no findings."""
        return not self.findings


def verify_catalog(
    storage: Storage, catalog: Catalog, progress: Progress | None = None, *, threads: int = 0
) -> VerifyReport:
    """Check every file of a storage that `catalog` names: size, header, block checksums, and that every tensor is complete.

    The other arguments are those of `verify`.
    """
    counted = Counted(sum(file.size for file in catalog.files), progress)
    count = threads or settings().storage.read_threads or parallel_reads(storage, catalog)
    findings = (*_FileCheck(storage, catalog, counted).run(count), *coverage_findings(catalog))
    notes, of_view = _notes(storage, catalog), _view_findings(storage, catalog)
    return VerifyReport(
        storage.url, len(catalog.files), counted.done, catalog.count, (*findings, *of_view), notes, not findings
    )


class _FileCheck:
    """One pass over the files of a checkpoint, several ranges at a time."""

    def __init__(self, storage: Storage, catalog: Catalog, counted: Counted) -> None:
        self._storage = with_time_limits(storage)
        self._catalog = catalog
        self._counted = counted
        self._findings: dict[VerifyFinding, tuple[int, int]] = {}  # the file, and the block or -1
        self._damaged: list[tuple[int, int]] = []  # file, block

    def run(self, threads: int) -> list[VerifyFinding]:
        """Check all files; return the findings in order of file and block."""
        sections: list[tuple[int, int]] = []
        for number, file in enumerate(self._catalog.files):
            length = max(file.size - file.data_offset, 1) if file.block_bytes else 1
            sections += [(number, start) for start in range(0, length, _whole_blocks(_SECTION, file.block_bytes))]
        parallel_map(self._check, sections, threads, "bytecheckpoint-verify")
        self._report_blocks(sorted(self._damaged))
        return sorted(self._findings, key=lambda finding: self._findings[finding])

    def _check(self, section: tuple[int, int]) -> None:
        """Check a section of a file: its number, and a first byte in its data; the first section also has the header."""
        number, start = section
        file = self._catalog.files[number]
        try:
            reader = open_stored(self._storage, file)
        except FileNotFoundError:
            self._report(number, "missing", f"{file.name} is missing", 0, file.size)
            return
        except CheckpointError as error:
            kind = "header" if isinstance(error, CorruptCheckpointError) else "unreadable"  # adopted, and replaced
            self._report(number, kind, str(error), 0, file.size)
            return
        with contextlib.closing(reader):
            if reader.size != file.size:
                text = f"{file.name} has {reader.size} bytes, the catalog says {file.size}"
                self._report(number, "size", text, reader.size, file.size)
            if start or self._has_header(number, reader):
                self._check_blocks(number, start, reader)

    def _has_header(self, number: int, reader: FileReader) -> bool:
        """Check the header of a file; return False if it cannot be read."""
        file = self._catalog.files[number]
        try:
            buffer = np.empty(min(file.data_offset, reader.size), np.uint8)
            got = reader.read_into(0, [memoryview(buffer)])
        except (StorageError, MemoryError) as error:
            self._report(number, "unreadable", str(error), 0, file.size)
            return False
        if text := self._header_problem(number, buffer[:got]):
            self._report(number, "header", f"{file.name}: {text}", 0, file.data_offset)
        self._counted.add(got)
        return True

    def _check_blocks(self, number: int, start: int, reader: FileReader) -> None:
        """Check the blocks of a file from one on, up to the end of its section."""
        file = self._catalog.files[number]
        if not file.block_bytes:
            return
        stop = min(start + _whole_blocks(_SECTION, file.block_bytes), min(file.size, reader.size) - file.data_offset)
        step = _whole_blocks(_CHUNK, file.block_bytes)
        buffer = np.empty(max(min(step, stop - start), 0), np.uint8)
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            try:
                got = reader.read_into(file.data_offset + begin, [memoryview(buffer)[: end - begin]])
            except StorageError as error:
                self._report(number, "unreadable", str(error), file.data_offset + begin, file.data_offset + end)
                buffer = np.empty_like(buffer)  # a read that timed out may still fill the other one later
                continue
            first = begin // file.block_bytes
            sums = block_sums(memoryview(buffer)[:got], file.block_bytes)
            wrong = np.flatnonzero(sums != self._catalog.sums(number)[first : first + len(sums)])
            self._damaged += [(number, first + block) for block in wrong.tolist()]
            self._counted.add(got)

    def _header_problem(self, number: int, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> str:
        file = self._catalog.files[number]
        if file.format == FOREIGN:
            return ""  # its header is a part of the data
        if len(data) < file.data_offset:
            return "it ends inside its header"
        if xxhash.xxh3_64_intdigest(data) != file.header_sum:
            return "checksum mismatch in its header"
        try:
            header = parse_header(data.tobytes(), file=file.name)
        except CheckpointError as error:
            return str(error)
        return _disagreement(self._catalog, number, header)

    def _report(self, number: int, kind: str, text: str, low: int, high: int, block: int = -1, blocks: int = 0) -> None:
        finding = finding_in(self._catalog, number, kind, text, (low, high), (block, blocks))
        self._findings[finding] = number, block

    def _report_blocks(self, damaged: list[tuple[int, int]]) -> None:
        """Report damaged blocks, given as ascending (file, block); consecutive ones form one finding."""
        for _, run in itertools.groupby(enumerate(damaged), lambda item: (item[1][0], item[1][1] - item[0])):
            blocks = [place for _, place in run]
            number, first = blocks[0]
            file = self._catalog.files[number]
            low = file.data_offset + first * file.block_bytes
            high = min(low + len(blocks) * file.block_bytes, file.size)
            named = f"block {first}" if len(blocks) == 1 else f"blocks {first} to {first + len(blocks) - 1}"
            text = f"checksum mismatch in {file.name}, {named} (bytes {low} to {high})"
            self._report(number, "block", text, low, high, first, len(blocks))


def _whole_blocks(nbytes: int, block_bytes: int) -> int:
    """Return the bytes of the blocks that `nbytes` have room for, at least one; of a file without blocks, `nbytes`."""
    return max(nbytes // block_bytes, 1) * block_bytes if block_bytes else nbytes


def finding_in(
    catalog: Catalog, number: int, kind: str, text: str, span: tuple[int, int], blocks: tuple[int, int] = (-1, 0)
) -> VerifyFinding:
    """Return a finding about bytes of a file, with the tensors that lie there.

    Args:
        catalog: catalog of the checkpoint.
        number: position of the file in the catalog.
        kind: kind of the finding.
        text: the finding in words, without the tensors.
        span: first byte, and the end of the bytes.
        blocks: the first damaged block, and how many there are.
    """
    rows = (catalog.file == number) & (catalog.byte_offset < span[1])
    rows &= catalog.byte_offset + catalog.byte_length > span[0]
    touched = np.unique(catalog.boxes.tensor[rows])
    tensors = tuple(_display_key(catalog, int(t)) for t in touched[:_MAX_NAMED_TENSORS])
    if tensors:
        more = f" and {len(touched) - 3} more" if len(touched) > 3 else ""
        text += f"; touches {', '.join(tensors[:3])}{more}"
    return VerifyFinding(kind, catalog.files[number].name, *blocks, tensors, len(touched), text)


def _display_key(catalog: Catalog, tensor: int) -> str:
    """Return a tensor's key for messages, with the owning rank if each rank has its own."""
    name = catalog.key(tensor)
    key = f"the plain values of {name.state}" if name.slot == VALUES_SLOT else str(name)
    owner = int(catalog.owner[tensor])
    return key if owner < 0 else f"{key} (rank {owner}'s)"


def _disagreement(catalog: Catalog, number: int, header: StorageHeader) -> str:
    """Return how a file's header contradicts the catalog, or "" if both agree."""
    file = catalog.files[number]
    if header.foreign:
        return ""  # a foreign header says nothing about boxes
    facts = (header.data_offset, header.data_offset + header.data_length, header.block_bytes, header.generation)
    if facts != (file.data_offset, file.size, file.block_bytes, file.generation):
        return "its header and the catalog differ about its layout"
    if not np.array_equal(header.sums, catalog.sums(number)):
        return "its header and the catalog have different checksums"
    rows = np.flatnonzero(catalog.file == number)
    listed = []
    for row in rows.tolist():
        tensor = int(catalog.boxes.tensor[row])
        dims = int(catalog.ndims[tensor])
        box = (*catalog.boxes.offsets[row, :dims].tolist(), *catalog.boxes.lengths[row, :dims].tolist())
        place = (int(catalog.byte_offset[row]) - file.data_offset, int(catalog.byte_length[row]))
        listed.append(
            (tuple(map(escape, catalog.key(tensor))), catalog.dtype[tensor], catalog.shape(tensor), box, place)
        )
    held = [
        (tuple(map(escape, e.key)), e.dtype, e.global_shape, (*e.offsets, *e.lengths), (e.byte_offset, e.byte_length))
        for e in header.entries
    ]
    if sorted(listed) != sorted(held):
        return "its header and the catalog describe different tensors"
    return ""


def coverage_findings(catalog: Catalog) -> Iterator[VerifyFinding]:
    """Yield a finding for each tensor of which a part is missing or stored twice."""
    whole = np.prod(catalog.shapes, axis=1, dtype=np.float64)
    have = np.bincount(catalog.boxes.tensor, catalog.boxes.volumes().astype(np.float64), catalog.count)
    pairs = overlapping(catalog.boxes)
    twice = np.unique(catalog.boxes.tensor[pairs.left])
    for tensor in twice.tolist():
        name = _display_key(catalog, tensor)
        yield VerifyFinding("overlap", "", -1, 0, (name,), 1, f"parts of {name} are stored at two places")
    short = np.setdiff1d(np.flatnonzero(have != whole), twice)
    for tensor in short.tolist():
        name = _display_key(catalog, tensor)
        yield VerifyFinding(
            "hole", "", -1, 0, (name,), 1, f"{name} is incomplete: {whole[tensor] - have[tensor]:.0f} elements lack"
        )


def _view_findings(storage: Storage, catalog: Catalog) -> list[VerifyFinding]:
    """Check the files of the view for other programs; a checkpoint is restorable without it."""
    findings: list[VerifyFinding] = []

    def report(kind: str, name: str, text: str) -> None:
        findings.append(VerifyFinding(kind, name, -1, 0, (), 0, f"{text}: other programs read it, no load does"))

    try:
        sums = view_sums(storage, catalog.info) or {}
    except CheckpointError as error:
        report("unreadable", VIEW_INDEX, str(error))
        return findings
    for name, known in sums.items():
        try:
            if sum_of(storage, name) != known:
                report("sum", name, f"{name} of the view does not have its bytes")
        except FileNotFoundError:
            report("missing", name, f"{name} of the view is missing")
        except CheckpointError as error:
            report("unreadable", name, str(error))
    return findings


def _notes(storage: Storage, catalog: Catalog) -> tuple[str, ...]:
    named = {file.name for file in catalog.files}
    named |= {CATALOG_NAME, *companions(named)}
    try:
        present = dict(storage.list())
        stray = [(name, size) for name, size in present.items() if name not in named]
    except StorageError as error:
        return (f"the folder cannot be listed: {error}",)
    notes = [
        f"{file.name} has no checksums: only its size was checked" for file in catalog.files if not file.block_bytes
    ]
    view = view_names(catalog.info, present)
    if VIEW_KEY in catalog.info and VIEW_INDEX not in view and "moved_to" not in catalog.info:
        notes.append(NO_VIEW)
    for name, size in stray:
        if name.startswith(f"{METRICS_FOLDER}/") or name in view:
            continue
        whose = (
            "left by a save that did not commit; the next save here removes it" if generation_of(name) else "not ours"
        )
        notes.append(f"{name} ({size} bytes) does not belong to the checkpoint: {whose}")
    return tuple(notes)
