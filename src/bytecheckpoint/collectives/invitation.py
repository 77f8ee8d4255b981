"""What rank 0 tells the other ranks through a store of torch.distributed: where it listens, and the secret of the world."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointTimeoutError,
    PeerLostError,
    error_from_report,
    error_report,
)
from bytecheckpoint.threads import try_start

__all__ = ["KEY", "Invitation"]

KEY = "bytecheckpoint"
"""Names the message within the store of its group."""
#: Seconds beyond the deadline in which the store itself reports that it has passed.
_STORE_GRACE = 1.0
#: Seconds that rank 0 has to tell its address where a message in the store leads to somebody else.
_SUCCESSION = 5.0


class Invitation:
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
        self._nonce = ""  # of the message that was sent or received last

    def send(self, message: dict[str, Any]) -> None:
        """Tell the other ranks. Errors as of `receive`."""
        self._nonce = secrets.token_hex(8)
        text = json.dumps({**message, "nonce": self._nonce})
        self._ask_store(lambda: self._store.set(KEY, text))

    def remove(self) -> None:
        """Remove the message: it holds a secret, and nobody may find it after a failure."""
        with contextlib.suppress(CheckpointError):  # a store that cannot delete, or that has ended
            self._ask_store(lambda: self._store.delete_key(KEY))

    def withdraw(self, error: CheckpointError) -> None:
        """Tell the ranks that have not received the message yet why nobody can follow it. They would wait for another."""
        text = json.dumps({"refused": error_report(error), "nonce": self._nonce})
        with contextlib.suppress(CheckpointError):
            self._ask_store(lambda: self._store.set(KEY, text))

    def refuse(self, error: CheckpointError) -> None:
        """Tell the others why the ranks cannot connect as the message says. Connections tell only those that have one."""
        if self.refusal() is not None:
            return
        report = json.dumps([self._rank, error_report(error)])
        with contextlib.suppress(CheckpointError):
            self._ask_store(lambda: self._store.set(f"{KEY}/{self._nonce}", report))

    def refusal(self) -> CheckpointError | None:
        """Return why another rank cannot follow the message that was sent or received last, if one has said so."""
        key = f"{KEY}/{self._nonce}"
        with contextlib.suppress(CheckpointError):
            if self._ask_store(lambda: self._store.check([key])):
                rank, report = json.loads(self._ask_store(lambda: self._store.get(key)))
                return error_from_report(report, prefix=f"rank {rank} cannot join the others: " if rank else "")
        return None

    def receive(self) -> dict[str, Any]:
        """Wait for a message that this rank has not had before; it may have failed then, and rank 0 not removed it.

        Raises:
            CheckpointTimeoutError: rank 0 has told nothing in time.
            PeerLostError: the store is gone.
        """

        def get() -> dict[str, Any]:
            while True:
                self._store.wait([KEY], timedelta(seconds=max(0.001, self._deadline - time.monotonic())))
                message: dict[str, Any] = json.loads(self._store.get(KEY))
                if message["nonce"] not in self._heard:
                    return message
                if time.monotonic() > self._deadline:
                    raise TimeoutError
                time.sleep(0.02)

        message: dict[str, Any] = self._ask_store(get)
        self._nonce = message["nonce"]
        self._heard.append(self._nonce)
        return message

    def outdated(self) -> bool:
        """Return whether rank 0 has told something else since this rank received a message, or that it has given up."""

        def look() -> bool:
            if self._store.check([f"{KEY}/{self._nonce}"]):
                return True
            return self._store.check([KEY]) and json.loads(self._store.get(KEY))["nonce"] not in self._heard

        with contextlib.suppress(CheckpointError):
            return bool(self._ask_store(look))
        return False

    def becomes_outdated(self) -> bool:
        """Wait for a moment until rank 0 has told something else; return whether it has.

        Raises:
            CheckpointError: why the ranks cannot connect, if one has said so.
        """
        end = min(self._deadline, time.monotonic() + _SUCCESSION)
        while not (outdated := self.outdated()) and time.monotonic() < end:
            time.sleep(0.1)
        if (error := self.refusal()) is not None:
            raise error from None
        return outdated

    def _ask_store(self, call: Callable[[], Any]) -> Any:
        """Return `call()`. It runs on another thread: torch's store waits for ever for a server that was stopped."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:  # noqa: BLE001  raised below
                done.set_exception(error)

        if not try_start(threading.Thread(target=run, name="bytecheckpoint-invite", daemon=True)):
            run()  # else the other ranks would wait for this one
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
