"""The protocol of objects that hand over their state in pieces, which no save or load holds as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from bytecheckpoint.errors import CorruptCheckpointError, OutOfRangeError, UsageError

__all__ = ["PIECE_CHUNK", "Piece", "PieceReader", "StateProvider", "is_provider"]

#: Bytes that an iteration over a `PieceReader` yields at a time.
PIECE_CHUNK = 8 << 20


class Piece:
    """A part of the state of a provider, of known size, whose bytes a save asks for later.

    Args:
        name: name of the piece, which no other piece of the provider has; a checkpoint shows it as the tensor
            "<state>/<name>".
        size: number of bytes, or (dtype, shape) of the tensor that they are.
        read: function (offset, buffer) that fills the buffer with the bytes from an offset on, and returns None or their
            number. A save calls it in the background, on one thread, with offsets in ascending order.
        stable: True if the bytes stay those of the call until `done`. The bytes of other pieces are read in the call, and
            kept in memory until they are written.
        token: bytes that are equal in two saves only if those of the piece are. A save with `incremental=True` does not
            read a piece that had an equal token in the last one: its file gets a further name, as those of frozen
            parameters do, while all other pieces in it are unchanged too.
        done: function that the save calls exactly once, when it needs the piece no more, also if it fails.
    """

    __slots__ = ("done", "dtype", "name", "read", "shape", "stable", "token")

    def __init__(
        self,
        name: str,
        size: int | tuple[torch.dtype, Sequence[int]],
        read: Callable[[int, memoryview], int | None],
        *,
        stable: bool,
        token: bytes | None = None,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise UsageError(f"Piece({name!r}): the name must be a non-empty str")
        dtype, shape = size if isinstance(size, tuple) and len(size) == 2 else (torch.uint8, (size,))
        if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in shape):
            raise UsageError(f"Piece({name!r}): {size!r} is no number of bytes, and no dtype with a shape")
        if not callable(read) or not callable(done) or not isinstance(token, bytes | None):
            raise UsageError(f"Piece({name!r}): read and done must be functions, and token bytes or None")
        self.name = name
        self.dtype = dtype
        self.shape: tuple[int, ...] = tuple(shape)
        self.read = read
        self.stable = stable
        self.token = token
        self.done = done

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class PieceReader:
    """Reads one piece of a checkpoint, inside of `StateProvider.load_pieces` only. Every byte is verified.

    Args:
        name: name of the piece.
        dtype: its dtype; torch.uint8 for bytes.
        shape: its shape.
        read: function (offset, length) that returns verified bytes.

    Attributes:
        name: name of the piece.
        dtype: its dtype.
        shape: its shape.
        nbytes: its length.
    """

    def __init__(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[int, int], bytes]
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.nbytes = math.prod(shape) * dtype.itemsize
        self._read: Callable[[int, int], bytes] | None = read

    def read_into(self, offset: int, buffer: memoryview | bytearray) -> None:
        """Fill a buffer with the bytes from an offset on.

        Raises:
            OutOfRangeError: the piece ends before.
            CorruptCheckpointError: the bytes do not match their checksums.
        """
        if self._read is None:
            raise UsageError(f"piece {self.name!r} can be read inside of load_pieces only")
        target = memoryview(buffer).cast("B")
        if offset < 0 or offset + len(target) > self.nbytes:
            raise OutOfRangeError(
                f"piece {self.name!r} has {self.nbytes} bytes: {len(target)} from byte {offset} on are not in it"
            )
        found = self._read(offset, len(target))
        if len(found) != len(target):
            raise CorruptCheckpointError(
                f"piece {self.name!r} is shorter than the catalog says; use another checkpoint"
            )
        target[:] = found

    def __iter__(self) -> Iterator[memoryview]:
        """Iterate over all bytes, in pieces of 8 MiB."""
        for offset in range(0, self.nbytes, PIECE_CHUNK):
            chunk = bytearray(min(PIECE_CHUNK, self.nbytes - offset))
            self.read_into(offset, chunk)
            yield memoryview(chunk)

    def close(self) -> None:
        """Refuse further reads."""
        self._read = None


@runtime_checkable
class StateProvider(Protocol):
    """Public protocol of objects whose state is too large to be held twice: a replay buffer, an index, a file.

    Such an object is a state of its own, `{"replay": buffer}`. If it has `state_dict` and `load_state_dict`, these hold its
    plain values and small tensors; a load calls `load_state_dict` first.
    """

    def __bytecheckpoint_pieces__(self) -> Iterable[Piece]:
        """Return all pieces, with exact sizes. A save calls this in the caller's thread, and reads the pieces later."""

    def load_pieces(self, pieces: Mapping[str, PieceReader]) -> None:
        """Take over the pieces of a checkpoint, by name: this rank's, or those of rank 0 on a rank that the save lacked."""


def is_provider(value: object) -> bool:
    """Return whether `value` hands over its state in pieces."""
    return not isinstance(value, type) and hasattr(value, "__bytecheckpoint_pieces__")
