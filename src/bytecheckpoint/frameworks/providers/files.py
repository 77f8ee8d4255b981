"""Stream a file of the program into checkpoints and back."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError
from bytecheckpoint.frameworks.providers.base import Piece, PieceReader

__all__ = ["FileProvider"]


class FileProvider:
    """A file of the program as a state: the index of a vector database, the tokens that were seen.

    A save opens the file in the call, and reads it in the background. It may be replaced then (`os.replace`), but not
    changed: a save fails if its size or time of modification differ from those of the call. A load writes a new file beside
    it, makes that durable and puts it in its place.

    Args:
        path: path of the file.
        trust_times: True if a save with `incremental=True` need not read a file whose inode, size and times are those of
            the last save. Writes through a mapping of the file may change it without its times for a while.
    """

    def __init__(self, path: str | os.PathLike[str], *, trust_times: bool = False) -> None:
        self.path = Path(path)
        self._trust_times = trust_times

    def __bytecheckpoint_pieces__(self) -> Iterator[Piece]:
        """Return the file as one piece, which keeps it open until the save has read it."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        before = os.fstat(descriptor)

        def read(offset: int, buffer: memoryview) -> None:
            done = 0
            while done < len(buffer) and (found := os.preadv(descriptor, [buffer[done:]], offset + done)):
                done += found
            now = os.fstat(descriptor)
            if done < len(buffer) or (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise CheckpointError(f"{self.path} has changed since the save was called")

        try:
            seen = (before.st_dev, before.st_ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns)
            # A change within one tick of the clock of the file system would not show.
            settled = self._trust_times and time.time_ns() - max(before.st_mtime_ns, before.st_ctime_ns) > 2 * 10**9
            token = repr(seen).encode() if settled else None
            done = partial(os.close, descriptor)
            piece = Piece("file", before.st_size, read, stable=True, token=token, done=done)
        except BaseException:
            os.close(descriptor)
            raise
        yield piece

    def load_pieces(self, pieces: Mapping[str, PieceReader]) -> None:
        """Replace the file by the saved one.

        Raises:
            IncompatibleCheckpointError: the pieces are not those of a file.
        """
        if pieces.keys() != {"file"}:
            raise IncompatibleCheckpointError(f"{self.path}: the checkpoint's pieces {sorted(pieces)} are not a file")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        try:
            with new.open("wb") as file:
                for chunk in pieces["file"]:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
