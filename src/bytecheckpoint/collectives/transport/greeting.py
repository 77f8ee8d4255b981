"""A handshake by which two ranks prove that they know the secret of their world. The secret never crosses the wire.

The side that dials sends a random number (HELLO). The other one answers with a number of its own and a proof (CHALLENGE),
and gets a proof back (PROOF). A proof is an HMAC over both numbers, both ranks and the purpose of the connection, so an
overheard proof is of no use on another connection.
"""

from __future__ import annotations

import hmac
import os
import struct

from bytecheckpoint.collectives.transport.wire import ANYBODY, Kind, ProtocolError

__all__ = ["Greeting"]

_NONCE = 32
_RANKS = struct.Struct("<II")


class Greeting:
    """One side of a new connection, until each side has authenticated the other.

    Args:
        purpose: purpose of the connection, equal on both sides.
        secret: secret of the world.
        rank: rank of this side.
        dialled: rank that this side has called, or `ANYBODY`; None if this side was called.
        facts: description that the dialling side sends of itself, at most 200 bytes.

    Attributes:
        other: the rank of the other side.
        received: its facts.
        over: end of the handshake, True once each side has proved that it knows the secret.
    """

    def __init__(self, purpose: str, secret: bytes, rank: int, dialled: int | None = None, facts: bytes = b"") -> None:
        self._purpose, self._secret, self._rank, self._facts = purpose.encode(), secret, rank, facts
        self.dialled = dialled
        self.other = ANYBODY if dialled is None else dialled
        self.received = b""
        self.over = False
        self._nonces = b"" if dialled is None else os.urandom(_NONCE)

    def hello(self) -> bytes:
        """Return the payload of the first frame, of the side that dials."""
        return self._nonces

    def answer(self, kind: Kind, source: int, to: int, payload: bytes) -> tuple[Kind, bytes] | None:
        """Take a frame of the other side; return the frame to answer with, if one is due.

        Raises:
            ProtocolError: the other side is no rank of this world, or not the one that was dialled.
        """
        if self.dialled is None and kind is Kind.HELLO and not self._nonces and to in (self._rank, ANYBODY):
            if len(payload) == _NONCE:
                self.other = source
                self._nonces = payload + os.urandom(_NONCE)
                return Kind.CHALLENGE, self._nonces[_NONCE:] + self._proof(b"called", source, self._rank)
        elif self.dialled is None and kind is Kind.PROOF and self._nonces and source == self.other:
            self.received = payload[_NONCE:]
            if hmac.compare_digest(payload[:_NONCE], self._proof(b"calls", source, self._rank, self.received)):
                self.over = True
                return None
        elif self.dialled in (source, ANYBODY) and kind is Kind.CHALLENGE:
            self._nonces += payload[:_NONCE]
            if hmac.compare_digest(payload[_NONCE:], self._proof(b"called", self._rank, source)):
                self.other, self.over = source, True
                return Kind.PROOF, self._proof(b"calls", self._rank, source, self._facts) + self._facts
        raise ProtocolError("not a rank of this world")

    def _proof(self, side: bytes, caller: int, called: int, facts: bytes = b"") -> bytes:
        words = (self._purpose, side, _RANKS.pack(caller, called), self._nonces, facts)
        return hmac.digest(self._secret, b"/".join(words), "sha256")
