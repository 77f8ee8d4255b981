"""How the ranks of a load open a checkpoint: who reads its catalog and its plain values, and who gets them from another."""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.collectives import Collective
from bytecheckpoint.concurrency import call_with_timeout
from bytecheckpoint.engine.catalogs import CatalogReader
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.engine.machine_reads import MachineReads
from bytecheckpoint.errors import CheckpointError, CheckpointReplacedError, IncompatibleCheckpointError
from bytecheckpoint.failures import Failure
from bytecheckpoint.loading.call import LoadArguments, LoadCall
from bytecheckpoint.loading.decision import OpenDecision, OpenReport, decide_open
from bytecheckpoint.loading.open_checkpoint import detect_replacement
from bytecheckpoint.loading.trees import Trees
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog import Catalog

__all__ = ["Opening", "Source"]


class Source(NamedTuple):
    """A checkpoint that is open, before its contents are matched with the live objects; `reader` has its catalog."""

    arguments: LoadArguments
    reader: CatalogReader
    files: FileSet
    trees: Trees


class Opening:
    """One rank's part in opening a checkpoint.

    Where the page cache keeps files, or ranks may see different ones, each rank reads the catalog. From other storages
    rank 0 reads what all ranks need of it, and sends it with its decision. What they need then, groups of a large catalog
    and trees of plain values, one rank of each machine reads, unless it is in the machine's memory already.

    Args:
        collective: the ranks.
        tag: unique to this attempt of a load.
        call: the arguments of the load.

    Attributes:
        shared: divides the reading between the ranks of a machine.
    """

    def __init__(self, collective: Collective, tag: str, call: LoadCall) -> None:
        self._collective = collective
        self._call = call
        self._arguments: LoadArguments | None = None
        self._source: Source | None = None
        self._stopped: CheckpointError | None = None
        self.shared = MachineReads(collective, f"{tag}/pieces", call.settings.timeout)

    def stop(self, failure: Failure) -> None:
        """End reads with `failure`. Any thread may call it, once."""
        self._stopped = failure.as_error()
        if self._source is not None:
            self._source.files.stop(self._stopped)

    def open(self, stack: contextlib.ExitStack) -> OpenReport:
        """Read the catalog if this rank does so itself, and begin to serve pieces, until `stack` is closed."""
        self._arguments = arguments = self._call.check()
        several = self._collective.world_size > 1
        storage = arguments.storage
        far = several and storage.capabilities.shared and not storage.capabilities.page_cache
        digest = b""
        if not far or self._collective.rank == 0:
            source = self._use(CatalogReader(storage), stack)
            digest = xxhash.xxh3_128_digest(source.reader.identity)
            with detect_replacement(source.reader):
                far = far or (several and source.trees.far())
        if far:
            stack.enter_context(self.shared.serve())
        return OpenReport(digest, self._collective.host if far else "", storage.url)

    def _use(self, reader: CatalogReader, stack: contextlib.ExitStack) -> Source:
        """Go on with a catalog."""
        assert self._arguments is not None
        stack.callback(reader.close)
        files = stack.enter_context(FileSet(self._arguments.storage, reader.catalog))
        self._source = Source(self._arguments, reader, files, Trees(reader.catalog, files, self.shared))
        if self._stopped is not None:
            raise self._stopped
        return self._source

    def decide(self, reports: list[OpenReport]) -> OpenDecision:
        """Decide on rank 0 upon the reports of all ranks."""
        assert self._source is not None
        return decide_open(reports, self._source.reader.head)

    def check(self, decided: OpenDecision, *, last: bool) -> None:
        """Refuse different catalogs.

        Raises:
            CheckpointReplacedError: they differ, and this is not the last attempt.
            IncompatibleCheckpointError: they differ.
        """
        if not decided.alike:
            assert self._arguments is not None
            kind = IncompatibleCheckpointError if last else CheckpointReplacedError
            if decided.paths:
                raise kind(f"ranks see different checkpoints: {decided.paths}; give all the same path, and load again")
            raise kind(
                f"ranks see different checkpoints at {self._arguments.storage.url}; it was replaced during the "
                f"load, or the path is not shared; load again"
            )

    def share(self, decided: OpenDecision, stack: contextlib.ExitStack) -> Source:
        """Take rank 0's catalog if this rank has read none, and begin to divide the reading with the machine's ranks.

        Raises:
            CorruptCheckpointError: the catalog's bytes have changed on their way.
        """
        assert self._arguments is not None
        source = self._source or self._use(CatalogReader(self._arguments.storage, decided.head), stack)

        def read(name: str) -> NDArray[np.uint8]:
            kind, _, number = name.partition(" ")
            if kind == "tree":
                return source.trees.read_here(int(number))
            # In a thread of its own, so that the failure of another rank ends the wait.
            group = functools.partial(source.reader.group, int(number))
            timeout, stopped = 2 * source.files.read_timeout(), source.files.stopped
            return np.frombuffer(
                call_with_timeout(timeout, group, f"cannot read {source.files.url}", stopped=stopped), np.uint8
            )

        self.shared.begin(read, decided.servers(self._collective.rank))
        return source

    def rows(self, numbers: Int64s) -> Catalog:
        """Return the large catalog with the rows of some groups, each read once per machine if its ranks serve pieces."""
        assert self._source is not None
        _, reader, files, _ = self._source

        def fill(number: int, memory: memoryview) -> None:
            self.shared.get(f"group {number}", number, np.frombuffer(memory, np.uint8), files)

        return reader.rows(numbers, fill)
