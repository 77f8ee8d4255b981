"""Create the files of one rank in one save, fill them, and finish them with their headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bytecheckpoint.engine.catalogs import refuse_foreign
from bytecheckpoint.engine.image_writer import HelperWriter, ImageWriter, WriteJob, slot_bytes, stream_image
from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.engine.save_resources import SaveResources
from bytecheckpoint.engine.staging import Image
from bytecheckpoint.engine.writing import FileTask, WrittenSums
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.saving.file_layout import FileOrigin, PlannedFile, record_of
from bytecheckpoint.saving.messages import FileRecord
from bytecheckpoint.saving.request import SaveMode, SaveRequest
from bytecheckpoint.storage.optional import check_room
from bytecheckpoint.tiers.storage import tier_of
from bytecheckpoint.tracing.operation import Operation

__all__ = ["FileOutput", "Siblings"]


class Siblings(NamedTuple):
    """The files of one rank in one save, as the header of each names them.

    Attributes:
        files: number of all files.
        adopted: names of those of earlier checkpoints.
    """

    files: int
    adopted: list[str]


class FileOutput:
    """Files of one rank in one save, from their creation until they are durable.

    Args:
        origin: rank and save that write the files.
        request: arguments of the save.
        resources: helper process of this rank.
        cancel: signal of another rank's failure.
        operation: measurements of the save.
    """

    def __init__(
        self,
        origin: FileOrigin,
        request: SaveRequest,
        resources: SaveResources,
        cancel: Cancellation,
        operation: Operation,
    ) -> None:
        self._origin = origin
        self._request = request
        self._resources = resources
        self._cancel = cancel
        self._operation = operation
        self._replaces: str | None = None
        self._writers: list[ImageWriter] = []

    @property
    def begun(self) -> bool:
        """True if files may exist."""
        return self._replaces is not None

    def name(self, file: PlannedFile) -> str:
        """Return the name of a file in the checkpoint's folder."""
        return self._origin.file_name(file.state, file.part, values=file.values)

    def check_target(self, nbytes: int) -> str:
        """On rank 0, check that the catalog may be replaced and that `nbytes` fit; return the catalog's version."""
        if self._replaces is None:
            replaces, storage = "", self._request.storage
            if self._origin.rank == 0:
                replaces = storage.version(CATALOG_NAME)
                if replaces and tier_of(storage) is None:  # a tier asks its durable storage
                    refuse_foreign(storage)
                storage.check_publish(CATALOG_NAME, replaces)
                check_room(storage, nbytes)
            self._replaces = replaces
        return self._replaces

    def open(
        self,
        files: Sequence[PlannedFile],
        nbytes: int,
        pool: StagingPool,
        *,
        stable: bool = False,
        by_helper: bool = False,
    ) -> tuple[ImageWriter, str]:
        """Create files, so that a full or read-only storage shows early.

        Args:
            files: files to write.
            nbytes: bytes of the tensors that all ranks write.
            pool: staging pool that is written from.
            stable: True if the pool holds the whole image until the save ends.
            by_helper: True if the helper process writes, where it can.

        Returns:
            The writer, and the version of the catalog that the commit replaces.
        """
        replaces, settings = self.check_target(nbytes), self._request.settings
        by_helper = by_helper and pool.shared and self._request.storage.capabilities.shared
        job = self._job(files)
        writer: ImageWriter
        if by_helper and self._resources.start_helper(settings):
            writer = HelperWriter(job, self._resources.helper, pool, stable=stable)
        else:
            writer = job.on_threads(pool, stable=stable)
        self._writers.append(writer)
        writer.open()
        return writer, replaces

    def stream(
        self, files: Sequence[PlannedFile], image: Image, pool: StagingPool, siblings: Siblings
    ) -> list[FileRecord]:
        """Write files from live tensors, through a few small buffers of a pool.

        Args:
            files: files to write.
            image: live tensors of the files.
            pool: pool whose pages are touched already: touching new ones would cost more than copying into them.
            siblings: all files of the rank, for the headers.
        """
        settings = self._request.settings
        pool.reserve(slot_bytes(image.files, settings), touch=False, device=image.copies.any_device)
        writer = self._job(files).on_threads()
        self._writers.append(writer)
        writer.open()
        still = self._request.mode is SaveMode.SYNCHRONOUS
        return self.finish(files, writer, stream_image(image, pool, writer, settings, still=still), siblings)

    def finish(
        self,
        files: Sequence[PlannedFile],
        writer: ImageWriter,
        sums: Sequence[WrittenSums],
        siblings: Siblings,
    ) -> list[FileRecord]:
        """Write the headers, make the files durable and describe them.

        Args:
            files: files whose data sections are written.
            writer: writer of the files.
            sums: sums of each file.
            siblings: all files of the rank, for the headers.
        """
        if not self._request.storage.capabilities.whole_files:  # else the bytes go out by `writer.finish`
            self._operation.mark("write")
            self._operation.phase = "finish"
        headers = [
            file.header.render(file_sums.blocks, self._origin.generation, *siblings)
            for file, file_sums in zip(files, sums, strict=True)
        ]
        writer.finish(headers)
        records = [
            record_of(self.name(file), file, header, file_sums)
            for file, header, file_sums in zip(files, headers, sums, strict=True)
        ]
        self._operation.mark(self._operation.phase)
        return records

    def abort(self) -> None:
        """End unfinished writes and remove their files."""
        for writer in self._writers:
            writer.abort()
        self._writers = []

    def _job(self, files: Sequence[PlannedFile]) -> WriteJob:
        tasks = [
            FileTask(
                self.name(file),
                file.header.data_offset,
                file.header.data_length,
                file.header.block_bytes,
                file.boxes() if self._request.settings.fingerprint else (),
            )
            for file in files
        ]
        return WriteJob(tasks, self._request.storage, self._request.settings, self._cancel)
