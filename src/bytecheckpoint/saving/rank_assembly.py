"""Keep one rank's part in joining the cut tensors of one state: tensors that it writes whole, and boxes that move."""

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
from bytecheckpoint.representation.names import file_stem, unescape
from bytecheckpoint.representation.shards import LiveShard
from bytecheckpoint.saving.file_layout import FileOrigin, PlannedFile, end_of, lay_out_names, lay_out_rows, moved

__all__ = ["RankAssembly", "make_rank_assembly"]


@dataclass(frozen=True, slots=True)
class RankAssembly:
    """The tensors of one state that one rank writes whole. Their memory lies in the pool behind the rank's image.

    Attributes:
        state: name of the state.
        files: files in the place of the rank's files of the state, as many as these; sections from byte 0 of the memory.
        tensors: tensors in them, from byte 0 of the memory.
        kept, sent, received: boxes that make up these tensors and those of other ranks (`join_tensors`).
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
    ) -> tuple[list[PlannedFile], list[StagedChunk]]:
        """Return the files of the rank with those of whole tensors in the place of those of its boxes, and their chunks.

        Args:
            files: all files of the rank's image.
            memory: byte of the pool where the tensors' memory begins.
            chunk_bytes: length of a chunk.
        """
        places = self.places_in(files)
        found = list(files)
        for place, file in zip(places, self.files, strict=True):
            found[place] = replace(file, image=moved(file.image, memory))
        chunks = [
            StagedChunk(places[c.file], c.start, found[places[c.file]].image.start + c.start, c.nbytes)
            for c in chunks_of([file.image for file in self.files], chunk_bytes)
        ]
        return found, chunks


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
    state = unescape(moves.state)
    stems = [file_stem(origin.file_name(file.state, file.part, values=False)) for file in files]
    ends = np.cumsum([shard.rows for shard in shards], dtype=np.int64)
    tensors = [_whole(shards[number]) for number in np.searchsorted(ends, rows, "right").tolist()]
    found, _ = lay_out_rows(tensors, np.arange(len(tensors)), origin, siblings=stems)
    parts = {file.part: file for file in found}
    position = end_of(found[-1].image) if found else 0
    places = [file for file in files if file.state == state]
    written = [
        parts.get(file.part) or lay_out_names(state, origin, stems, (), part=file.part, position=position, values=False)
        for file in places
    ]
    assert len(written) >= len(found), "a rank writes a tensor of which it stages a box"
    staged = [(file.image.start + box.start, box) for file in files for box in file.boxes()]

    def move(row: int, rank: int, number: int, tensor: int = -1) -> BoxMove:
        at, box = staged[row]
        return BoxMove(rank, number, at, box.nbytes, tensor, box.offsets, box.lengths)

    items = [tensor.data.element_size() for tensor in tensors]
    ndim = moves.ndim
    return RankAssembly(
        state,
        written,
        [WholeTensor(file.image.start + box.start, box.itemsize, box.shape) for file in found for box in file.boxes()],
        [move(row, origin.rank, 0, tensor) for row, tensor in kept.tolist()],
        [move(row, owner, number) for row, owner, number in sent.tolist()],
        [
            BoxMove(rank, number, -1, items[tensor] * int(np.prod(box[ndim:])), tensor, box[:ndim], box[ndim:])
            for rank, number, tensor, *box in received.tolist()
        ],
    )


def _whole(shard: LiveShard) -> LiveShard:
    """Return the shard of the whole tensor of which this is a box, without its elements."""
    shape = shard.global_shape
    data = torch.empty([1] * len(shape), dtype=shard.data.dtype).expand(shape)
    return structs.replace(shard, offsets=(0,) * len(shape), lengths=shape, fragments=None, data=data)
