"""One at a time: who fills the cold folder of a step says so there, where everybody sees it.

Two that fill it at once would each take the other's unfinished files for damaged ones and remove them, perhaps after the
other has counted on them. No storage but local ones has locks, so the claim is a small file, created as a catalog is: of
several, one succeeds. Its holder renews it while it works. Whoever meets a claim that stays as it is takes it over, on
the condition that it still is; no clocks of different machines are compared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator

import msgspec

from ..collectives import host_id
from ..errors import CheckpointError, StorageConflictError, StorageError, StorageUnavailableError
from ..storage import Storage

__all__ = ["CLAIM", "Claim", "claimed"]

CLAIM = "cooldown.claim"
#: Seconds between two renewals of a claim that is held.
_RENEWAL = 10.0
#: Seconds for which a claim must stay as it is for its holder to be taken for dead.
_LEASE = 60.0

_log = logging.getLogger("bytecheckpoint")


class _Holder(msgspec.Struct, frozen=True):
    """Who claims: machine and process, when the process began (its number is used again), which claim of its own.

    `renewed` counts, so that each renewal differs from the one before.
    """

    host: str = ""
    process: int = 0
    started: str = ""
    claim: str = ""
    renewed: int = 0

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}" if self.host else "an unknown process"

    def alive(self) -> bool | None:
        """Whether the process is there; None when only its own machine can tell."""
        return _started(self.process) == self.started if self.host == _here() else None


def _started(process: int) -> str:
    """When a process of this machine began, in the kernel's units; "" when it is gone, or dead and not yet buried."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _here() -> str:
    """The machine, and the container: processes of others have numbers that mean nothing here."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{host_id()} {space}".strip()


class Claim:
    """A claim to a folder, held by this process.

    Args:
        storage: the folder.

    Attributes:
        storage: the folder.

    Raises:
        StorageConflictError: another process holds it.
        StorageError: the storage fails.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._holder = _Holder(_here(), os.getpid(), _started(os.getpid()), secrets.token_hex(8))
        self._renewing = threading.Lock()
        self._released = threading.Event()
        try:
            self._publish(self._holder, "")
        except StorageConflictError:
            self._take_over()
        threading.Thread(target=self._keep, name="bytecheckpoint-claim", daemon=True).start()

    def check(self) -> None:
        """See that it is held still.

        Raises:
            StorageConflictError: another process has taken it over, or somebody has removed it.
            StorageError: the storage fails.
        """
        if not self.seen_in(self.storage):
            raise StorageConflictError(
                f"{self.storage.url}: {CLAIM} is not this process's any more, which had not renewed it for {_LEASE:g} s; "
                "run cooldown again"
            )

    def seen_in(self, storage: Storage) -> bool:
        """Whether this very claim is in a folder: then that is the claimed one, whatever it is called."""
        return _decoded(_read(storage)).claim == self._holder.claim

    def release(self) -> None:
        """Give it back; never raises. While the storage is away that is tried again, for this process is no dead holder."""
        self._released.set()
        if not self._given_back():
            with contextlib.suppress(RuntimeError):  # the interpreter ends, and the holder with it
                threading.Thread(target=self._give_back_later, name="bytecheckpoint-claim", daemon=True).start()

    def _given_back(self) -> bool:
        """Try to give it back; whether nothing is left to be tried."""
        try:
            with self._renewing:
                if self.seen_in(self.storage):
                    self.storage.delete([CLAIM])
        except CheckpointError as error:
            _log.warning("%s: %s could not be removed: %s", self.storage.url, CLAIM, error)
            return not isinstance(error, StorageUnavailableError)
        return True

    def _give_back_later(self) -> None:
        while not self._given_back():
            time.sleep(_RENEWAL)

    def _publish(self, holder: _Holder, expected: str) -> None:
        data = msgspec.json.encode(holder)
        try:
            self.storage.publish(CLAIM, data, expected=expected)
        except StorageUnavailableError:  # the answer got lost, or the claim did
            if _read(self.storage) != data:
                raise

    def _take_over(self) -> None:
        storage = self.storage
        version, found = storage.version(CLAIM), _read(storage)
        other = _decoded(found)
        alive = other.alive() if found else False
        deadline = time.monotonic() + _LEASE
        while alive is None:
            time.sleep(_LEASE / 20)
            if _read(storage) != found:
                alive = True
            elif time.monotonic() >= deadline:
                alive = False
        busy = f"{storage.url} is being filled by another cooldown ({other}); let it finish"
        if alive:
            raise StorageConflictError(busy)
        try:
            storage.probe(CLAIM, version)
            self._publish(self._holder, version)
        except StorageUnavailableError:
            raise
        except StorageConflictError:
            raise StorageConflictError(busy) from None
        except StorageError as error:  # nothing can be replaced there, so claims are not renewed either
            raise StorageConflictError(f"{busy}, or, if it is gone, remove {CLAIM} there") from error

    def _keep(self) -> None:
        """Renew it until it is released or lost."""
        while not self._released.wait(_RENEWAL):
            with self._renewing:
                try:
                    version = self.storage.version(CLAIM)
                    if self._released.is_set() or not self.seen_in(self.storage):
                        return
                    self.storage.probe(CLAIM, version)
                    self._holder = msgspec.structs.replace(self._holder, renewed=self._holder.renewed + 1)
                    self._publish(self._holder, version)
                except StorageUnavailableError as error:
                    _log.warning("%s: %s could not be renewed: %s", self.storage.url, CLAIM, error)
                except StorageError:
                    return  # it is lost, which `check` finds; or nothing can be replaced there: then nobody takes it over


def _read(storage: Storage) -> bytes:
    """What the claim to a folder says, b"" when nobody holds it."""
    try:
        return storage.read(CLAIM)
    except FileNotFoundError:
        return b""


def _decoded(data: bytes) -> _Holder:
    try:
        return msgspec.json.decode(data, type=_Holder)
    except msgspec.MsgspecError:
        return _Holder()


@contextlib.contextmanager
def claimed(storage: Storage) -> Iterator[Claim]:
    """Hold the claim to a folder.

    Raises:
        StorageConflictError: another process holds it.
        StorageError: the storage fails.
    """
    claim = Claim(storage)
    try:
        yield claim
    finally:
        claim.release()
