"""Capture one rank's states: shards that (key, box) identifies, and values that are compared by content."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import numpy as np
import torch
import xxhash

from bytecheckpoint.engine.device_copies import DeviceCopies
from bytecheckpoint.engine.tensor_bytes import dense, flat_bytes, same_bits
from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.selection import SelectionReport
from bytecheckpoint.frameworks.tensors.plain import is_lazy_view
from bytecheckpoint.garbage_collection import gc_paused
from bytecheckpoint.planning.local_table import LocalTable, describe
from bytecheckpoint.representation.catalog import VALUES_SLOT
from bytecheckpoint.representation.shards import LaterShards, LiveShard, LiveState, TensorKey
from bytecheckpoint.saving.background import StateProof, SteadyShards
from bytecheckpoint.saving.drift import relative_drift
from bytecheckpoint.saving.messages import ValueRecord, escaped

__all__ = ["CapturedState", "KnownCapture", "Value", "content_digest", "hash_all", "resolve_lazy_views", "signature"]

#: Bytes that are hashed at a time.
_HASH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Value:
    """A value that is compared by content: a tree of plain values, or a tensor that may differ between ranks.

    Attributes:
        key: its key.
        data: contiguous tensor: live memory on any device when captured, a copy on the host when staged.
        dtype: name of its dtype in torch.
        merged: True if the values of ranks complement each other (see `ValueRecord`).
        digest: hash of dtype, shape and bytes; b"" until `hashed`.
        parts: number of the parts of its state (see `ValueRecord`).
    """

    key: TensorKey
    data: torch.Tensor
    dtype: str
    merged: bool
    digest: bytes = b""
    parts: int = 0

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.data.numel() * self.data.element_size()

    def hashed(self) -> Value:
        """Return the value with its digest."""
        return self if self.digest else replace(self, digest=content_digest(self.data, self.dtype))

    def without_data(self) -> Value:
        """Return the value without its content, in the same shape."""
        # One element, shown in the same shape. A meta tensor would import torch's compiler: seconds, and while the
        # interpreter ends after Ctrl-C the classes that it makes reset the exit status of the program.
        data = torch.empty([1] * self.data.ndim, dtype=self.data.dtype).expand(self.data.shape)
        return replace(self, data=data)

    def record(self, place: tuple[int, int] = (-1, 0)) -> ValueRecord:
        """Describe the value for the coordinator.

        Args:
            place: number of its file among the rank's files, -1 for none, and its byte offset in the file's data section.
        """
        shape = tuple(self.data.shape)
        return ValueRecord(
            escaped(self.key), self.digest, self.dtype, shape, self.merged, *place, self.nbytes, self.parts
        )


def hash_all(values: Iterable[Value], copies: DeviceCopies) -> list[Value]:
    """Hash the values that have no digest yet.

    Args:
        values: values on the host or on devices.
        copies: copies from the devices.
    """
    with copies.queued():
        return [value.hashed() for value in values]


def resolve_lazy_views(states: Iterable[LiveState]) -> None:
    """Replace views that show the conjugates or negatives of the elements in their memory by copies."""
    for state in states:
        for shard in state.shards:
            if is_lazy_view(shard.data):
                shard.data = shard.data.resolve_conj().resolve_neg()


class ShardFacts:
    """Facts about shards that do not depend on their content. All captures of the same objects share them."""

    def __init__(self) -> None:
        self._devices: set[torch.device] | None = None
        self._steady: SteadyShards | None = None
        self._tables: dict[bool, tuple[LocalTable, bytes]] = {}

    def devices(self, held: HeldShards) -> set[torch.device]:
        """Return the devices of the shards."""
        if self._devices is None:
            self._devices = {tensor.device for tensor in held.tensors()}
        return self._devices

    def steady(self, held: HeldShards) -> SteadyShards:
        """Return those that stand still."""
        if self._steady is None:
            self._steady = SteadyShards(held.made())
        return self._steady

    def table(self, held: HeldShards, selection: SelectionReport, *, incremental: bool) -> tuple[LocalTable, bytes]:
        """Return the table of the shards, and its signature, which is the key of the plan cache."""
        if incremental not in self._tables:
            with gc_paused():
                table = describe(held.made(), incremental=incremental)
            self._tables[incremental] = table, signature(table, selection)
        return self._tables[incremental]


class HeldShards:
    """The shards of a save, which are made when they are first asked for.

    Args:
        states: captured states.
    """

    def __init__(self, states: Iterable[LiveState]) -> None:
        self._parts: list[list[LiveShard] | LaterShards] = []
        for state in states:
            self._parts.append(state.later or [shard for shard in state.shards if not shard.by_content])
        self._made: list[LiveShard] | None = None
        self._lock = threading.Lock()
        self.proof: StateProof | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of all shards, which may be the program's own."""
        if self._made is not None:
            return [shard.data for shard in self._made]
        found: list[torch.Tensor] = []
        for part in self._parts:
            found += part.tensors if isinstance(part, LaterShards) else [shard.data for shard in part]
        return found

    def made(self) -> list[LiveShard]:
        """Return the shards."""
        with self._lock:
            if self._made is None:
                made: list[LiveShard] = []
                exchanged: list[int] = []
                for part in self._parts:
                    if isinstance(part, LaterShards):
                        before = len(made)
                        made += part.made()
                        exchanged += (before + number for number in part.exchanged)
                    else:
                        made += part
                if self.proof is not None:
                    self.proof.watch(made, exchanged)
                self._made, self._parts = made, []
            return self._made

    def release(self) -> None:
        """Drop the tensors."""
        self._made, self._parts, self.proof = [], [], None


