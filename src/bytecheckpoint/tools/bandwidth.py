"""Measure what a storage takes and gives, with plain writes and reads beside a run."""

from __future__ import annotations

import contextlib
import mmap
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.errors import StorageError, UsageError
from bytecheckpoint.monitoring.analysis.limits import LIMITS_PREFIX, StorageLimit
from bytecheckpoint.monitoring.sinks.files import METRICS_FOLDER, remove_forgotten
from bytecheckpoint.monitoring.table import run_of_path
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.base import NewFile
from bytecheckpoint.storage.optional import folder_exists, is_cached
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.tiers.storage import tier_of
from bytecheckpoint.tools.subject import Subject, storage_of

__all__ = ["keeps_limits", "measure"]

#: Prefix of the folders of running measurements. Each has a name of its own, so that several machines may measure at once.
_PREFIX = ".bytecheckpoint-measure-"
_PAGE = mmap.PAGESIZE
#: Bytes of one call.
_CHUNK = 8 << 20
#: Seconds for which files may appear that a thread was making when the measurement was interrupted.
_LATE_FILES = 5.0


def measure(run: Subject, nbytes: int, threads: int) -> StorageLimit:
    """Write files beside a run as a save does, read them, and remove them.

    The bandwidths are kept beside the metrics of the run, for its reports, if it has metrics. Nothing else stays.

    Args:
        run: folder of a run, which exists: a path or storage. Of a tier, the durable storage is measured.
        nbytes: number of bytes to write, about.
        threads: number of files that are written and read at once.

    Raises:
        UsageError: too few bytes, or the folder does not exist, or is a checkpoint.
        StorageError: the storage refuses or does not answer.
    """
    share = nbytes // threads // _PAGE * _PAGE
    if not share:
        raise UsageError(f"{nbytes} bytes are too few for {threads} threads: give a page of {_PAGE} to each")
    storage = _durable(run)
    _check_folder(storage)
    host = socket.gethostname()
    _remove_forgotten(storage)
    folder = f"{_PREFIX}{uuid.uuid4().hex}"
    names = [f"{folder}/{number}" for number in range(threads)]
    data = mmap.mmap(-1, min(_CHUNK, share))
    data.write(np.random.default_rng().bytes(len(data)))  # nothing on the way can compress it
    try:
        begin = time.perf_counter()
        _on_threads(lambda name, stop: _write(storage, name, share, memoryview(data), stop), names)
        storage.sync(names)
        writing = time.perf_counter() - begin
        cached = any(is_cached(storage, name, range(0, share, _CHUNK)) for name in names)
        begin = time.perf_counter()
        if not cached:
            _on_threads(lambda name, stop: _read(storage, name, share, stop), names)
        reading = time.perf_counter() - begin
    finally:
        with contextlib.suppress(StorageError):  # an error above says more
            _remove(storage, folder, names)
    total = share * threads
    limit = StorageLimit(
        host=host, time=time.time(), write=total / writing, read=None if cached else total / reading,
        nbytes=total, threads=threads,
    )  # fmt: skip
    if keeps_limits(storage):
        when = time.strftime("%Y%m%dT%H%M%S", time.gmtime(limit.time))
        name = f"{LIMITS_PREFIX}{when}-{re.sub(r'[^A-Za-z0-9.-]', '_', host)}.json"
        _beside(storage, METRICS_FOLDER).publish(name, msgspec.json.encode(limit))
    return limit


def _remove(run: Storage, folder: str, names: Sequence[str]) -> None:
    """Remove the files. An interrupted `create` continues in a thread of its own, and may make one more."""
    deadline = time.monotonic() + _LATE_FILES
    run.delete(names)
    while folder in run.folders() and time.monotonic() < deadline:
        time.sleep(0.05)
        run.delete(names)


def keeps_limits(run: Subject) -> bool:
    """Return whether measurements are kept beside a run, because it has metrics."""
    return METRICS_FOLDER in _durable(run).folders()


def _durable(run: Subject) -> Storage:
    storage = storage_of(run)
    tier = tier_of(storage)
    return with_time_limits(storage if tier is None else tier.durable)


def _beside(run: Storage, folder: str) -> Storage:
    return with_time_limits(resolve(f"{run.url.rstrip('/')}/{folder}"))


def _check_folder(run: Storage) -> None:
    """Refuse to measure in a folder that does not exist, or belongs to a checkpoint."""
    if not folder_exists(run):
        raise UsageError(f"{run.url} does not exist: give the folder of a run, or make it before")
    for url in (run.url, run_of_path(run.url)):
        if with_time_limits(resolve(url)).version(CATALOG_NAME):
            raise UsageError(f"{url} is a checkpoint: give the folder of the run, in which it lies")


def _remove_forgotten(run: Storage) -> None:
    """Remove the files of measurements that were killed."""
    for name in run.folders():
        if name.startswith(_PREFIX):
            remove_forgotten(_beside(run, name), "")
            run.delete([f"{name}/-"])  # removes the folder if it is empty


def _on_threads(work: Callable[[str, threading.Event], None], names: list[str]) -> None:
    """Call `work` for all names at once. After an error, also an interrupt, the other calls end soon."""
    stop = threading.Event()

    def guarded(name: str) -> None:
        try:
            work(name, stop)
        except BaseException:
            stop.set()
            raise

    parallel_map(guarded, names, len(names), "bytecheckpoint-measure")


def _write(folder: Storage, name: str, size: int, data: memoryview, stop: threading.Event) -> None:
    direct = settings().storage.direct_io != "off"
    writer = folder.create(NewFile(name, size, direct=direct, stable=True))
    try:
        for offset in [*range(len(data), size, len(data)), 0]:  # the first bytes come last
            if stop.is_set():
                break
            writer.write_at(offset, [data[: size - offset]])
        else:
            writer.finish(size)
            return
    except BaseException:
        writer.abort()
        raise
    writer.abort()


def _read(folder: Storage, name: str, size: int, stop: threading.Event) -> None:
    buffer = memoryview(mmap.mmap(-1, min(_CHUNK, size)))
    with contextlib.closing(folder.open(name)) as reader:
        for offset in range(0, size, len(buffer)):
            if stop.is_set():
                return
            part = buffer[: size - offset]
            if reader.read_into(offset, [part]) != len(part):
                raise StorageError(f"{folder.url}/{name} was cut or removed while it was measured; measure again")
