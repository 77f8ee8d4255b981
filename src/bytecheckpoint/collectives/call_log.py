"""A log of the calls that all ranks make together, to detect ranks that are in different calls."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping

import msgspec

from bytecheckpoint.errors import UsageError

__all__ = ["CallLog"]

# Built at import: msgspec (0.22) crashes if two threads use a type for the first time at once.
_CALLS = msgspec.json.Decoder(tuple[int, str, bool, str, str] | None)


class CallLog:
    """The calls that this rank makes together with the others, counted; calls of several threads at once have no order.

    Attributes:
        last: number and name of the last call, and whether the main thread has made it; None where calls have no order.
        kind: kind of the last call, if ranks in calls of different kinds would wait in vain; "" until it is known.
        path: path of the last call.
    """

    def __init__(self) -> None:
        self.last: tuple[int, str, bool] | None = None
        self.kind = self.path = ""
        self._count = 0
        self._threads: list[threading.Thread] = []

    def begin(self, name: str, path: str) -> None:
        """Note the next call."""
        self._count += 1
        self.kind, self.path = "", path
        thread = threading.current_thread()
        others = [other for other in self._threads if other is not thread and other.is_alive()]
        self._threads = [thread, *others]
        self.last = None if others else (self._count, name, thread is threading.main_thread())

    def describe(self, kind: str, path: str) -> None:
        """Note the kind and the path of the last call."""
        self.kind, self.path = kind, path

    def encode(self) -> bytes:
        """Return the last call for another rank."""
        return json.dumps(self.last and (*self.last, self.kind, self.path)).encode()

    def of(self, tag: str) -> tuple[int, str, bool] | None:
        """Return the last call if a tag is one of its tags."""
        last = self.last
        return last if last is not None and tag.startswith((f"{last[1]}/", f"{last[1]}.")) else None

    def absent(self, tag: str, answers: Mapping[int, bytes]) -> str:
        """Say which ranks have made no call of that tag, for an error; "" or "; ...".

        Args:
            tag: tag of a message of this rank's last call.
            answers: results of `encode` on silent ranks, by rank.
        """
        own = self.of(tag)
        found = []
        for rank, answer in sorted(answers.items()):
            call = json.loads(answer)
            if own is not None and call is None:
                found.append(f"rank {rank} has made no call")
            elif own is not None and call[1] != own[1]:
                found.append(f"the last call of rank {rank} is {_describe(call[1], call[4])}")
        if own is None or not found:
            return ""
        return f", of {_describe(own[1], self.path)}; {', '.join(found[:4])}"

    def check(self, rank: int, own: tuple[int, str, bool], answers: Mapping[int, bytes]) -> None:
        """Raise `UsageError` if another rank is in another call than this one is in.

        Args:
            rank: this rank.
            own: its call.
            answers: results of `encode` on other ranks, by rank.
        """
        for other, answer in sorted(answers.items()):
            try:
                call = _CALLS.decode(answer)
            except (msgspec.DecodeError, RecursionError):  # an answer that says nothing
                continue
            if call is None or (call[0], call[2]) != (own[0], own[2]):
                continue
            if call[1] != own[1]:
                here, there = (name.replace("/", " ") for name in (own[1], call[1]))
                raise UsageError(
                    f"rank {other} is in {there}, and rank {rank} in {here}, as call {own[0]} of each: "
                    f"make the same calls on all ranks, in one order ({call[4]}, {self.path})",
                    calls_differ=True,
                )
            if self.kind and call[3] and call[3] != self.kind:
                raise UsageError(
                    f"{own[1].replace('/', ' ')}: rank {other} is at {call[4]}, and rank {rank} at {self.path}; "
                    "give all the same path",
                    calls_differ=True,
                )


def _describe(name: str, path: str) -> str:
    """Format a call: "save 3 (/run/step_3)"."""
    return name.replace("/", " ") + (f" ({path})" if path else "")
