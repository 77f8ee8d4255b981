"""What one rank knows of another: their connection, and the transfers and failures that wait for it."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from bytecheckpoint.collectives.transport.transfers import PeerLink, Report, Transfer

__all__ = ["ConnectionSetup", "Peer"]

T = TypeVar("T")

_REMEMBERED = 64  # failed exchanges with one peer: more than can be under way between two ranks


@dataclass
class ConnectionSetup:
    """What two ranks have done so far to connect."""

    wanted: bool = False  # the other rank has asked for a connection since the last one was made
    message_sent: bool = False  # this rank has sent its address to a higher rank, or asked a lower one for it
    address: tuple[str, int] | None = None  # where the other rank listens; only of lower ranks
    dialling: socket.socket | PeerLink | None = None  # a connection that is being made
    failure: str = ""  # why the last attempt to make one failed


class Peer:
    """What one rank knows of another."""

    def __init__(self, rank: int) -> None:
        self.rank = rank  # the other
        self.link: PeerLink | None = None
        self.setup = ConnectionSetup()
        self.offers: dict[str, deque[Transfer]] = {}  # by tag, outgoing, not requested by the other rank yet
        self.to_request: set[Transfer] = set()  # incoming, to be requested once there is a connection
        # By tag, the reports of exchanges that one of the two ranks has given up before the other one.
        self.given_up_here: dict[str, Report | None] = {}  # None: the other rank knows
        self.given_up_there: dict[str, Report] = {}

    @property
    def unreported(self) -> dict[str, Report]:
        """The part of `given_up_here` that the other rank does not know."""
        return {tag: report for tag, report in self.given_up_here.items() if report is not None}

    def give_up(self, tag: str, report: Report) -> None:
        """Note that this rank has given up exchange `tag`."""
        _remember(self.given_up_here, tag, report)

    def on_given_up(self, tag: str, report: Report) -> None:
        """Note that the other rank has given up exchange `tag`, which does not run here now."""
        if tag in self.given_up_here:
            del self.given_up_here[tag]
        else:
            _remember(self.given_up_there, tag, report)

    def withdraw(self, transfer: Transfer) -> None:
        """Move no more of an array: its memory is neither read nor written once this returns."""
        self.to_request.discard(transfer)
        tag = transfer.operation.tag
        if transfer in self.offers.get(tag, ()):
            self.offers[tag].remove(transfer)
            if not self.offers[tag]:
                del self.offers[tag]
        elif self.link is not None:
            self.link.forget(transfer)


def _remember(reports: dict[str, T], tag: str, report: T) -> None:
    """Add a report, and drop the oldest beyond the limit."""
    while len(reports) >= _REMEMBERED:
        del reports[next(iter(reports))]
    reports[tag] = report
