"""Write the bytes of one save on one rank, through the memory that suits the save and its storage."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch

from bytecheckpoint.concurrency import call_with_timeout
from bytecheckpoint.engine.assembly import Exchange
from bytecheckpoint.engine.device_copies import DeviceCopies
from bytecheckpoint.engine.image_writer import (
    ImageWriter,
    slot_bytes,
    stage_image,
)
from bytecheckpoint.engine.pieces import SharedCopy
from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.engine.runs import Runs
from bytecheckpoint.engine.save_resources import SaveResources
from bytecheckpoint.engine.staging import Image, KnownTargets
from bytecheckpoint.errors import CheckpointError, listed
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.liveness import busy
from bytecheckpoint.representation.names import file_stem, unescape
from bytecheckpoint.representation.shards import LiveShard, TensorKey
from bytecheckpoint.saving.adoption import Adoption
from bytecheckpoint.saving.capture import Value, hash_all
from bytecheckpoint.saving.file_layout import (
    FileOrigin,
    PlannedFile,
    end_of,
    lay_out_names,
    lay_out_values,
    moved,
    moved_up,
    place_values,
)
from bytecheckpoint.saving.file_output import FileOutput, Siblings
from bytecheckpoint.saving.rank_files import Places, StagedFiles, WholeMemory, WrittenFiles
from bytecheckpoint.saving.rank_plan import AgreedPlan
from bytecheckpoint.saving.request import SaveMode, SaveRequest
from bytecheckpoint.settings import Settings
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.base import call_timeout
from bytecheckpoint.tracing.operation import Operation, span
from bytecheckpoint.tuning import tuning

__all__ = ["RankWriter"]

_log = logging.getLogger("bytecheckpoint")
#: Bytes per second that staging copies at least, unless a device hangs.
_SLOWEST_COPY = 64 << 20


class RankWriter:
    """Stages and writes this rank's files: the planned ones first, further values if the coordinator asks for them.

    Args:
        origin: origin of the files.
        request: arguments of the save.
        resources: staging pools and helper process.
        cancel: token of the save.
        operation: measurements of the save.

    Attributes:
        piece_files: number of the rank's files of pieces of providers, which others write.
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
        self._operation = operation
        self._adoption = Adoption(origin, request, resources.earlier, cancel)
        self._output = FileOutput(origin, request, resources, cancel, operation)
        self._files: list[PlannedFile] = []
        self._pool: StagingPool | None = None
        self.piece_files = 0

    @property
    def file_names(self) -> list[str]:
        """Names of the files that are laid out."""
        return [self._output.name(file) for file in self._files]

    def prewarm(self, agreed: AgreedPlan) -> None:
        """Touch the pages of the staging pool that `copy` needs; write nothing."""
        _, places, image = self._lay_out_plan(agreed, adopt=False)
        self._files = []  # none of them is written
        spare = _spare_image(_spare_values(agreed.captured.values, places), image.nbytes, image.copies)
        nbytes = self._with_memory(agreed, max(image.nbytes, spare.nbytes))
        pools = self._resources.pools
        pools.note_need(nbytes)
        pools.prewarm(nbytes, self._settings, touch=True, device=image.copies.any_device)

    def stage_live(self, agreed: AgreedPlan) -> StagedFiles:
        """Stage the planned files of a caller who waits until they are written."""
        self._operation.phase = "write"
        agreed.captured.fill()
        files, places, image = self._lay_out_plan(agreed)
        values, pools, pool = agreed.captured.values, self._resources.pools, None
        device, assembly, slots = image.copies.any_device, agreed.plan.assembly, slot_bytes(image.files, self._settings)
        if self._storage.capabilities.whole_files:
            # Such a storage gets the files from memory, if they fit there, else from a spool file.
            if (pool := self._acquire_with_memory(agreed, image.nbytes, device)) is not None:
                pools.note_need(self._with_memory(agreed, image.nbytes))
                chunks = stage_image(image, pool, self._settings.storage.chunk_bytes)
                return StagedFiles(files, places, values, pool, chunks, whole=WholeMemory(image.nbytes))
            pool = self._pool = pools.acquire_whole(image.nbytes, self._settings, device)
        elif assembly is not None:
            first, end = assembly.span_of(files)
            pool = pools.acquire_joining(end - first + assembly.nbytes, self._settings, device)
            if pool is not None:
                pools.note_need(slots)
                whole = WholeMemory(end - first, -first)
                return StagedFiles(files, places, values, pool, image=image, whole=whole)
        if pool is None:
            pools.note_need(slots)
            return StagedFiles(files, places, values, image=image)
        pools.note_need(image.nbytes)
        opened = self._output.open(files, self._needs(agreed), pool, stable=True)
        chunks = stage_image(image, pool, self._settings.storage.chunk_bytes)
        return StagedFiles(files, places, values, pool, chunks, opened=opened)

    def copy(self, agreed: AgreedPlan, shared: SharedCopy | None) -> tuple[StagedFiles, Callable[[], StagedFiles]]:
        """Copy all but the values into a staging pool, so that optimizers may step.

        Args:
            agreed: plan of the save.
            shared: copy in which other threads take part; None if the caller waits.

        Returns:
            What is staged, and a function that copies the values and returns all that is staged then.
        """
        self._operation.phase = "stage"
        files, places, image = self._lay_out_plan(agreed)
        settings = self._settings
        values = {value.key: value for value in agreed.captured.values}
        spare = _spare_values(agreed.captured.values, places)
        spare_image = _spare_image(spare, image.nbytes, image.copies)
        nbytes = max(image.nbytes, spare_image.nbytes)
        pools, device = self._resources.pools, image.copies.any_device
        whole, needed = None, nbytes
        with span("reserve", nbytes):
            if (pool := self._acquire_with_memory(agreed, nbytes, device)) is not None:
                whole, needed = WholeMemory(nbytes), self._with_memory(agreed, nbytes)
            else:
                pool = pools.acquire_whole(nbytes, settings, device) or pools.acquire(image.nbytes, settings, device)
        self._pool = pool
        pools.note_need(needed)
        self._operation.count("staging pool", nbytes=pool.capacity)
        opened = None
        fits = pool.capacity >= image.nbytes
        if not fits:
            agreed.captured.fill()
            opened = self._output.open(files, self._needs(agreed), pool, by_helper=True)
            # No copy stays that could be hashed later.
            for value in hash_all((values[key] for key in places), image.copies):
                values[value.key] = value.without_data()
        plain, limit = sum(not file.values for file in files), settings.timeout + nbytes / _SLOWEST_COPY
        with busy(limit), span("copy", image.nbytes):
            writer = opened[0] if opened else None
            chunks = stage_image(image, pool, settings.storage.chunk_bytes, writer, shared, slice(plain))
        staged = StagedFiles(files, places, (), pool, chunks, opened=opened, pool_bytes=needed, whole=whole)

        def copy_values() -> StagedFiles:
            agreed.captured.fill()
            with busy(limit), span("copy values"):
                if fits and places:
                    image.stage(pool.tensor(), pool.generation, None, slice(plain, None))
                    first = len(self._adoption.records)
                    for key, (file, offset) in places.items():
                        values[key] = _staged(values[key], files[file - first].image.start + offset, pool)
                copied = values | {value.key: value for value in _copy_spare(spare, spare_image, pool)}
            self._operation.mark("stage")
            return replace(staged, values=[*copied.values()])

        return staged, copy_values

    def _acquire_with_memory(self, agreed: AgreedPlan, nbytes: int, device: torch.device | None) -> StagingPool | None:
        """Return a pool for `nbytes` and whole tensors behind them; None if none are joined, or this rank has no memory."""
        if agreed.plan.assembly is None:
            return None
        needed = max(self._with_memory(agreed, nbytes), 1)  # this rank may hold nothing
        self._pool = self._resources.pools.acquire_whole(needed, self._settings, device)
        return self._pool

    @staticmethod
    def _with_memory(agreed: AgreedPlan, nbytes: int) -> int:
        """Return the length of a pool for `nbytes` and the tensors that this rank joins."""
        assembly = agreed.plan.assembly
        return nbytes + (0 if assembly is None else assembly.nbytes)

    def assemble(self, staged: StagedFiles, agreed: AgreedPlan, exchange: Exchange) -> StagedFiles:
        """Join cut tensors with the other ranks, and return the files with the whole ones.

        Args:
            staged: staged boxes.
            agreed: plan of the save, with an assembly.
            exchange: function that exchanges bytes with the other ranks.
        """
        assembly = agreed.plan.assembly
        assert assembly is not None
        pool, whole, image = staged.pool, staged.whole, staged.image
        assert pool is not None and whole is not None, "this rank has said that it is ready"
        places, opened = assembly.places_in(staged.files), None
        files, chunks, joined = assembly.replaced(staged.files, whole.start, self._settings.storage.chunk_bytes)
        self._files += files[len(staged.files) :]
        self._operation.planned_bytes = sum(file.image.nbytes for file in files)
        if image is None:  # the other files are written meanwhile
            opened = self._open(files, agreed, pool)
            opened[0].write_staged([chunk for chunk in staged.chunks if chunk.file not in joined])
        with busy(self._settings.timeout + assembly.nbytes / _SLOWEST_COPY), span("join tensors", assembly.nbytes):
            if image is not None:
                sections = [moved(staged.files[place].image, whole.image) for place in places]
                Image(image.tensors, sections, image.copies).stage(pool.tensor(), pool.generation)
            received = assembly.join(pool.tensor().numpy(), whole.image, whole.start, exchange)
        self._operation.count("joined with others", nbytes=received)
        return replace(staged, files=files, chunks=chunks, opened=opened, whole=whole._replace(files=joined))

    def _open(self, files: Sequence[PlannedFile], agreed: AgreedPlan, pool: StagingPool) -> tuple[ImageWriter, str]:
        """Create files that are written from a pool which holds them all; return as `FileOutput.open`."""
        by_helper = self._request.mode is not SaveMode.SYNCHRONOUS
        return self._output.open(files, self._needs(agreed), pool, stable=True, by_helper=by_helper)

    def compare_rest(self, agreed: AgreedPlan) -> None:
        """Compare the frozen parameters that `copy` has only looked at with the files in their place.

        Of those that differ, the live tensors are written; they must not change until this returns.
        """
        with busy(self._settings.timeout + agreed.plan.nbytes / _SLOWEST_COPY):
            different, image = self._adoption.compare_rest()
            if image is not None:
                self._operation.planned_bytes += image.nbytes
                self._output.check_target(self._operation.planned_bytes)
                pool = StagingPool(shared=False)  # the other one holds the copy
                try:
                    siblings = self._siblings(len(different))
                    self._adoption.written += self._output.stream(different, image, pool, siblings)
                finally:
                    pool.release()
                self._operation.phase = "stage"
        self._operation.mark("stage")

    def write(self, staged: StagedFiles, agreed: AgreedPlan) -> WrittenFiles:
        """Write staged files and make them durable."""
        self._operation.phase = "write"
        if staged.image is not None:
            return self._stream(staged, staged.image, agreed)
        pool = staged.pool
        assert pool is not None
        with self._using(pool, agreed, staged.pool_bytes):
            writer, replaces = staged.opened or self._open(staged.files, agreed, pool)
            writer.write_staged(staged.chunks)
            values = hash_all(staged.values, agreed.captured.copies)
            # Other saves use the pool later; the values that this rank has not written are kept until the commit.
            values = [value.without_data() if value.key in staged.places else value for value in values]
            records = self._output.finish(staged.files, writer, writer.sums(), self._siblings())
        adoption = self._adoption
        return WrittenFiles(adoption.records, [*adoption.written, *records], staged.places, values, replaces)

    def write_anew(self, agreed: AgreedPlan) -> WrittenFiles:
        """Remove the written files, and write those of another plan from the live tensors."""
        self.abort()
        self._storage.delete([*self._adoption.linked, *self.file_names])
        self._files = []
        files, places, image = self._lay_out_plan(agreed)
        return self._stream(StagedFiles(files, places, agreed.captured.values, image=image), image, agreed)

    def write_values(
        self, keys: Collection[TensorKey], written: WrittenFiles, copies: DeviceCopies, *, live: bool
    ) -> WrittenFiles:
        """Write further values, beside the planned files.

        Args:
            keys: keys of the values.
            written: files that are written already.
            copies: copies from the devices.
            live: True if the values are in live memory; else they are staged copies.

        Returns:
            All written files.
        """
        values = [value for value in written.values if value.key in keys]
        files, places, image = self._lay_out([], [], KnownTargets(), values, copies)
        # Staged copies lie in the shared pool, which must not be written to.
        pool = self._resources.pools.shared if live else StagingPool(shared=False)
        try:
            records = self._output.stream(files, image, pool, self._siblings())
        finally:
            if not live:
                pool.release()
        return replace(written, records=[*written.records, *records], places={**written.places, **places})

    def lost_files(self) -> list[str]:
        """Return the names of adopted files that somebody has removed meanwhile."""
        return self._adoption.lost()

    def remember(self, written: WrittenFiles) -> None:
        """Remember the committed files, for later saves."""
        self._adoption.remember([*written.adopted, *written.records])

    def abort(self) -> None:
        """End unfinished writes, remove their files, and free the memory that this save alone uses."""
        self._output.abort()
        if self._pool is not None:
            self._resources.pools.release(self._pool)

    def discard(self, further: Sequence[str] = ()) -> None:
        """Remove all files after a failure, `further` ones too; never raise for the storage, nor wait long for it."""
        self.abort()
        names = [*self._adoption.linked, *further, *(self.file_names if self._output.begun else ())]
        if not names:
            return  # nothing was written
        seconds = min(call_timeout(self._storage), tuning().stopped_calls)
        try:
            call_with_timeout(seconds, lambda: self._storage.delete(names), f"cannot delete from {self._storage.url}")
        except (CheckpointError, OSError) as error:
            _log.warning(
                "%s: files of a failed save may stay (%s): %s; the next save there, or `bytecheckpoint gc`, removes them",
                self._storage.url,
                listed(names, 3),
                error,
            )

    @property
    def to_compare(self) -> list[int]:
        """Indexes of the plan's tensors that `compare_rest` still reads."""
        return self._adoption.to_compare

    @property
    def _storage(self) -> Storage:
        return self._request.storage

    @property
    def _settings(self) -> Settings:
        return self._request.settings

    # --- files and images -----------------------------------------------------------------------------------------

    def _needs(self, agreed: AgreedPlan) -> int:
        """Return the bytes that the storage must be able to take, as far as this rank knows."""
        return self._operation.planned_bytes if self._request.incremental else agreed.plan.nbytes

    def _lay_out_plan(self, agreed: AgreedPlan, *, adopt: bool = True) -> tuple[list[PlannedFile], Places, Image]:
        """Lay out the files of a plan.

        Args:
            agreed: plan of the save.
            adopt: True to use unchanged files of earlier checkpoints again, which are then not laid out.

        Returns:
            The files, the places of values in them, and their image.
        """
        plan, captured = agreed.plan.image, agreed.captured
        planned, targets = plan.files, plan.targets
        tensors = [_source(captured.shards[number], first, end) for number, first, end in plan.sources]
        values = agreed.plan.values.to_write(captured.values)
        if adopt and self._request.incremental:
            with busy(self._settings.timeout + agreed.plan.nbytes / _SLOWEST_COPY):
                planned = self._adoption.adopt(planned, tensors, captured.copies)
            if self._adoption.records:
                planned, targets = moved_up(planned), KnownTargets()
        files, places, image = self._lay_out(planned, tensors, targets, values, captured.copies)
        self._operation.planned_bytes = sum(file.nbytes for file in image.files)
        return files, places, image

    def _lay_out(
        self,
        files: list[PlannedFile],
        tensors: Sequence[torch.Tensor | Runs],
        targets: KnownTargets,
        values: Sequence[Value],
        copies: DeviceCopies,
    ) -> tuple[list[PlannedFile], Places, Image]:
        """Lay out planned files, and behind them files of values. Returns as `_lay_out_plan`."""
        adopted = self._adoption.files
        siblings = [
            file_stem(name) for name in (*(r.name for r in adopted), *map(self._output.name, (*self._files, *files)))
        ]
        value_files, found = lay_out_values(
            values,
            self._origin,
            first=len(tensors),
            position=end_of(files[-1].image) if files else 0,
            part=1 if self._files else 0,
            siblings=siblings,
            adoptable=siblings[: len(adopted)],
        )
        base = len(adopted) + len(self._files) + len(files)
        places = {v.key: (base + f, offset) for v, (f, offset) in zip(values, found, strict=True)}
        files = [*files, *value_files]
        if adopted and not files and not self._files:
            state = unescape(adopted[0].state)
            stems = [*siblings, file_stem(self._origin.file_name(state, 0, values=True))]
            files = [lay_out_names(state, self._origin, stems, siblings)]
        self._files += files
        image = Image([*tensors, *(v.data for v in values)], [f.image for f in files], copies, targets)
        return files, places, image

    # --- writing --------------------------------------------------------------------------------------------------

    def _siblings(self, further: int = 0) -> Siblings:
        """Return the other files of this rank: `further` ones are laid out nowhere."""
        count = len(self._adoption.files) + len(self._files) + self.piece_files + further
        return Siblings(count, [record.name for record in self._adoption.records])

    def _stream(self, staged: StagedFiles, image: Image, agreed: AgreedPlan) -> WrittenFiles:
        """Write planned files from the live tensors, and those of whole tensors from the pool."""
        replaces, pools = self._output.check_target(self._needs(agreed)), self._resources.pools
        files, joined = staged.files, [] if staged.whole is None else [*staged.whole.files]
        rest = [place for place in range(len(files)) if place not in joined]
        whole, writer = [files[place] for place in joined], None
        if whole:
            assert staged.pool is not None, "it holds the whole tensors"
            writer, _ = self._output.open(whole, self._needs(agreed), staged.pool, stable=True)
            writer.write_staged([chunk._replace(file=joined.index(chunk.file)) for chunk in staged.chunks])
            image = Image(image.tensors, [files[place].image for place in rest], image.copies)
        streamed = self._output.stream([files[place] for place in rest], image, pools.shared, self._siblings())
        records = dict(zip(rest, streamed, strict=True))
        if writer is not None:
            written = self._output.finish(whole, writer, writer.sums(), self._siblings())
            records.update(zip(joined, written, strict=True))
        pools.resize()
        return WrittenFiles(
            self._adoption.records,
            [records[place] for place in range(len(files))],
            staged.places,
            hash_all(staged.values, image.copies),
            replaces,
        )

    @contextlib.contextmanager
    def _using(self, pool: StagingPool, agreed: AgreedPlan, nbytes: int) -> Iterator[None]:
        """Give the pool back when the body has written its chunks."""
        pools = self._resources.pools
        if pool is pools.shared:
            yield
            pools.resize()
            return
        try:
            with self._resources.starting_helper(self._settings) if nbytes else contextlib.nullcontext():
                yield
        finally:
            pools.release(pool)
            agreed.plan.forget_targets()
            if nbytes:
                # Only now: with both pools touched the save would take twice the memory of the state.
                self._resources.warm_up(nbytes, self._settings)


