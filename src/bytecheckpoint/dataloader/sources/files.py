"""Find local files by path or pattern, read them at positions, and sample them for a fingerprint."""

from __future__ import annotations

import bisect
import functools
import glob
import itertools
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from bytecheckpoint.dataloader.sources.base import Document, MapSource
from bytecheckpoint.errors import StorageError, UsageError
from bytecheckpoint.tuning import tuning

__all__ = ["Paths", "RangeSource", "SourceFiles"]

#: A path, a pattern of `glob` ("**" crosses folders), or several paths. A pattern's files are sorted by path.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_MAX_OPEN: Final = 128

# What the fingerprint reads: this many bytes at each of so many places, of so many files.
_SAMPLE_BYTES: Final = 4096
_SAMPLES: Final = 6
_SAMPLED_FILES: Final = 64

_COMPRESSED: Final = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip")


class SourceFiles:
    """Files that are read at positions. Each is opened when it is first needed.

    Reads are `pread`: threads and forked processes share the open files, and a file that was cut short is an error, which
    would kill the process if the file were mapped into memory.

    Attributes:
        paths: absolute paths.
        sizes: bytes of each file when the source was made, int64 [files].
        name: last component of the first path.

    Raises:
        UsageError: a path is no file, a pattern matches none, or a file is compressed.
    """

    def __init__(self, paths: Paths) -> None:
        given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        self.paths = tuple(found for path in given for found in _found(os.fspath(path)))
        if not self.paths:
            raise UsageError("the list of paths is empty: give at least one file")
        for path in self.paths:
            if path.lower().endswith(_COMPRESSED):
                raise UsageError(f"{path} is compressed, so its documents have no positions: decompress it")
        self.sizes = np.fromiter((_size(path) for path in self.paths), np.int64, len(self.paths))
        self.name = os.path.basename(os.fspath(given[0]))
        self._open: dict[int, _OpenSourceFile] = {}

    def read(self, file: int, offset: int, length: int) -> bytes:
        """Return bytes of a file.

        Raises:
            StorageError: the file has vanished, was cut short, or cannot be read.
        """
        try:
            opened = self._opened(file)
            data = os.pread(opened.descriptor, length, offset)
            while len(data) < length:  # one call reads at most 2 GiB
                more = os.pread(opened.descriptor, length - len(data), offset + len(data))
                if not more:
                    raise self._cut_short(file, os.fstat(opened.descriptor).st_size)
                data += more
        except OSError as error:
            raise StorageError(f"{self.paths[file]} cannot be read: {error.strerror}") from error
        return data

    def pieces(self, file: int, dtype: DTypeLike = np.uint8, *, end: int | None = None) -> Iterator[NDArray[Any]]:
        """Iterate over a whole file, or its first `end` bytes, in arrays of a few MiB."""
        end = int(self.sizes[file]) if end is None else end
        step = tuning().source_piece
        for offset in range(0, end, step):
            yield np.frombuffer(self.read(file, offset, min(step, end - offset)), dtype)

    def check(self, file: int) -> None:
        """Check that a file has not vanished and was not cut short.

        Raises:
            StorageError: it has, or it was.
        """
        try:
            size = os.stat(self.paths[file]).st_size
        except OSError as error:
            raise StorageError(f"{self.paths[file]} cannot be read: {error.strerror}") from error
        if size < self.sizes[file]:
            raise self._cut_short(file, size)

    @property
    def fingerprint(self) -> str:
        """Hash of all sizes, and of samples from up to 64 files."""
        return self._sampled[0]

    @property
    def sampled(self) -> dict[str, str]:
        """Hash of the size and samples of each file with samples, by path, to say which one has changed."""
        return self._sampled[1]

    @functools.cached_property
    def _sampled(self) -> tuple[str, dict[str, str]]:
        running = xxhash.xxh3_64(self.sizes.astype("<i8").tobytes())
        files: dict[str, str] = {}
        count = len(self.paths)
        sampled = min(count, _SAMPLED_FILES)
        for file in sorted({i * (count - 1) // max(sampled - 1, 1) for i in range(sampled)}):
            size = int(self.sizes[file])
            if size <= _SAMPLES * _SAMPLE_BYTES:
                samples = [self.read(file, 0, size)]
            else:
                places = [i * (size - _SAMPLE_BYTES) // (_SAMPLES - 1) for i in range(_SAMPLES)]
                samples = [self.read(file, place, _SAMPLE_BYTES) for place in places]
            for sample in samples:
                running.update(sample)
            files[self.paths[file]] = xxhash.xxh3_64_hexdigest(b"".join([b"%d " % size, *samples]))
        return running.hexdigest(), files

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def _opened(self, file: int) -> _OpenSourceFile:
        opened = self._open.get(file)
        if opened is None:
            self.check(file)
            opened = self._open[file] = _OpenSourceFile(self.paths[file])
            if len(self._open) > _MAX_OPEN:
                self._open.pop(next(iter(self._open)), None)  # closes it when no thread reads it any more
        return opened

    def _cut_short(self, file: int, size: int) -> StorageError:
        return StorageError(
            f"{self.paths[file]} has {size} bytes, but had {self.sizes[file]} when its documents were found: "
            "restore it, or start again with the new data"
        )


class _OpenSourceFile:
    """A file that closes when its last user is gone."""

    __slots__ = ("descriptor",)

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class RangeSource(MapSource):
    """A source whose documents are ranges of bytes in files.

    Args:
        files: files with the documents.
        name: name of the source; None for the name of the files.
        shuffle: True for a random order of its own in every epoch.
        bounds: starts of the documents of each file, and the end of the last one, int64 [documents + 1].

    Raises:
        UsageError: there are no documents.
    """

    def __init__(
        self, files: SourceFiles, name: str | None, shuffle: bool, bounds: Iterable[NDArray[np.int64]]
    ) -> None:
        self.name = files.name if name is None else name
        self.shuffle = shuffle
        self._files = files
        by_file = list(bounds)
        self._bounds = np.concatenate(by_file)
        # Documents up to the end of each file.
        self._ends: list[int] = list(itertools.accumulate(len(one) - 1 for one in by_file))
        if not len(self):
            raise UsageError(f"the source {self.name!r} has no documents: {files.paths[0]} has none")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Document:
        file = bisect.bisect_right(self._ends, index)
        start, stop = self._bounds[index + file : index + file + 2].tolist()
        return self._document(self._files.read(file, start, stop - start), file, start)

    def place(self, index: int) -> str:
        """Return where the document of a number is, in words, for messages."""
        file = bisect.bisect_right(self._ends, index)
        return f"document {index} (from byte {self._bounds[index + file]} of {self._files.paths[file]})"

    def sampled_files(self) -> dict[str, str]:
        """Return the hash of each file in "files" of the description, by path."""
        return self._files.sampled

    @abstractmethod
    def _document(self, data: bytes, file: int, start: int) -> Document:
        """Turn a range, which starts at byte `start` of a file, into a document."""

    def describe(self) -> dict[str, Any]:
        """Return the count, the sizes and samples of the files."""
        return {
            "documents": len(self),
            "bytes": int(self._files.sizes.sum()),
            "shuffle": self.shuffle,
            "fingerprint": self._files.fingerprint,
            "files": [*self._files.sampled.values()],
        }


def _found(path: str) -> list[str]:
    """Return the absolute paths of a path or pattern."""
    if "://" in path:
        raise UsageError(
            f"{path} is no local file: sources read local files, so copy it to a disk, or mount its storage"
        )
    if glob.has_magic(path) and not os.path.exists(path):
        found = sorted(os.path.abspath(one) for one in glob.iglob(path, recursive=True) if os.path.isfile(one))
        if not found:
            raise UsageError(f"no file matches {path}")
        return found
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder: name its files, as in {os.path.join(path, '*')}")
    return [os.path.abspath(path)]


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
