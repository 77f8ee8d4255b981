"""Commit on object stores by a conditional put, on stores that honour the condition.

One put replaces an object atomically, so readers never see a mixture. The condition protects two jobs that save to one
path: the second cannot silently replace the catalog of the first while the first removes the second's files. A store that
ignores the condition, or honours it only for one request at a time, would break that silently. So each process probes each
bucket once, before the first save writes anything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import obstore

from bytecheckpoint.errors import StorageError, StorageUnavailableError
from bytecheckpoint.retries import retry
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.base import Storage, conflict_error
from bytecheckpoint.storage.objects.bucket import REFUSED, Bucket
from bytecheckpoint.storage.objects.errors import facts_of
from bytecheckpoint.tuning import tuning

__all__ = ["Commits", "publish_exclusively", "require_commits"]

_T = TypeVar("_T")
_log = logging.getLogger("bytecheckpoint")
#: Races that a probe makes, and writers in each.
_RACES = 3
_RACERS = 12
_PROBE = ".bytecheckpoint-probe-"
_ABANDONED_SECONDS = 3600.0
#: HTTP statuses by which stores refuse a condition that they do not know, among other requests.
_MAYBE_UNKNOWN_CONDITION = {400, 405, 501}


@dataclass(frozen=True, slots=True)
class Commits:
    """The conditional puts that a bucket honours.

    Attributes:
        create: True if exactly one of several concurrent puts with If-None-Match succeeds.
        replace: a put with If-Match succeeds if the object has that version, and is refused otherwise.
    """

    create: bool
    replace: bool


def require_commits(bucket: Bucket, prefix: str, label: str, expected: str) -> None:
    """Raise an error unless the bucket honours the conditional puts that a publish needs; probe it if that is unknown.

    Args:
        bucket: the bucket.
        prefix: key prefix of the folder in which the probe creates and removes small objects.
        label: address of the object to publish.
        expected: its version to replace, "" for none.

    Raises:
        StorageError: the bucket does not honour them.
    """
    if settings().storage.commit == "plain":
        return
    with bucket.lock:
        if bucket.commits is None:
            bucket.commits = _probe(bucket, prefix)
    if not bucket.commits.create:
        raise StorageError(
            f"cannot publish {label}: {bucket.name} does not honour conditional puts (If-None-Match) of several writers at "
            f"once, so two jobs that save to one path could destroy each other's checkpoint; use another store, or "
            f"configure(commit='plain') if you make sure that one job at a time saves to a path"
        )
    if expected and not bucket.commits.replace:
        raise StorageError(
            f"cannot replace {label}: {bucket.name} does not honour puts under the condition that the object is still the "
            f"same (If-Match); save each step to a path of its own, or call configure(commit='plain') if you make sure "
            f"that one job at a time saves to a path"
        )


def _probe(bucket: Bucket, prefix: str) -> Commits:
    name = f"{prefix}{_PROBE}{secrets.token_hex(8)}"
    keys: list[str] = []

    def race(client: Any) -> int:
        # A new object for every attempt: one whose response was lost may exist already.
        keys.append(f"{name}-{len(keys)}")
        return _winners(client, keys[-1])

    def winners() -> int:
        for _ in range(_RACES):
            count = bucket.run("try conditional puts on", f"{bucket.name}/{name}", race)
            if count:
                break  # a store may refuse all of them for a moment
        return count

    try:
        create = all(winners() == 1 for _ in range(_RACES))
        _remove_abandoned(bucket, prefix)
        return Commits(create, create and _replaces(bucket, keys[-1]))
    finally:
        try:
            bucket.delete(keys, bucket.name)
        except StorageError as error:
            _log.warning("probe objects were left behind: %s", error)


def _remove_abandoned(bucket: Bucket, prefix: str) -> None:
    """Remove the objects of probes that were killed, by the store's clock: those much older than the newest probe."""
    folder = prefix.rstrip("/") or None
    found = bucket.run("list", bucket.name, lambda client: obstore.list_with_delimiter(client, folder))
    probes = {
        o["path"]: o["last_modified"].timestamp() for o in found["objects"] if o["path"].startswith(prefix + _PROBE)
    }
    newest = max(probes.values(), default=0.0)
    bucket.delete([path for path, made in probes.items() if made < newest - _ABANDONED_SECONDS], bucket.name)


def _put(bucket: Bucket, key: str, data: bytes, condition: Any) -> bool:
    """Try a conditional put; return whether it succeeded."""

    def call(client: Any) -> bool:
        try:
            obstore.put(client, key, data, mode=condition, use_multipart=False)
        except REFUSED:
            # The object may be this put's own: an earlier attempt succeeded, and its response was lost.
            return bytes(obstore.get(client, key).bytes()) == data
        except FileNotFoundError:
            return False
        except (obstore.exceptions.BaseError, NotImplementedError) as error:
            if not _is_condition_unknown(client, key, error):
                raise
            return False
        return True

    return bucket.run("try conditional puts on", f"{bucket.name}/{key}", call)


