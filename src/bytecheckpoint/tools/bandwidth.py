"""Measure what a storage takes and gives, with plain writes and reads beside a run."""

from __future__ import annotations

import contextlib
import mmap
import re
import socket
import time
import uuid
from collections.abc import Callable

import msgspec
import numpy as np

from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.errors import StorageError, UsageError
from bytecheckpoint.monitoring.analysis.limits import LIMITS_PREFIX, StorageLimit
from bytecheckpoint.monitoring.sinks.files import METRICS_FOLDER, remove_forgotten
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.base import NewFile
from bytecheckpoint.storage.optional import is_cached
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.tiers.storage import tier_of
from bytecheckpoint.tools.subject import Subject, storage_of

__all__ = ["measure"]

_PREFIX = "measure-"
_PAGE = mmap.PAGESIZE
#: Bytes of one call.
_CHUNK = 8 << 20


def measure(run: Subject, nbytes: int, threads: int) -> StorageLimit:
    """Write files beside a run as a save does, read them, remove them, and keep the bandwidths for its reports.

    Several machines may measure at once.

    Args:
        run: folder of a run: a path, storage or open checkpoint. Of a tier, the durable storage is measured.
        nbytes: number of bytes to write, about.
        threads: number of files that are written and read at once.

    Raises:
        UsageError: too few bytes.
        StorageError: the storage refuses or does not answer.
    """
    share = nbytes // threads // _PAGE * _PAGE
    if not share:
        raise UsageError(f"{nbytes} bytes are too few for {threads} threads: give a page of {_PAGE} to each")
    storage = storage_of(run)
    tier = tier_of(storage)
    url = (storage if tier is None else tier.durable).url
    folder = with_time_limits(resolve(f"{url.rstrip('/')}/{METRICS_FOLDER}"))
    host = socket.gethostname()
    remove_forgotten(folder, _PREFIX)
    names = [f"{_PREFIX}{uuid.uuid4().hex}" for _ in range(threads)]
    data = mmap.mmap(-1, min(_CHUNK, share))
    data.write(np.random.default_rng().bytes(len(data)))  # nothing on the way can compress it
    try:
        begin = time.perf_counter()
        _on_threads(lambda name: _write(folder, name, share, memoryview(data)), names)
        folder.sync(names)
        writing = time.perf_counter() - begin
        cached = any(is_cached(folder, name, range(0, share, _CHUNK)) for name in names)
        begin = time.perf_counter()
        if not cached:
            _on_threads(lambda name: _read(folder, name, share), names)
        reading = time.perf_counter() - begin
    finally:
        with contextlib.suppress(StorageError):  # an error above says more
            folder.delete(names)
    total = share * threads
    limit = StorageLimit(
        host=host, time=time.time(), write=total / writing, read=None if cached else total / reading,
        nbytes=total, threads=threads,
    )  # fmt: skip
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime(limit.time))
    name = f"{LIMITS_PREFIX}{when}-{re.sub(r'[^A-Za-z0-9.-]', '_', host)}.json"
    folder.publish(name, msgspec.json.encode(limit))
    return limit


def _on_threads(work: Callable[[str], None], names: list[str]) -> None:
    parallel_map(work, names, len(names), "bytecheckpoint-measure")


def _write(folder: Storage, name: str, size: int, data: memoryview) -> None:
    direct = settings().storage.direct_io != "off"
    writer = folder.create(NewFile(name, size, direct=direct, stable=True))
    try:
        for offset in [*range(len(data), size, len(data)), 0]:  # the first bytes come last
            writer.write_at(offset, [data[: size - offset]])
        writer.finish(size)
    except BaseException:
        writer.abort()
        raise


def _read(folder: Storage, name: str, size: int) -> None:
    buffer = memoryview(mmap.mmap(-1, min(_CHUNK, size)))
    with contextlib.closing(folder.open(name)) as reader:
        for offset in range(0, size, len(buffer)):
            part = buffer[: size - offset]
            if reader.read_into(offset, [part]) != len(part):
                raise StorageError(f"{folder.url}/{name} was cut or removed while it was measured; measure again")
