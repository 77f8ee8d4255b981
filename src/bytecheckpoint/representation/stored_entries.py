"""The entries of a storage file, and the names under which safetensors tools see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bytecheckpoint.representation.shards import TensorKey

__all__ = ["StoredEntry", "entry_names"]


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One box of one tensor, as it lies in a storage file.

    Attributes:
        key: which tensor.
        dtype: torch's name of the dtype without prefix.
        global_shape: shape of the whole tensor.
        offsets: first coordinate of the box, one per dimension.
        lengths: extent of the box, one per dimension.
        aliases: further FQNs of the same tensor, without `key.fqn`.
        requires_grad: as the whole tensor has it.
        owner: the rank whose own value this is, or -1 when all ranks share it.
        byte_offset: first byte, relative to the data section.
        byte_length: number of bytes: volume of the box times item size.
    """

    key: TensorKey
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    requires_grad: bool = False
    owner: int = -1
    byte_offset: int = 0
    byte_length: int = 0


def entry_names(entries: Sequence[StoredEntry]) -> list[str]:
    """The safetensors keys of `entries`, in order and all different.

    A whole tensor has its plain FQN ("state/<fqn>/<slot>" when it has a slot), a piece also its box:
    "layers.0.weight[0:512,1024:2048]". A key that is taken, or reserved, gets "#2", "#3", ... appended. In the file
    they stand escaped (`names.escape`).
    """
    names: list[str] = []
    taken: dict[str, int] = {"__metadata__": 1}
    for entry in entries:
        _, fqn, slot = entry.key
        name = f"state/{fqn}/{slot}" if slot and fqn else fqn or slot
        if entry.lengths != entry.global_shape:
            box = ",".join([f"{o}:{o + n}" for o, n in zip(entry.offsets, entry.lengths, strict=True)])
            name = f"{name}[{box}]"
        if name in taken:
            plain, count = name, taken[name]
            while name in taken:
                count += 1
                name = f"{plain}#{count}"
            taken[plain] = count
        taken[name] = 1
        names.append(name)
    return names
