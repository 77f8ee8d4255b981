"""Loading from a tier on several machines: the ranks agree which copy counts, and serve their hot files to each other."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.collectives.base import DataProvider
from bytecheckpoint.errors import CheckpointError, StorageError, StorageUnavailableError
from bytecheckpoint.representation.catalog_file import decode_outline
from bytecheckpoint.representation.names import CATALOG_NAME, is_uri
from bytecheckpoint.settings import Settings
from bytecheckpoint.storage import FileReader, Storage
from bytecheckpoint.storage.wrappers import wrapped_like
from bytecheckpoint.tiers.copies import AnyCopy
from bytecheckpoint.tiers.current_copy import open_durable_catalog
from bytecheckpoint.tiers.hot_folder import StepRecord
from bytecheckpoint.tiers.machines import Machines, find_machines
from bytecheckpoint.tiers.names import digest_of
from bytecheckpoint.tiers.storage import TierStorage, tier_of

__all__ = ["SharedTier", "choose_copy"]

_log = logging.getLogger("bytecheckpoint")


def choose_copy(
    storage: Storage, collective: Collective, tag: str, settings: Settings, stack: contextlib.ExitStack
) -> Storage:
    """Agree on the copy of a checkpoint that all ranks of a load read. Every rank calls this.

    A storage without tiers has one copy and is returned as it is.

    Args:
        storage: storage of the checkpoint, as this rank sees it.
        collective: ranks of the load.
        tag: tag of the messages, unique to this attempt.
        settings: settings with the time limits.
        stack: exit stack of the load; this rank serves its hot files to the other ranks until it is closed.

    Returns:
        The storage to load from. That of a tier reads the hot step that the machines have among them, or the durable step.
    """
    tier = tier_of(storage)
    if tier is None or collective.world_size == 1:
        return storage
    return wrapped_like(storage, _choose_copy(tier, collective, tag, settings, stack))


def _choose_copy(
    storage: TierStorage, collective: Collective, tag: str, settings: Settings, stack: contextlib.ExitStack
) -> TierStorage:
    agreement = Agreement(collective, tag, settings.timeout)
    machines = find_machines(agreement, storage.hot_root)
    leads = machines.leads(collective.rank)
    catalog = storage.hot_folder.catalog() if leads else None
    referee = _Referee(storage)
    candidates = agreement.agree(
        "look", lambda: _look(storage, catalog) if leads else _Found(), referee.candidates, reports=_Found
    )
    missing: list[str] = []
    for number, (digest, holder) in enumerate(candidates):
        own = catalog if catalog is not None and collective.rank == holder else b""
        judge = functools.partial(referee.judge, digest, holder)
        choice = agreement.agree(f"catalog-{number}", functools.partial(bytes, own), judge, decisions=_Choice)
        if choice.counts:
            return _serve_files(agreement, machines, storage, choice, stack)
        missing = missing or choice.missing
    return _DurableOnly(storage.url, missing)


def _look(storage: TierStorage, catalog: bytes | None) -> _Found:
    """Look into the hot folder of this machine, which holds this catalog."""
    files = dict(storage.hot.list())
    if catalog is None:
        return _Found(files=files)
    return _Found(digest_of(catalog), storage.hot_folder.record(catalog), files)


class SharedTier(TierStorage):
    """A tier as the ranks of a load see it together: this machine's files, those of other machines, the durable ones.

    Args:
        url: address of the tier.
        own: True if this machine has the catalog of the hot step that counts.
        holders: size of each file (and of the catalog), and the ranks of other machines that serve it.
        remote: reads the files of these ranks.
    """

    def __init__(self, url: str, own: bool, holders: dict[str, tuple[int, list[int]]], remote: RemoteFiles) -> None:
        super().__init__(url)
        self._own = own
        self._holders = holders
        self._remote = remote

    def _open_catalog(self) -> FileReader:
        local, _ = super().copies(CATALOG_NAME)
        return AnyCopy(f"{self.url}/{CATALOG_NAME}", [*[local][: self._own], *self._openers(CATALOG_NAME)])

    def copies(self, name: str) -> list[Callable[[], FileReader]]:
        local, durable = super().copies(name)
        return [local, *self._openers(name), durable]

    def _openers(self, name: str) -> list[Callable[[], FileReader]]:
        size, ranks = self._holders.get(name, (0, []))
        return [functools.partial(RemoteReader, self._remote, rank, name, size) for rank in ranks]


class _DurableOnly(TierStorage):
    """A tier whose hot copies do not count.

    Args:
        url: address of the tier.
        missing: files that an otherwise valid hot step lacks on all machines.
    """

    def __init__(self, url: str, missing: list[str]) -> None:
        super().__init__(url)
        self._missing = missing

    def _open_catalog(self) -> FileReader:
        return open_durable_catalog(self.url, self.durable, self._missing, "none of these machines")


class _Found(msgspec.Struct, frozen=True, array_like=True):
    """The findings of one rank in the hot folder of its machine; only the first rank of a machine looks.

    Attributes:
        digest: digest of the catalog, "" when there is none.
        record: record of the step.
        files: sizes by name.
    """

    digest: str = ""
    record: StepRecord | None = None
    files: dict[str, int] = {}


class _Choice(msgspec.Struct, frozen=True, array_like=True):
    """The decision of rank 0 about one hot step.

    Attributes:
        counts: True if the step counts and is complete.
        holders: size of each file (and of the catalog), and the ranks whose machines have it.
        missing: files that no machine and not the durable storage has, if the step counts but is incomplete.
    """

    counts: bool = False
    holders: dict[str, tuple[int, list[int]]] = {}
    missing: list[str] = []


class _Referee:
    """Decides on rank 0 which hot step counts.

    Args:
        storage: tier, as rank 0 sees it.
    """

    def __init__(self, storage: TierStorage) -> None:
        self._storage = storage
        self._found: list[_Found] = []  # by rank

    def candidates(self, found: list[_Found]) -> list[tuple[str, int]]:
        """Return the hot steps that the ranks have found, the newest first: its digest, and a rank with its catalog."""
        self._found = found
        holders: dict[str, int] = {}
        for rank, report in enumerate(found):
            if report.digest:
                holders.setdefault(report.digest, rank)
        saved = {digest: record.saved if (record := self._record_of(digest)) else 0.0 for digest in holders}
        return sorted(holders.items(), key=lambda item: -saved[item[0]])

    def _record_of(self, digest: str) -> StepRecord | None:
        records = [report.record for report in self._found if report.digest == digest and report.record is not None]
        return records[-1] if records else None

    def judge(self, digest: str, holder: int, catalogs: list[bytes]) -> _Choice:
        """Decide whether a hot step counts and is complete.

        Args:
            digest: digest of its catalog.
            holder: rank that has sent the catalog.
            catalogs: messages of all ranks.
        """
        storage, found, catalog = self._storage, self._found, catalogs[holder]
        if not storage.hot_copy_counts(catalog, self._record_of(digest)):
            return _Choice()
        try:
            files = [file for file in decode_outline(catalog)[0] if not is_uri(file.name)]
        except CheckpointError as error:
            _log.warning("%s: a hot catalog cannot be read: %s", storage.url, error)
            return _Choice(missing=[CATALOG_NAME])
        holders = {
            file.name: (
                file.stored_bytes,
                [rank for rank, each in enumerate(found) if each.files.get(file.name) == file.stored_bytes],
            )
            for file in files
        }
        missing = {file.name: file.stored_bytes for file in files if not holders[file.name][1]}
        if missing:
            present: dict[str, int] = {}
            try:
                present = dict(storage.durable.list())
            except CheckpointError as error:
                _log.warning("%s: %s", storage.url, error)
            missing = {name: size for name, size in missing.items() if present.get(name) != size}
        holders[CATALOG_NAME] = len(catalog), [rank for rank, each in enumerate(found) if each.digest == digest]
        return _Choice(missing=sorted(missing)) if missing else _Choice(True, holders)


def _serve_files(
    agreement: Agreement, machines: Machines, storage: TierStorage, choice: _Choice, stack: contextlib.ExitStack
) -> TierStorage:
    """Begin to serve this machine's files if other machines may want them. Return the tier to load from."""
    rank, collective, tag = agreement.rank, agreement.collective, f"{agreement.tag}/files"
    holds = any(rank in ranks for _, ranks in choice.holders.values())

    def serve() -> None:
        if holds and len(machines.groups) > 1:
            stack.enter_context(collective.serve(tag, file_provider(storage.hot)))

    agreement.agree("serve", serve, lambda _: None)  # so that no rank asks before all serve
    holders: dict[str, tuple[int, list[int]]] = {}
    own = False
    for name, (size, ranks) in choice.holders.items():
        others = [other for other in ranks if machines.machine_of[other] != machines.machine_of[rank]]
        own |= name == CATALOG_NAME and len(others) < len(ranks)
        # Ranks that read one file from other machines begin with different ones.
        turn = rank % len(others) if others else 0
        holders[name] = size, others[turn:] + others[:turn]
    return SharedTier(storage.url, own, holders, RemoteFiles(collective, tag, agreement.timeout))


