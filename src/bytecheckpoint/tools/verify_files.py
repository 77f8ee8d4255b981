"""Verify one copy of a checkpoint: every byte of every file against the catalog, in constant memory, without torch."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import xxhash

from bytecheckpoint.engine.file_set import parallel_reads
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, StorageError
from bytecheckpoint.planning.coverage import overlapping
from bytecheckpoint.representation.catalog import FOREIGN, VALUES_SLOT, Catalog
from bytecheckpoint.representation.checksums import block_sums
from bytecheckpoint.representation.header_reader import StorageHeader, parse_header
from bytecheckpoint.representation.names import CATALOG_NAME, METRICS_FOLDER, escape, generation_of
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import FileReader, Storage, open_stored
from bytecheckpoint.storage.time_limits import with_time_limits

__all__ = ["Progress", "VerifyFinding", "VerifyReport", "finding_in", "verify_catalog"]

_CHUNK = 8 << 20
_MAX_PENDING = 64
_MAX_NAMED_TENSORS = 20


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


Progress = Callable[[int, int], None]


def verify_catalog(
    storage: Storage, catalog: Catalog, progress: Progress | None = None, *, threads: int = 0
) -> VerifyReport:
    """Check every file that `catalog` names: size, header, block checksums, and that every tensor is complete.

    Args:
        storage: storage of the files.
        catalog: the catalog to check against.
        progress: function of (bytes checked, bytes in all), called by one thread at a time.
        threads: concurrent reads; 0 uses as many as a load.
    """
    check = _FileCheck(storage, catalog, progress)
    try:
        found = check.run(threads or settings().storage.read_threads or parallel_reads(storage, catalog))
    finally:
        check.close()
    findings = (*found, *_coverage(catalog))
    notes = _notes(storage, catalog)
    return VerifyReport(storage.url, len(catalog.files), check.done, catalog.count, findings, notes, not findings)


class _FileCheck:
    """One pass over the files of a checkpoint, several ranges at a time."""

    def __init__(self, storage: Storage, catalog: Catalog, progress: Progress | None) -> None:
        self._storage = with_time_limits(storage)
        self._catalog = catalog
        self._progress = progress
        self._total = sum(f.size for f in catalog.files)
        self._lock = threading.Lock()
        self._local = threading.local()
        self._findings: list[tuple[int, int, VerifyFinding]] = []  # (file, block, finding)
        self._open: dict[int, tuple[FileReader, int]] = {}  # file -> (reader, ranges left)
        self.done = 0

    def close(self) -> None:
        for reader, _ in self._open.values():
            reader.close()

    def run(self, threads: int) -> list[VerifyFinding]:
        """Check all files; return the findings in order of file and block."""
        damaged: list[tuple[int, int]] = []  # (file, block)
        with ThreadPoolExecutor(threads, thread_name_prefix="bytecheckpoint-verify") as pool:
            waiting: set[Future[list[tuple[int, int]]]] = set()
            try:
                for task in self._ranges():
                    waiting.add(pool.submit(self._check_range, *task))
                    if len(waiting) >= _MAX_PENDING:
                        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                        for future in done:
                            damaged += future.result()
                for future in waiting:
                    damaged += future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        self._report_blocks(sorted(damaged))
        return [finding for _, _, finding in sorted(self._findings, key=lambda item: item[:2])]

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield (file, start, stop) of the ranges of all data sections. Each range consists of whole blocks."""
        for number, file in enumerate(self._catalog.files):
            reader = self._open_file(number)
            if reader is None:
                continue
            length = min(file.size, reader.size) - file.data_offset
            step = max(_CHUNK // file.block_bytes, 1) * file.block_bytes if file.block_bytes else 0
            starts = range(0, max(length, 0), step) if step else range(0)
            if not starts:
                reader.close()
                continue
            with self._lock:
                self._open[number] = (reader, len(starts))
            for start in starts:
                yield number, start, min(start + step, length)

    def _open_file(self, number: int) -> FileReader | None:
        """Open a file, and check its size and header. Return None for a file that cannot be read."""
        file = self._catalog.files[number]
        try:
            reader = open_stored(self._storage, file)
        except FileNotFoundError:
            self._report(number, "missing", f"{file.name} is missing", 0, file.size)
            return None
        except CheckpointError as error:
            kind = "header" if isinstance(error, CorruptCheckpointError) else "unreadable"  # adopted, and replaced
            self._report(number, kind, str(error), 0, file.size)
            return None
        if reader.size != file.size:
            text = f"{file.name} has {reader.size} bytes, the catalog says {file.size}"
            self._report(number, "size", text, reader.size, file.size)
        try:
            buffer = np.empty(min(file.data_offset, reader.size), np.uint8)
            got = reader.read_into(0, [memoryview(buffer)])
        except (StorageError, MemoryError) as error:
            self._report(number, "unreadable", str(error), 0, file.size)
            reader.close()
            return None
        text = self._header_problem(number, buffer[:got])
        if text:
            self._report(number, "header", f"{file.name}: {text}", 0, file.data_offset)
        self._advance(got)
        return reader

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

    def _check_range(self, number: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return (file, block) of the blocks that do not match their checksums."""
        file = self._catalog.files[number]
        size, damaged = stop - start, []
        if getattr(self._local, "buffer", None) is None or len(self._local.buffer) < size:
            self._local.buffer = np.empty(size, np.uint8)
        view = memoryview(self._local.buffer)[:size]
        reader, _ = self._open[number]
        try:
            got = reader.read_into(file.data_offset + start, [view])
        except StorageError as error:
            self._report(number, "unreadable", str(error), file.data_offset + start, file.data_offset + stop)
            self._local.buffer = None  # a read that timed out may still fill it later
            got = 0
        else:
            first = start // file.block_bytes
            sums = block_sums(view[:got], file.block_bytes)
            wrong = np.flatnonzero(sums != self._catalog.sums(number)[first : first + len(sums)])
            damaged = [(number, first + block) for block in wrong.tolist()]
        with self._lock:
            left = self._open[number][1] - 1
            self._open[number] = (reader, left)
            if left == 0:
                del self._open[number]
                reader.close()
        self._advance(got)
        return damaged

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self._total)

    def _report(self, number: int, kind: str, text: str, low: int, high: int, block: int = -1, blocks: int = 0) -> None:
        finding = finding_in(self._catalog, number, kind, text, (low, high), (block, blocks))
        with self._lock:
            self._findings.append((number, block, finding))

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


def _coverage(catalog: Catalog) -> Iterator[VerifyFinding]:
    """Yield a finding for each tensor of which a part is missing or stored twice."""
    whole = np.prod(catalog.shapes, axis=1, dtype=np.float64)
    have = np.zeros(catalog.count)
    np.add.at(have, catalog.boxes.tensor, catalog.boxes.volumes().astype(np.float64))
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


def _notes(storage: Storage, catalog: Catalog) -> tuple[str, ...]:
    named = {file.name for file in catalog.files} | {CATALOG_NAME}
    try:
        stray = [(name, size) for name, size in storage.list() if name not in named]
    except StorageError as error:
        return (f"the folder cannot be listed: {error}",)
    notes = [
        f"{file.name} has no checksums: only its size was checked" for file in catalog.files if not file.block_bytes
    ]
    for name, size in stray:
        if name.startswith(f"{METRICS_FOLDER}/"):
            continue
        whose = (
            "left by a save that did not commit; the next save here removes it" if generation_of(name) else "not ours"
        )
        notes.append(f"{name} ({size} bytes) does not belong to the checkpoint: {whose}")
    return tuple(notes)
