"""The collective of ranks that share a store of torch.distributed: those of a process group, or of what is left of one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import DataProvider, new_world_id
from bytecheckpoint.collectives.inbox import Inbox, InboxCollective
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
    error_from_report,
    error_report,
)
from bytecheckpoint.settings import settings
from bytecheckpoint.tuning import tuning

__all__ = ["StoreCollective", "collective_of_group"]

#: Names the message within the store of its group.
_KEY = "bytecheckpoint"
#: Seconds beyond the deadline in which the store itself reports that it has passed.
_STORE_GRACE = 1.0
#: Seconds that rank 0 has to tell its address where a message in the store leads to somebody else.
_SUCCESSION = 5.0


class StoreCollective(InboxCollective):
    """The collective of ranks that share a key-value store, over TCP connections of its own.

    Construction is a collective operation of all these ranks, in the foreground: the store tells every rank where rank 0
    listens. It is not used after that. So the world of a process group outlives `destroy_process_group()`, and nothing ever
    touches the training's communicators.

    Args:
        store: of torch.distributed, in which these ranks alone use the key `_KEY`.
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
        invitation = _Invitation(store, rank, [] if heard is None else heard, deadline)
        self._star: Star = (self._host_star if self.rank == 0 else self._join_star)(invitation, deadline)

    def _host_star(self, invitation: _Invitation, deadline: float) -> Hub:
        """Listen as rank 0, tell the other ranks the address, and wait until they have connected."""
        secret = secrets.token_bytes(32)
        self.world_id = new_world_id()
        tree = _prefers_tree(self.world_size)
        try:
            hub = Hub(self.world_size, self.inbox, secret, self._linger, self._name_beside() if tree else "")
        except (CheckpointError, OSError) as error:
            invitation.send({"refused": error_report(error)})
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"rank 0: cannot listen for the other ranks: {error}") from error
        self._loops.append(hub)
        invitation.send(
            {
                "world": self.world_id,
                "secret": secret.hex(),
                "hosts": local_addresses(os.environ.get("MASTER_ADDR")),
                "port": hub.port,
                "host": self.host,
                "tree": tree,
            }
        )
        try:
            hub.wait_ready(deadline - time.monotonic())
        finally:
            invitation.remove()
        return hub

    def _join_star(self, invitation: _Invitation, deadline: float) -> Spoke:
        """Connect to rank 0, and wait until all ranks have connected.

        The store may still hold what rank 0 of an earlier group told, which was killed, or could not remove it: then nobody
        listens there, and this rank 0 tells something else.
        """
        while True:
            told = invitation.receive()
            if "refused" in told:
                raise error_from_report(told["refused"])
            self.world_id = told["world"]
            same_host = told["host"] == self.host
            # Some machines resolve their own name to 127.0.1.1, which leads nowhere from another machine.
            hosts = [h for h in told["hosts"] if same_host or not is_loopback(h)]
            hosts += ["localhost"] if same_host else []
            try:
                spoke = Spoke(self.rank, self.world_size, self.inbox, bytes.fromhex(told["secret"]), self._linger)
            except OSError as error:
                raise CheckpointError(f"rank {self.rank}: cannot listen for the other ranks: {error}") from error
            try:
                spoke.connect(
                    hosts,
                    told["port"],
                    deadline - time.monotonic(),
                    beside=self._name_beside() if told["tree"] else "",
                    outdated=invitation.outdated,
                )
            except PeerLostError:
                if not invitation.becomes_outdated():
                    raise
                self.inbox = Inbox(self.rank)
                continue
            self._loops.append(spoke)
            return spoke

    def _name_beside(self) -> str:
        """Return the name under which the ranks of this machine find each other. Containers have names of their own."""
        return f"bytecheckpoint-{self.world_id}-{hashlib.sha256(self.host.encode()).hexdigest()[:16]}"

    def send(self, to: int, tag: str, payload: bytes) -> None:  # noqa: D102 (inherited)
        self._star.send(to, tag, payload)

    def send_each(self, tag: str, payloads: Mapping[int, bytes]) -> None:  # noqa: D102 (inherited)
        self._star.send_each(tag, payloads)

    def collect(  # noqa: D102 (inherited)
        self, sources: Collection[int], tag: str, *, timeout: float, unless: str = ""
    ) -> list[bytes]:
        self._star.check_process()
        for source in sources:
            if source not in (0, self.rank) and not self.inbox.has(source, tag):
                self._star.watch(source)
        return super().collect(sources, tag, timeout=timeout, unless=unless)

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
        self, rank: int, tag: str, request: bytes, into: NDArray[np.uint8], *, timeout: float
    ) -> None:
        self._star.check_open(tag)
        if rank == self.rank:
            super().fetch(rank, tag, request, into, timeout=timeout)
        else:
            self._data_plane().fetch(rank, tag, request, into, timeout=timeout)

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
    if settings().message_tree == "auto":
        return world_size > tuning().star_ranks or not may_open(world_size)
    return settings().message_tree == "on"