def _is_condition_unknown(client: Any, key: str, error: BaseException) -> bool:
    """Return whether a put failed because the store does not know its condition: then a put without one succeeds."""
    if not isinstance(error, NotImplementedError) and facts_of(error).status not in _MAYBE_UNKNOWN_CONDITION:
        return False
    obstore.put(client, key, b"unconditional", use_multipart=False)
    return True


def _winners(client: Any, key: str) -> int:
    """Let several writers create one object at the same time; return how many responses say that it succeeded.

    Requests may fail meanwhile. The race proves enough if half of the writers have an answer and one of them has won.
    """

    async def race() -> list[Any]:
        puts = [
            obstore.put_async(client, key, f"writer {number}".encode(), mode="create", use_multipart=False)
            for number in range(_RACERS)
        ]
        return await asyncio.gather(*puts, return_exceptions=True)

    # On the client's threads, because Python starts no threads while the interpreter shuts down.
    answers = _without_loop(lambda: asyncio.run(race()))
    failed = [a for a in answers if isinstance(a, BaseException) and not isinstance(a, REFUSED)]
    winners = sum(not isinstance(answer, BaseException) for answer in answers)
    for answer in failed:
        if _is_condition_unknown(client, key, answer):
            return 0
        if not winners or not facts_of(answer).transient or 2 * len(failed) > len(answers):
            raise answer
    if not winners:
        # Perhaps no put can succeed here, as below an object on a store over a file system: then this raises.
        obstore.put(client, key, b"unconditional", use_multipart=False)
    return winners


def _without_loop(call: Callable[[], _T]) -> _T:
    """Return `call()`. It runs on another thread if this one has an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1, thread_name_prefix="bytecheckpoint-probe") as pool:
        return pool.submit(call).result()


def _replaces(bucket: Bucket, key: str) -> bool:
    """Return whether If-Match succeeds with the present version and is refused with an old one."""
    first = bucket.run("look at", f"{bucket.name}/{key}", lambda client: obstore.head(client, key))
    condition = _condition(first["e_tag"], first["version"])
    # A store that reports neither an entity tag nor a version cannot tell versions of an object apart.
    return bool(condition) and _put(bucket, key, b"second", condition) and not _put(bucket, key, b"third", condition)


def _condition(e_tag: str | None, version: str | None) -> dict[str, str]:
    return {key: value for key, value in (("e_tag", e_tag), ("version", version)) if value}


def publish_exclusively(bucket: Bucket, key: str, label: str, data: bytes, expected: str, storage: Storage) -> None:
    """Put `data` under `key` if the expected version is present.

    A refusal may have three causes. Another writer was first: that is a conflict. This writer's own put has succeeded, and
    its response was lost: the stored bytes are then equal, since every catalog contains the name of its save. Requests of
    other writers were in progress and changed nothing (S3's status 409): the put is retried.

    Args:
        bucket: the bucket.
        key: key of the object.
        label: its address, for messages.
        data: the new content.
        expected: the version that must be present, "" for none.
        storage: the storage of the object, to look at it again.

    Raises:
        StorageConflictError: another writer's bytes are present.
        StorageUnavailableError: the store keeps refusing although nothing has changed.
    """
    name = label[len(storage.url) + 1 :]
    mode: Any = "create" if not expected else _condition(*msgspec.json.decode(expected))
    if settings().storage.commit == "plain":
        if storage.version(name) != expected:
            raise conflict_error(label)
        mode = "overwrite"

    def put(client: Any) -> None:
        obstore.put(client, key, data, mode=mode, use_multipart=False)

    def attempt() -> None:
        try:
            bucket.run("publish", label, put, conditional=True)
            return
        except (*REFUSED, FileNotFoundError):
            pass
        if storage.version(name) == expected:
            raise _RefusedError(
                f"cannot publish {label}: its condition is refused, although nothing has changed; save again"
            )
        if not _holds(storage, name, data):
            raise conflict_error(label)

    retry(attempt, min(bucket.seconds, tuning().object_conflict_retry), lambda error: isinstance(error, _RefusedError))


class _RefusedError(StorageUnavailableError):
    """A store refuses a condition that holds."""


def _holds(storage: Storage, name: str, data: bytes) -> bool:
    try:
        return storage.stat(name).size == len(data) and storage.read(name) == data
    except FileNotFoundError:
        return False
