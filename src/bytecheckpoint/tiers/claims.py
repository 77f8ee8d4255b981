"""One at a time: who fills the cold folder of a step says so there, where everybody sees it.

Two that fill it at once would each take the other's unfinished files for damaged ones and remove them, perhaps after the
other has counted on them. No storage but local ones has locks, so the claim is a small file, created as a catalog is: of
several, one succeeds. That of a killed process of this machine is taken over; that of another machine cannot be told
from one that works, so a person has to remove it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator

import msgspec

from ..collectives import host_id
from ..errors import CheckpointError, StorageConflictError, StorageUnavailableError
from ..storage import Storage

__all__ = ["CLAIM", "claimed", "release_dead"]

CLAIM = "cooldown.claim"

_log = logging.getLogger("bytecheckpoint")


class _Claim(msgspec.Struct, frozen=True):
    """Who claims: machine and process, when the process began (its number is used again), and since when."""

    host: str
    process: int
    started: str
    since: float


def _started(process: int) -> str:
    """When a process of this machine began, in the kernel's units; "" when there is none."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _here() -> str:
    """The machine, and the container: processes of others have numbers that mean nothing here."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{host_id()} {space}".strip()


def _dead(claim: _Claim) -> bool:
    return claim.host == _here() and _started(claim.process) != claim.started


def _present(storage: Storage) -> _Claim | None:
    try:
        return msgspec.json.decode(storage.read(CLAIM), type=_Claim)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


@contextlib.contextmanager
def claimed(storage: Storage) -> Iterator[None]:
    """Hold the claim to a folder.

    Raises:
        StorageConflictError: another process holds it.
    """
    pid = os.getpid()
    data = msgspec.json.encode(_Claim(_here(), pid, _started(pid), time.time()))
    try:
        _publish(storage, data, "")
    except StorageConflictError:
        version = storage.version(CLAIM)
        other = _present(storage)
        if other is None or not _dead(other):
            who = f"process {other.process} on {other.host}" if other is not None else "an unknown process"
            raise StorageConflictError(
                f"{storage.url} is being filled by another cooldown ({who}); let it finish, or, if it is gone, remove "
                f"{CLAIM} there"
            ) from None
        _publish(storage, data, version)
    try:
        yield
    finally:
        _remove(storage)


def release_dead(storage: Storage) -> None:
    """Remove the claim that a killed process of this machine has left."""
    claim = _present(storage)
    if claim is not None and _dead(claim):
        _remove(storage)


def _publish(storage: Storage, data: bytes, expected: str) -> None:
    try:
        storage.publish(CLAIM, data, expected=expected)
    except StorageUnavailableError:  # the answer got lost, or the claim did
        try:
            if storage.read(CLAIM) == data:
                return
        except FileNotFoundError:
            pass
        raise


def _remove(storage: Storage) -> None:
    try:
        storage.delete([CLAIM])
    except CheckpointError as error:
        _log.warning("%s: %s could not be removed: %s", storage.url, CLAIM, error)
