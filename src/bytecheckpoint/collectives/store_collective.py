"""The collective of ranks that share a key-value store of torch.distributed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from bytecheckpoint._version import __version__
from bytecheckpoint.collectives.base import DataProvider, new_world_id
from bytecheckpoint.collectives.inbox import Inbox, InboxCollective
from bytecheckpoint.collectives.rendezvous import Rendezvous
from bytecheckpoint.collectives.transport.hub import Hub
from bytecheckpoint.collectives.transport.loop import Loop
from bytecheckpoint.collectives.transport.mesh import Mesh
from bytecheckpoint.collectives.transport.sockets import is_loopback, local_addresses, may_open
from bytecheckpoint.collectives.transport.spoke import Spoke
from bytecheckpoint.collectives.transport.star import Star
from bytecheckpoint.collectives.transport.wire import ANYBODY
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointTimeoutError,
    PeerLostError,
    UsageError,
)
from bytecheckpoint.failures import Cancellation, Failure
from bytecheckpoint.settings import settings
from bytecheckpoint.tuning import tuning

__all__ = ["StoreCollective", "collective_of_group"]


class StoreCollective(InboxCollective):
    """Communicate over TCP connections of its own, between ranks that share a key-value store.

    Construction is a collective operation of all these ranks, in the foreground: rank 0 publishes in the store where it
    listens. The store is not used after that. So the world of a process group outlives `destroy_process_group()`, and
    nothing ever touches the training's communicators.

    Args:
        store: key-value store of torch.distributed, in which these ranks alone use the keys of `Rendezvous`.
        rank: rank of this process.
        world_size: number of ranks, more than one.
        group: process group of exactly these ranks; None for ranks that have none.
        timeout: seconds for construction.
        linger: most seconds by which the end of the program is delayed to deliver the last messages.
        host: name of the machine, as in `Collective`; "" for this one.

    Raises:
        CheckpointTimeoutError, PeerLostError: not every rank could be reached.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: float = 300.0,
        linger: float = 10.0,
        host: str = "",
    ) -> None:
        super().__init__(rank, world_size, "")
        self.host = host or self.host
        self._linger = linger
        self._group = weakref.ref(group) if group is not None else None
        self._loops: list[Loop] = []
        self._finalizer = weakref.finalize(self, _leave, self._loops)
        # At the end of the program `leave_all` does this, later than finalizers would.
        self._finalizer.atexit = False
        self._mesh: Mesh | None = None  # started by the first exchange
        self._mesh_lock = threading.Lock()
        deadline = time.monotonic() + timeout
        received = _received.setdefault(group, []) if group is not None else []
        rendezvous = Rendezvous(store, rank, received, deadline)
        self._star: Star = (self._host_star if self.rank == 0 else self._join_star)(rendezvous, deadline)

    def process_group(self) -> dist.ProcessGroup | None:  # noqa: D102 (inherited)
        return self._group() if self._group is not None else None

    def _host_star(self, rendezvous: Rendezvous, deadline: float) -> Hub:
        """Listen as rank 0, publish the address, and wait until the other ranks have connected."""
        secret = secrets.token_bytes(32)
        self.world_id = new_world_id()
        tree = _prefers_tree(self.world_size)
        try:
            hosts = local_addresses(os.environ.get("MASTER_ADDR"))
            hub = Hub(self.world_size, self.inbox, secret, self._linger, self._name_beside() if tree else "")
        except Exception as error:
            own = error if isinstance(error, CheckpointError) else CheckpointError(f"cannot listen: {error!r}")
            failure = Failure.of(own, rank=0, stage="connect")
            rendezvous.publish({"failure": failure})
            raise failure.as_error() from error
        self._loops.append(hub)
        rendezvous.publish(
            {
                "world": self.world_id,
                "version": __version__,
                "secret": secret.hex(),
                "hosts": hosts,
                "port": hub.port,
                "host": self.host,
                "tree": tree,
                "tls": bool(settings().transport.tls_certificate),
            }
        )
        try:
            hub.wait_ready(deadline - time.monotonic(), rendezvous.failure)
        except BaseException as error:
            found = rendezvous.publish_failure(error) if isinstance(error, CheckpointError) else None
            if found is None or isinstance(error, CheckpointTimeoutError):
                rendezvous.remove()  # a rank that has made no call may join the next attempt
            else:
                rendezvous.replace_by_failure(found)
            raise
        rendezvous.remove()
        return hub

    def _join_star(self, rendezvous: Rendezvous, deadline: float) -> Spoke:
        """Connect to rank 0, and wait until all ranks have connected.

        The store may still hold the message of rank 0 of an earlier group, which was killed, or could not remove it. Then
        nobody listens there, and this rank 0 publishes another one.
        """
        while True:
            message = rendezvous.receive()
            try:
                self._loops.append(spoke := self._connect(message, rendezvous, deadline))
            except CheckpointError as error:
                if isinstance(error, PeerLostError) and rendezvous.wait_until_superseded():
                    self.inbox = Inbox(self.rank)
                    continue
                rendezvous.publish_failure(error)
                raise
            return spoke

    def _connect(self, message: dict[str, Any], rendezvous: Rendezvous, deadline: float) -> Spoke:
        """Connect to rank 0 at the address in its `message`."""
        # First: messages of other versions may have other items.
        if (version := message.get("version", "of another version")) != __version__:
            versions = f"rank {self.rank} runs bytecheckpoint {__version__} and rank 0 {version}"
            raise UsageError(f"{versions}: install one version on all machines")
        self.world_id, own = message["world"], bool(settings().transport.tls_certificate)
        if message["tls"] is not own:
            difference = "uses TLS, and rank 0 does not" if own else "does not use TLS, and rank 0 does"
            raise UsageError(
                f"rank {self.rank} {difference}: set tls_certificate, tls_key and tls_authority on all ranks, or on none"
            )
        same_host = message["host"] == self.host
        # Some machines resolve their own name to 127.0.1.1, which leads nowhere from another machine.
        hosts = [h for h in message["hosts"] if same_host or not is_loopback(h)]
        hosts += ["localhost"] if same_host else []
        try:
            spoke = Spoke(self.rank, self.world_size, self.inbox, bytes.fromhex(message["secret"]), self._linger)
        except CheckpointError:
            raise
        except Exception as error:  # every one: rank 0 has to know
            raise CheckpointError(f"rank {self.rank}: cannot listen for the other ranks: {error!r}") from error
        spoke.connect(
            hosts,
            message["port"],
            deadline - time.monotonic(),
            beside=self._name_beside() if message["tree"] else "",
            superseded=rendezvous.superseded,
        )
        return spoke

    def _name_beside(self) -> str:
        """Return the name under which the ranks of this machine find each other. Containers have names of their own."""
        return f"bytecheckpoint-{self.world_id}-{hashlib.sha256(self.host.encode()).hexdigest()[:16]}"

    def send(self, to: int, tag: str, payload: bytes) -> None:  # noqa: D102 (inherited)
        self._star.send(to, tag, payload)

    def send_each(self, tag: str, payloads: Mapping[int, bytes]) -> None:  # noqa: D102 (inherited)
        self._star.send_each(tag, payloads)

    def collect(  # noqa: D102 (inherited)
        self,
        sources: Collection[int],
        tag: str,
        *,
        timeout: float,
        cancel: Cancellation | None = None,
    ) -> list[bytes]:
        self._star.check_process()
        for source in sources:
            if source not in (0, self.rank) and not self.inbox.has(source, tag):
                self._star.watch(source)
        return super().collect(sources, tag, timeout=timeout, cancel=cancel)

    def watch_losses(self, on_lost: Callable[[int, str], None]) -> Callable[[], None]:  # noqa: D102 (inherited)
        self._star.watch(ANYBODY)
        return super().watch_losses(on_lost)

    def exchange(  # noqa: D102 (inherited)
        self,
        tag: str,
        outgoing: Mapping[int, NDArray[np.uint8]],
        incoming: Mapping[int, NDArray[np.uint8]],
        *,
        timeout: float,
        cancel: Cancellation | None = None,
    ) -> None:
        self._star.check_open(tag)
        for array in (*outgoing.values(), *incoming.values()):
            assert array.dtype == np.uint8 and array.ndim == 1 and array.flags.c_contiguous
        assert all(array.flags.writeable for array in incoming.values())
        if (own := incoming.get(self.rank)) is not None:
            np.copyto(own, outgoing[self.rank])
        outgoing, incoming = (
            {peer: array for peer, array in arrays.items() if peer != self.rank and array.nbytes}
            for arrays in (outgoing, incoming)
        )
        if outgoing or incoming:
            self._data_plane().exchange(tag, outgoing, incoming, timeout=timeout, cancel=cancel)

    @contextlib.contextmanager
    def serve(self, tag: str, provider: DataProvider) -> Iterator[None]:  # noqa: D102 (inherited)
        with super().serve(tag, provider), self._data_plane().serve(tag, provider):
            yield

    def fetch(  # noqa: D102 (inherited)
        self, rank: int, tag: str, request: bytes, destination: NDArray[np.uint8], *, timeout: float
    ) -> None:
        self._star.check_open(tag)
        if rank == self.rank:
            super().fetch(rank, tag, request, destination, timeout=timeout)
        else:
            self._data_plane().fetch(rank, tag, request, destination, timeout=timeout)

    def _data_plane(self) -> Mesh:
        with self._mesh_lock:
            if self._mesh is None:
                self._mesh = Mesh(self._star, self._linger)
                self._loops.append(self._mesh)
            return self._mesh

    def close(self) -> None:  # noqa: D102 (inherited)
        self._finalizer()


def _leave(loops: list[Loop]) -> None:
    for loop in loops:
        loop.leave()


def _prefers_tree(world_size: int) -> bool:
    """Return whether messages pass through one rank of each machine."""
    if settings().transport.message_tree == "auto":
        return world_size > tuning().star_ranks or not may_open(world_size)
    return settings().transport.message_tree == "on"


def collective_of_group(group: dist.ProcessGroup, *, timeout: float) -> StoreCollective:
    """Return a new collective of the ranks of a process group; see `StoreCollective`."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    return StoreCollective(group.get_group_store(), rank, world_size, group=group, timeout=timeout)


#: Nonces of the messages that this process has received in each group.
_received: weakref.WeakKeyDictionary[dist.ProcessGroup, list[str]] = weakref.WeakKeyDictionary()
