"""Hold a lease on a folder, so that one process at a time fills it (decision 0057).

A second process would take the first one's unfinished files for damaged ones and remove them. The lease is a small file
that is created like a catalog: of several creators one succeeds. Its holder renews it. A lease that stays unchanged for
`tuning().lease_expiry` has expired. No clocks of different machines are compared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator

from bytecheckpoint.collectives import host_id
from bytecheckpoint.errors import StorageConflictError, StorageError, StorageUnavailableError
from bytecheckpoint.storage import Storage
from bytecheckpoint.threads import start
from bytecheckpoint.tuning import tuning

__all__ = ["LEASE_FILE", "Lease", "leased"]

LEASE_FILE = "cooldown.lease"

_log = logging.getLogger("bytecheckpoint")


class Lease:
    """A lease on a folder that this process holds.

    Args:
        storage: the folder.

    Raises:
        StorageConflictError: another process holds the lease.
        StorageError: the storage fails.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._holder = f"process {os.getpid()} on {host_id()}, {secrets.token_hex(8)}"
        found, deadline = _read(storage), time.monotonic() + tuning().lease_expiry
        if found:
            _log.warning("%s is leased by %s: waiting for it to expire", storage.url, found.partition("\n")[0])
        while (present := _read(storage)) and time.monotonic() < deadline:
            if present != found:
                raise self._conflict()
            time.sleep(tuning().lease_expiry / 20)
        if present:
            storage.delete([LEASE_FILE])  # not replaced under a condition, which not all stores can
        try:
            self._publish("")
        except StorageConflictError:
            raise self._conflict() from None

    def check(self) -> None:
        """Raise StorageConflictError unless this process still holds the lease."""
        if not self.is_in(self._storage):
            raise StorageConflictError(
                f"{self._storage.url}: this process lost {LEASE_FILE}, which it had not renewed for "
                f"{tuning().lease_expiry:g} s; try again"
            )

    def is_in(self, storage: Storage) -> bool:
        """Return whether a folder holds this lease: then it is the leased folder, perhaps under another name."""
        return _read(storage).partition("\n")[0] == self._holder

    def renew(self) -> None:
        """Change the file of the lease, if this process still holds it."""
        version = self._storage.version(LEASE_FILE)
        self.check()
        try:
            self._publish(version)
        except (StorageConflictError, StorageUnavailableError):
            raise
        except StorageError:  # the store cannot replace a file under a condition
            self._publish(None)

    def release(self) -> None:
        """Remove the file of the lease. It expires if the storage does not answer."""
        try:
            if self.is_in(self._storage):
                self._storage.delete([LEASE_FILE])
        except StorageError as error:
            _log.warning("%s: %s could not be removed: %s", self._storage.url, LEASE_FILE, error)

    def _publish(self, expected: str | None) -> None:
        content = f"{self._holder}\n{secrets.token_hex(8)}"
        try:
            self._storage.publish(LEASE_FILE, content.encode(), expected=expected)
        except StorageUnavailableError:  # the answer may be lost, and the file there
            if _read(self._storage) != content:
                raise

    def _conflict(self) -> StorageConflictError:
        holder = _read(self._storage).partition("\n")[0] or "an unknown process"
        return StorageConflictError(
            f"{self._storage.url} is being filled by another cooldown or copy ({holder}); let it finish"
        )


@contextlib.contextmanager
def leased(storage: Storage) -> Iterator[Lease]:
    """Hold and renew the lease on a folder inside a `with` block. Raises as `Lease`."""
    lease, ended = Lease(storage), threading.Event()

    def renew() -> None:
        while not ended.wait(tuning().lease_renewal):
            try:
                lease.renew()
            except StorageConflictError:
                return  # `check` reports a lost lease
            except StorageError as error:
                _log.warning("%s: %s could not be renewed: %s", storage.url, LEASE_FILE, error)

    thread = threading.Thread(target=renew, name="bytecheckpoint-lease", daemon=True)
    try:
        start(thread)
        yield lease
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join(tuning().lease_expiry)  # else a renewal in progress would bring the file back
        lease.release()


def _read(storage: Storage) -> str:
    """Return the content of a folder's lease, "" if there is none."""
    try:
        return storage.read(LEASE_FILE).decode(errors="replace")
    except FileNotFoundError:
        return ""
