"""The world of a torch.distributed process group (gloo or NCCL)."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import time
import weakref
import zlib
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from bytecheckpoint.collectives.base import MailboxCollective, new_world_id
from bytecheckpoint.collectives.star import Hub, Spoke, local_addresses
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, PeerLostError, UsageError

__all__ = ["TorchCollective"]

_INVITATION_BYTES = 4096
_PIECE = 256 << 20  # bytes per gloo operation


class TorchCollective(MailboxCollective):
    """Agreement among the ranks of a process group, on connections of its own.

    Construction is a collective operation of all ranks of the group, in the foreground: one broadcast over the group
    tells everyone where rank 0 listens. After that the group is not used again, so this world outlives
    `destroy_process_group()`, and background threads never touch the training's communicators.

    Args:
        pg: whose ranks take part; None: the default group.
        timeout: seconds for construction.
        linger: most seconds that the end of the program is delayed so that mail under way is delivered.

    Raises:
        CheckpointTimeoutError, PeerLostError: not every rank could be reached.
    """

    def __init__(self, pg: dist.ProcessGroup | None = None, *, timeout: float = 300.0, linger: float = 10.0) -> None:
        rank, size = dist.get_rank(pg), dist.get_world_size(pg)
        super().__init__(rank, size, "")
        self._pid = os.getpid()
        store = self._join(pg, timeout, linger)
        try:
            # Not through dist.new_group: its names depend on how many groups each rank knows, which may differ, and
            # it would go down with destroy_process_group(). Timeouts of single operations are given to `wait`.
            self._gloo: Any = dist.ProcessGroupGloo(
                PrefixStore(f"bytecheckpoint/{self.world_id}", store), rank, size, timedelta(seconds=timeout)
            )
        except RuntimeError as error:
            self.close()
            raise PeerLostError(
                f"rank {rank}: could not connect to the other ranks for exchanges: {str(error).splitlines()[0]}"
            ) from error
        self._exchange_failed: str | None = None

    def _join(self, pg: dist.ProcessGroup | None, timeout: float, linger: float) -> Any:
        """Connect to the other ranks' mail; returns the store over which gloo makes its connections."""
        deadline = time.monotonic() + timeout
        if self.rank == 0:
            secret = secrets.token_bytes(32)
            self.world_id = new_world_id()
            hub = Hub(self.world_size, self._mailbox, secret, linger)
            self._adopt(hub)
            store = TCPStore("localhost", 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)
            invitation = {
                "world": self.world_id,
                "secret": secret.hex(),
                "hosts": local_addresses(os.environ.get("MASTER_ADDR")),
                "port": hub.port,
                "store": store.port,
                "host": self.host,
            }
            _broadcast(json.dumps(invitation).encode(), pg)
            hub.wait_ready(deadline - time.monotonic())
            return store
        told: dict[str, Any] = json.loads(_broadcast(None, pg))
        self.world_id = told["world"]
        here = told["host"] == self.host
        # An address like 127.0.1.1 for one's own name means something else on another machine.
        hosts = [h for h in told["hosts"] if here or not _is_loopback(h)] + (["localhost"] if here else [])
        spoke = Spoke(self.rank, self.world_size, self._mailbox, bytes.fromhex(told["secret"]), linger)
        self._adopt(spoke)
        spoke.connect(hosts, told["port"], deadline - time.monotonic())
        left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        try:
            return TCPStore(spoke.hub_address(), told["store"], None, False, left, wait_for_workers=False)
        except RuntimeError as error:
            self.close()
            raise PeerLostError(
                f"rank {self.rank}: rank 0 went away while the ranks were connecting: {str(error).splitlines()[0]}"
            ) from error

    def _adopt(self, wire: Hub | Spoke) -> None:
        self._wire = wire
        self._hang_up = weakref.finalize(self, wire.leave)
        # The program's end is handled by `leave_all`, later than finalizers would be.
        self._hang_up.atexit = False

    def send(self, to: int, tag: str, payload: bytes) -> None:  # noqa: D102 (inherited)
        self._wire.send(to, tag, payload)

    def collect(self, sources: Collection[int], tag: str, *, timeout: float) -> list[bytes]:  # noqa: D102
        self._check_process()
        for source in sources:
            if source not in (0, self.rank) and not self._mailbox.holds(source, tag):
                self._wire.watch(source)
        return super().collect(sources, tag, timeout=timeout)

    def exchange(  # noqa: D102 (inherited)
        self,
        tag: str,
        outgoing: Mapping[int, NDArray[np.uint8]],
        incoming: Mapping[int, NDArray[np.uint8]],
        *,
        timeout: float,
    ) -> None:
        self._check_process()
        if self._exchange_failed is not None:
            raise PeerLostError(
                f"rank {self.rank}: exchange {tag!r} is impossible after an earlier one failed "
                f"({self._exchange_failed}); restart the job"
            )
        if (own := incoming.get(self.rank)) is not None:
            np.copyto(own, outgoing[self.rank])
        deadline = time.monotonic() + timeout
        slot = zlib.crc32(tag.encode()) & 0x7FFFFFFF
        jobs: list[tuple[int, str, Any]] = []
        try:
            for source, array in incoming.items():
                if source != self.rank:
                    jobs += [(source, "from", self._gloo.recv([t], source, slot)) for t in _pieces(array)]
            for to, array in outgoing.items():
                if to != self.rank:
                    jobs += [(to, "to", self._gloo.send([t], to, slot)) for t in _pieces(array)]
            for position, (peer, way, job) in enumerate(jobs):  # noqa: B007 (used when it fails)
                job.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            raise self._exchange_error(tag, f"{way} rank {peer}" if jobs else "", error, deadline, timeout) from error

    def _exchange_error(
        self, tag: str, where: str, error: RuntimeError, deadline: float, timeout: float
    ) -> CheckpointError:
        # gloo closes all its connections when one operation fails, so this is final for exchanges, not for mail.
        late = time.monotonic() >= deadline - 0.01
        reason = f"nothing {where} within {timeout:g} s" if late else f"{where}: {str(error).splitlines()[0]}"
        self._exchange_failed = reason
        message = f"rank {self.rank}: exchange {tag!r} failed: {reason}; look for a hung or lost rank"
        return CheckpointTimeoutError(message) if late else PeerLostError(message)

    def close(self) -> None:  # noqa: D102 (inherited)
        self._hang_up()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"this is a forked child of rank {self.rank}: it cannot take part in its parent's collectives; "
                "call from the parent, or start the child with the 'spawn' method"
            )


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "localhost")


