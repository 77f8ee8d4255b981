"""Which box of which tensor a parameter of Megatron is, by its sharded state dict: names, offsets, fused parts.

`sharded_state_dict()` says of each local tensor which part it is of a global one. Its keys are made for Megatron's own
checkpoints; here every tensor gets the name that it has in the model without any parallelism, so that pipeline and expert
parallelism are differences of names, tensor parallelism is a difference of boxes, and a plain module with these names
loads the same checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.irregular import Block, Fragment, fragment_shards
from bytecheckpoint.frameworks.leaves import add_shards
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = ["Boxes", "Layout", "Piece", "fitted", "names_of", "piece_of", "pieces_of_factory"]

# Megatron numbers experts by an axis of their own under this prefix.
_EXPERTS = re.compile(r"(^|\.)experts\.experts\.")
_LOCAL_EXPERT = re.compile(r"(^|\.)local_experts\.\d+\.")
_LAST_NUMBER = re.compile(r"\d+$")


@dataclass(slots=True)
class Piece:
    """A part of a parameter that is one box of one tensor of the checkpoint.

    Attributes:
        names: the tensor's FQN and further names.
        global_shape: its shape.
        offsets: first coordinate of the box.
        lengths: its extent; dimensions that the parameter lacks come first and are 1.
        start: row-major number of the first element in the parameter.
        inside: where the part lies in the parameter; None: it is all of it.
        resizes: whether the tensor may have another shape in a checkpoint (a vocabulary padded for another layout).
    """

    names: tuple[str, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int = 0
    inside: tuple[slice, ...] | None = None
    resizes: bool = False

    def key(self, kind: str, slot: str = "") -> TensorKey:
        """The key under which it is saved."""
        return TensorKey(kind, self.names[0], slot)

    def shard(self, key: TensorKey, whole: torch.Tensor) -> LiveShard:
        """The box, as a view of a tensor of the parameter's shape."""
        found: list[LiveShard] = []
        add_shards(found, key, whole)
        (shard,) = found
        if self.inside is not None:
            shard.data = shard.data[self.inside]
        shard.data = shard.data[(None,) * (len(self.lengths) - shard.data.ndim)]
        shard.global_shape, shard.offsets, shard.lengths = self.global_shape, self.offsets, self.lengths
        shard.aliases = self.names[1:]
        return shard

    def run(self, key: TensorKey, data: torch.Tensor, start: int) -> Iterator[Fragment]:
        """What a run of the parameter's elements, from number `start`, holds of the box: one fragment, or nothing."""
        low = max(self.start, start)
        count = min(self.start + prod(self.lengths), start + data.numel()) - low
        if count > 0:
            block = Block(self.offsets, self.lengths)
            aliases = self.names[1:]
            yield Fragment(key, self.global_shape, low - self.start, data, low - start, count, block, aliases)


