"""Commit on object stores: a conditional put, on stores that are known to honour it.

One put replaces an object atomically, so readers never see a mixture. What a conditional put adds is that of two jobs
which save to one path the second cannot silently replace the first's catalog while its own files are being removed. A
store that ignores the condition, or honours it only one request at a time, would break that in silence; therefore it is
tried out, once per process and bucket, before the first save writes anything.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import obstore

from ..errors import StorageConflictError, StorageError
from ..settings import settings
from .object_bucket import Bucket

if TYPE_CHECKING:
    from .base import Storage

__all__ = ["Commits", "examine", "publish_exclusively"]

_log = logging.getLogger("bytecheckpoint")
_RACES = 3
_RACERS = 12
_PROBE = ".bytecheckpoint-probe-"
_ABANDONED_SECONDS = 3600.0
_REFUSED = (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError)


@dataclass(frozen=True, slots=True)
class Commits:
    """What a bucket can do.

    Attributes:
        create: of concurrent puts with If-None-Match one wins.
        replace: a put with If-Match is taken if the object is the one meant, and refused if it is not.
    """

    create: bool
    replace: bool


def examine(bucket: Bucket, prefix: str, shown: str, expected: str) -> None:
    """Find out what a bucket can do, unless that is known or does not matter, and whether that is enough.

    Args:
        bucket: the bucket.
        prefix: of the folder where a few small objects are made and removed again.
        shown: address of the object that is to be published.
        expected: version of it that is to be replaced, "" for none.

    Raises:
        StorageError: its conditional puts cannot be relied upon.
    """
    if settings().commit == "plain":
        return
    with bucket.lock:
        if bucket.commits is None:
            bucket.commits = _try_out(bucket, prefix)
    if not bucket.commits.create:
        raise StorageError(
            f"{bucket.name} does not honour conditional puts (If-None-Match) of several writers at once, so two jobs that "
            f"save to one path could destroy each other's checkpoint; use another store, or settings.commit='plain' if "
            f"you make sure that one job at a time saves to a path"
        )
    if expected and not bucket.commits.replace:
        raise StorageError(
            f"cannot replace {shown}: {bucket.name} refuses puts under the condition that the object is still the same "
            f"(If-Match), as Ceph does; save each step to a path of its own, or set settings.commit='plain' if you make "
            f"sure that one job at a time saves to a path"
        )


def _try_out(bucket: Bucket, prefix: str) -> Commits:
    _remove_abandoned(bucket, prefix)
    name = f"{prefix}{_PROBE}{secrets.token_hex(8)}"
    keys = [f"{name}-{race}" for race in range(_RACES)]
    try:
        create = all(_race(bucket, key) == 1 for key in keys)
        return Commits(create, create and _replaces(bucket, keys[0]))
    finally:
        try:
            bucket.delete(keys, bucket.name)
        except StorageError as error:
            _log.warning("probe objects were left behind: %s", error)


def _remove_abandoned(bucket: Bucket, prefix: str) -> None:
    """Remove what probes left that were killed on the way."""
    folder = prefix.rstrip("/") or None
    found = bucket.run("list", bucket.name, lambda client: obstore.list_with_delimiter(client, folder))
    old = time.time() - _ABANDONED_SECONDS
    probes = [o for o in found["objects"] if o["path"].startswith(prefix + _PROBE)]
    bucket.delete([o["path"] for o in probes if o["last_modified"].timestamp() < old], bucket.name)


def _put(bucket: Bucket, key: str, data: bytes, mode: Any) -> bool:
    """Whether a conditional put was taken."""

    def call(client: Any) -> None:
        obstore.put(client, key, data, mode=mode, use_multipart=False)

    try:
        bucket.run("try conditional puts on", f"{bucket.name}/{key}", call)
    except (*_REFUSED, FileNotFoundError):
        return False
    return True


def _race(bucket: Bucket, key: str) -> int:
    """How many of several writers were told that they created the same object."""
    start = threading.Barrier(_RACERS)

    def one(number: int) -> bool:
        start.wait()
        return _put(bucket, key, f"writer {number}".encode(), "create")

    with ThreadPoolExecutor(_RACERS, thread_name_prefix="bytecheckpoint-probe") as pool:
        winners = sum(pool.map(one, range(_RACERS)))
    if winners == 0:
        # A writer whose answer was lost may have met its own object.
        found = bucket.run("read", f"{bucket.name}/{key}", lambda client: obstore.head(client, key))
        return int(found["size"] > 0)
    return winners


def _replaces(bucket: Bucket, key: str) -> bool:
    """Whether If-Match works: right for the object that is there, wrong for one that is not any more."""
    first = bucket.run("look at", f"{bucket.name}/{key}", lambda client: obstore.head(client, key))
    condition = _condition(first["e_tag"], first["version"])
    try:
        return _put(bucket, key, b"second", condition) and not _put(bucket, key, b"third", condition)
    except NotImplementedError:
        return False


def _condition(e_tag: str | None, version: str | None) -> dict[str, str]:
    return {key: value for key, value in (("e_tag", e_tag), ("version", version)) if value}


def publish_exclusively(bucket: Bucket, key: str, shown: str, data: bytes, expected: str, storage: Storage) -> None:
    """Put `data` under `key` if what is there is what was expected.

    A refusal may come from this writer's own put, whose answer was lost: catalogs differ in the name of their save, so
    equal bytes are one's own.

    Args:
        bucket: the bucket.
        key: of the object.
        shown: its address, for messages.
        data: what to put.
        expected: version that must be there, "" for none.
        storage: of the object, to look at it again.

    Raises:
        StorageConflictError: somebody else's bytes are there.
    """
    name = shown[len(storage.url) + 1 :]
    mode: Any = "create" if not expected else _condition(*msgspec.json.decode(expected))
    if settings().commit == "plain":
        if storage.version(name) != expected:
            raise _conflict(shown)
        mode = "overwrite"

    def put(client: Any) -> None:
        obstore.put(client, key, data, mode=mode, use_multipart=False)

    try:
        bucket.run("publish", shown, put)
    except (*_REFUSED, FileNotFoundError):
        if not _holds(storage, name, data):
            raise _conflict(shown) from None


def _holds(storage: Storage, name: str, data: bytes) -> bool:
    try:
        return storage.stat(name).size == len(data) and storage.read(name) == data
    except FileNotFoundError:
        return False


def _conflict(shown: str) -> StorageConflictError:
    return StorageConflictError(
        f"cannot publish {shown}: another save replaced it meanwhile; let one job at a time save to a path"
    )
