"""The connections of one rank with another, and the transfers and failures that wait for them."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from bytecheckpoint.collectives.transport.transfers import PeerLink, Transfer
from bytecheckpoint.failures import Failure

__all__ = ["Peer"]

T = TypeVar("T")

_REMEMBERED = 64  # failed exchanges with one peer: more than can be under way between two ranks


@dataclass
class Dialling:
    """Attempts of this rank to connect to another one.

    Attributes:
        connection: connection that is being made.
        address: address at which the other rank listens, None until rank 0 has sent it.
        asked: request for the address, True once rank 0 has it.
        failure: reason why the last attempt failed.
    """

    connection: socket.socket | PeerLink | None = None
    address: tuple[str, int] | None = None
    asked: bool = False
    failure: str = ""


class Peer:
    """The other end of direct connections, as one rank knows it.

    Attributes:
        rank: the other rank.
        called: connection over which this rank asks for arrays; it has dialled.
        caller: connection over which the other rank asks for arrays.
        dialling: attempts to make the first of these connections.
        offers: outgoing arrays, by tag, that the other rank has not requested yet.
        to_request: incoming arrays, to be requested once there is a connection.
        given_up_here: failures, by tag, of exchanges that this rank has given up first; None once the other rank knows.
        given_up_there: failures, by tag, of exchanges that the other rank has given up first.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.called: PeerLink | None = None
        self.caller: PeerLink | None = None
        self.dialling = Dialling()
        self.offers: dict[str, deque[Transfer]] = {}
        self.to_request: set[Transfer] = set()
        self.given_up_here: dict[str, Failure | None] = {}
        self.given_up_there: dict[str, Failure] = {}

    @property
    def links(self) -> list[PeerLink]:
        """The connections with the other rank."""
        return [link for link in (self.called, self.caller) if link is not None]

    def forget(self, link: PeerLink) -> None:
        """Note that a connection is gone."""
        if link is self.called:
            self.called = None
        else:
            self.caller = None

    @property
    def unsent_failures(self) -> dict[str, Failure]:
        """The part of `given_up_here` that the other rank does not know."""
        return {tag: failure for tag, failure in self.given_up_here.items() if failure is not None}

    def give_up(self, tag: str, failure: Failure) -> None:
        """Note that this rank has given up exchange `tag`."""
        _remember(self.given_up_here, tag, failure)

    def on_given_up(self, tag: str, failure: Failure) -> None:
        """Note that the other rank has given up exchange `tag`, which does not run here now."""
        if tag in self.given_up_here:
            del self.given_up_here[tag]
        else:
            _remember(self.given_up_there, tag, failure)

    def withdraw(self, transfer: Transfer) -> None:
        """Stop the transfer of an array: its memory is neither read nor written once this returns."""
        self.to_request.discard(transfer)
        tag = transfer.operation.tag
        if transfer in self.offers.get(tag, ()):
            self.offers[tag].remove(transfer)
            if not self.offers[tag]:
                del self.offers[tag]
        elif (link := self.caller if transfer.outgoing else self.called) is not None:
            link.forget(transfer)


def _remember(failures: dict[str, T], tag: str, failure: T) -> None:
    """Add a failure, and drop the oldest beyond the limit."""
    while len(failures) >= _REMEMBERED:
        del failures[next(iter(failures))]
    failures[tag] = failure
