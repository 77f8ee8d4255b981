"""Shards: boxes of tensors in the memory of one rank (ByteCheckpoint, section 3.2: ShardMeta)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from bytecheckpoint.representation.boxes import BoxTable, Int64s

if TYPE_CHECKING:
    import torch

__all__ = [
    "MASTER",
    "Fragments",
    "LaterShards",
    "LiveShard",
    "LiveState",
    "LiveStream",
    "TensorKey",
    "boxes_of",
    "each_box",
]

#: Name of the optimizer state that is a parameter's master weight.
MASTER = "master"


class TensorKey(NamedTuple):
    """The name of a tensor within a checkpoint.

    Attributes:
        state: name of the state that holds the tensor ("model", "optimizer", "extra_states", ...).
        fqn: fully qualified name of the parameter or buffer; for other states the path of the tensor, joined by dots.
        slot: name of an optimizer state ("exp_avg"; "outer.inner" when nested), "" for any other tensor.
    """

    state: str
    fqn: str
    slot: str = ""

    def __str__(self) -> str:
        """Return the key under which `bytecheckpoint.open` shows the tensor."""
        return f"{self.state}/state/{self.fqn}/{self.slot}" if self.slot else f"{self.state}/{self.fqn}"


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Many boxes of one tensor, as columns. Each box is a run of consecutive elements of one 1-D tensor of stride 1.

    Attributes:
        offsets: first coordinate of each box, int64 [n, d].
        lengths: extent of each box, int64 [n, d].
        places: number of each box's first element in the 1-D tensor, int64 [n].
        counts: number of elements of each box, int64 [n].
    """

    offsets: Int64s
    lengths: Int64s
    places: Int64s
    counts: Int64s

    def __len__(self) -> int:
        return len(self.places)


class LiveShard(msgspec.Struct):
    """One box of one tensor in the memory of a rank, or many boxes of it: its fragments.

    Fragments cost no objects of their own. Every shard counts as as many rows as it has boxes.

    Attributes:
        key: the tensor.
        dtype: torch's name of the dtype without "torch.", e.g. "bfloat16".
        global_shape: shape of the whole tensor.
        offsets: first coordinate of the box, one per dimension.
        lengths: extent of the box, one per dimension.
        data: a detached view of the program's own tensor, of shape `lengths`, with any strides on any device. A write
            to it changes the program's tensor.
        aliases: further FQNs of the same tensor (tied weights), without `key.fqn`.
        requires_grad: flag of the whole tensor.
        by_content: True for a value that may differ between ranks under one key (extra states): copies on several
            ranks are replicas only when their bytes are equal. False: (key, box) identifies the content.
        converts: True when a load converts elements of another dtype although the caller did not ask for a cast: a
            parameter whose exact value is also loaded elsewhere, which is not reported as a cast; or optimizer state,
            where nothing is lost.
        fragments: the boxes, if this is not one box; `data` is then the 1-D tensor, and offsets and lengths are empty.
        must_be_equal: True where copies on several ranks are equal in any sound program: for parameters, trained or frozen,
            and in the state_dict of an optimizer. Running statistics of batches, for example, may differ.
        from_lowest: True for a buffer of a module, whose copies may differ: that of the lowest rank is saved, with the
            other buffers of this rank, as DDP broadcasts those of rank 0.
        frozen: True for a parameter of a module that is not trained, so that its bytes rarely change.
        volatile: True for a parameter whose memory the framework writes between the steps of its optimizer, too.
    """

    key: TensorKey
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    data: torch.Tensor
    aliases: tuple[str, ...] = ()
    requires_grad: bool = False
    by_content: bool = False
    converts: bool = False
    must_be_equal: bool = False
    fragments: Fragments | None = None
    from_lowest: bool = False
    frozen: bool = False
    volatile: bool = False

    @property
    def stands_still(self) -> bool:
        """True for a parameter or optimizer state, which nothing but a step changes."""
        if self.volatile or self.by_content:  # values are copied behind the fence
            return False
        return self.requires_grad or self.frozen or self.must_be_equal or bool(self.key.slot)

    @property
    def rows(self) -> int:
        """Number of boxes."""
        return 1 if self.fragments is None else len(self.fragments)

    def box(self, number: int) -> LiveShard:
        """Return one of the boxes as a shard of its own, with a view of the memory."""
        found = self.fragments
        if found is None:
            return self
        lengths = tuple(found.lengths[number].tolist())
        place, count = int(found.places[number]), int(found.counts[number])
        return msgspec.structs.replace(
            self,
            offsets=tuple(found.offsets[number].tolist()),
            lengths=lengths,
            data=self.data[place : place + count].view(lengths),
            fragments=None,
        )


