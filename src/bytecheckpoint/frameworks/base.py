"""What a framework adapter is: it turns live objects into live shards, and live shards back into objects.

Nothing outside this package knows the name of a framework. Saving asks an adapter for `LiveState`s; loading asks it
for a `Destination`: the memory to fill, and a function that installs everything else once the bytes are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey

__all__ = ["Destination", "Framework", "Names", "SavedStates", "SavedTensor", "ShardedLeaf"]

#: Explicit parameter names for optimizers: parameter -> FQN, or FQN -> parameter.
Names = Mapping[Any, Any]


class SavedTensor(NamedTuple):
    """One tensor of a checkpoint, as its catalog describes it.

    Attributes:
        key: the key under which the checkpoint holds it (aliases already resolved).
        dtype: torch's name of the dtype without its prefix.
        global_shape: shape of the whole tensor.
    """

    key: TensorKey
    dtype: str
    global_shape: tuple[int, ...]


class SavedStates(Protocol):
    """What a checkpoint holds, as an adapter sees it while it plans a load."""

    def kinds(self) -> Collection[str]:
        """Names of the states that the checkpoint holds."""

    def find(self, kind: str, names: Sequence[str], slot: str = "") -> SavedTensor | None:
        """The tensor of the first of `names` (aliases count) that is there."""

    def slots(self, kind: str, names: Sequence[str]) -> list[SavedTensor]:
        """All state tensors of the parameter that goes by any of `names`."""

    def keys(self, kind: str) -> list[TensorKey]:
        """The keys of all tensors of `kind`."""

    def tree(self, kind: str) -> bytes | None:
        """The encoded plain values for this rank: the shared tree, or its own, or rank 0's; None when there is none."""

    def trees(self, kind: str) -> list[bytes]:
        """All distinct trees of `kind` (ranks of a pipeline hold different ones)."""

    def trees_about(self, kind: str, names: Collection[str]) -> Iterator[bytes]:
        """The distinct trees of `kind`, each read when it is asked for.

        First the one that this rank itself saved, as far as one can tell, then those of the ranks that wrote tensors of
        `names`, then the others: whoever stops when everything is found has read hardly more than what speaks of it.
        """

    def shape_of(self, kind: str, fqn: str) -> SavedTensor | None:
        """The tensor behind a by-content leaf, chosen for this rank by the rule of `tree`.

        None when the tensor of that name is identified by its name and box, and `find` is the way to it.
        """


@dataclass(slots=True)
class Destination:
    """Where one rank wants a checkpoint's bytes, and what to do when they have arrived.

    Attributes:
        wanted: the boxes to fill. `key` is the checkpoint's key, which may differ from the live name (tied weights);
            `data` is the memory to write into.
        checks: what `check` runs, in order.
        finish: steps that `apply` runs, in order.
        missing: what the live objects hold and the checkpoint lacks, by the names that `bytecheckpoint.open` shows.
        claimed: every saved key that this rank accounts for. What no rank claims is unexpected.
        notes: what a person may want to know (parameters left without state, settings that were kept).
    """

    wanted: list[LiveShard] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    claimed: set[TensorKey] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """See that what has arrived can be installed; a rank that cannot keeps all others from installing theirs.

        Raises:
            IncompatibleCheckpointError: values that only the bytes tell do not fit.
        """
        while self.checks:
            self.checks.pop(0)()

    def apply(self) -> None:
        """Install new state, hyperparameters and values.

        To be called once, after all of `wanted` is filled. Until then nothing in the live objects has changed except
        the elements that were written through `wanted`.

        Raises:
            IncompatibleCheckpointError: an object does not take what was saved of another one; its own exception is
                the cause.
        """
        self.check()
        for step in self.finish:
            try:
                step()
            except CheckpointError:
                raise
            except Exception as error:
                # From the program's own load_state_dict or set_extra_state.
                name = type(error).__name__
                raise IncompatibleCheckpointError(
                    f"all bytes were loaded, but an object does not take its state as it was saved ({name}: {error}); "
                    "load it into one of the same kind"
                ) from error


class Framework(Protocol):
    """An adapter of one training framework."""

    name: str

    def matches(self, states: Mapping[str, object]) -> bool:
        """Whether this adapter understands the objects in `states` (asked under framework="auto")."""

    def capture(self, states: Mapping[str, object], *, names: Names | None = None) -> list[LiveState]:
        """This rank's shards and values, one `LiveState` per name in `states`.

        Raises:
            UsageError: something in `states` cannot be represented; the message names it.
        """

    def destination(
        self,
        states: MutableMapping[str, object],
        saved: SavedStates,
        *,
        strict: bool = True,
        names: Names | None = None,
    ) -> Destination:
        """Plan a load into `states` without changing them.

        Raises:
            UsageError: something in `states` cannot be represented.
            IncompatibleCheckpointError: the checkpoint does not fit in a way that only the adapter sees.
        """

    def describe(self, states: Mapping[str, object]) -> dict[str, Any]:
        """The layout as JSON-able data: device meshes, and how many tensors have which placements."""


@runtime_checkable
class ShardedLeaf(Protocol):
    """A public protocol: anything that can say which parts of one tensor it holds may stand where a tensor may.

    It needs no torch.distributed, so that code with a sharding scheme of its own (or a test that plays several
    ranks in one process) can save and load by boxes. A subclass of torch.Tensor may have it too: then its shape is that
    of the whole tensor, as a DTensor's is, and torch.empty_like makes another one (for optimizer state).
    """

    def __bytecheckpoint_shards__(self) -> Iterable[tuple[Sequence[int], Sequence[int] | int, torch.Tensor]]:
        """Yield (global shape, place, live tensor) for each part held here.

        The place is the offsets of a box, one per dimension, whose extent is the tensor's shape; or, for a ragged
        shard, the row-major number of the first element of a run, which the tensor holds in one dimension.
        """
