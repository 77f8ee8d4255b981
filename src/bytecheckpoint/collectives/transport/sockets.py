"""Listening sockets, addresses of this machine, the search for a rank at its addresses, and limits on open descriptors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from bytecheckpoint.errors import CheckpointTimeoutError, PeerLostError, UsageError
from bytecheckpoint.settings import settings
from bytecheckpoint.threads import start, try_start
from bytecheckpoint.tracing.operation import count_retries

__all__ = [
    "SCARCE",
    "Search",
    "is_loopback",
    "listen",
    "listen_beside",
    "local_addresses",
    "loopback",
    "may_open",
    "remote_end",
    "reserve_descriptors",
]

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
    if settings().transport.listen_address:
        return [settings().transport.listen_address]
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
    """Open a non-blocking listening socket, by default at any port of all interfaces (see the settings).

    Raises:
        UsageError: no port of `listen_ports` is free, or `listen_address` is not of this machine.
    """
    address = settings().transport.listen_address
    first, last = settings().transport.port_range
    # The global generator is the program's.
    for port in random.SystemRandom().sample(range(first, last + 1), last + 1 - first):
        try:
            listener = _listen_at(address, port, backlog)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            if address and (error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror)):
                raise UsageError(f"setting listen_address is {address!r}: not of this machine ({error})") from None
            raise
        listener.setblocking(False)
        return listener
    raise UsageError(
        f"setting listen_ports is {settings().transport.listen_ports!r}: no port of these is free; each rank takes two"
    )


def _listen_at(address: str, port: int, backlog: int) -> socket.socket:
    if address:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
    return socket.create_server(("", port), backlog=backlog)


def listen_beside(name: str, backlog: int) -> socket.socket | None:
    """Open a non-blocking socket that accepts connections of this machine under a name; None if the name is taken."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    listener.listen(backlog)
    listener.setblocking(False)
    return listener


def _without_mapping(address: str) -> str:
    """Remove the prefix that an IPv4 address has on a socket that serves both families."""
    return address.removeprefix("::ffff:") if "." in address else address


def is_loopback(host: str) -> bool:
    """Return whether `host` names the local machine on every machine."""
    return host.startswith("127.") or host in ("::1", "localhost")


def loopback() -> str:
    """Return the address of this machine for itself; some have IPv6 only."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))  # sends nothing
    except OSError:
        return "::1"
    return "127.0.0.1"


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


def may_open(count: int) -> bool:
    """Return whether this process may open `count` descriptors more."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return hard == resource.RLIM_INFINITY or _open_descriptors() + count + _SPARE <= hard


def reserve_descriptors(count: int, owner: str) -> None:
    """Raise the soft limit on open descriptors where `count` more would exceed it.

    Args:
        count: number of descriptors.
        owner: name of the object that needs the descriptors, for the error message.

    Raises:
        UsageError: the hard limit does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _open_descriptors() + count + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if not may_open(count):
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


#: Seconds by which an address is tried later than the one before it, at most: most worlds need the first one only.
_LEAD = 1.0
_AGAIN = 0.2  # seconds between two attempts at one address
_CONNECT = 5.0  # seconds of one attempt
_LOOK = 1.0  # seconds between two looks for a reason to end


class Search:
    """One search for a rank. An address that refuses, or accepts and never answers, keeps no other address waiting.

    Args:
        hosts: addresses, the likeliest first.
        port: port at all of them.
        greet: function that begins the handshake over a new connection of this search, from any thread.
        settles_address: True if the address that answers is that of rank 0.

    Attributes:
        found: event, set when the first connection is through its handshake.
        over: event, set when no more connections are wanted.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        port: int,
        greet: Callable[[socket.socket, Search], None],
        *,
        settles_address: bool = False,
    ) -> None:
        self.settles_address = settles_address
        self.found = threading.Event()
        self.over = threading.Event()
        self._hosts, self._port, self._greet = list(dict.fromkeys(hosts)), port, greet
        self._ends: dict[socket.socket, threading.Event] = {}  # of the connections that were made
        self._failure = ""
        self._retries = 0

    def ended(self, sock: socket.socket, reason: str) -> None:
        """Note that a connection has ended before the handshake was through."""
        self._failure = reason or self._failure
        if (end := self._ends.pop(sock, None)) is not None:
            end.set()

    def run(
        self, deadline: float, local: socket.socket | None, is_vain: Callable[[], bool], rank: int, too_late: str
    ) -> None:
        """Return when a connection is through its handshake, or the `local` one has ended.

        Args:
            deadline: time at which to give up.
            local: connection within this machine, to try in place of the addresses.
            is_vain: function that returns whether the search has become pointless; called now and then.
            rank: rank that searches.
            too_late: message for a time-out.

        Raises:
            PeerLostError: nobody can be reached.
            CheckpointTimeoutError: somebody was reached who did not answer.
        """
        begun = time.monotonic()
        local_end = threading.Event()
        try:
            if local is not None:
                self._ends[local] = local_end
                self._greet(local, self)
            else:
                self._start_threads(min(_LEAD, (deadline - begun) / (2 * len(self._hosts))))
            while not self.found.wait(max(0.0, min(_LOOK, deadline - time.monotonic()))):
                if local_end.is_set():
                    time.sleep(_AGAIN)
                    return
                late = time.monotonic() > deadline
                if late and self._ends:
                    raise CheckpointTimeoutError(f"{too_late}: somebody was reached who does not answer")
                if late or is_vain():
                    where = f"at {self._hosts} port {self._port}" if local is None else "on this machine"
                    raise PeerLostError(f"rank {rank}: cannot reach rank 0 {where}: {self._failure}")
        finally:
            self.over.set()
            for end in list(self._ends.values()):
                end.set()
            count_retries(self._retries, self._retries * _AGAIN)

    def _start_threads(self, lead: float) -> None:
        for number, host in enumerate(self._hosts):
            thread = threading.Thread(
                target=self._try, args=(host, number * lead), name="bytecheckpoint-connect", daemon=True
            )
            if number == 0:
                start(thread)
            elif not try_start(thread):
                break

    def _try(self, host: str, delay: float) -> None:
        """Connect with one address, again and again, until the search is over."""
        while not self.over.wait(delay):
            delay = _AGAIN
            try:
                sock = socket.create_connection((host, self._port), timeout=_CONNECT)
            except (OSError, UnicodeError) as error:
                self._failure = str(error)
                self._retries += 1
                continue
            end = self._ends[sock] = threading.Event()
            self._greet(sock, self)
            end.wait()
            self._retries += 1
