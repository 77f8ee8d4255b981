"""Read from the kernel's files how much memory this machine and this process's cgroups have free, anew at each call.

Page cache counts as free, because the kernel reclaims it before it refuses memory. Memory file systems (shmem) do not.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["FreeMemory", "free_memory"]

_UNLIMITED = 1 << 62


class FreeMemory(NamedTuple):
    """Memory that a process may still take.

    Attributes:
        nbytes: number of bytes.
        source: origin of the limit: "this machine", or the folder of a cgroup.
    """

    nbytes: int
    source: str


class _Version(NamedTuple):
    """The names of one version of cgroups.

    Attributes:
        limits: files with limits of a cgroup and all below it; one that is missing or is no number is no limit.
        used: file with the bytes in use, page cache included.
        cache: fields of memory.stat with the page cache of a cgroup and all below it.
    """

    limits: tuple[str, ...]
    used: str
    cache: tuple[str, ...]


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
# From memory.high on the kernel slows every allocation down.
_V2 = _Version(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def free_memory(root: Path = Path("/")) -> FreeMemory:
    """Return the memory that this process may still take: the least that the machine or one of its cgroups has free.

    Args:
        root: folder that holds `proc` and the mounted cgroups.
    """
    found = [_free_of_machine(root), *(_free_of_cgroup(*cgroup) for cgroup in _cgroups(root))]
    return min(found, key=lambda free: free.nbytes)


def _free_of_machine(root: Path) -> FreeMemory:
    free = _fields(f"{root}/proc/meminfo", ("MemAvailable:",)).get("MemAvailable:")
    return FreeMemory(_UNLIMITED if free is None else free << 10, "this machine")


def _free_of_cgroup(folder: str, version: _Version) -> FreeMemory:
    numbers = [_number(f"{folder}/{name}") for name in version.limits]
    limits = [limit for limit in numbers if limit is not None and limit < _UNLIMITED]  # v1 has a number for "none"
    used = _number(f"{folder}/{version.used}") if limits else None
    if used is None:
        return FreeMemory(_UNLIMITED, folder)
    cache = sum(_fields(f"{folder}/memory.stat", version.cache).values())
    return FreeMemory(max(min(limits) - max(used - cache, 0), 0), folder)


def _cgroups(root: Path) -> Iterator[tuple[str, _Version]]:
    """Find the cgroups that limit this process: its own, and every ancestor that is mounted here (cgroups(7))."""
    paths = {}
    for line in _lines(f"{root}/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[_V2] = path
        elif "memory" in controllers.split(","):
            paths[_V1] = path
    for line in _lines(f"{root}/proc/self/mountinfo"):
        mount, _, options = line.partition(" - ")
        kind, _, controllers = options.split(" ")[:3]
        version = {"cgroup2": _V2, "cgroup": _V1}.get(kind)
        if version not in paths or (version is _V1 and "memory" not in controllers.split(",")):
            continue
        mounted, mount_point = (_unescaped(field) for field in mount.split(" ")[3:5])
        top = str(root / mount_point.lstrip("/"))
        # In a container the mount may show a part of the tree only, or a tree that does not hold the path.
        path = paths[version]
        inside = path.removeprefix(mounted.rstrip("/")) if (path + "/").startswith(mounted.rstrip("/") + "/") else ""
        parts = [part for part in inside.split("/") if part]
        if ".." in parts:
            parts = []
        for depth in range(len(parts), -1, -1):
            yield "/".join([top, *parts[:depth]]), version


def _lines(file: str) -> list[str]:
    # Not pathlib, which takes longer than the reading: a tier asks before each file.
    with contextlib.suppress(OSError), open(file, errors="surrogateescape") as lines:
        return lines.read().splitlines()
    return []


def _fields(file: str, names: Sequence[str]) -> dict[str, int]:
    """Read the numbers on the lines that begin with one of `names`."""
    words = [line.split() for line in _lines(file) if line.startswith(tuple(names))]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[0] in names and line[1].isdigit()}


def _number(file: str) -> int | None:
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _unescaped(field: str) -> str:
    """Invert the escapes of mountinfo, which writes a space as a backslash and 040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
