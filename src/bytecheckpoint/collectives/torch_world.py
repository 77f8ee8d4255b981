"""The world of a torch.distributed process group (gloo or NCCL)."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import MailboxCollective, new_world_id
from bytecheckpoint.collectives.loop import Loop
from bytecheckpoint.collectives.mesh import Mesh
from bytecheckpoint.collectives.sockets import is_loopback, local_addresses
from bytecheckpoint.collectives.star import Hub, Spoke, Star
from bytecheckpoint.errors import CheckpointError, PeerLostError, error_from_report, error_report

__all__ = ["TorchCollective"]

_INVITATION_BYTES = 4096


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
        super().__init__(dist.get_rank(pg), dist.get_world_size(pg), "")
        self._linger = linger
        self._loops: list[Loop] = []
        self._hang_up = weakref.finalize(self, _leave, self._loops)
        # The program's end is handled by `leave_all`, later than finalizers would be.
        self._hang_up.atexit = False
        self._mesh: Mesh | None = None  # started by the first exchange
        self._mesh_lock = threading.Lock()
        deadline = time.monotonic() + timeout
        self._wire: Star = self._invite(pg, deadline) if self.rank == 0 else self._accept(pg, deadline)

    def _invite(self, pg: dist.ProcessGroup | None, deadline: float) -> Hub:
        secret = secrets.token_bytes(32)
        self.world_id = new_world_id()
        try:
            hub = Hub(self.world_size, self._mailbox, secret, self._linger)
        except (CheckpointError, OSError) as error:
            # The others wait for a word.
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

    def _accept(self, pg: dist.ProcessGroup | None, deadline: float) -> Spoke:
        told: dict[str, Any] = json.loads(_broadcast(None, pg))
        if "refused" in told:
            raise error_from_report(told["refused"])
        self.world_id = told["world"]
        here = told["host"] == self.host
        # An address like 127.0.1.1 for one's own name means something else on another machine.
        hosts = [h for h in told["hosts"] if here or not is_loopback(h)] + (["localhost"] if here else [])
        spoke = Spoke(self.rank, self.world_size, self._mailbox, bytes.fromhex(told["secret"]), self._linger)
        self._loops.append(spoke)
        spoke.connect(hosts, told["port"], deadline - time.monotonic())
        return spoke

    def send(self, to: int, tag: str, payload: bytes) -> None:  # noqa: D102 (inherited)
        self._wire.send(to, tag, payload)

    def collect(self, sources: Collection[int], tag: str, *, timeout: float) -> list[bytes]:  # noqa: D102
        self._wire.check_process()
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
        self._wire.check_open(tag)
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

    def _data_plane(self) -> Mesh:
        with self._mesh_lock:
            if self._mesh is None:
                self._mesh = Mesh(self._wire, self._linger)
                self._loops.append(self._mesh)
            return self._mesh

    def close(self) -> None:  # noqa: D102 (inherited)
        self._hang_up()


def _leave(loops: list[Loop]) -> None:
    for loop in loops:
        loop.leave()


def _broadcast(message: bytes | None, pg: dist.ProcessGroup | None) -> bytes:
    """Rank 0's message, over the process group itself, on whichever device it can send from."""
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
            f"rank {dist.get_rank(pg)}: lost another rank while the ranks agreed where to meet: "
            f"{str(error).splitlines()[0]}; restart the job from its last committed checkpoint"
        ) from error
    return tensor.cpu().numpy().tobytes().rstrip()
