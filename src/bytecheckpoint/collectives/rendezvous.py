"""Meet through a key-value store of torch.distributed: rank 0 publishes where it listens, the other ranks read it."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from bytecheckpoint.concurrency import CallTimeoutError, wait_for_call
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, PeerLostError
from bytecheckpoint.failures import Failure

__all__ = ["KEY", "Rendezvous"]

KEY = "bytecheckpoint"
"""Key of the message within the store of its group."""
#: Seconds beyond the deadline in which the store itself reports that it has passed.
_STORE_GRACE = 1.0
#: Seconds between two looks into the store of a rank that has waited for long.
_MOST_PAUSE = 0.5
#: Seconds that rank 0 has to publish its address where a message in the store leads to somebody else.
_SUCCESSION = 5.0


class Rendezvous:
    """One attempt of the ranks to meet, by one message of rank 0 in their store.

    The store, and no collective operation: a group's backend waits for a hung rank for as long as the training allows,
    and an operation that was given up would meet the training's next one.

    Args:
        store: key-value store of torch.distributed.
        rank: rank of this process.
        received: nonces of the messages that this process has received; extended.
        deadline: time at which to give up.
    """

    def __init__(self, store: Any, rank: int, received: list[str], deadline: float) -> None:
        self._store, self._rank, self._received, self._deadline = store, rank, received, deadline
        self._nonce = ""  # nonce of the message that was published or received last

    def publish(self, message: dict[str, Any]) -> None:
        """Publish the message of rank 0. Errors as those of `receive`."""
        self._nonce = secrets.token_hex(8)
        self._set(KEY, {**message, "nonce": self._nonce})

    def remove(self) -> None:
        """Remove the message: it holds a secret, and no rank may find it after a failure."""
        with contextlib.suppress(CheckpointError):  # a store that cannot delete, or that has ended
            self._ask_store(lambda: self._store.delete_key(KEY))

    def replace_by_failure(self, failure: Failure) -> None:
        """Replace the message by a failure, for ranks that have not received it. They would wait for another message."""
        with contextlib.suppress(CheckpointError):
            self._set(KEY, {"failure": failure, "nonce": self._nonce})

    def publish_failure(self, error: CheckpointError) -> Failure:
        """Publish why the ranks cannot connect, unless another rank has; a connection reports it only where there is one.

        Returns:
            The failure of `error`.
        """
        failure = Failure.of(error, rank=self._rank, stage="connect")
        if self.failure() is None:
            with contextlib.suppress(CheckpointError):
                self._set(f"{KEY}/{self._nonce}", failure)
        return failure

    def failure(self) -> Failure | None:
        """Return the failure of a rank that cannot connect, if one has published it."""
        key = f"{KEY}/{self._nonce}"
        with contextlib.suppress(CheckpointError):
            if self._ask_store(lambda: self._store.check([key])):
                return msgspec.json.decode(self._ask_store(lambda: self._store.get(key)), type=Failure)
        return None

    def receive(self) -> dict[str, Any]:
        """Wait for a message that this process has not received; it may have failed then, and rank 0 not removed it.

        Raises:
            CheckpointTimeoutError: rank 0 has published nothing in time.
            PeerLostError: the store is gone.
            CheckpointError: failure by which rank 0 has replaced its message.
        """

        def get() -> dict[str, Any]:
            # Not by `Store.wait`: it keeps every other thread of this process from the store, which all groups share.
            begun = time.monotonic()
            while True:
                if self._store.check([KEY]):
                    message: dict[str, Any] = json.loads(self._store.get(KEY))
                    if message["nonce"] not in self._received:
                        return message
                now = time.monotonic()
                if now > self._deadline:
                    raise TimeoutError
                time.sleep(min(max(0.01, (now - begun) / 8), _MOST_PAUSE, self._deadline - now + 0.001))

        message: dict[str, Any] = self._ask_store(get)
        self._nonce = message["nonce"]
        self._received.append(self._nonce)
        if "failure" in message:
            raise msgspec.convert(message["failure"], Failure).as_error()
        return message

    def superseded(self) -> bool:
        """Return whether rank 0 has published another message since this rank received one, or a rank has failed."""

        def look() -> bool:
            if self._store.check([f"{KEY}/{self._nonce}"]):
                return True
            return self._store.check([KEY]) and json.loads(self._store.get(KEY))["nonce"] not in self._received

        with contextlib.suppress(CheckpointError):
            return bool(self._ask_store(look))
        return False

    def wait_until_superseded(self) -> bool:
        """Wait a few seconds until rank 0 has published another message; return whether it has.

        Raises:
            CheckpointError: failure of a rank that cannot connect, if one has published it.
        """
        end = min(self._deadline, time.monotonic() + _SUCCESSION)
        while not (superseded := self.superseded()) and time.monotonic() < end:
            time.sleep(0.1)
        if (failure := self.failure()) is not None:
            raise failure.as_error() from None
        return superseded

    def _set(self, key: str, value: object) -> None:
        text = msgspec.json.encode(value).decode()
        self._ask_store(lambda: self._store.set(key, text))

    def _ask_store(self, call: Callable[[], Any]) -> Any:
        """Return `call()`, made on another thread: torch's store waits for ever for a server that was stopped."""
        try:
            return wait_for_call(call, max(0.0, self._deadline - time.monotonic()) + _STORE_GRACE)
        except (RuntimeError, TimeoutError, CallTimeoutError) as error:
            if time.monotonic() < self._deadline:
                raise PeerLostError(
                    f"rank {self._rank}: the store of the process group, through which rank 0 publishes its address, is "
                    f"gone: {str(error).splitlines()[0]}; restart the job from its last committed checkpoint"
                ) from error
            raise CheckpointTimeoutError(
                f"rank {self._rank}: rank 0 has not published its address in time: it made no save or load for this group, "
                "or the store of the group does not answer; look for a hung rank, or raise the time-out"
            ) from None
