"""Read files at positions, and sample them for a fingerprint."""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Self

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from bytecheckpoint.dataloader.sources.base import Document, MapSource
from bytecheckpoint.dataloader.sources.fingerprint import even_places
from bytecheckpoint.dataloader.sources.paths import Paths, SourceCache, local_files
from bytecheckpoint.errors import StorageError, UsageError
from bytecheckpoint.representation.values.equality import equal
from bytecheckpoint.tuning import tuning

__all__ = ["RangeSource", "SourceFiles"]

_MAX_OPEN: Final = 128

# What the fingerprint reads: this many bytes at each of so many places, of so many files.
_SAMPLE_BYTES: Final = 4096
_SAMPLES: Final = 6
_SAMPLED_FILES: Final = 64


class SourceFiles:
    """Files that are read at positions. Each is opened when it is first needed.

    Reads are `pread`: threads and forked processes share the open files, and a file that was cut short is an error, which
    would kill the process if the file were mapped into memory.

    Args:
        paths: paths of the files.
        cache: local folder for copies of files that are compressed or on another storage, and for indices of documents;
            None for neither.

    Attributes:
        paths: absolute paths.
        sizes: bytes of each file when the source was made, int64 [files].
        name: last component of the first path.

    Raises:
        UsageError: a path is no file, a pattern matches none, or a file needs a cache, and there is none.
    """

    def __init__(self, paths: Paths, cache: str | os.PathLike[str] | None = None) -> None:
        given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        self._cache = None if cache is None else SourceCache(cache)
        self.paths = tuple(found for path in given for found in local_files(os.fspath(path), self._cache))
        if not self.paths:
            raise UsageError("the list of paths is empty: give at least one file")
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

    def bounds(self, kind: str, find: Callable[[int], NDArray[np.int64]]) -> Iterator[NDArray[np.int64]]:
        """Yield the bounds of the documents of each file, from the cache if they are known.

        Args:
            kind: name of the rule by which documents are found.
            find: function from the number of a file to the bounds of its documents.
        """
        for file, path in enumerate(self.paths):
            if self._cache is None:
                yield find(file)
            else:
                yield self._cache.index(path, int(self.sizes[file]), kind, functools.partial(find, file))

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

    def first(self, saved: Mapping[str, Any]) -> Self | None:
        """Return the files as a description has them, without what came behind them; None if it is of other files."""
        ends, size = np.cumsum(self.sizes), saved.get("bytes")
        # Up to a number of samples, each file has one; the last ones may be empty.
        last = max(int(np.searchsorted(ends, size or 0)), len(saved.get("files", ())) - 1)
        if size is None or last >= len(ends) or (left := int(self.sizes[last] - ends[last]) + size) < 0:
            return None
        other = copy.copy(self)
        other.paths, other.sizes = self.paths[: last + 1], np.append(self.sizes[:last], left)
        other.__dict__.pop("_sampled", None)
        return other

    def describe(self) -> dict[str, Any]:
        """Return the bytes of all files, a hash of their sizes and of samples from up to 64 of them, and one of each."""
        fingerprint, files = self._sampled
        return {"bytes": int(self.sizes.sum()), "fingerprint": fingerprint, "files": [*files.values()]}

    @property
    def sampled(self) -> dict[str, str]:
        """Hash of the size and samples of each file with samples, by path, to say which one has changed."""
        return self._sampled[1]

    @functools.cached_property
    def _sampled(self) -> tuple[str, dict[str, str]]:
        running = xxhash.xxh3_64(self.sizes.astype("<i8").tobytes())
        files: dict[str, str] = {}
        for file in even_places(len(self.paths), _SAMPLED_FILES):
            size = int(self.sizes[file])
            if size <= _SAMPLES * _SAMPLE_BYTES:
                samples = [self.read(file, 0, size)]
            else:
                places = even_places(size - _SAMPLE_BYTES + 1, _SAMPLES)
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

    def describe_first(self, saved: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the description of the first documents; see `Source`."""
        count, files = saved["documents"], self._files.first(saved)
        last = 0 if files is None else len(files.paths) - 1
        earlier = [0, *self._ends][last]  # documents in the files before the last one
        if files is None or not earlier <= count <= self._ends[last]:
            return None
        size, bounds = int(files.sizes[last]), self._bounds[earlier + last : count + last + 1]
        if bounds[-1] < size or (bounds[:-1] >= size).any():
            return None
        before = copy.copy(self)
        before._files, before._ends = files, [*self._ends[:last], count]
        before._bounds = np.append(self._bounds[: count + last], size)
        # The last document may have grown.
        return before.describe() if equal(_read(before, count - 1), _read(self, count - 1)) else None

    def describe(self) -> dict[str, Any]:
        """Return the count, the sizes and samples of the files."""
        return {
            "documents": len(self),
            "shuffle": self.shuffle,
            **self._files.describe(),
        }


def _read(source: RangeSource, index: int) -> Document:
    """Return a document, or what is wrong with it."""
    try:
        return source[index]
    except UsageError as error:
        return str(error)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