class LaterShards:
    """Shards of tensors that an earlier capture has described; `made` makes the views that their `data` are.

    A save in the background makes them behind its call: they take a microsecond for each tensor.

    Args:
        prototypes: the shards with any data.
        tensors: tensor of each shard, the program's own.
        forms: address and strides of each tensor.

        moving: numbers of the shards that do not stand still.

    Attributes:
        tensors: tensor of each shard: the program's own, or a copy.
        moving: numbers of the shards that do not stand still.
        exchanged: numbers of the shards whose tensors had other memory when the shards were made.
    """

    def __init__(
        self,
        prototypes: Sequence[LiveShard],
        tensors: list[torch.Tensor],
        forms: Sequence[tuple[int, tuple[int, ...]]],
        moving: Sequence[int],
    ) -> None:
        self.tensors = tensors
        self.moving = moving
        self.exchanged: list[int] = []
        self._prototypes = prototypes
        self._forms = forms
        self._memory = [tensor.untyped_storage() for tensor in tensors]
        self._copied: set[int] = set()

    def __len__(self) -> int:
        return len(self.tensors)

    def copy(self, number: int, copy: Callable[[torch.Tensor], torch.Tensor]) -> int:
        """Put a copy in the place of a tensor; return its bytes."""
        self.tensors[number] = copy(self.tensors[number])
        self._copied.add(number)
        return self.tensors[number].nbytes

    def made(self) -> list[LiveShard]:
        """Return the shards, whose data are views of the memory that the tensors had at first."""
        # copy.copy, or replace with the new data, takes three times as long.
        shards: list[LiveShard] = [prototype.__copy__() for prototype in self._prototypes]  # type: ignore[attr-defined]
        for number, (shard, tensor) in enumerate(zip(shards, self.tensors, strict=True)):
            shard.data = tensor.detach()
            address, strides = self._forms[number]
            if number not in self._copied and shard.data.data_ptr() != address:
                self.exchanged.append(number)
                memory = self._memory[number]
                first = (address - memory.data_ptr()) // tensor.element_size()
                shard.data = tensor.new_empty(0).set_(memory, first, shard.lengths, strides)
        return shards


def each_box(shards: Iterable[LiveShard]) -> Iterator[LiveShard]:
    """Iterate over all boxes as shards of one box each. That takes some microseconds for each fragment."""
    for shard in shards:
        for number in range(shard.rows):
            yield shard.box(number)


def boxes_of(shards: Sequence[LiveShard], tensors: Sequence[int]) -> BoxTable:
    """Return the boxes of all shards, in order, as columns.

    Args:
        shards: the shards.
        tensors: number of each shard's tensor.
    """
    tables: list[BoxTable] = []
    numbered = zip(shards, tensors, strict=True)
    for plain, found in groupby(numbered, lambda item: item[0].fragments is None):
        run = list(found)
        if plain:
            tables.append(BoxTable.build([t for _, t in run], [s.offsets for s, _ in run], [s.lengths for s, _ in run]))
            continue
        for shard, tensor in run:
            many = shard.fragments
            assert many is not None
            tables.append(BoxTable(np.full(len(many), tensor, np.int64), many.offsets, many.lengths))
    return BoxTable.concat(tables)


@dataclass(slots=True)
class LiveStream:
    """A part of a state that any rank may hold, and that another rank may load: a stream of a data loader.

    Attributes:
        name: its FQN in the state; those of its tensors begin with it and a dot.
        tree: its plain values, encoded.
        shards: its tensors.
        fill: function that fills them, if nothing else can change them; to be called once. None: they are the program's.
    """

    name: str
    tree: bytes
    shards: list[LiveShard] = field(default_factory=list)
    fill: Callable[[], object] | None = None


@dataclass(slots=True)
class LiveState:
    """The shards and plain values that one rank holds of one state.

    Attributes:
        name: name of the state.
        shards: shards of the tensors.
        later: shards that are still to be made, instead of `shards`.
        tree: the plain values, encoded by `representation.values`, or None when there are none. Ranks compare trees by
            content, as they compare `by_content` shards.
        merged: True when the trees of the ranks complement each other: the tree of an optimizer or module describes
            the parameters of its rank. False: each rank's tree is its own value, unless the trees of all ranks are equal.
        layout: describes the objects as data for JSON: their type, and how many tensors have which layout. Rank 0 calls
            it where a save makes a new plan, perhaps in another thread than the caller's. It reads only what the
            capture found: a second scan would run the hooks of modules on rank 0 alone, and those may communicate.
        entries: True when the tree is a dict of FQN -> value whose items are independent of each other (extra states).
        streams: streams of this rank. Each is stored once; ranks that hold the same stream, or the tree beside the
            streams, must hold it with the same content.
        stream_count: number of streams of all ranks; 0 for a state without streams.
        provider: object that hands over pieces of the state, if it is streamed.
        again: function that describes the value of the state in a later save, if that is cheaper than a capture; it returns
            None if the tensors are not the same. It keeps no tensor alive.
    """

    name: str
    shards: list[LiveShard] = field(default_factory=list)
    tree: bytes | None = None
    merged: bool = False
    layout: Callable[[], dict[str, Any]] = dict
    entries: bool = False
    streams: list[LiveStream] = field(default_factory=list)
    stream_count: int = 0
    provider: Any = None
    again: Callable[[object], LiveState | None] | None = None
    later: LaterShards | None = None
