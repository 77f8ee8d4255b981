"""Detect a lost rank, and let the surviving ranks agree on what each of them holds."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import FrameType
from typing import Any, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from bytecheckpoint.collectives import Collective, SingleProcess
from bytecheckpoint.collectives.base import names_of_ranks
from bytecheckpoint.collectives.store_collective import StoreCollective
from bytecheckpoint.collectives.transport.sockets import local_addresses
from bytecheckpoint.concurrency import wait_for_call
from bytecheckpoint.errors import CheckpointError, PeerLostError
from bytecheckpoint.settings import settings

__all__ = ["Survivors"]

_log = logging.getLogger("bytecheckpoint")

#: Seconds for which an exception or a signal waits for the report of a lost rank.
_NEWS = 2.0
#: Seconds for which an agreement waits for ranks that may be lost.
_PATIENCE = 10.0
_POLL = 0.05


class Survivors:
    """Watches for the loss of a rank in a `with` block.

    The world of this package has connections of its own, which break when a process ends. So a loss is known within
    milliseconds, even if the training's communication hangs. After a loss, SIGTERM does not end a rank: torchrun sends it
    to the other ranks at once, and leaves them 30 seconds.

    Args:
        collective: ranks of the job.
        tag: name of the messages that set this object up, never used twice in one world.
        handles_sigterm: True if this object may handle SIGTERM.
    """

    def __init__(self, collective: Collective, tag: str, *, handles_sigterm: bool) -> None:
        self._collective = collective
        self._hosts = self._offer_stores(tag)
        self._lost: dict[int, str] = {}
        self._handles_sigterm = handles_sigterm and threading.current_thread() is threading.main_thread()
        self._before: Any = None

    def _offer_stores(self, tag: str) -> dict[int, tuple[list[str], int]]:
        """Start a store for agreements on rank 0 and on another rank, of another machine if there is one.

        The store of the job will not do: rank 0 may hold it, and it may still have entries of earlier attempts of the job.

        Returns:
            The addresses and the port of each of these ranks.
        """
        timeout = settings().timeout
        machines = [name.decode() for name in self._all_gather(f"{tag}/machines", self._collective.host, timeout)]
        others = [rank for rank, machine in enumerate(machines) if machine != machines[0]]
        hosts = [0, *(others or range(1, len(machines)))[:1]]
        offer: Any = None
        if self._collective.rank in hosts:
            self._own_store = TCPStore("0.0.0.0", 0, None, is_master=True, wait_for_workers=False)
            offer = [*local_addresses(os.environ.get("MASTER_ADDR")), "127.0.0.1"], self._own_store.port
        offers = [json.loads(text) for text in self._all_gather(f"{tag}/stores", json.dumps(offer), timeout)]
        return {rank: (offers[rank][0], offers[rank][1]) for rank in hosts}

    def _all_gather(self, tag: str, text: str, timeout: float) -> list[bytes]:
        return self._collective.all_gather(tag, text.encode(), timeout=timeout)

    def __enter__(self) -> Self:
        self._end_watch: Callable[[], None] = self._collective.watch_losses(self._note)
        if self._handles_sigterm:
            self._before = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_watch()
        # Equal, not identical: each access makes a new bound method.
        if self._handles_sigterm and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _note(self, rank: int, reason: str) -> None:
        self._lost[rank] = reason

    @property
    def lost(self) -> Mapping[int, str]:
        """Lost ranks, with the reasons."""
        return dict(self._lost)

    def wait_for_loss(self) -> bool:
        """Wait a moment for a loss; return whether there is one. Takes no lock, because a signal handler calls it."""
        return _wait_until(lambda: self._lost, _NEWS)

    def wait_for_all(self) -> bool:
        """Wait a moment until all ranks call this; return whether they do."""

        def meet() -> bool:
            self._store = self._find_store()
            store, names = self._keys("ending"), [str(rank) for rank in range(self._collective.world_size)]
            store.set(str(self._collective.rank), "")
            return _wait_until(lambda: self._lost or store.check(names), _PATIENCE)

        try:
            return wait_for_call(meet, 2 * _PATIENCE)
        except Exception as error:  # noqa: BLE001  the exception that ends the training says more
            _log.info("rank %d: the other ranks cannot be reached: %s", self._collective.rank, error)
            return False

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if not self.wait_for_loss():
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            signal.raise_signal(number)

    def agree(self, value: int) -> dict[int, int]:
        """Exchange a value with the other surviving ranks.

        Args:
            value: value of this rank.

        Returns:
            The values by rank, equal on all ranks that take part.

        Raises:
            PeerLostError: the ranks cannot reach each other.
        """
        try:
            # On another thread: torch's store waits for ever for a server that hangs.
            return wait_for_call(lambda: self._agree(value), 3 * _PATIENCE)
        except CheckpointError:
            raise
        except Exception as error:
            hosts = " nor at ".join(f"rank {host}" for host in self._hosts)
            raise PeerLostError(
                f"rank {self._collective.rank}: the surviving ranks cannot meet, neither at {hosts}: "
                f"{(str(error) or repr(error)).splitlines()[0]}"
            ) from error

    def _agree(self, value: int) -> dict[int, int]:
        rank, ranks = self._collective.rank, range(self._collective.world_size)
        self._store = self._find_store()
        store = self._keys("left")
        store.set(str(rank), str(value))
        end = time.monotonic() + _PATIENCE
        while not store.check(["agreed"]):
            here = [other for other in ranks if store.check([str(other)])]
            complete = here[0] == rank and set(ranks) - self._lost.keys() <= set(here)
            # The first rank decides; if it is gone, the next one.
            if (complete or time.monotonic() > end + here.index(rank)) and store.add("decides", 1) == 1:
                store.set("agreed", json.dumps({other: int(store.get(str(other))) for other in here}))
            time.sleep(_POLL)
        agreed = {int(other): found for other, found in json.loads(store.get("agreed")).items()}
        if rank not in agreed:
            raise PeerLostError(f"{names_of_ranks(agreed.keys())} continued without rank {rank}")
        return agreed

    def _find_store(self) -> Any:
        """Connect to the first store whose rank is not lost."""
        host = next((host for host in self._hosts if host not in self._lost), 0)
        if host == self._collective.rank:
            return self._own_store
        addresses, port = self._hosts[host]
        for address in addresses:
            with contextlib.suppress(RuntimeError):  # it leads nowhere from here
                return TCPStore(address, port, None, timeout=timedelta(seconds=_PATIENCE / 2))
        raise PeerLostError(f"rank {host} does not answer at {', '.join(addresses)}, port {port}")

    def connect(self, members: list[int], name: str, timeout: float) -> Collective:
        """Return a new collective of some of the ranks, in the given order. All of them call it.

        Args:
            members: ranks of the old world, this one among them.
            name: name of the new world, new each time.
            timeout: seconds to wait for the others.
        """
        if len(members) == 1:
            return SingleProcess()
        return StoreCollective(self._keys(name), members.index(self._collective.rank), len(members), timeout=timeout)

    def publish(self, name: str, value: str) -> None:
        """Publish a value for the other ranks."""
        self._keys("published").set(name, value)

    def receive(self, name: str, timeout: float) -> str:
        """Wait for a value that a rank publishes.

        Raises:
            PeerLostError: no rank publishes it in time.
        """
        store = self._keys("published")
        if not _wait_until(lambda: store.check([name]), timeout):
            raise PeerLostError(f"rank {self._collective.rank}: the ranks that save have not reported the outcome")
        value: bytes = store.get(name)
        return value.decode()

    def _keys(self, prefix: str) -> Any:
        return PrefixStore(f"bytecheckpoint/{self._collective.world_id}/{prefix}", self._store)


def _wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait until a condition holds; return whether it does. Takes no lock."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(_POLL)
    return bool(holds)
