"""Damage to the files of a checkpoint in a folder."""

from __future__ import annotations

from pathlib import Path

__all__ = ["damage", "flip_bit", "storage_file"]


def storage_file(folder: Path, state: str = "model", rank: str = "") -> Path:
    """Return a storage file of a checkpoint: the only one of a kind of state, or that of a rank ("00001")."""
    return next((folder / state).glob(f"rank-{rank}*"))


def flip_bit(file: Path, place: int = -100) -> None:
    """Flip one bit of the byte at `place`, which counts from the end if it is negative."""
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def damage(file: Path, how: str = "flip", byte: int = -100) -> None:
    """Change a file: "flip" one bit of a byte, "cut" its end off, "extend" or "remove" it."""
    if how == "flip":
        flip_bit(file, byte)
    elif how == "remove":
        file.unlink()
    else:
        data = file.read_bytes()
        file.write_bytes({"cut": data[:-50], "extend": data + b"x"}[how])
