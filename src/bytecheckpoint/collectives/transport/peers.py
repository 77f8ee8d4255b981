"""What one rank knows of another: their connection, and the transfers and failures that wait for it."""

from __future__ import annotations

import socket
from collections import deque
from typing import TypeVar

from bytecheckpoint.collectives.transport.transfers import PeerLink, Report, Transfer

__all__ = ["ConnectionSetup", "Peer"]

T = TypeVar("T")

_REMEMBERED = 64  # failed exchanges with one peer: more than can be under way between two ranks


class ConnectionSetup:
    """What two ranks have done so far to connect.

    Attributes:
        wanted: whether the other rank has asked for a connection since the last one was made.
        address: where the other rank listens, once it has said so; only of lower ranks.
        address_wanted: whether the other rank was asked for its address; only of lower ranks.
        address_sent: whether the other rank knows where this rank listens; only of higher ranks.
        dialling: a connection that is being made.
        failure: why the last attempt to make one failed.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.address: tuple[str, int] | None = None
        self.address_wanted = False
        self.address_sent = False
        self.dialling: socket.socket | PeerLink | None = None
        self.failure = ""


class Peer:
    """What one rank knows of another.

    Attributes:
        rank: the other.
        link: the connection, if there is one.
        setup: the state of making one.
        offers: outgoing transfers that the other rank has not requested yet, by tag.
        to_request: incoming transfers to be requested once there is a connection.
        given_up_here: by tag, reports of exchanges that this rank gave up before the other rank did; None: it knows.
        given_up_there: by tag, reports of exchanges that the other rank gave up before they began here.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.link: PeerLink | None = None
        self.setup = ConnectionSetup()
        self.offers: dict[str, deque[Transfer]] = {}
        self.to_request: set[Transfer] = set()
        self.given_up_here: dict[str, Report | None] = {}
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
