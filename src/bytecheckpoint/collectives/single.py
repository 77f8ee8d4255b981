"""A world of one rank."""

from __future__ import annotations

from bytecheckpoint.collectives.base import MailboxCollective, new_world_id
from bytecheckpoint.errors import PeerLostError

__all__ = ["SingleProcess"]


class SingleProcess(MailboxCollective):
    """The world of a program without torch.distributed: rank 0 of 1, whose only correspondent is itself.

    >>> SingleProcess().gather("example", b"payload", timeout=1)
    [b'payload']
    """

    def __init__(self) -> None:
        super().__init__(0, 1, new_world_id())

    def send(self, to: int, tag: str, payload: bytes) -> None:
        """Post `payload` to oneself."""
        assert to == 0
        if self._mailbox.closed is not None:
            raise PeerLostError(f"rank 0: cannot send {tag!r}: {self._mailbox.closed}")
        self._mailbox.deposit(0, tag, payload)

    def close(self) -> None:
        """Refuse further mail."""
        self._mailbox.close("this world was closed")
