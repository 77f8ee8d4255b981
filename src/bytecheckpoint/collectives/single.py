"""The world of one rank."""

from __future__ import annotations

from bytecheckpoint.collectives.base import new_world_id
from bytecheckpoint.collectives.inbox import InboxCollective
from bytecheckpoint.errors import PeerLostError

__all__ = ["SingleProcess"]


class SingleProcess(InboxCollective):
    """The collective of a program without torch.distributed: rank 0 of 1, which sends messages to itself only.

    >>> SingleProcess().gather("example", b"payload", timeout=1)
    [b'payload']
    """

    def __init__(self) -> None:
        super().__init__(0, 1, new_world_id())

    def send(self, to: int, tag: str, payload: bytes) -> None:
        """Send `payload` to this rank itself."""
        assert to == 0
        if self.inbox.closed is not None:
            raise PeerLostError(f"rank 0: cannot send {tag!r}: {self.inbox.closed}")
        self.inbox.put(0, tag, payload)
