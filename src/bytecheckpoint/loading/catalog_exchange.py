"""Open a checkpoint for a load: few ranks read the catalog and the plain values, and pass them on to the others."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.collectives import Collective
from bytecheckpoint.concurrency import call_with_timeout
from bytecheckpoint.engine.catalogs import CatalogHead, CatalogReader, open_catalog
from bytecheckpoint.engine.distribution import whose_turn
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.errors import CheckpointError, CheckpointReplacedError, CorruptCheckpointError
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.formats.detect import as_checkpoint
from bytecheckpoint.loading.decision import OpenDecision, OpenReport
from bytecheckpoint.planning.read_plan import groups_to_read, stored_rows
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog
from bytecheckpoint.representation.catalog_index import stored_tree
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage

__all__ = ["CatalogExchange", "OpenCheckpoint", "Trees"]


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint that is open for a load.

    Attributes:
        reader: reader of the catalog.
        files: storage files.
        trees: reader of the plain values.
    """

    reader: CatalogReader
    files: FileSet
    trees: Trees

    @contextlib.contextmanager
    def detect_replacement(self) -> Iterator[None]:
        """Turn a damaged read in a `with` block into `CheckpointReplacedError` if another save replaced the files."""
        try:
            yield
        except CorruptCheckpointError as error:
            self.files.check_unchanged()
            if self.reader.replaced():
                raise CheckpointReplacedError(str(error)) from error
            raise


class CatalogExchange:
    """One rank's part in reading the catalog and the plain values.

    Each rank reads the catalog itself if the page cache keeps files, or if ranks may see different files. From other
    storages rank 0 reads the part that all ranks need, and sends it with its decision. One rank of each machine reads the
    rest for the ranks of the machine: row groups of a large catalog, and trees of plain values.

    Args:
        collective: ranks of the load.
        tag: tag of the messages, unique to this attempt.
        storage: storage of the checkpoint.
        timeout: seconds to wait for other ranks.
        cancel: token that ends the reads.
        stack: exit stack of the attempt, which closes the files.

    Attributes:
        machine_reads: division of the reads between the ranks of a machine.
    """

    def __init__(
        self,
        collective: Collective,
        tag: str,
        storage: Storage,
        timeout: float,
        cancel: Cancellation,
        stack: contextlib.ExitStack,
    ) -> None:
        self.machine_reads = MachineReads(collective, f"{tag}/pieces", timeout)
        self._collective = collective
        self._storage = storage
        self._cancel = cancel
        self._stack = stack

    def read(self) -> tuple[OpenCheckpoint | None, OpenReport]:
        """Read the catalog, unless this rank gets it from rank 0. Begin to serve plain values to the other ranks.

        Returns:
            The checkpoint as far as this rank has read it, and the report to rank 0.
        """
        several = self._collective.world_size > 1
        remote = several and self._storage.capabilities.shared and not self._storage.capabilities.page_cache
        own, digest, versions = None, b"", b""
        if not remote or self._collective.rank == 0:
            self._storage, reader = open_catalog(self._storage)
            own = self._open(reader)
            digest = xxhash.xxh3_128_digest(own.reader.identity)
            if of_files := reader.versions():
                versions = xxhash.xxh3_128_digest(repr(sorted(of_files.items())).encode())
            with own.detect_replacement():
                remote = remote or (several and own.trees.are_remote())
        if remote:
            self._stack.enter_context(self.machine_reads.serve())
        return own, OpenReport(digest, self._collective.host if remote else "", self._storage.url, versions)

    def complete(self, own: OpenCheckpoint | None, decision: OpenDecision) -> OpenCheckpoint:
        """Use rank 0's catalog if this rank has read none, and begin to divide the reads with the ranks of this machine.

        Raises:
            CorruptCheckpointError: the catalog's bytes have changed on their way.
        """
        checkpoint = own or self._open(self._reader_of(decision.head))

        def read(name: str) -> NDArray[np.uint8]:
            what, _, number = name.partition(" ")
            if what == "tree":
                return checkpoint.trees.read_here(int(number))
            # On a thread of its own, so that the failure of another rank ends the wait.
            group = functools.partial(checkpoint.reader.group, int(number))
            timeout = 2 * checkpoint.files.read_timeout()
            what = f"cannot read {checkpoint.files.url}"
            data = call_with_timeout(timeout, group, what, stopped=self._cancel.future)
            return np.frombuffer(data, np.uint8)

        self.machine_reads.begin(read, decision.servers(self._collective.rank))
        return checkpoint

    def _reader_of(self, head: CatalogHead | None) -> CatalogReader:
        """Return the reader of a catalog that rank 0 has read."""
        if head is not None and head.versions and (found := as_checkpoint(self._storage)) is not None:
            found.trust(head.versions)
            self._storage = found
        return CatalogReader(self._storage, head)

    def rows(self, checkpoint: OpenCheckpoint, wanted: BoxTable | None) -> Catalog:
        """Return a large catalog with the rows near some boxes, or with all rows for None.

        A group is read once per machine if its ranks serve it.
        """
        groups = checkpoint.reader.groups
        assert groups is not None

        def fill(number: int, memory: memoryview) -> None:
            data = np.frombuffer(memory, np.uint8)
            self.machine_reads.get(f"group {number}", number, data, checkpoint.files)

        chosen = np.unique(groups.group) if wanted is None else groups_to_read(groups, wanted)
        return checkpoint.reader.rows(np.union1d(chosen, groups.head_groups), fill, wanted)

    def _open(self, reader: CatalogReader) -> OpenCheckpoint:
        self._stack.callback(reader.close)
        files = self._stack.enter_context(FileSet(self._storage, reader.catalog, self._cancel.future))
        self._cancel.raise_if_set()
        return OpenCheckpoint(reader, files, Trees(reader.catalog, files, self.machine_reads))


