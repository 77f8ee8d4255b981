"""What the collectives need of the operating system: listening sockets, addresses, descriptors."""

from __future__ import annotations

import errno
import os
import resource
import socket

from bytecheckpoint.errors import UsageError

__all__ = ["SCARCE", "is_loopback", "listen", "local_addresses", "local_end", "remote_end", "reserve_descriptors"]

SCARCE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""Errors of `accept` that say nothing about the connection: it can be accepted later."""

_SPARE = 64  # descriptors that opening a few files takes meanwhile


def local_addresses(towards: str | None) -> list[str]:
    """Addresses that other ranks may reach this machine by, most likely first.

    Args:
        towards: the job's MASTER_ADDR: the interface that leads there is the one that the job uses.
    """
    found: list[str] = []
    try:
        for family, kind, _, _, address in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM) if towards else ():
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # a datagram socket: picks a route, sends nothing
                found.append(str(probe.getsockname()[0]))
    except OSError:
        pass
    found.append(socket.gethostname())
    return list(dict.fromkeys(found))


def listen(backlog: int) -> socket.socket:
    """A non-blocking socket that accepts connections at a free port of all interfaces."""
    listener: socket.socket | None = None
    if socket.has_dualstack_ipv6():
        try:
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
    listener = listener or socket.create_server(("", 0), backlog=backlog)
    listener.setblocking(False)
    return listener


def _plain(address: str) -> str:
    """Without the form that IPv4 takes on a socket that serves both families."""
    return address.removeprefix("::ffff:") if "." in address else address


def is_loopback(host: str) -> bool:
    """Whether `host` means the machine itself, whichever machine says it."""
    return host.startswith("127.") or host in ("::1", "localhost")


def local_end(sock: socket.socket) -> str:
    """Address of this machine on the way that a connection takes."""
    return _plain(str(sock.getsockname()[0]))


def remote_end(sock: socket.socket) -> str:
    """Address of the machine at the other end of a connection."""
    return _plain(str(sock.getpeername()[0]))


def _in_use() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return 0


def reserve_descriptors(count: int, purpose: str) -> None:
    """Make sure that `count` more descriptors can be opened: raise the soft limit where it is in the way.

    Args:
        count: how many.
        purpose: for the message: who needs them.

    Raises:
        UsageError: the hard limit does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _in_use() + count + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"{purpose} needs {count} open descriptors more, {needed} in all, but the hard limit of this process is "
            f"{hard}: raise it to {needed} or more before the start (ulimit -Hn, LimitNOFILE= of systemd, --ulimit "
            "nofile= of a container)"
        )
    # The program keeps the room that it had: what is taken here is added.
    wanted = max(needed, soft + count)
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(hard, wanted), hard)
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{purpose} needs {needed} open descriptors, but the limit of {soft} could not be raised ({error}): "
            f"run `ulimit -n {needed}` before the start"
        ) from error