def _source(shard: LiveShard, first: int, end: int) -> torch.Tensor | Runs:
    """Return the elements of boxes `first` to `end` of a shard."""
    found = shard.fragments
    return shard.data if found is None else Runs(shard.data, found.places[first:end], found.counts[first:end])


def _spare_values(values: Collection[Value], places: Places) -> list[Value]:
    """Return the values that this rank does not write, larger elements first: each lies at a multiple of its size.

    Copies of other ranks stand for them. The coordinator asks for a value that no longer equals such a copy.
    """
    return sorted((v for v in values if v.key not in places), key=lambda value: -value.data.element_size())


def _spare_image(spare: Sequence[Value], start: int, copies: DeviceCopies) -> Image:
    """Place the spare values from byte `start` on, behind the image of the rank's files."""
    return Image([value.data for value in spare], [place_values(spare, start)] if spare else [], copies)


def _copy_spare(spare: Sequence[Value], image: Image, pool: StagingPool) -> list[Value]:
    """Copy the spare values into `pool`, or into new memory if they do not fit there."""
    if not spare:
        return []
    if pool.capacity < image.nbytes:
        with image.copies.queued():
            return [replace(value, data=value.data.to("cpu", copy=True)) for value in spare]
    image.stage(pool.tensor(), pool.generation)
    places = [section.start + start for section in image.files for start in section.starts.tolist()]
    return [_staged(value, place, pool) for value, place in zip(spare, places, strict=True)]


def _staged(value: Value, place: int, pool: StagingPool) -> Value:
    """Return a value with its copy at byte `place` of the pool as data."""
    return replace(value, data=Image.staged(value.data, place, pool.tensor()))
