"""Ranged reads of foreign files: exactly the bytes asked for, with a time limit, or an error that names the file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Final, TypeVar

import msgspec

from bytecheckpoint.concurrency import call_with_timeout, parallel_map
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from bytecheckpoint.storage import FileReader, Storage
from bytecheckpoint.storage.base import call_timeout

__all__ = ["RangedFile", "damage", "open_file", "open_files", "read_in_parallel", "refuse_pointer"]


#: Bytes between two ranges up to which one request reads both, and bytes of the longest such request.
_GAP, _LONGEST_RUN = 4096, 8 << 20
#: Most requests, one after the other, that have one time limit together.
_MOST_IN_GROUP: Final = 64
_MOST_JSON: Final = 64 << 20
#: Most values in a text of JSON, each of which takes up to a hundred bytes of memory.
_MOST_VALUES: Final = 1 << 20
_S = TypeVar("_S")
_T = TypeVar("_T")


class RangedFile:
    """A part of an open foreign file, usually all of it.

    Attributes:
        name: name of the file inside its folder.
        folder, label: address of its folder and of the file, for messages.
        start: first byte of the part.
        size: length of the part in bytes.
    """

    def __init__(
        self, storage: Storage, name: str, reader: FileReader, start: int = 0, size: int | None = None
    ) -> None:
        self.name = name
        self.folder = storage.url
        self.label = f"{storage.url}/{name}"
        self.start = start
        self.size = reader.size if size is None else size
        self._storage = storage
        self._reader = reader

    def part(self, start: int, size: int) -> RangedFile:
        """Return a part of this part. Raises CorruptCheckpointError: the part lies outside."""
        self._check_inside(start, size)
        return RangedFile(self._storage, self.name, self._reader, self.start + start, size)

    def _check_inside(self, start: int, size: int) -> None:
        if start < 0 or size < 0 or start + size > self.size:
            raise self.damaged(f"it has {self.size} bytes, and bytes {start} to {start + size} are needed")

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes of this part.

        Raises:
            CorruptCheckpointError: the bytes lie outside of this part, or the file is shorter than its stated size.
            StorageError: the storage fails.
        """
        return self._read_each([(offset, length)])[0]

    def _read_each(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read ranges (offset, length), one after the other within one time limit."""
        for offset, length in ranges:
            self._check_inside(offset, length)

        def read() -> list[bytes]:
            found = []
            for offset, length in ranges:
                data = bytearray(length)
                if length and self._reader.read_into(self.start + offset, [memoryview(data)]) != length:
                    raise self.damaged(f"it ends before byte {self.start + offset + length}")
                found.append(bytes(data))
            return found

        total = sum(length for _, length in ranges)
        if not total or self._storage.capabilities.in_memory:
            return read()
        return call_with_timeout(call_timeout(self._storage, total), read, f"cannot read {self.label}")

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several ranges (offset, length); neighbours in one request, as many at a time as suits the storage.

        Raises as `read`.
        """
        runs: list[tuple[int, int]] = []
        places = [(0, 0)] * len(ranges)
        for k in sorted(range(len(ranges)), key=ranges.__getitem__):
            offset, length = ranges[k]
            begin, end = runs[-1] if runs else (0, 0)
            if runs and offset <= end + _GAP and max(end, offset + length) - begin <= _LONGEST_RUN:
                runs[-1] = begin, max(end, offset + length)
            else:
                runs.append((offset, offset + length))
            places[k] = len(runs) - 1, offset - runs[-1][0]
        requests, count = [(begin, end - begin) for begin, end in runs], self._group(len(runs))
        groups = [requests[k : k + count] for k in range(0, len(requests), count)]
        data = [*chain.from_iterable(read_in_parallel(self._storage, self._read_each, groups))]
        return [data[run][at : at + length] for (run, at), (_, length) in zip(places, ranges, strict=True)]

    def _group(self, count: int) -> int:
        """Return how many of `count` requests have one time limit together: it costs more than a read of a few bytes."""
        return max(1, min(_MOST_IN_GROUP, count // (4 * self._storage.capabilities.parallel_reads)))

    def json(self, kind: type[_T]) -> _T:
        """Return the content of a file of JSON as a type.

        Raises:
            IncompatibleCheckpointError: the file is too large, has too many values, or only points to its content.
            CorruptCheckpointError: it is no JSON of this type.
        """
        if self.size > _MOST_JSON:
            raise IncompatibleCheckpointError(f"{self.label} has {self.size} bytes, more than {_MOST_JSON}")
        data = self.read(0, self.size)
        refuse_pointer(self, data)
        return self.decoded_json("it", data, kind)

    def decoded_json(self, what: str, text: bytes | str, kind: type[_T]) -> _T:
        """Return a text of JSON in the file, `what` in errors, as a type. Raises as `json`.

        Python writes `Infinity` and `NaN`, which JSON lacks, as older configurations of transformers have them. They become
        `{"__float__": "Infinity"}`, the form of newer ones.
        """
        raw = text.encode() if isinstance(text, str) else text
        if sum(map(raw.count, (b",", b"[", b"{"))) > _MOST_VALUES:
            raise IncompatibleCheckpointError(f"{self.label}: {what} has more than {_MOST_VALUES} values")
        try:
            if b"Infinity" in raw or b"NaN" in raw:
                content = json.loads(raw, parse_constant=lambda name: {"__float__": name})
                return msgspec.convert(content, type=kind)
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: of UTF-8 and of Python's JSON
            raise self.damaged(f"{what} cannot be read ({error})") from error

    def damaged(self, what: str) -> CorruptCheckpointError:
        """Return the error of a file whose content contradicts itself."""
        return CorruptCheckpointError(f"{self.label} is damaged: {what}", file=self.name)


def refuse_pointer(file: RangedFile, first: bytes) -> None:
    """Refuse a file that only points to its content, as a clone without Git LFS leaves it, by its first bytes."""
    if first.startswith(b"version https://git-lfs."):
        raise IncompatibleCheckpointError(
            f"{file.label} is a pointer of Git LFS, without its content: run 'git lfs pull'"
        )


def read_in_parallel(storage: Storage, read: Callable[[_S], _T], places: Sequence[_S]) -> list[_T]:
    """Return what a function reads at each of some places, as many at a time as suits the storage."""
    threads = 1 if storage.capabilities.in_memory else storage.capabilities.parallel_reads
    return parallel_map(read, places, threads, "bytecheckpoint-foreign")


@contextlib.contextmanager
def open_file(storage: Storage, name: str) -> Iterator[RangedFile]:
    """Open a file of a foreign checkpoint for the `with` block.

    Raises:
        CheckpointNotFoundError: there is no such file.
        StorageError: the storage fails.
    """
    label = f"{storage.url}/{name}"
    try:
        reader = call_with_timeout(call_timeout(storage), lambda: storage.open(name), f"cannot open {label}")
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{label}: there is no such file") from None
    try:
        yield RangedFile(storage, name, reader)
    finally:
        reader.close()


@contextlib.contextmanager
def open_files(storage: Storage, names: Sequence[str]) -> Iterator[Callable[[int], RangedFile]]:
    """Open files for the `with` block, each when it is first asked for by its number. Raises as `open_file`."""
    with contextlib.ExitStack() as stack:
        yield cache(lambda number: stack.enter_context(open_file(storage, names[number])))


@contextlib.contextmanager
def damage(file: RangedFile, program: str) -> Iterator[None]:
    """Name the file in errors, and turn those of objects that are not as a program makes them into one of damage."""
    try:
        yield
    except CheckpointError as error:
        if isinstance(error, IncompatibleCheckpointError) and file.folder not in str(error):
            raise IncompatibleCheckpointError(f"{file.label}: {error}") from None
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        text = f"its objects are not those of {program} ({type(error).__name__}: {str(error)[:200]})"
        raise file.damaged(text) from error
