"""The collective of a torch.distributed process group (gloo or NCCL)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import DataProvider, new_world_id
from bytecheckpoint.collectives.inbox import InboxCollective
from bytecheckpoint.collectives.transport.loop import Loop
from bytecheckpoint.collectives.transport.mesh import Mesh
from bytecheckpoint.collectives.transport.sockets import is_loopback, local_addresses
from bytecheckpoint.collectives.transport.star import Hub, Spoke, Star
from bytecheckpoint.errors import CheckpointError, PeerLostError, error_from_report, error_report

__all__ = ["TorchCollective"]

_INVITATION_BYTES = 4096


class TorchCollective(InboxCollective):
    """The collective of a process group's ranks, over TCP connections of its own.

    Construction is a collective operation of all ranks of the group, in the foreground: one broadcast over the group
    tells every rank where rank 0 listens. The group is not used after that. So this world outlives
    `destroy_process_group()`, and background threads never touch the training's communicators.

    Args:
        pg: the ranks that take part; None: the default group.
        timeout: seconds for connecting. The broadcast before that has the time limit of the group.
        linger: most seconds by which the end of the program is delayed to deliver the last messages.

    Raises:
        CheckpointTimeoutError, PeerLostError: not every rank could be reached.
    """

    def __init__(self, pg: dist.ProcessGroup | None = None, *, timeout: float = 300.0, linger: float = 10.0) -> None:
        super().__init__(dist.get_rank(pg), dist.get_world_size(pg), "")
        self._linger = linger
        self._loops: list[Loop] = []
        self._finalizer = weakref.finalize(self, _leave, self._loops)
        # At the end of the program `leave_all` does this, later than finalizers would.
        self._finalizer.atexit = False
        self._mesh: Mesh | None = None  # started by the first exchange
        self._mesh_lock = threading.Lock()
        deadline = time.monotonic() + timeout
        self._star: Star = self._host_star(pg, deadline) if self.rank == 0 else self._join_star(pg, deadline)

    def _host_star(self, pg: dist.ProcessGroup | None, deadline: float) -> Hub:
        """Listen as rank 0, tell the other ranks the address, and wait until they have connected."""
        secret = secrets.token_bytes(32)
        self.world_id = new_world_id()
        try:
            hub = Hub(self.world_size, self.inbox, secret, self._linger)
        except (CheckpointError, OSError) as error:
            # The other ranks wait for this broadcast.
            _broadcast(json.dumps({"refused": error_report(error)}).encode(), pg)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"rank 0: cannot listen for the other ranks: {error}") from error
        self._loops.append(hub)
        invitation = {
            "world": self.world_id,
            "secret": secret.hex(),
            "hosts": local_addresses(os.environ.get("MASTER_ADDR")),
            "port": hub.port,
            "host": self.host,
        }
        _broadcast(json.dumps(invitation).encode(), pg)
        hub.wait_ready(deadline - time.monotonic())
        return hub

    def _join_star(self, pg: dist.ProcessGroup | None, deadline: float) -> Spoke:
        """Connect to rank 0, and wait until all ranks have connected."""
        invitation: dict[str, Any] = json.loads(_broadcast(None, pg))
        if "refused" in invitation:
            raise error_from_report(invitation["refused"])
        self.world_id = invitation["world"]
        same_host = invitation["host"] == self.host
        # Some machines resolve their own name to 127.0.1.1, which leads nowhere from another machine.
        hosts = [h for h in invitation["hosts"] if same_host or not is_loopback(h)]
        hosts += ["localhost"] if same_host else []
        spoke = Spoke(self.rank, self.world_size, self.inbox, bytes.fromhex(invitation["secret"]), self._linger)
        self._loops.append(spoke)
        spoke.connect(hosts, invitation["port"], deadline - time.monotonic())
        return spoke

    def send(self, to: int, tag: str, payload: bytes) -> None:  # noqa: D102 (inherited)
        self._star.send(to, tag, payload)

    def collect(self, sources: Collection[int], tag: str, *, timeout: float) -> list[bytes]:  # noqa: D102
        self._star.check_process()
        for source in sources:
            if source not in (0, self.rank) and not self.inbox.has(source, tag):
                self._star.watch(source)
        return super().collect(sources, tag, timeout=timeout)

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


def _broadcast(message: bytes | None, pg: dist.ProcessGroup | None) -> bytes:
    """Broadcast rank 0's message over the process group, on a device that its backend supports."""
    devices = {part.split(":")[0] for part in str(dist.get_backend_config(pg)).split(",")}
    accelerator = torch.accelerator.current_accelerator()
    device = torch.device("cpu") if "cpu" in devices or accelerator is None else torch.device(accelerator.type)
    assert message is None or len(message) <= _INVITATION_BYTES
    padded = (message or b"").ljust(_INVITATION_BYTES, b" ")
    tensor = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    try:
        dist.broadcast(tensor, group=pg, group_src=0)
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {dist.get_rank(pg)}: lost another rank while rank 0 told the ranks its address: "
            f"{str(error).splitlines()[0]}; restart the job from its last committed checkpoint"
        ) from error
    return tensor.cpu().numpy().tobytes().rstrip()
