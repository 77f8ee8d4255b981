"""The mounts of this machine, as the kernel lists them. To ask it touches no file system, so nothing here hangs."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["is_in_memory", "mounted", "network_mount", "on_network"]

#: Types of file systems with a server, which may be away for a while. FUSE may be anything; most of it is remote.
_NETWORK = re.compile(
    r"nfs4?|cifs|smb3|smbfs|ceph|9p|virtiofs|lustre|gpfs|beegfs\w*|afs|coda|panfs|wekafs|pvfs2|glusterfs|davfs|vboxsf|"
    r"fuse(\.(?!fuse-overlayfs).*)?"
)
#: The kernel's escapes for spaces and other characters in its list of mounts.
_ESCAPED = re.compile(r"\\([0-7]{3})")
#: Mount points of network file systems that this process has used.
_used: set[str] = set()


class _Mount(NamedTuple):
    """One line of the list.

    Attributes:
        number: device number of the kernel; another one after the file system was mounted anew.
        kind: type of the file system.
    """

    number: str
    kind: str


def is_in_memory(path: str) -> bool:
    """Return whether an absolute path is known to be on a tmpfs. No other file system is touched: it may hang."""
    try:
        point, kind = _mount_of(path, _recent_mounts(int(time.monotonic())))
        if kind != "tmpfs":
            return False
        # A symbolic link may lead anywhere.
        below = [prefix for prefix in _prefixes(path) if len(prefix) > len(point)]
        return not any(stat.S_ISLNK(os.lstat(prefix).st_mode) for prefix in below)
    except FileNotFoundError:
        return True  # the rest of the path does not exist yet
    except OSError:
        return False


def network_mount(path: str) -> str:
    """Return the mount point of the network file system that an absolute path is on, "" on others.

    A mount point where this process has seen a network file system counts as one while nothing is mounted there. The
    list of mounts may be a second old, since to read it takes long.
    """
    return _network_mount(path, _recent_mounts(int(time.monotonic())))


def _network_mount(path: str, mounts: dict[str, _Mount]) -> str:
    point, kind = _mount_of(path, mounts)
    if _NETWORK.fullmatch(kind):
        _used.add(point)
    return max((used for used in _used if used in _prefixes(path)), key=len, default="")


def on_network(path: str) -> bool:
    """Return whether an absolute path is on a network file system now, perhaps by symbolic links, which are followed."""
    with contextlib.suppress(OSError):
        if os.major(os.stat(path).st_dev) != 0:  # a disk: the list need not be read
            return False
    mounts = _mounts()
    return bool(_network_mount(path, mounts) or _network_mount(os.path.realpath(path), mounts))


@contextlib.contextmanager
def mounted(point: str) -> Iterator[None]:
    """Raise ENOTCONN if a mount point has no mount, or gets another one, while the block runs.

    Without its mount a path names a folder of the local disk: what is written there disappears, and what is read there
    looks as if there were no checkpoint.

    Args:
        point: mount point, from `network_mount`; "" to check nothing.
    """
    if not point:
        yield
        return
    before = _require_mount(point)
    try:
        yield
    except OSError:
        _require_mount(point, before)
        raise
    _require_mount(point, before)


def _require_mount(point: str, before: str = "") -> str:
    mounts = _mounts()
    number = mounts[point].number if point in mounts else ""
    automatic = not number and _mount_of(point, mounts)[1] == "autofs"  # it is mounted when it is used
    if not (number or automatic) or (before and number != before):
        raise OSError(errno.ENOTCONN, f"nothing is mounted at {point}", point)
    return number


def _prefixes(path: str) -> list[str]:
    parts = path.rstrip("/").split("/")
    return ["/".join(parts[:number]) or "/" for number in range(1, len(parts) + 1)]


def _mount_of(path: str, mounts: dict[str, _Mount]) -> tuple[str, str]:
    """Return mount point and type of the mount that a path is on, by its text."""
    point = next((prefix for prefix in reversed(_prefixes(path)) if prefix in mounts), "")
    return point, mounts[point].kind if point else ""


def _mounts() -> dict[str, _Mount]:
    """Return the mounts by mount point."""
    mounts: dict[str, _Mount] = {}
    with (
        contextlib.suppress(OSError),  # without /proc no mount is known
        open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file,
    ):
        for line in file:
            mount, _, source = line.partition(" - ")
            number, *_, place = mount.split(" ", 5)[:5]
            point = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), place)
            mounts[point] = _Mount(number, source.partition(" ")[0])  # of several at one point, the last is visible
    return mounts


@functools.lru_cache(maxsize=1)
def _recent_mounts(_second: int) -> dict[str, _Mount]:
    """Return `_mounts()`, read at most once a second."""
    return _mounts()
