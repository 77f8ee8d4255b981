"""The chunks of an exchange that pass between machines over the fabric: who sends what to whom, and when.

A chunk goes down a tree. Its root is the reader, then comes one rank of each other machine, then the other ranks of that
machine which want it. Every rank knows all trees from the plan, so nobody tells anybody what comes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from bytecheckpoint.engine.exchange_chunks import ChunkMover, LoadedChunk
from bytecheckpoint.engine.fabric import Fabric, Transfers
from bytecheckpoint.tuning import tuning

__all__ = ["FabricExchange", "tree_of"]

_T = TypeVar("_T")
#: Chunk, its reader, and `Machines.others`.
_Chunk = tuple[int, int, Sequence[Sequence[int]]]
_ALIGNMENT = 512
#: (0, n): the n-th stage between machines; (1, n): inside of them. All ranks go through them in order.
_Stage = tuple[int, int]


def tree_of(position: int, holders: Sequence[_T]) -> tuple[tuple[int, _T] | None, list[tuple[int, _T]]]:
    """Return from whom a member of a binomial tree receives, and to whom it sends, each with its stage.

    In stage s the first 2**s holders have it, and each sends it to the one 2**s places further on.

    >>> tree_of(1, "abcdef")
    ((0, 'a'), [(1, 'd'), (2, 'f')])

    Args:
        position: of the member in `holders`.
        holders: the root first.
    """
    first = position.bit_length()
    parent = (first - 1, holders[position - (1 << first - 1)]) if position else None
    stages = range(first, (len(holders) - 1).bit_length())
    return parent, [(s, holders[position + (1 << s)]) for s in stages if position + (1 << s) < len(holders)]


class FabricExchange:
    """One rank's part in the transfers of all rounds of an exchange.

    Args:
        fabric: the group.
        mover: delivers what arrives.
        machines: number of each rank's machine.
        rank: this rank.
    """

    def __init__(self, fabric: Fabric, mover: ChunkMover, machines: Sequence[int], rank: int) -> None:
        self.fabric = fabric
        self._mover = mover
        self._machines = machines
        self._rank = rank
        self._staging = torch.empty(0, dtype=torch.uint8)

    def run(self, chunks: Iterator[_Chunk], loaded: Mapping[int, LoadedChunk]) -> dict[int, int]:
        """Transfer the chunks of a round, and deliver those that arrive here.

        Args:
            chunks: (chunk, reader, `Machines.others`) of all chunks of the round, in the same order on every rank.
            loaded: the chunks that this rank has read.

        Returns:
            Chunks that have arrived, with their bytes.

        Raises:
            CheckpointError: as `Fabric.run`.
        """
        arrived: dict[int, int] = {}
        for part in self._parts(chunks):
            for chunk, data in self.fabric.run(functools.partial(self._move, part, loaded)).items():
                self._mover.deliver(chunk, data)
                arrived[chunk] = data.numel()
        return arrived

    def close(self) -> None:
        """End the group, and release the staging memory."""
        self.fabric.close()
        self._staging = self._staging[:0].clone()

    def _parts(self, chunks: Iterator[_Chunk]) -> Iterator[list[_Chunk]]:
        """Cut a round into parts that fit into the staging memory of any rank; equal on all ranks."""
        part: list[_Chunk] = []
        size = 0
        for chunk, reader, others in chunks:
            if not others:
                continue
            nbytes = _aligned(self._mover.nbytes(chunk))
            if part and size + nbytes > tuning().fabric_bytes:
                yield part
                part, size = [], 0
            part.append((chunk, reader, others))
            size += nbytes
        if part:
            yield part

    def _move(
        self,
        part: list[_Chunk],
        loaded: Mapping[int, LoadedChunk],
        transfer: Callable[[Transfers], None],
    ) -> dict[int, torch.Tensor]:
        """Send and receive on the fabric's thread; return the chunks that have arrived, in the staging memory."""
        stages: dict[_Stage, Transfers] = {}
        arriving: dict[int, torch.Tensor] = {}
        mine = [(chunk, *self._edges(chunk, reader, others)) for chunk, reader, others in part]
        mine = [(chunk, sources, targets) for chunk, sources, targets in mine if sources or targets]
        ends = np.cumsum([0, *(_aligned(self._mover.nbytes(chunk)) for chunk, _, _ in mine)]).tolist()
        if ends[-1] > self._staging.numel() and (self.fabric.device.type != "cpu" or any(s for _, s, _ in mine)):
            self._staging = self._staging[:0]  # first give back the old memory
            self._staging = torch.empty(ends[-1], dtype=torch.uint8, device=self.fabric.device)
        for begin, (chunk, sources, targets) in zip(ends, mine, strict=False):
            data = self._staging[begin : begin + self._mover.nbytes(chunk)]
            if chunk in loaded:
                data = _upload(loaded[chunk], data, self.fabric.device)
            for stage, rank in sources:
                arriving[chunk] = data
                stages.setdefault(stage, Transfers([], [])).receives.append((rank, chunk, data))
            for stage, rank in targets:
                stages.setdefault(stage, Transfers([], [])).sends.append((rank, chunk, data))
        for stage in sorted(stages):
            transfer(stages[stage])
        return arriving

    def _edges(
        self, chunk: int, reader: int, others: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[_Stage, int]], list[tuple[_Stage, int]]]:
        """Return from whom this rank receives a chunk (one or nobody), and to whom it sends it, with the stages."""
        sources: list[tuple[_Stage, int]] = []
        targets: list[tuple[_Stage, int]] = []
        own = self._machines[self._rank]
        machine = next((ranks for ranks in others if self._machines[ranks[0]] == own), ())
        trees = [[reader, *(ranks[chunk % len(ranks)] for ranks in others)]]
        if machine:
            turn = chunk % len(machine)
            trees.append([*machine[turn:], *machine[:turn]])
        for level, holders in enumerate(trees):
            if self._rank in holders:
                parent, children = tree_of(holders.index(self._rank), holders)
                sources += [((level, parent[0]), parent[1])] if parent else []
                targets += [((level, stage), rank) for stage, rank in children]
        return sources, targets


def _upload(loaded: LoadedChunk, staging: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a chunk that this rank has read on a device; the copies to it are queued."""
    buffers = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in loaded.buffers]
    if device.type == "cpu":
        return buffers[0] if len(buffers) == 1 else torch.cat(buffers)
    begin = 0
    for buffer in buffers:
        staging[begin : begin + buffer.numel()].copy_(buffer, non_blocking=True)
        begin += buffer.numel()
    return staging


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
