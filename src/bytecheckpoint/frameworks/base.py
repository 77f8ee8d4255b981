"""The protocol of framework adapters, which turn live objects into live shards and fill live objects from shards.

Nothing outside `frameworks` knows the name of a framework. Saving asks an adapter for `LiveState`s. Loading asks it for a
`Destination`: the memory to fill, and the steps that install everything else after the bytes have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey

__all__ = [
    "Destination",
    "Framework",
    "ParameterName",
    "SavedStates",
    "SavedTensor",
    "Strict",
    "SupportsShards",
    "SupportsStreams",
    "UserNames",
    "is_strict",
]

#: Explicit parameter names for optimizers: parameter -> FQN, or FQN -> parameter.
UserNames = Mapping[Any, Any]

#: Strictness: whether missing and unexpected names are errors, for all states or by state (True for states not named).
Strict = bool | Mapping[str, bool]

#: The FQN of a parameter and its aliases: further FQNs of the same tensor (tied weights).
ParameterName = tuple[str, tuple[str, ...]]


def is_strict(strict: Strict, state: str) -> bool:
    """Return whether a load is strict about `state`."""
    return bool(strict.get(state, True) if isinstance(strict, Mapping) else strict)


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


class SavedPiece(NamedTuple):
    """A tensor of a checkpoint that a check of the load reads for itself, piece by piece.

    Attributes:
        tensor: the tensor, which is one run of bytes.
        number: its number in the catalog.
        read: function (offset, length) that returns verified bytes.
    """

    tensor: SavedTensor
    number: int
    read: Callable[[int, int], bytes]


class SavedStates(Protocol):
    """The contents of a checkpoint, as an adapter sees them while it plans a load.

    A *tree* holds the plain values of one state as one rank saved them, encoded. `find`, `slots` and `trees_about` take
    names of live objects, as `names_of` does; names in trees and keys are the checkpoint's own.

    Attributes:
        shown_names: names under which a layout shows the tensors of each of the checkpoint's names; the trees of optimizers
            have the latter. Empty without a layout.
    """

    shown_names: Mapping[str, Sequence[str]]

    @property
    def is_foreign(self) -> bool:
        """True if another program wrote the checkpoint."""

    def states(self) -> Collection[str]:
        """Return the names of the states that the checkpoint holds."""

    def find(self, state: str, names: Sequence[str], slot: str = "") -> SavedTensor | None:
        """Return the tensor of the first of `names` that the checkpoint holds, as a name or as an alias."""

    def slots(self, state: str, names: Sequence[str]) -> list[SavedTensor]:
        """Return all optimizer state tensors of the parameter that has any of `names`."""

    def names_of(self, state: str, names: Sequence[str], *, parameter: bool = False) -> Sequence[str]:
        """Return the checkpoint's names of something that has `names` in the live objects, or none to leave it alone.

        The caller of a load may rename live names, and select some of them. What is not selected seems to be missing,
        and the load does not report it.

        Args:
            state: name of the state.
            names: FQNs of one tensor or extra state.
            parameter: they are the FQNs of a parameter, in the state of its optimizer.
        """

    def stored(self, key: TensorKey) -> SavedTensor | None:
        """Return a tensor by the name or alias that the checkpoint itself has for it."""

    def tensors_of(self, state: str, live: Collection[str]) -> dict[str, SavedTensor]:
        """Return the tensors of a state's modules, also those that the caller of a load leaves out.

        Args:
            state: name of the state.
            live: names of live tensors, under which the result has the tensors that a load takes for them.

        Returns:
            Name -> tensor; the other tensors have all of their own names.
        """

    def substitute(self, state: str, found: Mapping[str, SavedTensor | None]) -> None:
        """Note the tensors that hooks give live names in place of the saved ones of these names; None: no tensor.

        A parameter's optimizer state is that of the saved tensor, if there is one.
        """

    def number(self, state: str, names: Sequence[Sequence[str]]) -> bool:
        """Give the parameters of an optimizer the names "#0", "#1", ... if the checkpoint has only numbers for them.

        Args:
            state: name of the state.
            names: FQNs of each parameter, in the order of the optimizer's groups.

        Returns:
            True if the checkpoint has numbers.

        Raises:
            IncompatibleCheckpointError: it has numbers, and is seen through a layout.
        """

    def keys(self, state: str) -> list[TensorKey]:
        """Return the keys of all tensors of `state`."""

    def tree(self, state: str) -> bytes | None:
        """Return this rank's tree: the shared one, else its own, else rank 0's; None when there is none."""

    def trees(self, state: str) -> list[bytes]:
        """Return all distinct trees of `state` (ranks of a pipeline hold different ones)."""

    def trees_about(self, state: str, names: Collection[str]) -> Iterator[bytes]:
        """Iterate over the distinct trees of `state`, the likeliest to mention `names` first, reading each when asked for.

        The order is: this rank's own tree, as far as one can tell; the trees of ranks that wrote tensors of `names`;
        the others. A caller that stops when it has found everything reads few trees.
        """

    def streams(self, state: str) -> list[SavedTensor]:
        """Return the trees of the parts of `state`; a part's name is the FQN of its key."""

    def pieces(self, state: str, others: Collection[TensorKey], *, all_ranks: bool = False) -> list[SavedPiece]:
        """Return the tensors of `state` that this rank saved as pieces, or rank 0 if the save lacked this rank.

        Args:
            state: name of the state.
            others: keys of the tensors that are no pieces.
            all_ranks: True for those of all ranks.
        """

    def find_by_content(self, state: str, fqn: str) -> SavedTensor | None:
        """Return a tensor that is identified by its content: this rank's own, else the shared one, else the lowest rank's.

        None when the tensor of that name is identified by its name and box: `find` returns it then.
        """


