"""The lease on a cold folder: one process at a time fills it.

Two processes that fill a folder at once would take each other's unfinished files for damaged ones and remove them.
Object stores have no locks, so the lease is a small file that is created like a catalog: of several creators one succeeds.
The holder renews the lease while it works. If a lease stays unchanged for `tuning().lease_expiry`, its holder is dead and
another process takes it over. Clocks of different machines are never compared (decision 0019).
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

from bytecheckpoint.collectives import host_id
from bytecheckpoint.errors import CheckpointError, StorageConflictError, StorageError, StorageUnavailableError
from bytecheckpoint.storage import Storage
from bytecheckpoint.threads import start, try_start
from bytecheckpoint.tuning import tuning

__all__ = ["LEASE_FILE", "Lease", "leased"]

LEASE_FILE = "cooldown.claim"

_log = logging.getLogger("bytecheckpoint")


@contextlib.contextmanager
def leased(storage: Storage, machine: str = "") -> Iterator[Lease]:
    """Hold the lease on a folder inside a `with` block.

    Args:
        storage: the folder.
        machine: see `Lease`.

    Raises:
        StorageConflictError: another process holds it.
        StorageError: the storage fails.
    """
    lease = Lease(storage, machine)
    try:
        yield lease
    finally:
        lease.release()


class Lease:
    """A lease on a folder, held by this process and renewed by a thread.

    Args:
        storage: the folder.
        machine: machine and container of the holder; "": this one. Tests give the name of another machine.

    Attributes:
        storage: the folder.

    Raises:
        StorageConflictError: another process holds it.
        StorageError: the storage fails.
    """

    def __init__(self, storage: Storage, machine: str = "") -> None:
        self.storage = storage
        self._content = _Content(machine or _machine(), os.getpid(), _start_time(os.getpid()), secrets.token_hex(8))
        self._renewing = threading.Lock()
        self._released = threading.Event()
        try:
            self._publish(self._content, "")
        except StorageConflictError:
            self._take_over()
        try:
            start(threading.Thread(target=self._renew_until_released, name="bytecheckpoint-lease", daemon=True))
        except CheckpointError:
            self._remove()
            raise

    def check(self) -> None:
        """Raise unless this process still holds the lease.

        Raises:
            StorageConflictError: another process has taken it over, or somebody has removed it.
            StorageError: the storage fails.
        """
        if not self.is_in(self.storage):
            raise StorageConflictError(
                f"{self.storage.url}: this process lost {LEASE_FILE}, which it had not renewed for "
                f"{tuning().lease_expiry:g} s; run cooldown again"
            )

    def is_in(self, storage: Storage) -> bool:
        """Return whether a folder holds this lease: then it is the leased folder, perhaps under another name."""
        return _decode(_read(storage)).lease == self._content.lease

    def release(self) -> None:
        """Give the lease up; never raises. While the storage does not answer, a thread goes on trying.

        Without it, other processes of this machine would see that the holder lives and never take the lease over.
        """
        self._released.set()
        if not self._remove():
            try_start(threading.Thread(target=self._remove_later, name="bytecheckpoint-lease", daemon=True))

    def _remove(self) -> bool:
        """Try to remove the file. Return False if another attempt may succeed."""
        try:
            with self._renewing:
                if self.is_in(self.storage):
                    self.storage.delete([LEASE_FILE])
        except CheckpointError as error:
            _log.warning("%s: %s could not be removed: %s", self.storage.url, LEASE_FILE, error)
            return not isinstance(error, StorageUnavailableError)
        return True

    def _remove_later(self) -> None:
        while not self._remove():
            time.sleep(tuning().lease_renewal)

    def _publish(self, content: _Content, expected: str | None) -> None:
        data = msgspec.json.encode(content)
        try:
            self.storage.publish(LEASE_FILE, data, expected=expected)
        except StorageUnavailableError:  # the answer may be lost, and the file there
            if _read(self.storage) != data:
                raise

    def _take_over(self) -> None:
        """Replace the lease of another process, once that process is known to be dead.

        Of several that do so at once, one may remove the new lease of another, which then ends at its `check`.
        """
        storage = self.storage
        found = _read(storage)
        holder = _decode(found)
        alive = holder.alive(self._content.host) if found else False
        deadline = time.monotonic() + tuning().lease_expiry
        while alive is None:
            time.sleep(tuning().lease_expiry / 20)
            if _read(storage) != found:
                alive = True
            elif time.monotonic() >= deadline:
                alive = False
        held = f"{storage.url} is being filled by another cooldown ({holder}); let it finish"
        if alive or _read(storage) != found:
            raise StorageConflictError(held)
        try:
            storage.delete([LEASE_FILE])  # not replaced under a condition, which not all object stores can
            self._publish(self._content, "")
        except StorageConflictError:
            raise StorageConflictError(held) from None

    def _renew_until_released(self) -> None:
        while not self._released.wait(tuning().lease_renewal):
            with self._renewing:
                try:
                    version = self.storage.version(LEASE_FILE)
                    if self._released.is_set() or not self.is_in(self.storage):
                        return  # `check` reports a lost lease
                    self._content = msgspec.structs.replace(self._content, renewals=self._content.renewals + 1)
                    self._publish(self._content, version if self._can_replace(version) else None)
                except StorageConflictError:
                    return
                except StorageError as error:
                    _log.warning("%s: %s could not be renewed: %s", self.storage.url, LEASE_FILE, error)

    def _can_replace(self, version: str) -> bool:
        """Return whether the storage replaces files under a condition, which some object stores cannot."""
        try:
            self.storage.check_publish(LEASE_FILE, version)
        except (StorageUnavailableError, StorageConflictError):
            raise
        except StorageError:
            return False
        return True


class _Content(msgspec.Struct, frozen=True):
    """What the file of a lease says about its holder.

    Attributes:
        host: machine and container of the process, as `_machine` names them.
        process: its number.
        started: when the process began, since process numbers are used again.
        lease: random characters, since one process may hold several leases.
        renewals: number of renewals, so that each renewal changes the file.
    """

    host: str = ""
    process: int = 0
    started: str = ""
    lease: str = msgspec.field(default="", name="claim")
    renewals: int = msgspec.field(default=0, name="renewed")

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}" if self.host else "an unknown process"

    def alive(self, machine: str) -> bool | None:
        """Return whether the process lives, as `machine` sees it; None when only the process's own machine can tell."""
        return _start_time(self.process) == self.started if self.host == machine else None


# Built at import: msgspec (0.22) crashes if two threads use a type for the first time at once.
_DECODER = msgspec.json.Decoder(_Content)


def _start_time(process: int) -> str:
    """Return when a process of this machine began, in the kernel's units; "" when it is gone or a zombie."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    """Return the name of this machine and container: in another container a process number means another process."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{host_id()} {namespace}".strip()


def _read(storage: Storage) -> bytes:
    """Return the content of a folder's lease, b"" when nobody holds one."""
    try:
        return storage.read(LEASE_FILE)
    except FileNotFoundError:
        return b""


def _decode(data: bytes) -> _Content:
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError:
        return _Content()