@dataclass(slots=True)
class Layout:
    """A parameter or buffer, and what it is in a checkpoint.

    Attributes:
        names: its FQN in the model without parallelism, and further names.
        tensor: the live one.
        pieces: what it is made of: usually one.
        copy: whether another pipeline stage has the same tensor, and saves it.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    pieces: list[Piece] = field(default_factory=list)
    copy: bool = False

    def in_words(self) -> str:
        """For example "dim 0 in 2", or "whole"."""
        piece = self.pieces[0]
        lengths = list(piece.lengths)
        if len(self.pieces) > 1 and all(other.names == piece.names for other in self.pieces):
            lengths[-self.tensor.ndim :] = self.tensor.shape
        cut = [(dim, s // n) for dim, (n, s) in enumerate(zip(lengths, piece.global_shape, strict=True)) if 0 < n < s]
        return ", ".join(f"dim {dim} in {parts}" for dim, parts in cut) or "whole"


class Boxes:
    """Collects shards; flat runs are made into boxes all at once, which takes a fraction of the time."""

    def __init__(self) -> None:
        self._whole: list[LiveShard] = []
        self._runs: list[Fragment] = []

    def add(self, piece: Piece, key: TensorKey, data: torch.Tensor, start: int | None = None) -> None:
        """What `data` holds of one piece.

        Args:
            piece: the piece.
            key: the key of the shards.
            data: of the parameter's shape; or, with `start`, a flat run of its elements.
            start: number of the run's first element in the parameter.
        """
        if start is None:
            self._whole.append(piece.shard(key, data))
        else:
            self._runs += piece.run(key, data, start)

    def shards(self) -> list[LiveShard]:
        """All that was added."""
        return self._whole + fragment_shards(self._runs)


def fitted(shards: list[LiveShard], saved_shape: tuple[int, ...]) -> list[LiveShard]:
    """Shards as far as a saved tensor of another shape reaches."""
    out: list[LiveShard] = []
    for shard in shards:
        if shard.global_shape != saved_shape and len(shard.global_shape) == len(saved_shape):
            lengths = [min(o + n, s) - o for o, n, s in zip(shard.offsets, shard.lengths, saved_shape, strict=True)]
            if min(lengths, default=1) <= 0:
                continue
            shard.data = shard.data[tuple(slice(n) for n in lengths)]
            shard.lengths, shard.global_shape = tuple(lengths), saved_shape
        out.append(shard)
    return out


def names_of(state_key: str, key: str, prepended: Sequence[int]) -> tuple[tuple[str, ...], int]:
    """All names of a tensor, the one of the model without parallelism first.

    Args:
        state_key: as this rank's module calls it; layers and experts are numbered within the rank.
        key: as Megatron calls it in a checkpoint.
        prepended: coordinates along the dimensions that Megatron puts before those of the tensor.

    Returns:
        The names, and how many of these dimensions they stand for.
    """
    absorbed = 0
    if len(prepended) == 1 and _EXPERTS.search(key):
        # As expert number n of a module that holds all experts one by one.
        key = _EXPERTS.sub(rf"\1experts.local_experts.{prepended[0]}.", key, count=1)
        absorbed = 1
    if len(prepended) > absorbed:
        return (key,), absorbed
    here, there = state_key.split("."), key.split(".")
    common: list[str] = []
    for ours, theirs in zip(here, there, strict=False):
        if ours != theirs and not (ours.isdecimal() and theirs.isdecimal()):
            break
        common.append(theirs)
    if not any(map(str.isdecimal, common)):
        # It goes by the name of another tensor (an output layer that is tied to the embedding).
        return (key,), absorbed
    rest = ".".join(here[len(common) :])
    if absorbed and rest:
        rest, found = _LOCAL_EXPERT.subn(rf"\1local_experts.{prepended[0]}.", rest, count=1)
        if not found:
            rest = _LAST_NUMBER.sub(str(prepended[0]), rest)
    return tuple(dict.fromkeys((".".join([*common, rest] if rest else common), key))), absorbed


def piece_of(where: str, state_key: str, sharded: Any, parameter_key: str | None = None) -> Piece:
    """The piece that one ShardedTensor of Megatron is.

    Args:
        where: how to call it in errors.
        state_key: name of the parameter on this rank.
        sharded: the ShardedTensor.
        parameter_key: Megatron's key of the parameter that it is a part of; None: its own.

    Raises:
        UsageError: it describes a box that its tensor does not have.
    """
    prepended = int(sharded.prepend_axis_num)
    key = parameter_key if parameter_key is not None and sharded.key.startswith(parameter_key) else sharded.key
    names, absorbed = names_of(state_key, key, tuple(sharded.global_offset[:prepended]))
    names = tuple(name + sharded.key[len(key) :] for name in names)
    local = tuple(sharded.local_shape)
    offsets = tuple(sharded.global_offset[absorbed:])
    lengths = (1,) * (prepended - absorbed) + local
    shape = tuple(sharded.global_shape[absorbed:])
    resizes = bool(sharded.allow_shape_mismatch)
    if len(shape) != len(lengths) or any(o + n > s for o, n, s in zip(offsets, lengths, shape, strict=True)):
        raise UsageError(
            f"{where}: its sharded state dict puts a tensor of shape {local} at {offsets} of {sharded.key!r}, which has "
            f"shape {shape}"
        )
    return Piece(names, shape, offsets, lengths, resizes=resizes)


def pieces_of_factory(where: str, state_key: str, factory: Any, made: Sequence[Any], like: torch.Tensor) -> list[Piece]:
    """The pieces that a ShardedTensorFactory makes of a tensor.

    Args:
        where: how to call the tensor in errors.
        state_key: its name on this rank.
        factory: Megatron's.
        made: what the factory makes of `like`.
        like: a contiguous tensor of the parameter's shape.

    Raises:
        UsageError: the parts are not rows of the parameter, one below the other.
    """
    pieces: list[Piece] = []
    total = 0
    for part in made:
        data: torch.Tensor = part.data
        shares = data.untyped_storage()._cdata == like.untyped_storage()._cdata
        start = int(data.storage_offset())
        if not shares or not data.is_contiguous() or data.ndim != like.ndim:
            raise UsageError(
                f"{where}: {factory.key!r} is stored in parts that are not runs of its elements, which is not supported"
            )
        piece = piece_of(where, state_key, part, factory.key)
        piece.start = start
        corner = _coordinates(start, tuple(like.shape))
        piece.inside = tuple(slice(o, o + n) for o, n in zip(corner, data.shape, strict=True))
        pieces.append(piece)
        total += data.numel()
    if total != like.numel():
        raise UsageError(f"{where}: the parts in which {factory.key!r} is stored do not cover it")
    return pieces


def _coordinates(number: int, shape: tuple[int, ...]) -> list[int]:
    out = []
    for extent in reversed(shape):
        out.append(number % max(extent, 1))
        number //= max(extent, 1)
    return out[::-1]
