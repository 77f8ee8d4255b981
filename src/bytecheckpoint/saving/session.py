"""One save on one rank, step by step."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from .._version import __version__
from ..engine.pool import StagingPool
from ..engine.save_job import SaveJob
from ..engine.staging import Image, KnownTargets, dense
from ..engine.writing import FileTask
from ..errors import CheckpointError, IncompatibleCheckpointError
from ..handles import SaveHandle, SaveReport
from ..monitoring.collector import collector_paused
from ..monitoring.phases import Phases
from ..planning.save_plan import LocalTable, describe
from ..representation.names import CATALOG_NAME, escape, file_stem, new_generation, storage_file_name, values_file_name
from ..representation.shards import LiveState, TensorKey
from .coordinator import SaveTask
from .local import LocalPlan, PlannedFile, Value, content_digest, lay_out_rows, lay_out_values, signature, split
from .messages import (
    MIXED_PLANS,
    Answer,
    Description,
    Failure,
    FileRecord,
    Outcome,
    Report,
    Request,
    ValueRecord,
    decode,
    encode,
    escaped,
    tag,
    unescaped,
)

if TYPE_CHECKING:
    from .saver import SaveCall, Saver

__all__ = ["SaveSession"]

_log = logging.getLogger("bytecheckpoint")
#: A rank that writes slower than this is taken for hanging, bytes per second.
_SLOWEST = 4 << 20


class SaveSession:
    """The steps of one save; `Saver` decides which of them run in the caller's thread.

    Attributes:
        task: number and time limit; rank 0's coordinator reads the rest of it.
        next_report: tag of the next message that the coordinator expects from this rank; "" when none.
        stage_name: what is being done, for failure messages.
        blocking: seconds that the caller waited.
    """

    def __init__(
        self, saver: Saver, task: SaveTask, call: SaveCall, states: Sequence[LiveState], phases: Phases
    ) -> None:
        self._saver = saver
        self._collective = saver.collective
        self.task = task
        self._call = call
        self._phases = phases
        self._shards, self._values = split(states)
        self._timeout = call.settings.timeout
        self.next_report = "a"
        self.stage_name = "plan"
        self.blocking = 0.0
        self._table: tuple[LocalTable, bytes] | None = None
        self._plan: LocalPlan | None = None
        self._cached = False
        self._live = True
        self._undecided = False
        self._may_look = True
        self._differences: tuple[str, ...] = ()
        self._jobs: list[SaveJob] = []
        self._names: list[str] = []
        self._written = 0
        self._chunks: list[tuple[int, int, int, int]] = []
        self._pool: StagingPool | None = None
        self._image_bytes = 0
        self._files: list[PlannedFile] = []
        self._places: dict[TensorKey, tuple[int, int]] = {}
        self._generation = new_generation(self._collective.world_id, task.sequence)
        if self._collective.rank == 0:
            task.storage = call.storage
            task.generation = self._generation
            task.info = _info(call, self._collective.world_size)

    # --- plan -------------------------------------------------------------------------------------------------

    def foresee(self, *, dry: bool = False) -> None:
        """To be called in the caller's thread before `plan` runs in another one.

        The layout is read here, if it will be wanted: a module's state_dict() makes FSDP2 put its shards back, which
        must not happen in the middle of a forward pass.
        """
        self._may_look = False
        if self._collective.rank != 0:
            return
        if dry or self._call.check_replicas or self._described()[1] not in self._saver.plans:
            self.task.layout = self._call.framework.describe(self._call.states)

    def _described(self) -> tuple[LocalTable, bytes]:
        """This rank's table and its signature, made once."""
        if self._table is None:
            with collector_paused():
                table = describe(self._shards)
            self._table = table, signature(table)
        return self._table

    def plan(self, *, dry: bool = False) -> None:
        """Find out what this rank writes: from the cache, or by asking the coordinator."""
        table, key = self._described()
        cached = self._saver.plans.get(key)
        if cached is not None and not self._call.check_replicas and not dry:
            self._saver.plans.move_to_end(key)
            self._plan, self._cached = cached, True
            self.task.layout = cached.layout
            self._phases.mark("plan")
            return
        digests = b""
        if self._call.check_replicas:
            digests = self._row_digests()
        values = [self._record(v) for v in self._values]
        if self._collective.rank == 0 and self._may_look:
            self.task.layout = self._call.framework.describe(self._call.states)
        self._send(Request(escape(self._call.storage.url), table, values, digests, dry))
        self.next_report = ""
        answer = self._receive("b", self._timeout)
        if not dry:
            self.next_report = "c"
        assert isinstance(answer, Answer)
        self._adopt(answer)
        self._phases.mark("plan")

    def _adopt(self, answer: Answer) -> None:
        """Make the coordinator's answer this rank's plan, and remember it."""
        table, key = self._described()
        rows = np.frombuffer(answer.rows, np.int64).tolist()
        with collector_paused():
            files = lay_out_rows(
                self._shards,
                rows,
                rank=self._collective.rank,
                world_size=self._collective.world_size,
                generation=self._generation,
            )
        known = {v.key for v in self._values}
        write = {unescaped(k) for k in answer.values}
        layout = self.task.layout
        self._plan = LocalPlan(answer.plan, rows, files, write, known, table, layout, KnownTargets(len(files)))
        self._differences = tuple(answer.differences)
        self._saver.remember(key, self._plan)

    def _row_digests(self) -> bytes:
        sums = np.zeros(len(self._shards), np.uint64)
        for i, shard in enumerate(self._shards):
            sums[i] = xxhash.xxh3_64_intdigest(content_digest(dense(shard.data.cpu()), shard.dtype))
        return sums.tobytes()

    def _record(self, value: Value) -> ValueRecord:
        file, offset = self._places.get(value.key, (-1, 0))
        shape = tuple(value.data.shape)
        return ValueRecord(
            escaped(value.key), value.digest, value.dtype, shape, value.merged, file, offset, value.nbytes
        )

    # --- bytes ------------------------------------------------------------------------------------------------

    def _image(self, values: Sequence[Value], planned: bool) -> tuple[Image, list[FileTask]]:
        """The image of this rank's files: the planned ones and those of `values`."""
        plan = self._plan
        assert plan is not None
        tensors: list[torch.Tensor] = [self._shards[i].data for i in plan.rows] if planned else []
        files = list(plan.files) if planned else []
        last = files[-1].image if files else None
        position = last.start + -(-last.nbytes // 4096) * 4096 if last else 0
        more, places, _ = lay_out_values(
            values,
            first=len(tensors),
            position=position,
            part=1 if self._files else 0,
            rank=self._collective.rank,
            world_size=self._collective.world_size,
            generation=self._generation,
            siblings=[file_stem(self._file_name(f)) for f in (*self._files, *files)],
        )
        base = len(self._files) + len(files)
        self._places.update({v.key: (base + f, offset) for v, (f, offset) in zip(values, places, strict=True)})
        tensors += [v.data for v in values]
        files += more
        tasks = []
        for file in files:
            name = self._file_name(file)
            header = file.header
            tasks.append(FileTask(name, header.data_offset, header.data_length, header.block_bytes))
        self._names += [t.name for t in tasks]
        self._files += files
        known = plan.targets if planned else KnownTargets()
        return Image(tensors, [f.image for f in files], known), tasks

    def _begin_commit(self) -> None:
        """Before the first byte is written: see what the commit will replace, and whether it can."""
        if self._collective.rank == 0:
            storage = self._call.storage
            self.task.replaces = storage.version(CATALOG_NAME)
            storage.probe(CATALOG_NAME, self.task.replaces)

    def _file_name(self, file: PlannedFile) -> str:
        name = values_file_name if file.values else storage_file_name
        return name(file.kind, self._collective.rank, self._generation, file.part)

    def _values_to_write(self) -> list[Value]:
        plan = self._plan
        assert plan is not None
        return [v for v in self._values if v.key in plan.write_values or v.key not in plan.known_values]

    def _new_job(self, values: Sequence[Value], *, planned: bool) -> tuple[SaveJob, Image]:
        image, tasks = self._image(values, planned)
        job = SaveJob(image, tasks, self._call.storage, self._call.settings)
        self._jobs.append(job)
        return job, image

    def write_through(self, handle: SaveHandle) -> None:
        """A synchronous save from here on."""
        self.stage_name = "write"
        self._begin_commit()
        job, image = self._new_job(self._values_to_write(), planned=True)
        # What is only sent when it is complete waits in memory, if there is room, else in a file.
        whole = self._call.storage.capabilities.whole_files
        pool = self._saver.whole_pool(image.nbytes, self._call.settings) if whole else None
        if pool is None:
            records = self._finish(job, self._write_through(job), self._files)
        else:
            try:
                job.open_backend(pool, None)
                records = self._finish(job, job.write_staged(job.stage(pool)), self._files)
            finally:
                self._give_back(pool)
        handle.staged.set_result(None)
        self._commit(handle, records)

    def _write_through(self, job: SaveJob) -> list[NDArray[np.uint64]]:
        # Kept from save to save: touching new pages would cost more than copying into them.
        pool = self._pool or self._saver.pool
        pool.reserve(job.slot_bytes(), touch=False)
        return job.write_through(pool)

    def stage(self, handle: SaveHandle) -> None:
        """Copy everything, so that the caller may go on."""
        self.stage_name = "stage"
        job, image = self._new_job(self._values_to_write(), planned=True)
        settings = self._call.settings
        self._pool = self._saver.staging_pool(image.nbytes, settings)
        self._image_bytes = image.nbytes
        if self._pool.capacity < image.nbytes:
            self._open_backend(job)
        self._chunks = job.stage(self._pool)
        self._phases.mark("stage")
        # Values that another rank's copy stands for may still have to be written, if the copies prove to differ.
        for value in self._values:
            if value.key not in self._places:
                value.data = value.data.clone()
        # The live tensors are not needed any more, and must not be kept alive.
        image.tensors = []
        self._live = False
        self._shards = []
        self._table = None
        handle.staged.set_result(None)

    def write_and_commit(self, handle: SaveHandle) -> None:
        """The background half of an asynchronous save."""
        self.stage_name = "write"
        job = self._jobs[0]
        with self._readying():
            if not job.opened:
                self._open_backend(job)
            records = self._finish(job, job.write_staged(self._chunks), self._files)
            self._commit(handle, records)

    def _open_backend(self, job: SaveJob) -> None:
        assert self._pool is not None
        self._begin_commit()
        job.open_backend(self._pool, self._saver.helper(self._call.settings) if self._pool.shared else None)

    @contextlib.contextmanager
    def _readying(self) -> Iterator[None]:
        """Beside the first save, which goes through a pool of its own, make ready what later ones use."""
        if self._pool is self._saver.pool:
            yield
            return
        thread = threading.Thread(target=self._make_ready, name="bytecheckpoint-ready", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter ends: there will be no later saves
            thread.start()
        try:
            yield
        finally:
            if thread.ident is not None:
                # A new process first closes what this one has open, for which a file system that hangs lets it wait.
                thread.join(self._timeout)
            assert self._pool is not None
            self._give_back(self._pool)

    def _give_back(self, pool: StagingPool) -> None:
        """Free a pool that was made for this save only."""
        if pool is not self._saver.pool:
            pool.release()
            if self._plan is not None:
                self._plan.targets.forget()

    def _make_ready(self) -> None:
        settings = self._call.settings
        try:
            self._saver.helper(settings)
            self._saver.reserve(self._image_bytes, settings, touch=True)
        except (CheckpointError, OSError) as error:
            _log.warning("the staging pool could not be made ready, the next save tries again: %s", error)

    def run_in_background(self, handle: SaveHandle) -> None:
        """All of an asynchronous save whose caller did not even wait for the copy."""
        self._saver._raise_earlier_failure()
        self._phases.mark("wait")
        self.plan()
        self.stage(handle)
        self.write_and_commit(handle)

    def prepare(self) -> None:
        """Start the writer process, plan, reserve the pool and touch its pages."""
        settings = self._call.settings
        # Nothing here waits for the process to come up: a save that follows at once would have to wait as long, and
        # needs it only in its background half.
        self._saver.helper(settings)
        self.plan(dry=True)
        assert self._plan is not None
        image, _ = self._image(self._values_to_write(), planned=True)
        self._saver.reserve(image.nbytes, settings, touch=True)

    def _finish(self, job: SaveJob, sums: list[NDArray[np.uint64]], files: Sequence[PlannedFile]) -> list[FileRecord]:
        self._phases.mark("write")
        self.stage_name = "finish"
        count = len(self._files)
        headers = [f.header.render(s, self._generation, count) for f, s in zip(files, sums, strict=True)]
        job.finish(headers)
        records = []
        for file, header, file_sums in zip(files, headers, sums, strict=True):
            template = file.header
            size = template.data_offset + template.data_length
            self._written += size
            header_sum = xxhash.xxh3_64_intdigest(header)
            records.append(
                FileRecord(
                    self._file_name(file),
                    escape(file.kind),
                    file.part,
                    file.values,
                    size,
                    template.data_offset,
                    header_sum,
                    template.block_bytes,
                    file_sums.tobytes(),
                )
            )
        self._phases.mark("finish")
        return records

    # --- commit -----------------------------------------------------------------------------------------------

    def _commit(self, handle: SaveHandle, records: list[FileRecord]) -> None:
        self.stage_name = "commit"
        plan = self._plan
        assert plan is not None
        self._report(records)
        # The slowest rank decides how long this takes; its bytes are not known here, ours are a measure.
        waiting = 2 * self._timeout + 4 * self._written / _SLOWEST
        outcome = self._receive("f", waiting)
        if isinstance(outcome, Outcome) and outcome.describe:
            self.next_report = "d"
            self._send(Description(plan.table, np.array(plan.rows, np.int64).tobytes()))
            self.next_report = ""
            outcome = self._receive("h", waiting)
        if isinstance(outcome, Answer):
            records = self._write_anew(outcome)
            self._report(records)
            outcome = self._receive("k", waiting)
            plan = self._plan
            assert plan is not None
        assert isinstance(outcome, Outcome)
        if outcome.write_values:
            self.next_report = "e"
            keys = {unescaped(k) for k in outcome.write_values}
            job, _ = self._new_job([v for v in self._values if v.key in keys], planned=False)
            new = self._files[len(records) :]
            records += self._finish(job, self._write_through(job), new)
            plan.write_values |= keys
            self._report(records)
            self._receive("g", waiting)
        self._phases.mark("commit")
        total = self._phases.total()
        report = SaveReport(
            path=self._call.storage.url,
            bytes_written=self._written,
            blocking_seconds=self.blocking or total,
            total_seconds=total,
            phases=dict(self._phases.seconds),
            plan_cached=self._cached,
            generation=self._generation,
            replica_differences=self._differences,
        )
        self._jobs.clear()
        self._saver.committed(self._call, handle, report, self.task.sequence)

    def _write_anew(self, answer: Answer) -> list[FileRecord]:
        """Write by another plan: what the cached one made this rank write does not fit what other ranks hold now.

        Raises:
            IncompatibleCheckpointError: only what the cached plan wanted was copied, and the caller has gone on since.
        """
        self.next_report = "c"
        if not self._live:
            raise IncompatibleCheckpointError(f"{MIXED_PLANS}: {answer.why_anew}")
        for job in self._jobs:
            job.abort()
        self._call.storage.delete(self._names)
        self._jobs, self._names, self._files, self._places, self._written = [], [], [], {}, 0
        self._cached = False
        self._adopt(answer)
        job, _ = self._new_job(self._values_to_write(), planned=True)
        return self._finish(job, self._write_through(job), self._files)

    def _report(self, records: list[FileRecord]) -> None:
        assert self._plan is not None
        values = [self._record(v) for v in self._values]
        self._undecided = True
        self._send(Report(escape(self._call.storage.url), self._plan.name, records, values))
        self.next_report = ""

    def _send(self, message: Any) -> None:
        self._collective.send(0, tag(self.task.sequence, self.next_report), encode(message))

    def _receive(self, step: str, timeout: float) -> Any:
        message = decode(self._collective.recv(0, tag(self.task.sequence, step), timeout=timeout))
        self._undecided = isinstance(message, Failure) and message.keep
        if isinstance(message, Failure):
            raise message.as_error()
        return message

    def discard(self) -> None:
        """After a failure: remove what this rank wrote, unless a commit may still name it."""
        for job in self._jobs:
            job.abort()
        # Without the coordinator's word the commit may have happened: then the files must stay.
        if self._names and not self._undecided:
            with contextlib.suppress(CheckpointError, OSError):
                self._call.storage.delete(self._names)
        self._jobs.clear()


def _info(call: SaveCall, world_size: int) -> dict[str, Any]:
    return {
        "created": time.time(),
        "world_size": world_size,
        "framework": call.framework.name,
        "versions": {"bytecheckpoint": __version__, "torch": str(torch.__version__)},
        "metadata": dict(call.metadata),
    }
