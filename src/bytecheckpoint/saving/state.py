"""The captured state of one rank: shards that (key, box) identifies, and values that are compared by content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey
from bytecheckpoint.saving.messages import ValueRecord, escaped

__all__ = ["CapturedState", "Value", "content_digest", "signature"]

_PIECE = 32 << 20


@dataclass(slots=True)
class Value:
    """A value that is compared by content: a tree of plain values, or a tensor that may differ between ranks.

    `data` is contiguous: live memory on any device until the value is staged, a copy after that. The other fields are
    those of `ValueRecord`; `digest` is b"" until `hash` is called.
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

    def hash(self) -> None:
        """Hash the content, once."""
        if not self.digest:
            self.digest = content_digest(self.data, self.dtype)

    def release(self) -> None:
        """Let go of the content, and keep its hash, if it has one, and its shape."""
        # One element, shown in the same shape. A meta tensor would import torch's compiler: seconds, and while the
        # interpreter ends after Ctrl-C the classes that it makes reset the exit status of the program.
        self.data = torch.empty([1] * self.data.ndim, dtype=self.data.dtype).expand(self.data.shape)

    def record(self, place: tuple[int, int] = (-1, 0)) -> ValueRecord:
        """Describe the value for the coordinator.

        Args:
            place: its file among the rank's files, -1 for none, and its byte offset in the file's data section.
        """
        shape = tuple(self.data.shape)
        return ValueRecord(
            escaped(self.key), self.digest, self.dtype, shape, self.merged, *place, self.nbytes, self.parts
        )


class CapturedState:
    """One rank's shards and values in one save. Construct it in the caller's thread, for the sake of `copies`.

    Args:
        states: what the adapter captured, of what is selected.
        selection: what is selected.
        timeout: of `DeviceCopies`.

    Attributes:
        shards: live tensors by key and box; empty after `release`.
        values: values, with data of their own or views of live memory.
        copies: copies shards from devices, after the work that the caller had queued when it saved.
        live: the caller waits, so the live tensors still hold what is saved.
        selection: as given.
    """

    def __init__(
        self, states: Sequence[LiveState], selection: SelectionReport | None = None, timeout: float | None = None
    ) -> None:
        self.selection = selection or SelectionReport()
        self.shards: list[LiveShard] = []
        self.values: list[Value] = []
        self.live = True
        self._table: tuple[LocalTable, bytes] | None = None
        self._layouts = {state.name: state.layout for state in states}
        for state in states:
            for shard in state.shards:
                if is_lazy_view(shard.data):
                    shard.data = shard.data.resolve_conj().resolve_neg()
                if shard.by_content:
                    self.values.append(_value_of_shard(shard))
                else:
                    self.shards.append(shard)
            if state.tree is not None:
                self.values.append(_value_of_tree(state, "", state.tree, merged=state.merged))
            for part in state.parts:
                self.values.append(_value_of_tree(state, part.name, part.tree, merged=True))
                self.values += (_value_of_shard(shard, merged=True, parts=state.part_count) for shard in part.shards)
        tensors = [*(shard.data for shard in self.shards), *(value.data for value in self.values)]
        self.copies = DeviceCopies({tensor.device for tensor in tensors}, to_host=True, timeout=timeout)

    def described(self) -> tuple[LocalTable, bytes]:
        """Describe the shards: return their table and its signature, made once."""
        if self._table is None:
            with gc_paused():
                table = describe(self.shards)
            self._table = table, signature(table, self.selection)
        return self._table

    def layouts(self) -> dict[str, Any]:
        """Describe how the objects of each state are distributed, as data for JSON."""
        return {state: layout() for state, layout in self._layouts.items()}

    def hash_values(self) -> None:
        """Hash the content of every value that is not hashed yet."""
        with self.copies.queued():
            for value in self.values:
                value.hash()

    def release_values(self) -> None:
        """Let go of the content of all values, which may lie in the staging pool."""
        for value in self.values:
            value.release()

    def check_replicas(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Check that pairs of boxes, which are one box of one tensor, have one content.

        Raises:
            IncompatibleCheckpointError: two differ; the message names the tensor.
        """
        if not pairs:
            return
        ends = np.cumsum([shard.rows for shard in self.shards], dtype=np.int64)

        def box(row: int) -> LiveShard:
            number = int(np.searchsorted(ends, row, "right"))
            return self.shards[number].box(row - int(ends[number]) + self.shards[number].rows)

        with self.copies.queued():
            for first, second in pairs:
                shard, replica = box(first), box(second)
                if not same_bits(shard.data, replica.data):
                    raise IncompatibleCheckpointError(
                        f"{shard.key} is held twice by the modules or optimizers of this rank, with different contents: "
                        "keep replicas equal, or give different tensors different names"
                    )

    def release(self) -> None:
        """Let go of the live tensors, which the caller changes from now on."""
        self.live = False
        self.shards = []
        self._layouts = {}
        self._table = None


def _value_of_tree(state: LiveState, name: str, tree: bytes, *, merged: bool) -> Value:
    data = torch.frombuffer(bytearray(tree), dtype=torch.uint8)
    return Value(TensorKey(state.name, name, VALUES_SLOT), data, "uint8", merged, parts=state.part_count)


def _value_of_shard(shard: LiveShard, *, merged: bool = False, parts: int = 0) -> Value:
    return Value(shard.key, _contiguous(shard.data.detach()), shard.dtype, merged, parts=parts)


def _contiguous(data: torch.Tensor) -> torch.Tensor:
    """Return `data` if its elements are in row-major order, else a copy in host memory."""
    return data if data.is_contiguous() else dense(data.cpu())


def content_digest(data: torch.Tensor, dtype: str) -> bytes:
    """Hash a tensor's dtype, shape and bytes. Those of an accelerator pass through host memory in pieces."""
    digest = xxhash.xxh3_128(f"{dtype}{tuple(data.shape)}".encode())
    for piece in flat_bytes(_contiguous(data)).split(_PIECE):
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
