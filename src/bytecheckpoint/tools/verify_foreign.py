"""Verify a checkpoint of another program by the sums that its format has, in bounded memory, without torch.

These are the CRC32s of zip members, the sha256s of Megatron's integrity.json, and the sha256s that a download from
the hub of Hugging Face has left.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.engine.file_set import parallel_reads
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from bytecheckpoint.formats.archives import locate, read_directory
from bytecheckpoint.formats.files import RangedFile, open_file
from bytecheckpoint.formats.foreign_storage import ForeignStorage
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.names import VALUES_NAME
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.posix.storage import LocalStorage
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.storage.wrappers import unwrapped
from bytecheckpoint.tools.progress import Counted, Progress
from bytecheckpoint.tools.verify_files import VerifyFinding, VerifyReport, coverage_findings, finding_in

__all__ = ["verify_foreign"]

_CHUNK: Final = 8 << 20
#: Bytes of the ranges that one thread checks in one opening of a file, unless one range is longer.
_TASK_BYTES: Final = 64 << 20
_INTEGRITY: Final = "integrity.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
#: Records of `hf download --local-dir`: the revision, the digest and the time of the download, in lines.
_RECORDS: Final = ".cache/huggingface/download"


class _Integrity(msgspec.Struct):
    """The manifest of Megatron: sums of files by their names."""

    files: dict[str, str]
    algorithm: str = "sha256"


@dataclass
class _Task:
    """Checks of one file by one thread.

    Attributes:
        file: name of the file.
        sha256: digest of the whole file; "" for none.
        ranges: first byte, length and CRC32 of ranges; -1 for one that is a zip file with CRC32s of its own.
        nbytes: bytes to check.
        decoded: True for contents that are compressed: all of them are decoded, which notices most damage.
    """

    file: str
    sha256: str = ""
    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    decoded: bool = False
    nbytes: int = 0


def verify_foreign(storage: ForeignStorage, progress: Progress | None = None, *, threads: int = 0) -> VerifyReport:
    """Check the files of a checkpoint of another program against all sums that they have; arguments as for `verify`.

    Raises:
        CheckpointError: the files cannot be read as a checkpoint.
    """
    catalog, _ = read_catalog(storage)
    counted = Counted(0, progress)
    check = _ForeignCheck(storage, catalog, counted)
    count = threads or settings().storage.read_threads or parallel_reads(storage, catalog)
    sizes = {file.name: file.size for file in catalog.files}
    tasks = [_Task(name, nbytes=sizes[name], decoded=True) for name in storage.decoded()]
    tasks += [*check.of_whole_files(), *check.of_ranges(lambda name: name not in check.digests)]
    found = check.run(tasks, count)
    if damaged := {finding.file for finding in found if finding.kind == "sum"} & check.digests.keys():
        found += check.run(check.of_ranges(damaged.__contains__), count)  # these show which tensors
    found.sort(key=lambda finding: finding.file)
    found += coverage_findings(catalog)
    names = [file.name for file in catalog.files if not file.name.startswith(VALUES_NAME)]
    notes = (*storage.notes(), *(f"{name}: {check.sums_of(name)}" for name in sorted({*names, *check.digests})))
    tensors = catalog.summary().tensors
    return VerifyReport(storage.url, len(names), counted.done, tensors, tuple(found), notes, not found)


class _ForeignCheck:
    """One pass over the sums of a checkpoint.

    Attributes:
        digests: sha256 of whole files and its origin, by name.
    """

    def __init__(self, storage: ForeignStorage, catalog: Catalog, counted: Counted) -> None:
        self._storage = with_time_limits(storage)
        self._catalog = catalog
        self._numbers = {file.name: number for number, file in enumerate(catalog.files)}
        self._sums = storage.sums()
        self._counted = counted
        self.digests = {**_of_hub(storage, catalog), **_manifest(storage, catalog)}

    def sums_of(self, name: str) -> str:
        """Return which sums a file has, in words."""
        if name in self.digests:
            return f"its sha256 {self.digests[name][1]} was checked"
        number = self._numbers[name]
        ranges = int((self._sums[:, 0] == number).sum())
        return (
            f"the CRC32 of {ranges} of its parts was checked" if ranges else "no checksums; only its size was checked"
        )

    def of_whole_files(self) -> Iterator[_Task]:
        """Yield the checks of files by their sha256."""
        sizes = dict(self._storage.list())
        for name, (digest, _) in self.digests.items():
            yield _Task(name, digest, nbytes=sizes.get(name, 0))

    def of_ranges(self, wanted: Callable[[str], bool]) -> Iterator[_Task]:
        """Yield the checks of ranges of some files by their CRC32."""
        task = _Task("")
        for number, offset, length, crc in sorted(self._sums.tolist()):
            name = self._catalog.files[number].name
            if not wanted(name):
                continue
            if name != task.file or task.nbytes + length > _TASK_BYTES:
                if task.ranges:
                    yield task
                task = _Task(name)
            task.ranges.append((offset, length, crc))
            task.nbytes += length
        if task.ranges:
            yield task

    def run(self, tasks: Iterator[_Task] | list[_Task], threads: int) -> list[VerifyFinding]:
        """Check files in parallel; return the findings."""
        tasks = list(tasks)
        self._counted.expect(sum(task.nbytes for task in tasks))
        found = parallel_map(self._check, tasks, threads, "bytecheckpoint-verify")
        return [finding for findings in found for finding in findings]

    def _check(self, task: _Task) -> list[VerifyFinding]:
        try:
            with open_file(self._storage, task.file) as file:
                number = self._numbers.get(task.file)
                if number is not None and file.size != (size := self._catalog.files[number].size):
                    text = f"{task.file} has {file.size} bytes, and had {size} a moment ago"
                    return [self._finding(task, "size", text, 0, size)]
                return list(self._mismatches(task, file))
        except CheckpointNotFoundError:
            return [self._finding(task, "missing", f"{task.file} is missing", 0, 1 << 62)]
        except CorruptCheckpointError as error:
            kind, high = ("sum", 1 << 62) if task.decoded else ("header", 0)
            return [self._finding(task, kind, str(error), 0, high)]
        except CheckpointError as error:
            return [self._finding(task, "unreadable", str(error), 0, 1 << 62)]

    def _mismatches(self, task: _Task, file: RangedFile) -> Iterator[VerifyFinding]:
        if task.sha256:
            digest = hashlib.sha256()
            for chunk in self._chunks(file):
                digest.update(chunk)
            if digest.hexdigest() != task.sha256:
                where = self.digests[task.file][1]
                yield self._finding(task, "sum", f"{task.file} differs from its sha256 {where}", 0, file.size)
        for _ in self._chunks(file) if task.decoded else ():
            pass
        for offset, length, crc in task.ranges:
            part = file.part(offset, length)
            found: list[tuple[int, int, int | None]] = [(0, length, crc)]
            if crc < 0:
                directory = read_directory(part)
                found = [(m.offset, m.size, m.crc) for m in locate(part, directory.values()).values()]
                self._counted.add(length - sum(size for _, size, _ in found))
            for begin, size, expected in found:
                value = 0
                for chunk in self._chunks(part.part(begin, size)):
                    value = zlib.crc32(chunk, value)
                if size and value != expected:
                    low = offset + begin
                    text = f"CRC32 mismatch in {task.file} (bytes {low} to {low + size})"
                    yield self._finding(task, "sum", text, low, low + size)

    def _chunks(self, part: RangedFile) -> Iterator[bytes]:
        for at in range(0, part.size, _CHUNK):
            data = part.read(at, min(_CHUNK, part.size - at))
            yield data
            self._counted.add(len(data))

    def _finding(self, task: _Task, kind: str, text: str, low: int, high: int) -> VerifyFinding:
        number = self._numbers.get(task.file)
        if number is None:  # it holds no tensors
            return VerifyFinding(kind, task.file, -1, 0, (), 0, text)
        return finding_in(self._catalog, number, kind, text, (low, high))


def _of_hub(storage: ForeignStorage, catalog: Catalog) -> dict[str, tuple[str, str]]:
    """Return the digests that a download from the hub of Hugging Face has left, for files that lie in local folders."""
    folder = unwrapped(storage)
    found = {}
    for file in catalog.files if isinstance(folder, LocalStorage) else ():
        target = os.path.realpath(os.path.join(folder.url, file.name))
        place, digest = os.path.split(target)
        if os.path.basename(place) == "blobs" and _SHA256.fullmatch(digest):
            found[file.name] = digest, "in the cache of Hugging Face"
        elif digest := _recorded(folder.url, file.name):
            found[file.name] = digest, "in the record of its download"
    return found


def _recorded(folder: str, name: str) -> str:
    """Return the digest in the record that `hf download --local-dir` keeps of a file; "" if the file is newer."""
    with contextlib.suppress(OSError, ValueError):
        with open(os.path.join(folder, _RECORDS, f"{name}.metadata"), encoding="utf-8") as record:
            _, digest, time = (record.readline(100).strip() for _ in range(3))
        if _SHA256.fullmatch(digest) and os.path.getmtime(os.path.join(folder, name)) <= float(time) + 1:
            return digest
    return ""


def _manifest(storage: ForeignStorage, catalog: Catalog) -> dict[str, tuple[str, str]]:
    """Return the digests of Megatron's manifest; {} if there is none.

    Raises:
        CorruptCheckpointError: the manifest cannot be read.
    """
    if catalog.info.get("format") not in ("dcp", "megatron") or _INTEGRITY not in dict(storage.list()):
        return {}
    with open_file(storage, _INTEGRITY) as file:
        manifest = file.json(_Integrity)
    if manifest.algorithm != "sha256" or any("/" in name or not name for name in manifest.files):
        raise file.damaged(f"it has the algorithm {manifest.algorithm!r}, or names that lead out of the folder")
    return {name: (digest, f"in {_INTEGRITY}") for name, digest in manifest.files.items()}
