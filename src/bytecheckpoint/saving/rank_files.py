"""Describe the files of one save on one rank between its steps: staged, with the memory that holds them, and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bytecheckpoint.engine.image_writer import ImageWriter
from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.engine.staging import Image
from bytecheckpoint.engine.writing import StagedChunk
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.saving.capture import Value
from bytecheckpoint.saving.file_layout import PlannedFile
from bytecheckpoint.saving.messages import FileRecord

__all__ = ["Places", "StagedFiles", "WholeMemory", "WrittenFiles"]

#: Places of the values that a rank writes: number of the file among the rank's files, and byte offset in its data section.
Places = Mapping[TensorKey, tuple[int, int]]


class WholeMemory(NamedTuple):
    """Memory in a pool for the tensors that a rank joins.

    Attributes:
        start: first byte.
        image: byte of the pool for byte 0 of the image. There the boxes lie, or are staged when they are joined.
        files: numbers of the files of the tensors, when they are joined.
    """

    start: int
    image: int = 0
    files: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StagedFiles:
    """The files of one save on one rank, ready to be written.

    Attributes:
        files: the files.
        places: places of the values that this rank writes.
        values: all values of this rank; staged copies, unless the live tensors are written.
        pool: staging pool that holds the bytes; None where they are all written from the live tensors.
        chunks: chunks in the pool that are not written yet.
        image: live tensors that are written; None where the pool holds all bytes.
        opened: writer whose files are created already, if any, and the version of the catalog that the commit replaces.
        pool_bytes: bytes that a pool needs to hold all chunks.
        whole: memory for whole tensors; None if there is none.
    """

    files: list[PlannedFile]
    places: Places
    values: Sequence[Value]
    pool: StagingPool | None = None
    chunks: Sequence[StagedChunk] = ()
    image: Image | None = None
    opened: tuple[ImageWriter, str] | None = None
    pool_bytes: int = 0
    whole: WholeMemory | None = None


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The durable files of one save on one rank.

    Attributes:
        adopted: descriptions of the files of earlier checkpoints that belong to this one too.
        records: descriptions of the files that were written.
        places: places of the values that this rank has written; files are counted from the first adopted one.
        values: all values of this rank, hashed; those that it has not written hold their bytes.
        replaces: on rank 0, version of the catalog that was there before the first byte was written, "" for none.
    """

    adopted: list[FileRecord]
    records: list[FileRecord]
    places: Places
    values: Sequence[Value]
    replaces: str

    @property
    def nbytes(self) -> int:
        """Total length of the written files, headers included."""
        return sum(record.size for record in self.records)

    @property
    def nbytes_adopted(self) -> int:
        """Total length of the adopted files, headers included."""
        return sum(record.size for record in self.adopted)
