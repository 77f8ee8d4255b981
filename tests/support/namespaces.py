"""Several machines, or containers, on this machine: network namespaces that a switch connects."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

__all__ = ["container", "cut_cable", "inside", "lacks", "machines", "mend_cable", "two_machines"]

#: Begins a shell that has a host name, a /dev/shm of 64 MiB and process numbers of its own, and runs a command.
_ENTER = """
set -e
hostname "$0"
mount -t proc proc /proc
mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm
[ -z "$1" ] || mount --bind "$1" /etc/hosts
shift
exec "$@"
"""


def lacks() -> str:
    """Return what machines of this kind lack here; "" if they can be made."""
    if missing := [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]:
        return f"there is no {missing[0]}"
    return "" if os.geteuid() == 0 else "needs root"


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[str]]:
    """Yield the names of network namespaces that see each other at 10.99.9.1, 10.99.9.2, ..."""
    names = [f"bc{os.getpid()}{chr(ord('a') + number)}" for number in range(count)]
    switch = f"bc{os.getpid()}switch"
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names, 1):
            port = f"port{number}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "addr", "add", f"10.99.9.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False)


def two_machines() -> contextlib.AbstractContextManager[list[str]]:
    """Return `machines(2)`."""
    return machines(2)


def inside(name: str) -> list[str]:
    """Return what a command is put behind to run on a machine."""
    return ["ip", "netns", "exec", name]


def container(hostname: str, hosts: str = "") -> list[str]:
    """Return what a command is put behind to run in a container, which ends with it.

    Args:
        hostname: name of the container.
        hosts: file in place of /etc/hosts; "": that of this machine.
    """
    enter = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount"]
    return [*enter, "sh", "-c", _ENTER, hostname, hosts]


def cut_cable(name: str) -> None:
    """Let a machine neither send nor receive anything any more."""
    _ip("-n", name, "link", "set", "eth0", "down")


def mend_cable(name: str) -> None:
    """Undo `cut_cable`."""
    _ip("-n", name, "link", "set", "eth0", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