class KnownCapture:
    """The result of a capture of all states, for later saves of the same objects.

    Args:
        states: captured states, which all have the function `again`.

    Attributes:
        facts: facts about the shards that all captures share.
    """

    def __init__(self, states: Sequence[LiveState]) -> None:
        self._again = {state.name: state.again for state in states if state.again is not None}
        self.facts = ShardFacts()

    @classmethod
    def of(cls, states: Sequence[LiveState]) -> KnownCapture | None:
        """Return what later saves may use again; None if they must capture the states anew."""
        return cls(states) if all(state.again is not None for state in states) else None

    def again(self, objects: Mapping[str, object]) -> list[LiveState] | None:
        """Describe the states as they are now; None if their modules or optimizers are not the same."""
        if list(objects) != list(self._again):
            return None
        states: list[LiveState] = []
        with gc_paused(), torch.no_grad():
            for name, value in objects.items():
                state = self._again[name](value)
                if state is None:
                    return None
                states.append(state)
            resolve_lazy_views(states)
        return states


@dataclass(frozen=True, slots=True)
class CapturedState:
    """The live objects of one rank in one save.

    Attributes:
        held: live tensors by key and box; none after `release`.
        values: values, with data of their own or views of live memory; empty after `release`.
        copies: copies tensors from devices, after the work that the caller had queued when it saved.
        layouts: functions that describe how the objects of each state are distributed, as data for JSON; empty after
            `release`.
        selection: selected part of the states.
        incremental: True if files of earlier saves may be used again.
        providers: objects that hand over pieces, by the name of their state.
        facts: facts that do not depend on the content of the shards.
        streams: number of streams of each state of which this rank has none.
        fills: functions that fill values; empty once they were called.
    """

    held: HeldShards
    values: list[Value]
    copies: DeviceCopies
    layouts: dict[str, Callable[[], Any]]
    selection: SelectionReport
    incremental: bool = False
    providers: Mapping[str, Any] = field(default_factory=dict)
    facts: ShardFacts = field(default_factory=ShardFacts)
    streams: Mapping[str, int] = field(default_factory=dict)
    fills: list[Callable[[], object]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        states: Sequence[LiveState],
        selection: SelectionReport | None = None,
        timeout: float | None = None,
        *,
        facts: ShardFacts | None = None,
        proof: Literal["none", "sampled", "full"] = "none",
    ) -> CapturedState:
        """Sort what an adapter has captured. Call it in the caller's thread, for the sake of `copies`.

        Args:
            states: selected live states.
            selection: selected part of the states.
            timeout: seconds that the work may take which the caller had queued on devices; None: without limit.
            facts: facts about earlier shards of the same objects, if there are some.
            proof: extent of the samples to take now, which prove a later copy.
        """
        facts = facts or ShardFacts()
        held = HeldShards(states)
        values: list[Value] = []
        fills: list[Callable[[], object]] = []
        for state in states:
            values += (_value_of_shard(shard) for shard in state.shards if shard.by_content)
            if state.tree is not None:
                values.append(_value_of_tree(state, "", state.tree, merged=state.merged))
            for part in state.streams:
                values.append(_value_of_tree(state, part.name, part.tree, merged=True))
                values += (_value_of_shard(shard, merged=True, parts=state.stream_count) for shard in part.shards)
                fills += [part.fill] if part.fill is not None else []
        # Before the events that `DeviceCopies` queues.
        if proof != "none":
            held.proof = StateProof(held.tensors(), facts.steady(held), held.made, full=proof == "full")
        devices = facts.devices(held) | {value.data.device for value in values}
        copies = DeviceCopies(devices, to_host=True, timeout=timeout)
        layouts = {state.name: state.layout for state in states}
        providers = {state.name: state.provider for state in states if state.provider is not None}
        streams = {state.name: state.stream_count for state in states if state.stream_count and not state.streams}
        selection = selection or SelectionReport()
        return cls(held, values, copies, layouts, selection, False, providers, facts, streams, fills)

    @property
    def shards(self) -> list[LiveShard]:
        """Live tensors by key and box; none after `release`."""
        return self.held.made()

    @property
    def proof(self) -> StateProof | None:
        """Facts that prove a copy in the background; None if the caller waits."""
        return self.held.proof

    def describe(self) -> tuple[LocalTable, bytes]:
        """Return the table of the shards, and its signature, which is the key of the plan cache."""
        return self.facts.table(self.held, self.selection, incremental=self.incremental)

    def hash_values(self) -> None:
        """Hash the values now, before the caller changes them."""
        self.fill()
        self.values[:] = hash_all(self.values, self.copies)

    def fill(self) -> None:
        """Fill the values that are not filled yet; before they are read."""
        while self.fills:
            self.fills.pop()()

    def check_replicas(self, pairs: Sequence[tuple[int, int]], *, exact: bool) -> dict[str, float]:
        """Check that pairs of boxes, which are one box of one tensor, have one content.

        Args:
            pairs: numbers of the boxes of each pair.
            exact: True to demand equal bits; else copies may have drifted apart by rounding.

        Returns:
            The drift of the pairs that differ by rounding, by name of the tensor.

        Raises:
            IncompatibleCheckpointError: two differ; the message names the tensor.
        """
        if not pairs:
            return {}
        ends = np.cumsum([shard.rows for shard in self.shards], dtype=np.int64)

        def box(row: int) -> LiveShard:
            number = int(np.searchsorted(ends, row, "right"))
            return self.shards[number].box(row - int(ends[number]) + self.shards[number].rows)

        drifts: dict[str, float] = {}
        with self.copies.queued():
            for first, second in pairs:
                shard, replica = box(first), box(second)
                if same_bits(shard.data, replica.data):
                    continue
                drift = math.inf if exact else relative_drift(shard.data.cpu(), replica.data.cpu())
                if math.isinf(drift):
                    raise IncompatibleCheckpointError(
                        f"{shard.key} is held twice by the modules or optimizers of this rank, with different contents: "
                        "keep replicas equal, or give different tensors different names"
                    )
                drifts[str(shard.key)] = max(drifts.get(str(shard.key), 0.0), drift)
        return drifts

    def release(self) -> None:
        """Drop the live tensors, which the caller may change from now on."""
        self.held.release()
        self.values.clear()
        self.layouts.clear()


