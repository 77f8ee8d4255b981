"""A provider of pieces for tests, with one fault or none."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from bytecheckpoint import Piece, PieceReader

__all__ = ["FAULTS", "Buffer", "Rows"]

MIB = 1 << 20


class Rows:
    """A provider of pieces of random bytes, which counts how often the end of each was told.

    Args:
        sizes: length of each piece.
        stable: value for all pieces.
        seed: seed of the bytes.
        fault: name of one of `FAULTS`, "" for none.
    """

    def __init__(self, *sizes: int, stable: bool = True, seed: int = 0, fault: str = "") -> None:
        self.rows = {f"rows.{i}": np.random.default_rng((seed, i)).bytes(size) for i, size in enumerate(sizes)}
        self.stable = stable
        self.fault = fault
        self.ended: Counter[str] = Counter()
        self.handed_out = 0
        self.tokens: dict[str, bytes] = {}
        self.read: set[str] = set()
        self.threads: set[str] = set()
        self.release = threading.Event()

    def __bytecheckpoint_pieces__(self) -> Iterator[Any]:
        for name in self.rows:
            yield self._piece(name, len(self.rows[name]))
        if self.fault == "asking":
            raise OSError("no list")
        if self.fault == "no piece":
            yield "rows.9"
        if self.fault == "same name":
            yield self._piece("rows.0", 0)
        if self.fault == "size":
            yield self._piece("rows.9", -1)

    def _piece(self, name: str, nbytes: int) -> Piece:
        def read(offset: int, buffer: memoryview) -> int | None:
            self.read.add(name)
            self.threads.add(threading.current_thread().name)
            data = self.rows[name][offset : offset + len(buffer)]
            if self.fault == "raising" and offset >= 6 * MIB:
                raise KeyError("segment 7")
            if self.fault == "slow":
                self.release.wait(20)
            buffer[: len(data)] = data
            return len(data) - 1 if self.fault == "short" else None

        def done() -> None:
            self.ended[name] += 1
            if self.fault == "done":
                raise RuntimeError("no end")

        piece = Piece(name, nbytes, read, stable=self.stable, token=self.tokens.get(name), done=done)
        self.handed_out += 1
        return piece

    def load_pieces(self, pieces: Mapping[str, PieceReader]) -> None:
        self.rows = {name: b"".join(piece) for name, piece in pieces.items()}
        self.kept = dict(pieces)
        if self.fault == "loading":
            raise ValueError("no rows wanted")


class Buffer(Rows):
    """Such a provider with plain values and a small tensor."""

    def __init__(self, *sizes: int, cursor: int = 0, name: str = "scale", **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.cursor = cursor
        self.name = name
        self.scale = torch.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, self.name: self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor, self.scale = state["cursor"], state[self.name]


#: Fault -> part of the message.
FAULTS: dict[str, str] = {
    "asking": r"replay: Rows\.__bytecheckpoint_pieces__ failed \(OSError: no list\)",
    "no piece": "replay: Rows gave a str for a Piece",
    "same name": r"piece 'rows\.0' of replay, a Rows: the state has another piece or tensor of that name",
    "size": r"replay: Rows.*Piece\('rows\.9'\): -1 is no number of bytes",
    "raising": r"piece 'rows\.1' of replay, a Rows: its read at byte \d+ failed \(KeyError: 'segment 7'\)",
    "short": r"piece 'rows\.\d' of replay, a Rows: its read at byte 0 gave \d+ of \d+ bytes",
    "slow": r"piece 'rows\.\d' of replay, a Rows: its read at byte 0 took more than 1 s",
    "done": r"piece 'rows\.\d' of replay, a Rows: its done failed \(RuntimeError: no end\)",
}