def collective_of_group(group: dist.ProcessGroup, *, timeout: float) -> StoreCollective:
    """Return a new collective of the ranks of a process group; see `StoreCollective`."""
    store, rank = group.get_group_store(), dist.get_rank(group)
    heard = _heard.setdefault(group, [])
    new = StoreCollective(store, rank, dist.get_world_size(group), heard=heard, timeout=timeout)
    new.process_group = weakref.ref(group)  # type: ignore[method-assign]
    return new


class _Invitation:
    """What rank 0 tells the other ranks once, through their store.

    The store, and no collective operation: a group's backend waits for a hung rank for as long as the training allows,
    and an operation that was given up would meet the training's next one.

    Args:
        store: the store.
        rank: of this process.
        heard: the messages that this process has had, by their nonces; extended.
        deadline: time at which to give up.
    """

    def __init__(self, store: Any, rank: int, heard: list[str], deadline: float) -> None:
        self._store, self._rank, self._heard, self._deadline = store, rank, heard, deadline

    def send(self, message: dict[str, Any]) -> None:
        """Tell the other ranks. Errors as of `receive`."""
        text = json.dumps({**message, "nonce": secrets.token_hex(8)})
        self._ask_store(lambda: self._store.set(_KEY, text))

    def remove(self) -> None:
        """Remove the message: it holds a secret, and nobody may find it after a failure."""
        with contextlib.suppress(CheckpointError):  # a store that cannot delete, or that has ended
            self._ask_store(lambda: self._store.delete_key(_KEY))

    def receive(self) -> dict[str, Any]:
        """Wait for a message that this rank has not had before; it may have failed then, and rank 0 not removed it.

        Raises:
            CheckpointTimeoutError: rank 0 has told nothing in time.
            PeerLostError: the store is gone.
        """

        def get() -> dict[str, Any]:
            while True:
                self._store.wait([_KEY], timedelta(seconds=max(0.001, self._deadline - time.monotonic())))
                message: dict[str, Any] = json.loads(self._store.get(_KEY))
                if message["nonce"] not in self._heard:
                    return message
                if time.monotonic() > self._deadline:
                    raise TimeoutError
                time.sleep(0.02)

        message: dict[str, Any] = self._ask_store(get)
        self._heard.append(message["nonce"])
        return message

    def outdated(self) -> bool:
        """Return whether rank 0 has told something else since this rank received a message."""

        def look() -> bool:
            return self._store.check([_KEY]) and json.loads(self._store.get(_KEY))["nonce"] not in self._heard

        with contextlib.suppress(CheckpointError):
            return bool(self._ask_store(look))
        return False

    def becomes_outdated(self) -> bool:
        """Wait for a moment until rank 0 has told something else; return whether it has."""
        end = min(self._deadline, time.monotonic() + _SUCCESSION)
        while not (outdated := self.outdated()) and time.monotonic() < end:
            time.sleep(0.1)
        return outdated

    def _ask_store(self, call: Callable[[], Any]) -> Any:
        """Return `call()`. It runs on another thread: torch's store waits for ever for a server that was stopped."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:  # noqa: BLE001  raised below
                done.set_exception(error)

        threading.Thread(target=run, name="bytecheckpoint-invite", daemon=True).start()
        try:
            return done.result(max(0.0, self._deadline - time.monotonic()) + _STORE_GRACE)
        except (RuntimeError, TimeoutError) as error:
            if time.monotonic() < self._deadline:
                raise PeerLostError(
                    f"rank {self._rank}: the store of the process group, through which rank 0 tells its address, is gone: "
                    f"{str(error).splitlines()[0]}; restart the job from its last committed checkpoint"
                ) from error
            raise CheckpointTimeoutError(
                f"rank {self._rank}: rank 0 has not told its address in time: it made no save or load for this group, "
                "or the store of the group does not answer; look for a hung rank, or raise the time-out"
            ) from None


#: The messages that this process has had from each group, by their nonces.
_heard: weakref.WeakKeyDictionary[dist.ProcessGroup, list[str]] = weakref.WeakKeyDictionary()
