"""The `Collective` protocol: tagged messages between ranks, and the collective operations built from them.

Control messages never travel through the training's process groups. The pair (source, tag) names a message. A
message waits at its receiver until a thread takes it, in any order. So the foreground and background
threads of a rank can communicate at the same time, and a failed operation leaves nothing behind that disturbs a later one.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.errors import CheckpointError, PeerLostError, listed
from bytecheckpoint.failures import Cancellation, Failure
from bytecheckpoint.tuning import tuning

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "Collective",
    "DataProvider",
    "different_paths",
    "host_id",
    "names_of_ranks",
    "new_world_id",
    "provide",
]

#: Makes the data that other ranks fetch: request -> contiguous 1-D uint8. Several threads call it. The `fetch` of the
#: rank that asked raises what the provider raises.
DataProvider = Callable[[bytes], NDArray[np.uint8]]


def new_world_id() -> str:
    """Return 16 random hex characters."""
    return secrets.token_hex(8)


@functools.cache
def host_id() -> str:
    """Return the name of this machine and boot: equal for two processes that share memory and page cache."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def names_of_ranks(ranks: Collection[int], limit: int = 16) -> str:
    """Format ranks for an error message: "rank 3", "ranks 1, 2 and 9 more"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + listed(sorted(ranks), limit)


def different_paths(paths: Mapping[int, str], preposition: str) -> str:
    """Format paths of ranks for an error message: "rank 3 to /a, the others to /b"; "" if all are equal.

    Args:
        paths: by rank, ascending.
        preposition: stands before each path.
    """
    ranks: dict[str, list[int]] = {}
    for rank, path in paths.items():
        ranks.setdefault(path, []).append(rank)
    if len(ranks) < 2:
        return ""
    most = max(ranks, key=lambda path: len(ranks[path]))
    odd = [f"{names_of_ranks(found)} {preposition} {path}" for path, found in ranks.items() if path != most][:3]
    return f"{', '.join(odd)}, the others {preposition} {most}"


# First byte of rank 0's answer. The rest is the answer, the report of an error, or the length of a relayed answer.
_ANSWER, _ERROR, _RELAYED = b"\0", b"\1", b"\2"


def _pack(payloads: list[bytes]) -> bytes:
    """Join payloads into one message: a table of their lengths, then the payloads."""
    return np.array([len(payload) for payload in payloads], "<u8").tobytes() + b"".join(payloads)


def _unpack(message: bytes, count: int) -> list[bytes]:
    """Split a message of `_pack` into its `count` payloads."""
    head = 8 * count
    if len(message) < head:
        raise PeerLostError(f"rank 0 has sent {len(message)} bytes, which are not the messages of {count} ranks")
    ends = (head + np.cumsum(np.frombuffer(message, "<u8", count)).astype(np.int64)).tolist()
    return [message[start:end] for start, end in zip([head, *ends[:-1]], ends, strict=True)]


class Collective(ABC):
    """One rank's view of a world of ranks.

    The caller chooses the tags. Each names one message or one collective operation, and a world never reuses one.
    Any thread may call any operation, several at the same time.

    Attributes:
        rank: rank of this process (or thread) in the world.
        world_size: number of ranks.
        world_id: random hex characters, equal on all ranks, new for each world.
        host: equal for ranks that share memory and page cache (see `host_id`).
        attachment: an object that lives exactly as long as this collective; `world.world_of` keeps its `World` here. It
            may refer to the collective, so a dictionary with weak keys would keep both for ever.
    """

    rank: int
    world_size: int
    world_id: str
    host: str
    attachment: object | None = None

    def process_group(self) -> ProcessGroup | None:
        """Return the process group of exactly these ranks, None where there is none, or none any more."""
        return None

    @abstractmethod
    def send(self, to: int, tag: str, payload: bytes) -> None:
        """Send `payload` to rank `to`, without waiting for the receiver: to rank 0, from rank 0, or to this rank itself.

        Raises:
            PeerLostError: the world was closed, or its rank 0 is gone.
        """

    def send_each(self, tag: str, payloads: Mapping[int, bytes]) -> None:
        """Send several ranks, as rank 0, their payloads. One object that several get travels together where it can.

        Args:
            tag: tag of the messages.
            payloads: by rank.

        Raises:
            PeerLostError: as `send`.
        """
        for to, payload in payloads.items():
            self.send(to, tag, payload)

    @abstractmethod
    def recv(self, source: int, tag: str, *, timeout: float, cancel: Cancellation | None = None) -> bytes:
        """Receive the message that rank `source` sent under `tag`; wait at most `timeout` seconds.

        Args:
            source: rank.
            tag: tag of the message.
            timeout: seconds.
            cancel: token whose failure ends the wait.

        Raises:
            CheckpointError: failure of `cancel`.
            CheckpointTimeoutError: the message did not come in time.
            PeerLostError: the message cannot come any more: `source` is gone, or rank 0.
        """

    @abstractmethod
    def collect(
        self,
        sources: Collection[int],
        tag: str,
        *,
        timeout: float,
        cancel: Cancellation | None = None,
    ) -> list[bytes]:
        """Receive one message from each of `sources` under one deadline; errors name every missing rank.

        Args:
            sources: ranks.
            tag: tag of the messages.
            timeout: seconds.
            cancel: token whose failure ends the wait.

        Raises:
            CheckpointError: failure of `cancel`.
            CheckpointTimeoutError, PeerLostError: as `recv`.
        """

    @abstractmethod
    def watch(
        self, tag: str, on_message: Callable[[bytes], None], on_lost: Callable[[int, str], None] | None = None
    ) -> Callable[[], None]:
        """Give messages under `tag` to a function, on the transport's thread: it must return at once and never raise.

        Args:
            tag: tag of the messages.
            on_message: function of a message's payload.
            on_lost: function of a lost rank and the reason, as in `watch_losses`; on rank 0 for all ranks, on the others
                for rank 0 only.

        Returns:
            A function that ends this.
        """

    @abstractmethod
    def watch_losses(self, on_lost: Callable[[int, str], None]) -> Callable[[], None]:
        """Call `on_lost(rank, reason)` once for each rank that is gone or leaves, in the past too, as `watch` does.

        Returns:
            A function that ends this.
        """

    @abstractmethod
    def forget(self, tag: str) -> None:
        """Drop the messages under `tag`, those that have come and those still to come: nobody waits for them any more."""

    def begin_call(self, name: str, path: str = "") -> None:
        """Note that this rank begins a call that all ranks make, so that ranks in different calls do not wait in vain.

        Args:
            name: beginning of the tags of the call.
            path: path of the checkpoint, for errors.
        """

    def describe_call(self, kind: str, path: str) -> None:
        """Note more of the call that this rank has begun, for the same purpose.

        Args:
            kind: kind of the call; ranks in calls of different kinds take different steps.
            path: path of the checkpoint, for the error.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the world. Messages already sent still arrive; later calls raise `PeerLostError`."""

    def gather(self, tag: str, payload: bytes, *, timeout: float) -> list[bytes] | None:
        """Return every rank's payload, in order of rank, on rank 0; None elsewhere, without waiting."""
        if self.rank != 0:
            self.send(0, tag, payload)
            return None
        return [payload, *self.collect(range(1, self.world_size), tag, timeout=timeout)]

    def scatter(self, tag: str, payloads: Sequence[bytes] | None, *, timeout: float) -> bytes:
        """Return this rank's own of the payloads that rank 0 gives, one per rank; other ranks give None."""
        if self.rank != 0:
            return self.recv(0, tag, timeout=timeout)
        assert payloads is not None and len(payloads) == self.world_size
        self.send_each(tag, {to: payloads[to] for to in range(1, self.world_size)})
        return payloads[0]

    def broadcast(self, tag: str, payload: bytes | None, *, timeout: float) -> bytes:
        """Return rank 0's payload on every rank."""
        if self.rank == 0:
            assert payload is not None
            return self.scatter(tag, [payload] * self.world_size, timeout=timeout)
        return self.scatter(tag, None, timeout=timeout)

    def all_gather(self, tag: str, payload: bytes, *, timeout: float) -> list[bytes]:
        """Return every rank's payload, in order of rank, on every rank."""
        packed = self.gather_scatter(
            tag, payload, lambda all_payloads: [_pack(all_payloads)] * self.world_size, timeout=timeout
        )
        return _unpack(packed, self.world_size)

    def barrier(self, tag: str, *, timeout: float) -> None:
        """Wait until every rank has called this."""
        self.gather_scatter(tag, b"", lambda _: [b""] * self.world_size, timeout=timeout)

    def gather_scatter(
        self, tag: str, payload: bytes, decide: Callable[[list[bytes]], Sequence[bytes]], *, timeout: float
    ) -> bytes:
        """Let rank 0 compute an answer for each rank from the payloads of all ranks.

        Args:
            tag: names the operation.
            payload: payload of this rank.
            decide: function of the payloads in order of rank, which returns the answers in order of rank; called on rank 0.
            timeout: seconds for the whole operation.

        Returns:
            The answer for this rank.

        Raises:
            CheckpointTimeoutError, PeerLostError: a payload is missing. Every rank raises the error at once.
            CheckpointError: `decide` failed. Every rank raises the error at once.
        """
        deadline = time.monotonic() + timeout
        up, down = f"{tag}/up", f"{tag}/down"
        messages: list[bytes] | None = None
        relayed = None
        try:
            payloads = self.gather(up, payload, timeout=timeout)
            if payloads is not None:
                answers = decide(payloads)
                distinct = {id(answer): answer for answer in answers}
                if len(distinct) == 1 and self._relays(len(answers[0])):
                    relayed = np.frombuffer(answers[0], np.uint8)
                    messages = [_RELAYED + relayed.nbytes.to_bytes(8, "little")] * self.world_size
                else:
                    encoded = {key: _ANSWER + answer for key, answer in distinct.items()}
                    messages = [encoded[id(answer)] for answer in answers]
        except Exception as error:
            if self.rank == 0:
                with contextlib.suppress(CheckpointError):
                    self.broadcast(down, _ERROR + Failure.of(error, rank=0, stage=tag).encode(), timeout=0)
            raise
        message = self.scatter(down, messages, timeout=max(0.0, deadline - time.monotonic()))
        if message[:1] == _ERROR:
            raise Failure.decode(message[1:]).as_error()
        if message[:1] == _RELAYED:
            data = np.empty(int.from_bytes(message[1:], "little"), np.uint8) if relayed is None else relayed
            self._relay(tag, data, time.monotonic() + timeout)
            return data.tobytes()
        return message[1:]

    def _relays(self, nbytes: int) -> bool:
        """Return whether ranks relay an answer for all. Rank 0 alone would need long to send a long one to many ranks."""
        return nbytes > tuning().relay_bytes and self.world_size > tuning().relay_fan_out

    def _relay(self, tag: str, data: NDArray[np.uint8], deadline: float) -> None:
        """Receive rank 0's data from this rank's parent in a tree of ranks, and send it to the children."""
        fan_out = tuning().relay_fan_out
        first = self.rank * fan_out + 1
        children = range(first, min(first + fan_out, self.world_size))
        if self.rank:
            parent = (self.rank - 1) // fan_out
            timeout = max(0.0, deadline - time.monotonic())
            self.exchange(f"{tag}/from {parent}", {}, {parent: data}, timeout=timeout)
        if children:
            timeout = max(0.0, deadline - time.monotonic())
            self.exchange(f"{tag}/from {self.rank}", dict.fromkeys(children, data), {}, timeout=timeout)

    def exchange(
        self,
        tag: str,
        outgoing: Mapping[int, NDArray[np.uint8]],
        incoming: Mapping[int, NDArray[np.uint8]],
        *,
        timeout: float,
        cancel: Cancellation | None = None,
    ) -> None:
        """Send arrays to other ranks and fill arrays from them, all at the same time, over the data plane.

        Args:
            tag: names the exchange; equal on both sides.
            outgoing: by destination rank, contiguous 1-D uint8; must not change before the call returns.
            incoming: by source rank, contiguous 1-D uint8, of the size that the other side sends.
            timeout: seconds for the whole exchange.
            cancel: token whose failure ends the exchange.

        Raises:
            CheckpointError: failure of `cancel`.
            CheckpointTimeoutError, PeerLostError: as `recv`; also the failure of another rank of the exchange. The
                content of `incoming` is then undefined, but nothing writes to it any more. Other exchanges go on.
        """
        deadline = time.monotonic() + timeout
        for to, array in outgoing.items():
            self.send(to, tag, array.tobytes())
        for source, array in incoming.items():
            payload = self.recv(source, tag, timeout=max(0.0, deadline - time.monotonic()), cancel=cancel)
            assert len(payload) == array.nbytes, f"exchange {tag}: {len(payload)} bytes for {array.nbytes}"
            np.copyto(array, np.frombuffer(payload, np.uint8))

    # --- served data ---

    @abstractmethod
    def serve(self, tag: str, provider: DataProvider) -> AbstractContextManager[None]:
        """Serve data that other ranks fetch under `tag`, inside a `with` block.

        At most four answers are in memory at a time, however many ranks ask.

        Args:
            tag: names the service. The other ranks may fetch when they know that the block has begun.
            provider: makes the answers; its arrays must not change afterwards.
        """

    @abstractmethod
    def fetch(self, rank: int, tag: str, request: bytes, destination: NDArray[np.uint8], *, timeout: float) -> None:
        """Fill an array with data that another rank serves. That rank makes no call for it.

        Args:
            rank: rank that serves.
            tag: tag of its service.
            request: request to the server's provider.
            destination: contiguous 1-D array of the size of the provider's answer. Several MiB suit: the server holds
                an answer in memory.
            timeout: seconds.

        Raises:
            FileNotFoundError: the provider raised it.
            CheckpointError: the provider raised it (another error as `CheckpointError`), or nothing is served under
                `tag` any more.
            CheckpointTimeoutError, PeerLostError: as `recv`. The content of `destination` is then undefined.
        """


def provide(provider: DataProvider, request: bytes, size: int) -> NDArray[np.uint8]:
    """Return a provider's answer; raise `CheckpointError` if it has not `size` bytes."""
    data = provider(request)
    if data.nbytes != size:
        raise CheckpointError(f"has {data.nbytes} bytes for a fetch of {size}")
    return data