#: Bytes of one request, which the rank that serves it holds in memory.
_PIECE = 8 << 20


class _Range(msgspec.Struct, frozen=True, array_like=True):
    """A request: bytes [offset, offset + size) of a file."""

    name: str
    offset: int
    size: int


# Built at import: msgspec (0.22) crashes if two threads use a type for the first time at once.
_DECODER = msgspec.msgpack.Decoder(_Range)


def file_provider(files: Storage) -> DataProvider:
    """Make the provider that serves ranges of the files of a folder."""

    def read(request: bytes) -> NDArray[np.uint8]:
        wanted = _DECODER.decode(request)
        data = np.empty(wanted.size, np.uint8)
        reader = files.open(wanted.name)
        try:
            count = reader.read_into(wanted.offset, [memoryview(data)])
        finally:
            reader.close()
        if count != wanted.size:
            raise StorageError(f"{files.url}/{wanted.name} ends before byte {wanted.offset + wanted.size}")
        return data

    return read


class RemoteFiles:
    """The hot folders of other machines, as the ranks of one load serve them.

    Args:
        collective: the ranks.
        tag: identifies the service of this load on every rank that serves.
        timeout: seconds for one request.
    """

    def __init__(self, collective: Collective, tag: str, timeout: float) -> None:
        self._collective = collective
        self._tag = tag
        self._timeout = timeout

    def read_into(self, rank: int, name: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from byte `offset` of a file in the memory of rank `rank`'s machine.

        Raises:
            StorageError: the file is gone, or ends before.
            StorageUnavailableError: the other rank does not answer.
        """
        for start in range(0, len(buffer), _PIECE):
            piece = np.frombuffer(buffer[start : start + _PIECE], np.uint8)
            request = msgspec.msgpack.encode(_Range(name, offset + start, piece.nbytes))
            failed = f"cannot read {name} in the memory of rank {rank}'s machine"
            try:
                self._collective.fetch(rank, self._tag, request, piece, timeout=self._timeout)
            except FileNotFoundError:
                raise StorageError(f"{failed}: it is gone") from None
            except StorageError as error:
                raise StorageError(f"{failed}: {error}") from error
            except CheckpointError as error:
                raise StorageUnavailableError(f"{failed}: {error}") from error


class RemoteReader(FileReader):
    """A file in another machine's memory.

    Args:
        files: files of the other machines.
        rank: rank of that machine, which serves the file.
        name: name of the file.
        size: length of the file in bytes.
    """

    preferred_bytes = _PIECE

    def __init__(self, files: RemoteFiles, rank: int, name: str, size: int) -> None:
        self._files, self._rank, self._name = files, rank, name
        self.size = size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        total = min(sum(map(len, buffers)), max(self.size - offset, 0))
        if len(buffers) == 1:
            self._files.read_into(self._rank, self._name, offset, buffers[0][:total])
            return total
        # Buffers may be small, and a request for each would cost a round trip each.
        data = memoryview(np.empty(total, np.uint8))
        self._files.read_into(self._rank, self._name, offset, data)
        for buffer in buffers:
            buffer[: len(data)] = data[: len(buffer)]
            data = data[len(buffer) :]
        return total

    def close(self) -> None:
        pass