def _broadcast(message: bytes | None, pg: dist.ProcessGroup | None) -> bytes:
    """Rank 0's message, over the process group itself, on whichever device it can send from."""
    devices = {part.split(":")[0] for part in str(dist.get_backend_config(pg)).split(",")}
    accelerator = torch.accelerator.current_accelerator()
    device = torch.device("cpu") if "cpu" in devices or accelerator is None else torch.device(accelerator.type)
    padded = (message or b"").ljust(_INVITATION_BYTES, b" ")
    tensor = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    try:
        dist.broadcast(tensor, group=pg, group_src=0)
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {dist.get_rank(pg)}: lost another rank while the ranks agreed where to meet: "
            f"{str(error).splitlines()[0]}; restart the job from its last committed checkpoint"
        ) from error
    return tensor.cpu().numpy().tobytes().rstrip()


def _pieces(array: NDArray[np.uint8]) -> list[torch.Tensor]:
    """Views of `array` that are no larger than what one gloo operation should move."""
    assert array.dtype == np.uint8 and array.ndim == 1 and array.flags.c_contiguous
    if not array.nbytes:
        return []
    if not array.flags.writeable:
        # torch warns about read-only memory; these are only read. The caller holds the array during the exchange.
        array = np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data))
    return list(torch.from_numpy(array).split(_PIECE))