class Trees:
    """Reads the trees of plain values, which go by the number of their tensor in the catalog. Several threads may use it.

    Through a layout they go by the number in the catalog that it shows; ranks ask each other by the stored numbers.

    A file of values is small, so a load from a server costs about one request per file, and ranks want many of the same
    trees: those that all ranks share, and, to reshard a data loader, those of every rank that saved.

    Args:
        catalog: catalog of the checkpoint.
        files: storage files of the checkpoint.
        machine_reads: division of the reads between the ranks of a machine; None: this rank reads all that it wants.

    Attributes:
        rows: stored shards, ordered by tensor, of the catalog that is shown.
        bytes_read: bytes read from storage so far.
    """

    def __init__(self, catalog: Catalog, files: FileSet, machine_reads: MachineReads | None = None) -> None:
        self._catalog = catalog
        self._files = files
        self._machine_reads = machine_reads
        self._shown: Int64s | None = None
        self.rows = self._own_rows = stored_rows(catalog)
        self.bytes_read = 0

    def are_remote(self) -> bool:
        """Return whether some trees are not in this machine's memory, from which a read is as quick as from a rank."""
        trees = np.flatnonzero(self._catalog.slot.codes == self._catalog.slot.code_of(VALUES_SLOT))
        # A sample is enough: to look at all trees would take more requests than sharing them saves.
        sample = trees[[0, len(trees) // 2, -1]] if len(trees) else trees
        return bool(len(trees)) and not self._files.is_cached(self._ranges(sample))

    def read(self, number: int) -> bytes:
        """Read a tree, or get it from the rank of this machine that reads it. Raises as `FileSet.read`."""
        number = self._stored_number(number)
        if self._machine_reads is None:
            return stored_tree(self._catalog, number, self.read_here(number).tobytes())
        owner = int(self._catalog.owner[number])  # reads its own tree, which other ranks rarely want
        tree = np.empty(self._nbytes(number), np.uint8)
        self._machine_reads.get(f"tree {number}", owner if owner >= 0 else number, tree, self._files)
        return stored_tree(self._catalog, number, tree.tobytes())

    def read_here(self, number: int) -> NDArray[np.uint8]:
        """Read a tree from storage. Raises as `FileSet.read`."""
        nbytes = self._nbytes(number)
        ((file, start, _),) = self._ranges([number]).tolist()
        tree = np.frombuffer(self._files.read(file, start, nbytes), np.uint8)
        self.bytes_read += nbytes
        return tree

    def read_range(self, number: int, offset: int, nbytes: int) -> bytes:
        """Read a part of a tensor that is one run of bytes. Raises as `FileSet.read`."""
        ((file, start, stop),) = self._ranges([self._stored_number(number)]).tolist()
        self.bytes_read += nbytes
        return self._files.read(file, start + offset, min(nbytes, stop - start - offset))

    def replace_catalog(self, catalog: Catalog) -> None:
        """Use a catalog with more row groups, and so with the places of more of the same tensors."""
        self._catalog = catalog
        self.rows = self._own_rows = stored_rows(catalog)

    def show(self, catalog: Catalog, stored: Int64s) -> None:
        """Go by the numbers of a catalog that a layout shows.

        Args:
            catalog: the catalog.
            stored: number of each of its tensors in the stored catalog.
        """
        self.rows, self._shown = stored_rows(catalog), stored

    def _stored_number(self, number: int) -> int:
        return number if self._shown is None else int(self._shown[number])

    def _ranges(self, numbers: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each tree: (file, start, stop) rows, int64 [n, 3]. Each is one row of bytes."""
        row = np.searchsorted(self._own_rows.boxes.tensor, numbers)
        start = self._own_rows.start[row]
        return np.stack([self._own_rows.file[row], start, start + self._catalog.byte_length[row]], axis=1).astype(
            np.int64
        )

    def _nbytes(self, number: int) -> int:
        nbytes = int(self._catalog.byte_length[np.searchsorted(self._own_rows.boxes.tensor, number)])
        if self._catalog.shape(number) != (nbytes,) or self._catalog.dtype[number] != "uint8":
            raise CorruptCheckpointError(
                f"catalog '{CATALOG_NAME}' says that the values of {self._catalog.state[number]} are not one run of bytes; "
                "use another checkpoint",
                file=CATALOG_NAME,
                tensors=(str(self._catalog.key(number)),),
            )
        return nbytes


class MachineReads:
    """Reads named pieces of a checkpoint once per machine. Several threads may use it.

    Ranks serve before they know the checkpoint: a request waits until `begin`.

    Args:
        collective: ranks of the load.
        tag: tag of the messages, unique to the load.
        timeout: longest wait for `begin`, seconds.

    Attributes:
        bytes_received: bytes received from other ranks so far.
    """

    def __init__(self, collective: Collective, tag: str, timeout: float) -> None:
        self._collective, self._tag, self._timeout = collective, tag, timeout
        self._begun: Future[Callable[[str], NDArray[np.uint8]]] = Future()
        self._readers: Sequence[int] = ()
        self._found: dict[str, Future[NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()
        self.bytes_received = 0

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Serve pieces to other ranks inside the `with` block."""
        try:
            with self._collective.serve(self._tag, lambda request: self._read_once(request.decode())):
                yield
        finally:
            if not self._begun.done():
                self._begun.set_exception(CheckpointError("it has given up"))

    def begin(self, read: Callable[[str], NDArray[np.uint8]], readers: Sequence[int]) -> None:
        """Begin to read.

        Args:
            read: function that reads the piece of a name from storage and verifies it; called once for each name.
            readers: ranks of this machine that serve, the same on each of them, this one among them; or none.
        """
        self._readers = readers
        self._begun.set_result(read)

    def get(self, name: str, turn: int, destination: NDArray[np.uint8], files: FileSet) -> None:
        """Fill an array with a piece: read the piece, or get it from the rank of this machine that reads it.

        Args:
            name: name of the piece.
            turn: number that divides the pieces between the readers. The number of a reader gives the piece to it.
            destination: array of the piece's length.
            files: storage files, with the time limit and the failure of another rank.

        Raises:
            CheckpointError: as `read` of `begin`, here or on the other rank.
        """
        reader = self._collective.rank
        if self._readers:
            reader = turn if turn in self._readers else whose_turn(self._readers, turn)
        if reader == self._collective.rank:
            found = self._read_once(name)
            if found.ctypes.data != destination.ctypes.data:
                np.copyto(destination, found)
        elif len(destination):
            timeout = files.read_timeout()
            fetch = functools.partial(
                self._collective.fetch, reader, self._tag, name.encode(), destination, timeout=timeout
            )
            call_with_timeout(2 * timeout, fetch, f"cannot read {files.url}", stopped=files.stopped)
            self.bytes_received += len(destination)

    def _read_once(self, name: str) -> NDArray[np.uint8]:
        """Read a piece from storage, unless this rank has done so, for itself or for another."""
        with self._lock:
            found = self._found.get(name)
            first = found is None
            found = self._found.setdefault(name, Future())
        if first:
            try:
                found.set_result(self._begun.result(self._timeout)(name))
            except BaseException as error:  # noqa: BLE001  raised from `result`, in all threads that wait for the piece
                found.set_exception(error)
        return found.result()
