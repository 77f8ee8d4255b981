"""Hot files of other machines, read in ranges over the data plane."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.base import DataProvider
from bytecheckpoint.errors import CheckpointError, StorageError, StorageUnavailableError
from bytecheckpoint.storage import FileReader, Storage

__all__ = ["RemoteFiles", "RemoteReader", "file_provider"]

#: Bytes of one request, which the rank that serves it holds in memory.
_PIECE = 8 << 20


class _Range(msgspec.Struct, frozen=True, array_like=True):
    """A request: bytes [offset, offset + size) of a file."""

    name: str
    offset: int
    size: int


# Built at import: msgspec (0.22) crashes if two threads use a type for the first time at once.
_DECODER = msgspec.msgpack.Decoder(_Range)


def file_provider(files: Storage) -> DataProvider:
    """Make the provider that serves ranges of the files of a folder."""

    def read(request: bytes) -> NDArray[np.uint8]:
        wanted = _DECODER.decode(request)
        data = np.empty(wanted.size, np.uint8)
        reader = files.open(wanted.name)
        try:
            count = reader.read_into(wanted.offset, [memoryview(data)])
        finally:
            reader.close()
        if count != wanted.size:
            raise StorageError(f"{files.url}/{wanted.name} ends before byte {wanted.offset + wanted.size}")
        return data

    return read


class RemoteFiles:
    """The hot folders of other machines, as the ranks of one load serve them.

    Args:
        collective: the ranks.
        tag: identifies the service of this load on every rank that serves.
        timeout: seconds for one request.
    """

    def __init__(self, collective: Collective, tag: str, timeout: float) -> None:
        self._collective = collective
        self._tag = tag
        self._timeout = timeout

    def read_into(self, rank: int, name: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from byte `offset` of a file in the memory of rank `rank`'s machine.

        Raises:
            StorageError: the file is gone, or ends before.
            StorageUnavailableError: the other rank does not answer.
        """
        for start in range(0, len(buffer), _PIECE):
            piece = np.frombuffer(buffer[start : start + _PIECE], np.uint8)
            request = msgspec.msgpack.encode(_Range(name, offset + start, piece.nbytes))
            failed = f"cannot read {name} in the memory of rank {rank}'s machine"
            try:
                self._collective.fetch(rank, self._tag, request, piece, timeout=self._timeout)
            except FileNotFoundError:
                raise StorageError(f"{failed}: it is gone") from None
            except StorageError as error:
                raise StorageError(f"{failed}: {error}") from error
            except CheckpointError as error:
                raise StorageUnavailableError(f"{failed}: {error}") from error


class RemoteReader(FileReader):
    """A file in another machine's memory.

    Args:
        files: how to reach it.
        rank: a rank of that machine, which serves it.
        name: of the file.
        size: its length in bytes.
    """

    preferred_bytes = _PIECE

    def __init__(self, files: RemoteFiles, rank: int, name: str, size: int) -> None:
        self._files, self._rank, self._name = files, rank, name
        self.size = size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        total = min(sum(map(len, buffers)), max(self.size - offset, 0))
        if len(buffers) == 1:
            self._files.read_into(self._rank, self._name, offset, buffers[0][:total])
            return total
        # Buffers may be small, and a request for each would cost a round trip each.
        data = memoryview(np.empty(total, np.uint8))
        self._files.read_into(self._rank, self._name, offset, data)
        for buffer in buffers:
            buffer[: len(data)] = data[: len(buffer)]
            data = data[len(buffer) :]
        return total

    def close(self) -> None:
        pass
