"""The unit that everything else speaks about: one box of one tensor (ByteCheckpoint, section 3.2: ShardMeta)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["LiveShard", "LiveState", "TensorKey"]


class TensorKey(NamedTuple):
    """Which tensor of a checkpoint.

    Attributes:
        kind: name of the state it belongs to ("model", "optimizer", "extra_states", ...).
        fqn: fully qualified name of the parameter or buffer; the dotted path of a leaf in any other kind.
        slot: for optimizer state the name of the state ("exp_avg"; "outer.inner" when nested), else "".
    """

    kind: str
    fqn: str
    slot: str = ""

    def __str__(self) -> str:
        """The key under which `bytecheckpoint.open` shows the tensor."""
        return f"{self.kind}/state/{self.fqn}/{self.slot}" if self.slot else f"{self.kind}/{self.fqn}"


@dataclass(slots=True)
class LiveShard:
    """One box of one tensor, as a rank holds it right now.

    Attributes:
        key: which tensor.
        dtype: torch's name of the dtype without its prefix, e.g. "bfloat16".
        global_shape: shape of the whole tensor.
        offsets: first coordinate of the box, one per dimension.
        lengths: extent of the box, one per dimension.
        data: the live elements, shape == lengths, any strides, any device, detached. Writing into it changes the
            program's own tensor.
        aliases: further FQNs of the same tensor (tied weights), without `key.fqn`.
        requires_grad: as the whole tensor has it.
        by_content: True for values that may differ between ranks under one key (extra states): copies on other
            ranks are the same only when their bytes are. False: (key, box) identifies the content.
        converts: for a load: elements of another dtype are converted, also where the caller did not ask for a cast (a
            parameter of which the exact value goes elsewhere too).
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


@dataclass(slots=True)
class LiveState:
    """All that one rank holds of one kind.

    Attributes:
        kind: name of the state.
        shards: its tensors.
        tree: its plain values in the encoding of `representation.values`, or None when it has none. A tree is
            compared between ranks by its content, as `by_content` shards are.
        merged: trees of different ranks complement each other (optimizers, modules: each speaks of its own
            parameters). False: a tree is its rank's own, unless all ranks' are equal.
    """

    kind: str
    shards: list[LiveShard] = field(default_factory=list)
    tree: bytes | None = None
    merged: bool = False
