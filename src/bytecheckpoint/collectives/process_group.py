"""The collective of ranks that share a store of torch.distributed: those of a process group, or of what is left of one."""

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
from bytecheckpoint.collectives.invitation import Invitation
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
    error_from_report,
    error_report,
)
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.settings import settings
from bytecheckpoint.tuning import tuning

__all__ = ["StoreCollective", "collective_of_group"]


class StoreCollective(InboxCollective):
    """The collective of ranks that share a key-value store, over TCP connections of its own.

    Construction is a collective operation of all these ranks, in the foreground: the store tells every rank where rank 0
    listens. It is not used after that. So the world of a process group outlives `destroy_process_group()`, and nothing ever
    touches the training's communicators.

    Args:
        store: of torch.distributed, in which these ranks alone use the keys of `Invitation`.
        rank: of this process.
        world_size: number of ranks, more than one.
        heard: what this process has heard from the store before; extended.
        timeout: seconds for construction.
        linger: most seconds by which the end of the program is delayed to deliver the last messages.
        host: as of `Collective`; by default this machine.

    Raises:
        CheckpointTimeoutError, PeerLostError: not every rank could be reached.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        heard: list[str] | None = None,
        timeout: float = 300.0,
        linger: float = 10.0,
        host: str = "",
    ) -> None:
        super().__init__(rank, world_size, "")
        self.host = host or self.host
        self._linger = linger
        self._loops: list[Loop] = []
        self._finalizer = weakref.finalize(self, _leave, self._loops)
        # At the end of the program `leave_all` does this, later than finalizers would.
        self._finalizer.atexit = False
        self._mesh: Mesh | None = None  # started by the first exchange
        self._mesh_lock = threading.Lock()
        deadline = time.monotonic() + timeout
        invitation = Invitation(store, rank, [] if heard is None else heard, deadline)
        self._star: Star = (self._host_star if self.rank == 0 else self._join_star)(invitation, deadline)

    def _host_star(self, invitation: Invitation, deadline: float) -> Hub:
        """Listen as rank 0, tell the other ranks the address, and wait until they have connected."""
        secret = secrets.token_bytes(32)
        self.world_id = new_world_id()
        tree = _prefers_tree(self.world_size)
        try:
            hosts = local_addresses(os.environ.get("MASTER_ADDR"))
            hub = Hub(self.world_size, self.inbox, secret, self._linger, self._name_beside() if tree else "")
        except Exception as error:
            invitation.send({"refused": error_report(error)})
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"rank 0: cannot listen for the other ranks: {error!r}") from error
        self._loops.append(hub)
        invitation.send(
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
            hub.wait_ready(deadline - time.monotonic(), invitation.refusal)
        except CheckpointTimeoutError as error:
            invitation.refuse(error)
            invitation.remove()  # a rank that has made no call may join the next attempt
            raise
        except CheckpointError as error:
            invitation.refuse(error)
            invitation.withdraw(error)
            raise
        except BaseException:
            invitation.remove()
            raise
        invitation.remove()
        return hub

    def _join_star(self, invitation: Invitation, deadline: float) -> Spoke:
        """Connect to rank 0, and wait until all ranks have connected.

        The store may still hold what rank 0 of an earlier group told, which was killed, or could not remove it: then nobody
        listens there, and this rank 0 tells something else.
        """
        while True:
            told = invitation.receive()
            if "refused" in told:
                raise error_from_report(told["refused"])
            try:
                self._loops.append(spoke := self._connect(told, invitation, deadline))
            except CheckpointError as error:
                if isinstance(error, PeerLostError) and invitation.becomes_outdated():
                    self.inbox = Inbox(self.rank)
                    continue
                invitation.refuse(error)
                raise
            return spoke

    def _connect(self, told: dict[str, Any], invitation: Invitation, deadline: float) -> Spoke:
        """Connect to rank 0 where it has `told` that it listens."""
        # First: other versions may tell other things.
        if (version := told.get("version", "of another version")) != __version__:
            versions = f"rank {self.rank} runs bytecheckpoint {__version__} and rank 0 {version}"
            raise UsageError(f"{versions}: install one version on all machines")
        self.world_id, own = told["world"], bool(settings().transport.tls_certificate)
        if told["tls"] is not own:
            difference = "uses TLS, and rank 0 does not" if own else "does not use TLS, and rank 0 does"
            raise UsageError(
                f"rank {self.rank} {difference}: set tls_certificate, tls_key and tls_authority on all ranks, or on none"
            )
        same_host = told["host"] == self.host
        # Some machines resolve their own name to 127.0.1.1, which leads nowhere from another machine.
        hosts = [h for h in told["hosts"] if same_host or not is_loopback(h)]
        hosts += ["localhost"] if same_host else []
        try:
            spoke = Spoke(self.rank, self.world_size, self.inbox, bytes.fromhex(told["secret"]), self._linger)
        except CheckpointError:
            raise
        except Exception as error:  # every one: rank 0 has to know
            raise CheckpointError(f"rank {self.rank}: cannot listen for the other ranks: {error!r}") from error
        spoke.connect(
            hosts,
            told["port"],
            deadline - time.monotonic(),
            beside=self._name_beside() if told["tree"] else "",
            outdated=invitation.outdated,
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
        unless: str = "",
        cancel: Cancellation | None = None,
    ) -> list[bytes]:
        self._star.check_process()
        for source in sources:
            if source not in (0, self.rank) and not self.inbox.has(source, tag):
                self._star.watch(source)
        return super().collect(sources, tag, timeout=timeout, unless=unless, cancel=cancel)

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
            self._data_plane().exchange(tag, outgoing, incoming, timeout=timeout)

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
    """Whether messages pass through one rank of each machine."""
    if settings().transport.message_tree == "auto":
        return world_size > tuning().star_ranks or not may_open(world_size)
    return settings().transport.message_tree == "on"


def collective_of_group(group: dist.ProcessGroup, *, timeout: float) -> StoreCollective:
    """Return a new collective of the ranks of a process group; see `StoreCollective`."""
    store, rank = group.get_group_store(), dist.get_rank(group)
    heard = _heard.setdefault(group, [])
    new = StoreCollective(store, rank, dist.get_world_size(group), heard=heard, timeout=timeout)
    new.process_group = weakref.ref(group)  # type: ignore[method-assign]
    return new


#: The messages that this process has had from each group, by their nonces.
_heard: weakref.WeakKeyDictionary[dist.ProcessGroup, list[str]] = weakref.WeakKeyDictionary()
