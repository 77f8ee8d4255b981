"""Show a folder of another program as a storage with a catalog, and notice who writes to it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from bytecheckpoint.concurrency import call_with_timeout
from bytecheckpoint.errors import CheckpointReplacedError
from bytecheckpoint.formats.decoded import BytesReader, Decoded, DecodedFiles
from bytecheckpoint.formats.files import read_in_parallel
from bytecheckpoint.formats.foreign import ForeignCheckpoint
from bytecheckpoint.formats.shown import with_values
from bytecheckpoint.garbage_collection import gc_paused
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog_file import encode
from bytecheckpoint.representation.names import CATALOG_NAME, VALUES_NAME
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.base import FileReader, FileStat, call_timeout
from bytecheckpoint.storage.wrappers import WrappedStorage

__all__ = ["ForeignStorage"]

#: Notes and sums of a checkpoint, and the files that its folder does not hold, by name.
_Shown = tuple[tuple[str, ...], Int64s, Mapping[str, bytes | Decoded]]


class ForeignStorage(WrappedStorage):
    """A folder of another program, with the catalog and the files of plain values that a reader makes of it, in memory.

    Args:
        inner: storage of the folder.
        read: function that reads the folder.
        url: address that the user gave; by default that of the folder.
    """

    follows_links = True  # the cache of Hugging Face consists of links

    def __init__(self, inner: Storage, read: Callable[[Storage], ForeignCheckpoint], url: str = "") -> None:
        self._pinned = _PinnedFiles(inner)
        super().__init__(self._pinned)
        self.url = url or inner.url
        self._read = read
        self._lock = threading.Lock()
        self._found: _Shown | None = None
        self._decoded = DecodedFiles()

    def notes(self) -> tuple[str, ...]:
        """Return facts that a user should know: values that were left out, sizes that nothing proves."""
        return self._shown()[0]

    def sums(self) -> Int64s:
        """Return the CRC32s that the format has, as in `ForeignCheckpoint`."""
        return self._shown()[1]

    def decoded(self) -> tuple[str, ...]:
        """Return the names of the files whose contents are compressed in the folder."""
        return tuple(name for name, content in self._shown()[2].items() if isinstance(content, Decoded))

    def _shown(self) -> _Shown:
        """Return notes and sums of the checkpoint, and the files that the folder does not hold, by name."""
        with self._lock:
            if self._found is None:
                with gc_paused():
                    found = self._read(self.inner)
                    catalog, files = with_values(found, self.inner)
                    self._pinned.pin([file.name for file in catalog.files if file.name not in files])
                    self._found = tuple(found.notes), found.sums, {CATALOG_NAME: encode(catalog), **files}
            return self._found

    def versions(self) -> dict[str, str]:
        """Return the versions of the files from before they were read, by name, for the ranks that use the same catalog."""
        return {**self._pinned.versions}

    def trust(self, versions: Mapping[str, str]) -> None:
        """Take over what `versions` has returned on the rank that has read the index."""
        self._pinned.versions.update(versions)

    def check_unchanged(self, names: Iterable[str]) -> None:
        """Compare the versions of those of some files that lie in the folder with those from before they were read.

        Raises:
            CheckpointReplacedError: another program has written to one of them.
        """
        self._pinned.check(sorted({*names} & self._pinned.versions.keys()))

    def _made(self, name: str) -> bytes | Decoded | None:
        """Return the content of a file that the folder does not hold, None for one that it may hold."""
        return self._shown()[2].get(name) if name == CATALOG_NAME or name.startswith(VALUES_NAME) else None

    def open(self, name: str) -> FileReader:  # noqa: D102 (the base describes it)
        data = self._made(name)
        if data is None:
            return super().open(name)
        return BytesReader(_size(data), lambda: self._bytes_of(name, data))

    def read(self, name: str) -> bytes:  # noqa: D102
        data = self._made(name)
        return super().read(name) if data is None else self._bytes_of(name, data)

    def stat(self, name: str) -> FileStat:  # noqa: D102
        data = self._made(name)
        return super().stat(name) if data is None else FileStat(_size(data), 0.0, str(_size(data)))

    def _bytes_of(self, name: str, data: bytes | Decoded) -> bytes:
        return self._decoded.bytes_of(name, data) if isinstance(data, Decoded) else data


def _size(data: bytes | Decoded) -> int:
    return data.size if isinstance(data, Decoded) else len(data)


class _PinnedFiles(WrappedStorage):
    """A folder that remembers the version of each file from before the first read.

    A foreign checkpoint has no seal: its bytes belong together if no file has another version at the end.

    Args:
        inner: storage of the folder.

    Attributes:
        versions: version of each file that was opened or pinned, by its name.
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.versions: dict[str, str] = {}

    def wrap(self, inner: Storage) -> Storage:
        return _PinnedFiles(inner)

    def open(self, name: str) -> FileReader:
        self._pin(name)
        return super().open(name)

    def read(self, name: str) -> bytes:
        self._pin(name)
        return super().read(name)

    def _pin(self, name: str) -> None:
        if name not in self.versions:
            self.versions.setdefault(name, self.version(name))

    def pin(self, names: Collection[str]) -> None:
        """Remember the versions of files that will be read."""
        new = [name for name in names if name not in self.versions]
        for name, version in zip(new, self._now(new), strict=True):
            self.versions.setdefault(name, version)

    def check(self, names: Collection[str]) -> None:
        """Compare the versions of files with those from before. A file that was removed meanwhile was read whole.

        Raises:
            CheckpointReplacedError: a file has another version now.
        """
        for name, version in zip(names, self._now(names), strict=True):
            if version and version != self.versions.get(name, version):
                raise CheckpointReplacedError(
                    f"another program wrote to {self.url}/{name} while it was read or open: read it when it is whole"
                )

    def _now(self, names: Collection[str]) -> list[str]:
        if not names:
            return []
        find = partial(read_in_parallel, self, self.version, [*names])
        return call_with_timeout(call_timeout(self), find, f"cannot look at files of {self.url}")