@dataclass(slots=True)
class Destination:
    """The load plan of one rank: the memory to fill, and the steps to run after the bytes have arrived.

    Attributes:
        wanted: the boxes to fill. `key` is the checkpoint's key, which may differ from the live name (tied weights);
            `data` is the memory to write into.
        checks: the steps of `check`, in order.
        finish: the steps of `apply`, in order.
        missing: names that the live objects hold and the checkpoint lacks, as `bytecheckpoint.open` spells them.
        states: names of the states that the load fills beside those of the program: the model and optimizer of an engine.
        recognized: every saved key that this rank loads or knowingly skips. Keys that no rank recognizes are unexpected.
        extra_states: saved names of the extra states that this rank loads, by the state of their modules. Names in the
            state's trees that no rank lists are unexpected.
        notes: remarks for the user (parameters left without state, settings that keep their live value).
        mismatches: sentences about saved state that belongs to other objects than the live ones; each begins with the
            state's name. A strict load fails with them before it reads or before it installs. `checks` may add some.
        tied: pairs of saved tensors that are one tensor here. The load fills it from the first (see `native.py`).
        left_out: rows that the load leaves out by key of the tensor, because the live one is smaller: "36 of the 132 rows
            of model/w".
        streamed: tensors that a check reads for itself.
    """

    wanted: list[LiveShard] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    recognized: set[TensorKey] = field(default_factory=set)
    extra_states: dict[str, set[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    tied: list[tuple[SavedTensor, SavedTensor]] = field(default_factory=list)
    left_out: dict[TensorKey, str] = field(default_factory=dict)
    streamed: list[SavedPiece] = field(default_factory=list)

    def check(self) -> None:
        """Check that the loaded values can be installed. A failure on one rank keeps all ranks from installing.

        Raises:
            IncompatibleCheckpointError: loaded values do not fit.
        """
        while self.checks:
            self.checks.pop(0)()

    def apply(self) -> None:
        """Install new state, hyperparameters and values.

        Call it once, after all of `wanted` is filled. Before that, a load changes nothing in the live objects except
        the elements behind `wanted`.

        Raises:
            IncompatibleCheckpointError: an object rejects the state that another object saved; its exception is the
                cause.
        """
        self.check()
        for step in self.finish:
            try:
                step()
            except CheckpointError:
                raise
            except Exception as error:
                # The program's own load_state_dict or set_extra_state may raise anything.
                name = type(error).__name__
                raise IncompatibleCheckpointError(
                    f"all bytes were loaded, but an object rejects its saved state ({name}: {error}); "
                    "load it into one of the same kind"
                ) from error


class Framework(Protocol):
    """The adapter of one training framework.

    Attributes:
        name: name of the framework.
    """

    name: str

    def matches(self, states: Mapping[str, object]) -> bool:
        """Return whether this adapter handles the objects in `states` (asked under framework="auto")."""

    def reason_to_block(self, states: Mapping[str, object]) -> str:
        """Return why a save cannot copy `states` in the background; "" if it can.

        It can if nothing but the steps of optimizers of torch changes parameters and optimizer state. A save takes it that
        an adapter cannot whose own class does not define this.
        """

    def capture(self, states: Mapping[str, object], *, names: UserNames | None = None) -> list[LiveState]:
        """Describe this rank's shards and values, as one `LiveState` per name in `states`.

        Raises:
            UsageError: an object in `states` cannot be represented; the message names it.
        """

    def destination(
        self,
        states: MutableMapping[str, object],
        saved: SavedStates,
        *,
        strict: Strict = True,
        names: UserNames | None = None,
    ) -> Destination:
        """Plan a load into `states` without changing them.

        Args:
            states: the live objects.
            saved: the checkpoint.
            strict: strictness of the load by state; `is_strict` reads it.
            names: parameter names from the caller of `load`.

        Raises:
            UsageError: an object in `states` cannot be represented.
            IncompatibleCheckpointError: the checkpoint does not fit, in a way that only the adapter can detect.
        """


@runtime_checkable
class SupportsShards(Protocol):
    """Public protocol of objects that list the shards of one tensor; a state may hold them wherever it may hold a tensor.

    It needs no torch.distributed, so code with its own sharding scheme (or a test that plays several ranks in one
    process) can save and load by boxes. A subclass of torch.Tensor may implement it too. Its shape is then that of the
    whole tensor, as a DTensor's is, and torch.empty_like makes another one, for optimizer state.
    """

    def __bytecheckpoint_shards__(self) -> Iterable[tuple[Sequence[int], Any, torch.Tensor]]:
        """Yield (global shape, place, live tensor) for each shard on this rank.

        The place is the offsets of a box, one per dimension, whose extent is the live tensor's shape; or, for a flat
        range, the row-major number of its first element, with the elements in a 1-D live tensor; or, for many flat
        ranges in one 1-D live tensor, a table of integers [n, 3]: number of the first element, its place in the live
        tensor, number of elements.
        """


@runtime_checkable
class SupportsStreams(Protocol):
    """Public protocol of data loaders whose state belongs to streams, not to ranks (ByteCheckpoint, section 3.3).

    A job has a fixed number of streams. A rank feeds some of them, and holds their states; ranks that differ only in
    their tensor or pipeline coordinate may hold the same ones, or none. A checkpoint stores each stream once, by its
    number, and a load hands it to whichever rank asks for it. So nothing is split or merged when the number of ranks
    changes.

    States are plain values, in which tensors and arrays may lie anywhere. Tensors must not change while the caller of a
    save waits. An object whose states are large may have a method `stream_snapshots` too: it returns what
    `stream_states` does, but each state in a pair with a function that fills its tensors, which nothing else changes. The
    function is called once, in any thread, so a save in the background copies nothing of these states in the call.

    A load proves that the ranks take over all streams, unless the object's attribute `takes_all_streams` is False.
    """

    @property
    def stream_count(self) -> int:
        """Number of streams of all ranks."""

    def shared_state(self) -> Any:
        """Return the values that are equal on all ranks (sources, ratios, seed), without tensors, to be stored once."""

    def stream_states(self) -> Mapping[int, Any]:
        """Return the states of the streams that this rank saves, by number."""

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Return the saved streams that this rank needs, and change nothing.

        Args:
            shared: value of `shared_state` when the checkpoint was saved.
            saved: numbers of the saved streams, ascending.

        Raises:
            IncompatibleCheckpointError: the checkpoint was saved from other data, or with other settings.
        """

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> Sequence[str] | None:
        """Continue from the states of the streams that `choose_streams` chose; called once, at the end of a load.

        Returns:
            Remarks for the `LoadReport`, or None.
        """
