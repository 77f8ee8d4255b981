"""One place for every knob: defaults that need no thought, each with its unit and its reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import UsageError

__all__ = ["Settings", "configure", "settings"]

_TAKEN: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "str": (str,)}
_LONGEST = 1e9  # seconds; the clocks of locks and sockets end not far from there


@dataclass(frozen=True, slots=True)
class Settings:
    """Tunables of one process. Every field can be set by `configure` or by BYTECHECKPOINT_<FIELD> in the environment.

    Attributes:
        staging_bytes: size of the staging pool in bytes. 0 means: as large as the state while that is at most half of
            the memory that the machine has free when the pool grows, shared by the ranks that its launcher started there
            (LOCAL_WORLD_SIZE and the like); beyond that, that half, reused in a ring. Also the most that a synchronous
            save to a storage across a network keeps in memory.
        chunk_bytes: bytes that one write or read call moves; a multiple of 1 MiB.
        writer: "process" writes asynchronous saves from a helper process over shared memory, so that the training
            loop keeps the interpreter lock to itself; "thread" writes them from threads of this process.
        write_threads: concurrent writes per rank.
        read_threads: concurrent reads per rank; 0: as many as suit the storage, 2 for file systems, 8 or 16 across a
            network.
        direct_io: "auto" bypasses the page cache where the file system sits on a block device; "on" also on others that
            can, such as network file systems; "off".
        timeout: seconds that a rank waits for the others in one step of a save or load, or for an answer of a file
            system; where bytes are moved, the time that this takes comes on top.
        storage_timeout: seconds that one operation of a remote storage is tried again after transient errors.
        commit: "exclusive" publishes a checkpoint on an object store by a conditional put, so that of two jobs that
            save to one path one gets an error; "plain" by an ordinary put, for stores that lack conditional ones.
        spool_dir: where bytes wait that an object store can take only later, when memory has no room for them; by
            default the system's folder for temporary files.
        memory_dir: a memory file system, for `mem://`.
        tier_hot: where `tier+...` paths keep their hot copies on each machine: mem://name, or a folder of a local disk.
        tier_replicas: other machines that hold a copy of each machine's hot files.
        tier_keep: hot steps of a run that each machine keeps when they have been flushed.
        tier_waiting: hot steps that may wait for their flush; a save that would make one more waits.
    """

    staging_bytes: int = 0
    chunk_bytes: int = 8 << 20
    writer: str = "process"
    write_threads: int = 2
    read_threads: int = 0
    direct_io: str = "auto"
    timeout: float = 600.0
    storage_timeout: float = 180.0
    commit: str = "exclusive"
    spool_dir: str = ""
    memory_dir: str = "/dev/shm"
    tier_hot: str = "mem://tier"
    tier_replicas: int = 1
    tier_keep: int = 1
    tier_waiting: int = 2

    def __post_init__(self) -> None:
        """Refuse values that would fail later, far from their cause."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, _TAKEN[str(field.type)]):
                raise UsageError(f"settings.{field.name} is {value!r}, which is not of type {field.type}")
        if self.writer not in ("process", "thread"):
            raise UsageError(f"settings.writer is {self.writer!r}: use 'process' or 'thread'")
        if self.direct_io not in ("auto", "on", "off"):
            raise UsageError(f"settings.direct_io is {self.direct_io!r}: use 'auto', 'on' or 'off'")
        if self.chunk_bytes <= 0 or self.chunk_bytes % (1 << 20):
            raise UsageError(f"settings.chunk_bytes is {self.chunk_bytes}: use a positive multiple of 1 MiB")
        if self.write_threads < 1 or min(self.read_threads, self.staging_bytes) < 0:
            raise UsageError("settings: write_threads must be at least 1, read_threads and staging_bytes at least 0")
        if self.tier_replicas < 0 or self.tier_keep < 0 or self.tier_waiting < 1 or not self.tier_hot:
            raise UsageError("settings: tier_replicas and tier_keep are at least 0, tier_waiting 1, tier_hot not empty")
        for name in ("timeout", "storage_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds <= _LONGEST:  # also what is no number
                shown = float(max(-1e300, min(seconds, 1e300)))
                raise UsageError(f"settings.{name} is {shown:g}: use a positive number of seconds, up to {_LONGEST:g}")
        if self.commit not in ("exclusive", "plain"):
            raise UsageError(f"settings.commit is {self.commit!r}: use 'exclusive' or 'plain'")


def _from_environment() -> Settings:
    found: dict[str, Any] = {}
    parsers: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
    for field in fields(Settings):
        text = os.environ.get(f"BYTECHECKPOINT_{field.name.upper()}")
        if text is None:
            continue
        try:
            found[field.name] = parsers[str(field.type)](text)
        except ValueError:
            raise UsageError(f"BYTECHECKPOINT_{field.name.upper()}={text!r} is not of type {field.type}") from None
    return Settings(**found)


_current: Settings | None = None


def settings() -> Settings:
    """The settings in force."""
    global _current  # noqa: PLW0603  one process-wide value, replaced whole
    if _current is None:
        _current = _from_environment()
    return _current


def configure(**changes: Any) -> Settings:
    """Change settings for the saves and loads that start from now on.

    Args:
        **changes: fields of `Settings`.

    Returns:
        The settings now in force.

    Raises:
        UsageError: an unknown field or an impossible value.
    """
    global _current  # noqa: PLW0603  one process-wide value, replaced whole
    unknown = changes.keys() - {f.name for f in fields(Settings)}
    if unknown:
        known = ", ".join(f.name for f in fields(Settings))
        raise UsageError(f"unknown setting {sorted(unknown)[0]!r}; the settings are: {known}")
    _current = replace(settings(), **changes)
    return _current
