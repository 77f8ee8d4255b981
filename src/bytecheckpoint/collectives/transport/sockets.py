"""Listening sockets, addresses of this machine, and limits on open descriptors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import socket
import struct

from bytecheckpoint.errors import UsageError

__all__ = ["SCARCE", "is_loopback", "listen", "local_addresses", "local_end", "remote_end", "reserve_descriptors"]

SCARCE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""Errors of `accept` for lack of descriptors or memory: the connection can be accepted later."""

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # requests of netdevice(7)
_IFF_UP = 1
_SPARE = 64  # descriptors for the files that the program opens meanwhile


def local_addresses(towards: str | None) -> list[str]:
    """Return addresses at which other ranks may reach this machine, most likely first.

    Args:
        towards: the job's MASTER_ADDR. The job uses the interface that leads there.
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
    found += _interface_addresses()  # the name may be unknown elsewhere, as in containers
    return list(dict.fromkeys(found))


def _interface_addresses() -> list[str]:
    """Return the addresses of the interfaces that are up, without loopback and link-local ones; IPv4 first."""
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode().ljust(256, b"\0")
            with contextlib.suppress(OSError):  # an interface without such an address
                (flags,) = struct.unpack_from("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)
                if flags & _IFF_UP:
                    found.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            address, _, _, scope, *_ = line.split()
            if int(scope, 16) == 0:  # global; an interface that is down has none
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return [address for address in found if not is_loopback(address)]


def listen(backlog: int) -> socket.socket:
    """Open a non-blocking socket that accepts connections at a free port of all interfaces."""
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


def _without_mapping(address: str) -> str:
    """Remove the prefix that an IPv4 address has on a socket that serves both families."""
    return address.removeprefix("::ffff:") if "." in address else address


def is_loopback(host: str) -> bool:
    """Whether `host` names the local machine on every machine."""
    return host.startswith("127.") or host in ("::1", "localhost")


def local_end(sock: socket.socket) -> str:
    """Return this machine's address of a connection."""
    return _without_mapping(str(sock.getsockname()[0]))


def remote_end(sock: socket.socket) -> str:
    """Return the other machine's address of a connection."""
    return _without_mapping(str(sock.getpeername()[0]))


def _open_descriptors() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return 0


def reserve_descriptors(count: int, owner: str) -> None:
    """Raise the soft limit on open descriptors where `count` more would exceed it.

    Args:
        count: number of descriptors.
        owner: name of what needs the descriptors, for the error message.

    Raises:
        UsageError: the hard limit does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _open_descriptors() + count + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"{owner} needs {count} open descriptors more, {needed} in all, but the hard limit of this process is "
            f"{hard}: raise it to {needed} or more before the start (ulimit -Hn, LimitNOFILE= of systemd, --ulimit "
            "nofile= of a container)"
        )
    # Added to the limit, so that the program can open as many files as before.
    wanted = max(needed, soft + count)
    new = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{owner} needs {needed} open descriptors, but the limit of {soft} could not be raised ({error}): "
            f"run `ulimit -n {needed}` before the start"
        ) from error
