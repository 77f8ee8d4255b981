"""Commit on object stores: a conditional put, on stores that are known to honour it.

One put replaces an object atomically, so readers never see a mixture. What a conditional put adds is that of two jobs
which save to one path the second cannot silently replace the first's catalog while its own files are being removed. A
store that ignores the condition, or honours it only one request at a time, would break that in silence; therefore it is
tried out, once per process and bucket, before the first save writes anything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import obstore

from ..errors import StorageConflictError, StorageError, StorageUnavailableError
from ..settings import settings
from .object_bucket import REFUSED, Bucket
from .object_errors import facts_of
from .retrying import Attempts

if TYPE_CHECKING:
    from .base import Storage

__all__ = ["Commits", "examine", "publish_exclusively"]

_T = TypeVar("_T")
_log = logging.getLogger("bytecheckpoint")
_RACES = 3
_RACERS = 12
_PROBE = ".bytecheckpoint-probe-"
_ABANDONED_SECONDS = 3600.0
#: How long a put is tried that is refused although nothing has changed.
_REFUSAL_SECONDS = 30.0
#: Statuses of stores that do not understand a condition; also of many another error.
_NOT_UNDERSTOOD = {400, 405, 501}


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
            f"cannot publish {shown}: {bucket.name} does not honour conditional puts (If-None-Match) of several writers at "
            f"once, so two jobs that save to one path could destroy each other's checkpoint; use another store, or "
            f"settings.commit='plain' if you make sure that one job at a time saves to a path"
        )
    if expected and not bucket.commits.replace:
        raise StorageError(
            f"cannot replace {shown}: {bucket.name} does not honour puts under the condition that the object is still the "
            f"same (If-Match); save each step to a path of its own, or set settings.commit='plain' if you make sure that "
            f"one job at a time saves to a path"
        )


def _try_out(bucket: Bucket, prefix: str) -> Commits:
    _remove_abandoned(bucket, prefix)
    name = f"{prefix}{_PROBE}{secrets.token_hex(8)}"
    keys: list[str] = []

    def race(client: Any) -> int:
        # A new object for every try: one whose answer got lost may be there already.
        keys.append(f"{name}-{len(keys)}")
        return _winners(client, keys[-1])

    def winners() -> int:
        for _ in range(_RACES):
            count = bucket.run("try conditional puts on", f"{bucket.name}/{name}", race)
            if count:
                break  # a store may refuse all of them, for now
        return count

    try:
        create = all(winners() == 1 for _ in range(_RACES))
        return Commits(create, create and _replaces(bucket, keys[-1]))
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


def _put(bucket: Bucket, key: str, data: bytes, condition: Any) -> bool:
    """Whether a put is taken under a condition."""

    def call(client: Any) -> bool:
        try:
            obstore.put(client, key, data, mode=condition, use_multipart=False)
        except REFUSED:
            # It may meet itself: an earlier try was taken, and the answer got lost.
            return bytes(obstore.get(client, key).bytes()) == data
        except FileNotFoundError:
            return False
        except (obstore.exceptions.BaseError, NotImplementedError) as error:
            if not _unknown(client, key, error):
                raise
            return False
        return True

    return bucket.run("try conditional puts on", f"{bucket.name}/{key}", call)


def _unknown(client: Any, key: str, error: BaseException) -> bool:
    """Whether a put was refused because the store knows no such condition: it takes the same put without one."""
    if not isinstance(error, NotImplementedError) and facts_of(error).status not in _NOT_UNDERSTOOD:
        return False
    obstore.put(client, key, b"unconditional", use_multipart=False)
    return True


def _winners(client: Any, key: str) -> int:
    """How many of several writers are told that they created the same object."""

    async def race() -> list[Any]:
        puts = [
            obstore.put_async(client, key, f"writer {number}".encode(), mode="create", use_multipart=False)
            for number in range(_RACERS)
        ]
        return await asyncio.gather(*puts, return_exceptions=True)

    # The client's own threads do it: at the end of the interpreter Python makes no more of its own.
    answers = _without_loop(lambda: asyncio.run(race()))
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, REFUSED):
            if _unknown(client, key, answer):
                return 0
            raise answer
    return sum(not isinstance(answer, BaseException) for answer in answers)


def _without_loop(call: Callable[[], _T]) -> _T:
    """Run `call` in a thread without an event loop; the caller's has one in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1, thread_name_prefix="bytecheckpoint-probe") as pool:
        return pool.submit(call).result()


def _replaces(bucket: Bucket, key: str) -> bool:
    """Whether If-Match works: right for the object that is there, wrong for one that is not any more."""
    first = bucket.run("look at", f"{bucket.name}/{key}", lambda client: obstore.head(client, key))
    condition = _condition(first["e_tag"], first["version"])
    # Without anything that could be a condition the store does not tell versions of an object apart.
    return bool(condition) and _put(bucket, key, b"second", condition) and not _put(bucket, key, b"third", condition)


def _condition(e_tag: str | None, version: str | None) -> dict[str, str]:
    return {key: value for key, value in (("e_tag", e_tag), ("version", version)) if value}


def publish_exclusively(bucket: Bucket, key: str, shown: str, data: bytes, expected: str, storage: Storage) -> None:
    """Put `data` under `key` if what is there is what was expected.

    A refusal may come from this writer's own put, whose answer was lost: catalogs differ in the name of their save, so
    equal bytes are one's own. Or it comes from requests of others that changed nothing in the end (S3's status 409): then
    the put is tried again.

    Args:
        bucket: the bucket.
        key: of the object.
        shown: its address, for messages.
        data: what to put.
        expected: version that must be there, "" for none.
        storage: of the object, to look at it again.

    Raises:
        StorageConflictError: somebody else's bytes are there.
        StorageUnavailableError: the store goes on refusing, although nothing has changed.
    """
    name = shown[len(storage.url) + 1 :]
    mode: Any = "create" if not expected else _condition(*msgspec.json.decode(expected))
    if settings().commit == "plain":
        if storage.version(name) != expected:
            raise _conflict(shown)
        mode = "overwrite"

    def put(client: Any) -> None:
        obstore.put(client, key, data, mode=mode, use_multipart=False)

    attempts = Attempts(min(bucket.seconds, _REFUSAL_SECONDS))
    while True:
        attempts.count += 1
        try:
            bucket.run("publish", shown, put, conditional=True)
            return
        except (*REFUSED, FileNotFoundError):
            pass
        if storage.version(name) != expected:
            if _holds(storage, name, data):
                return
            raise _conflict(shown)
        if not attempts.pause():
            raise StorageUnavailableError(
                f"cannot publish {shown}: its condition is refused, although nothing has changed ({attempts}); save again"
            )


def _holds(storage: Storage, name: str, data: bytes) -> bool:
    try:
        return storage.stat(name).size == len(data) and storage.read(name) == data
    except FileNotFoundError:
        return False


def _conflict(shown: str) -> StorageConflictError:
    return StorageConflictError(
        f"cannot publish {shown}: another save replaced it meanwhile; let one job at a time save to a path"
    )
