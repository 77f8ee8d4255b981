"""Join the staged boxes of cut tensors to whole tensors, in the staging pool, with the boxes of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["BoxMove", "Bytes", "Exchange", "WholeTensor", "join_tensors"]

Bytes = NDArray[np.uint8]
#: Exchanges arrays with other ranks: (round, arrays by receiver, arrays to fill by sender).
Exchange = Callable[[int, Mapping[int, Bytes], Mapping[int, Bytes]], None]


class WholeTensor(NamedTuple):
    """The place of a tensor that this rank writes, in the pool.

    Attributes:
        at: first byte, a multiple of the size of an element.
        itemsize: bytes of an element.
        shape: its shape.
    """

    at: int
    itemsize: int
    shape: tuple[int, ...]

    def box(self, pool: Bytes, offsets: Sequence[int], lengths: Sequence[int]) -> NDArray[Any]:
        """Return the view of a box of the tensor."""
        nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.itemsize
        elements = pool[self.at : self.at + nbytes].view(_element(self.itemsize)).reshape(self.shape)
        for dim, (offset, length) in enumerate(zip(offsets[: len(self.shape)], lengths, strict=False)):
            elements = elements[(*[slice(None)] * dim, slice(offset, offset + length))]
        return elements


class BoxMove(NamedTuple):
    """A box that passes from one rank to another, or stays on this one.

    Attributes:
        rank: the other rank; this rank for a box that stays.
        round: number of the exchange.
        at: first byte of the staged box in the pool; -1 if the other rank has staged it.
        nbytes: length.
        tensor: number of the tensor that this rank joins; -1 if the other rank does.
        offsets, lengths: place in the tensor, padded as in a `BoxTable`.
    """

    rank: int
    round: int
    at: int
    nbytes: int
    tensor: int = -1
    offsets: Sequence[int] = ()
    lengths: Sequence[int] = ()


def join_tensors(
    pool: Bytes,
    tensors: Sequence[WholeTensor],
    kept: Sequence[BoxMove],
    sent: Sequence[BoxMove],
    received: Sequence[BoxMove],
    exchange: Exchange,
) -> int:
    """Fill whole tensors in the pool from its staged boxes and from those of other ranks.

    Args:
        pool: pool with the staged boxes and the memory of the tensors.
        tensors: tensors that this rank joins.
        kept: boxes of this rank in them.
        sent: boxes that other ranks join; those of one round for one rank in the order in which it takes them.
        received: boxes of other ranks; those of one round from one rank in the order in which it sends them.
        exchange: function that exchanges bytes. A round without bytes has no call.

    Returns:
        Number of bytes received.
    """
    for move in kept:
        target = tensors[move.tensor].box(pool, move.offsets, move.lengths)
        _fill(target, pool[move.at : move.at + move.nbytes])
    leaving, coming = _by_round(sent), _by_round(received)
    for number in sorted({*leaving, *coming}):
        outgoing = {
            rank: _joined([pool[move.at : move.at + move.nbytes] for move in moves])
            for rank, moves in leaving.get(number, {}).items()
        }
        incoming: dict[int, Bytes] = {}
        arriving: list[tuple[NDArray[Any], Bytes]] = []
        for rank, moves in coming.get(number, {}).items():
            targets = [tensors[move.tensor].box(pool, move.offsets, move.lengths) for move in moves]
            if len(moves) == 1 and targets[0].flags.c_contiguous:  # as large tensors cut by rows: without a copy
                incoming[rank] = targets[0].reshape(-1).view(np.uint8)
                continue
            incoming[rank] = memory = np.empty(sum(move.nbytes for move in moves), np.uint8)
            begin = 0
            for move, target in zip(moves, targets, strict=True):
                arriving.append((target, memory[begin : begin + move.nbytes]))
                begin += move.nbytes
        exchange(number, outgoing, incoming)
        for target, data in arriving:
            _fill(target, data)
    return sum(move.nbytes for move in received)


def _element(itemsize: int) -> np.dtype[Any]:
    return np.dtype({16: "c16"}.get(itemsize, f"u{itemsize}"))


def _fill(target: NDArray[Any], data: Bytes) -> None:
    """Copy the bytes of a box to its place."""
    if data.ctypes.data % target.itemsize:
        data = data.copy()
    np.copyto(target, data.view(target.dtype).reshape(target.shape))


def _joined(parts: Sequence[Bytes]) -> Bytes:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _by_round(moves: Sequence[BoxMove]) -> dict[int, dict[int, list[BoxMove]]]:
    """Return the moves by round and other rank."""
    found: dict[int, dict[int, list[BoxMove]]] = {}
    for move in moves:
        found.setdefault(move.round, {}).setdefault(move.rank, []).append(move)
    return found
