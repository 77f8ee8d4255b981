"""Damage to files."""

from __future__ import annotations

from pathlib import Path

__all__ = ["flip_bit"]


def flip_bit(file: Path, place: int) -> None:
    """Flip one bit of the byte at `place`, which counts from the end if it is negative."""
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
