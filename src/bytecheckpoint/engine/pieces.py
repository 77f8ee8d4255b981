"""Copy memory of the host in pieces: one thread from the front, a caller that waits for it from the end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

__all__ = ["PIECE_BYTES", "SharedCopy", "pieces_of"]

#: A thread that copies holds no lock of the interpreter for the 1 to 2 ms of a piece.
PIECE_BYTES = 8 << 20

_Pair = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def pieces_of(pairs: Sequence[_Pair]) -> list[_Pair]:
    """Cut (target, source) pairs of bytes into pieces of `PIECE_BYTES`; the last piece of a pair may be shorter."""
    return [
        (target[start : start + PIECE_BYTES], source[start : start + PIECE_BYTES])
        for target, source in pairs
        for start in range(0, target.nbytes, PIECE_BYTES)
    ]


class SharedCopy:
    """A copy that one thread makes, and in which a thread that waits for it may take part.

    Attributes:
        begun: future, done when the pieces are known.
        copied: future, done when what optimizers change is copied and proven; its result has the identities of the memory
            that the save still reads (`step_fence.storage_identity`): frozen parameters.
        helped: bytes that others than the copying thread have copied.
    """

    def __init__(self) -> None:
        self.begun: Future[None] = Future()
        self.copied: Future[frozenset[int]] = Future()
        self.helped = 0
        self._pieces: list[_Pair] = []
        self._taken = bytearray()
        self._done = bytearray()
        self._taking = threading.Lock()
        self._helping = threading.Lock()

    def begin(self, pairs: Sequence[_Pair]) -> None:
        """Set the (target, source) pairs of bytes, which others may copy from now on."""
        self._pieces = pieces_of(pairs)
        self._done = bytearray(len(self._pieces))
        self._taken = bytearray(len(self._pieces))
        self.begun.set_result(None)

    def finish(self) -> None:
        """Copy from the front what others have not copied, and return when all is copied."""
        try:
            for number in range(len(self._pieces)):
                if not self._copy(number):
                    break
        finally:
            with self._helping:  # nobody writes to the targets after this call
                pieces, self._pieces = self._pieces, []
        for number, done in enumerate(self._done):
            if not done:  # an interrupt ended `take_part` in the middle
                np.copyto(*pieces[number])

    def take_part(self) -> None:
        """Copy from the end until the copying thread is met."""
        with self._helping:
            for number in reversed(range(len(self._pieces))):
                if not self._copy(number):
                    break
                self.helped += self._pieces[number][0].nbytes

    def _copy(self, number: int) -> bool:
        """Copy a piece; return False if it is taken already."""
        with self._taking:
            if self._taken[number]:
                return False
            self._taken[number] = True
        np.copyto(*self._pieces[number])
        self._done[number] = True
        return True
