"""Two machines on this one: network namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

__all__ = ["cut_cable", "inside", "two_machines"]


@contextlib.contextmanager
def two_machines() -> Iterator[list[str]]:
    """Yield the names of two network namespaces that see each other at 10.99.9.1 and 10.99.9.2."""
    names = [f"bc{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.99.9.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def inside(name: str) -> list[str]:
    """Return what a command is put behind to run on a machine."""
    return ["ip", "netns", "exec", name]


def cut_cable(name: str) -> None:
    """Let a machine neither send nor receive anything any more."""
    _ip("-n", name, "link", "set", "eth0", "down")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
