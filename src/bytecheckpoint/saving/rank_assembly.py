"""Keep one rank's part in joining the boxes of one state: those that it writes, and pieces of staged ones that move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from msgspec import structs

from bytecheckpoint.engine.assembly import BoxMove, Bytes, Exchange, WholeTensor, join_tensors
from bytecheckpoint.engine.staging import chunks_of
from bytecheckpoint.engine.writing import StagedChunk
from bytecheckpoint.planning.assembly import RankMoves
from bytecheckpoint.planning.local_table import TensorRecord
from bytecheckpoint.representation.names import file_stem, unescape
from bytecheckpoint.representation.shards import LiveShard, TensorKey
from bytecheckpoint.saving.file_layout import FileOrigin, PlannedFile, end_of, lay_out_names, lay_out_rows, moved

__all__ = ["RankAssembly", "make_rank_assembly"]


@dataclass(frozen=True, slots=True)
class RankAssembly:
    """The boxes of one state that one rank writes. Their memory lies in the pool behind the rank's image.

    Attributes:
        state: name of the state.
        files: files in the place of the rank's files of the state, and further ones if there are more; sections from byte 0
            of the memory.
        tensors: boxes in them, from byte 0 of the memory.
        kept, sent, received: pieces that make up these boxes and those of other ranks (`join_tensors`).
    """

    state: str
    files: list[PlannedFile]
    tensors: list[WholeTensor]
    kept: list[BoxMove]
    sent: list[BoxMove]
    received: list[BoxMove]

    @property
    def nbytes(self) -> int:
        """Length of the memory."""
        return end_of(self.files[-1].image) if self.files else 0

    def places_in(self, files: Sequence[PlannedFile]) -> list[int]:
        """Return the numbers of the rank's files of the state, which follow each other."""
        return [number for number, file in enumerate(files) if file.state == self.state and not file.values]

    def span_of(self, files: Sequence[PlannedFile]) -> tuple[int, int]:
        """Return the first and the end byte of these files in the image."""
        found = [files[number].image for number in self.places_in(files)]
        return (found[0].start, end_of(found[-1])) if found else (0, 0)

    def join(self, pool: Bytes, image: int, memory: int, exchange: Exchange) -> int:
        """Fill the tensors; return the number of bytes that came from other ranks.

        Args:
            pool: pool with the staged boxes.
            image: byte of the pool for byte 0 of the image.
            memory: byte of the pool where the tensors' memory begins.
            exchange: function that exchanges bytes with other ranks.
        """
        tensors = [tensor._replace(at=tensor.at + memory) for tensor in self.tensors]
        kept, sent = ([move._replace(at=move.at + image) for move in moves] for moves in (self.kept, self.sent))
        return join_tensors(pool, tensors, kept, sent, self.received, exchange)

    def replaced(
        self, files: Sequence[PlannedFile], memory: int, chunk_bytes: int
    ) -> tuple[list[PlannedFile], list[StagedChunk], list[int]]:
        """Return the files of the rank with those of joined boxes in the place of those of staged ones.

        Args:
            files: all files of the rank's image.
            memory: byte of the pool where the tensors' memory begins.
            chunk_bytes: length of a chunk.

        Returns:
            The files, the chunks of the joined ones, and the numbers of these.
        """
        places = self.places_in(files)
        further = self.files[len(places) :]
        found = [*files, *further]
        places += range(len(files), len(found))
        for place, file in zip(places, self.files, strict=True):
            found[place] = replace(file, image=moved(file.image, memory))
        chunks = [
            StagedChunk(places[c.file], c.start, found[places[c.file]].image.start + c.start, c.nbytes)
            for c in chunks_of([file.image for file in self.files], chunk_bytes)
        ]
        return found, chunks, places


def make_rank_assembly(
    shards: Sequence[LiveShard], files: Sequence[PlannedFile], origin: FileOrigin, moves: RankMoves
) -> RankAssembly:
    """Lay out the whole tensors that the coordinator assigns to this rank.

    Args:
        shards: shards of the rank.
        files: files of the boxes that it stages.
        origin: origin of the files.
        moves: the coordinator's plan for this rank.
    """
    rows, kept, sent, received = moves.columns()
    state, ndim = unescape(moves.state), moves.ndim
    stems = [file_stem(origin.file_name(file.state, file.part, values=False)) for file in files]
    ends = np.cumsum([shard.rows for shard in shards], dtype=np.int64)
    own = [*shards, *(_of_record(record, shape) for record, shape in moves.others)]
    numbers = np.where(rows[:, 0] < 0, len(shards) - 1 - rows[:, 0], np.searchsorted(ends, rows[:, 0], "right"))
    boxes = zip(numbers.tolist(), rows[:, 1:].tolist(), strict=True)
    tensors = [_box(own[number], box[:ndim], box[ndim:]) for number, box in boxes]

    def with_further(found: Sequence[str]) -> list[str]:
        return list(dict.fromkeys([*stems, *found]))

    found, _ = lay_out_rows(tensors, np.arange(len(tensors)), origin, siblings=with_further, named=moves.named)
    position = end_of(found[-1].image) if found else 0
    every = with_further([file_stem(origin.file_name(state, file.part, values=False)) for file in found])
    lacking = {file.part for file in files if file.state == state}.difference(file.part for file in found)
    empty = (lay_out_names(state, origin, every, (), part=part, position=position, values=False) for part in lacking)
    written = sorted([*found, *empty], key=lambda file: file.part)
    staged = [file.image.start + box.start for file in files for box in file.boxes()]

    items = [tensor.data.element_size() for tensor in tensors]

    def move(rank: int, number: int, at: int, tensor: int, box: Sequence[int]) -> BoxMove:
        lengths = box[ndim:]
        return BoxMove(rank, number, at, items[tensor] * int(np.prod(lengths)), tensor, box[:ndim], lengths)

    return RankAssembly(
        state,
        written,
        [
            WholeTensor(file.image.start + box.start, box.itemsize, tuple(box.lengths))
            for file in found
            for box in file.boxes()
        ],
        [move(origin.rank, 0, staged[row] + start, k, box) for row, start, k, *box in kept.tolist()],
        [BoxMove(owner, number, staged[row] + start, size) for row, start, size, owner, number in sent.tolist()],
        [move(rank, number, -1, k, box) for rank, number, k, *box in received.tolist()],
    )


def _box(shard: LiveShard, offsets: Sequence[int], lengths: Sequence[int]) -> LiveShard:
    """Return the shard of a box of the tensor of which this is one, without its elements."""
    ndim = len(shard.global_shape)
    data = torch.empty([1] * ndim, dtype=shard.data.dtype).expand(tuple(lengths[:ndim]))
    return structs.replace(
        shard, offsets=tuple(offsets[:ndim]), lengths=tuple(lengths[:ndim]), fragments=None, data=data
    )


def _of_record(record: TensorRecord, shape: tuple[int, ...]) -> LiveShard:
    """Return a shard without elements of a tensor of which this rank holds nothing."""
    return LiveShard(
        key=TensorKey(*map(unescape, record.key)),
        dtype=record.dtype,
        global_shape=shape,
        offsets=(0,) * len(shape),
        lengths=(0,) * len(shape),
        data=torch.empty(0, dtype=getattr(torch, record.dtype)),
        aliases=tuple(map(unescape, record.aliases)),
        requires_grad=record.requires_grad,
    )