def _value_of_tree(state: LiveState, name: str, tree: bytes, *, merged: bool) -> Value:
    data = torch.frombuffer(bytearray(tree), dtype=torch.uint8)
    return Value(TensorKey(state.name, name, VALUES_SLOT), data, "uint8", merged, parts=state.stream_count)


def _value_of_shard(shard: LiveShard, *, merged: bool = False, parts: int = 0) -> Value:
    return Value(shard.key, _contiguous(shard.data.detach()), shard.dtype, merged, parts=parts)


def _contiguous(data: torch.Tensor) -> torch.Tensor:
    """Return `data` if its elements are in row-major order, else a copy in host memory."""
    return data if data.is_contiguous() else dense(data.cpu())


def content_digest(data: torch.Tensor, dtype: str) -> bytes:
    """Hash a tensor's dtype, shape and bytes. Bytes of an accelerator pass through host memory in pieces."""
    digest = xxhash.xxh3_128(f"{dtype}{tuple(data.shape)}".encode())
    for piece in flat_bytes(_contiguous(data)).split(_HASH_BYTES):
        digest.update(piece.cpu().numpy())
    return digest.digest()


def signature(table: LocalTable, selection: SelectionReport | None = None) -> bytes:
    """Hash a table and a selection: those that lead to the same plan have the same signature."""
    digest = xxhash.xxh3_128()
    for part in (*table.tensors, table.ndims, table.boxes, table.repeats):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    digest.update(msgspec.msgpack.encode(selection))
    return digest.digest()
