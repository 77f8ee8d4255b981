"""The captured state of one rank: shards that (key, box) identifies, and values that are compared by content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from bytecheckpoint.engine.device_copies import DeviceCopies
from bytecheckpoint.engine.tensor_bytes import dense, flat_bytes
from bytecheckpoint.monitoring.garbage_collection import gc_paused
from bytecheckpoint.planning.save_plan import LocalTable, describe
from bytecheckpoint.representation.catalog import VALUES_SLOT
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey
from bytecheckpoint.saving.messages import ValueRecord, escaped

__all__ = ["CapturedState", "Value", "content_digest", "signature"]


@dataclass(slots=True)
class Value:
    """A value that is compared by content: a tree of plain values, or a tensor that may differ between ranks.

    `data` is a dense CPU tensor. The other fields are those of `ValueRecord`.
    """

    key: TensorKey
    data: torch.Tensor
    dtype: str
    merged: bool
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.data.numel() * self.data.element_size()

    def record(self, place: tuple[int, int] = (-1, 0)) -> ValueRecord:
        """Describe the value for the coordinator.

        Args:
            place: its file among the rank's files, -1 for none, and its byte offset in the file's data section.
        """
        shape = tuple(self.data.shape)
        return ValueRecord(escaped(self.key), self.digest, self.dtype, shape, self.merged, *place, self.nbytes)


class CapturedState:
    """One rank's shards and values in one save. Construct it in the caller's thread, for the sake of `copies`.

    Args:
        states: what the adapter captured.

    Attributes:
        shards: live tensors by key and box; empty after `release`.
        values: values, with data of their own or views of live memory.
        copies: copies shards from devices, after the work that the caller had queued when it saved.
        live: the caller waits, so the live tensors still hold what is saved.
    """

    def __init__(self, states: Sequence[LiveState]) -> None:
        self.shards: list[LiveShard] = []
        self.values: list[Value] = []
        self.live = True
        self._table: tuple[LocalTable, bytes] | None = None
        for state in states:
            for shard in state.shards:
                if shard.by_content:
                    self.values.append(_value(shard.key, shard.data, shard.dtype, merged=False))
                else:
                    self.shards.append(shard)
            if state.tree is not None:
                tree = torch.frombuffer(bytearray(state.tree), dtype=torch.uint8)
                self.values.append(_value(TensorKey(state.kind, "", VALUES_SLOT), tree, "uint8", merged=state.merged))
        self.copies = DeviceCopies({shard.data.device for shard in self.shards}, to_host=True)

    def described(self) -> tuple[LocalTable, bytes]:
        """Describe the shards: return their table and its signature, made once."""
        if self._table is None:
            with gc_paused():
                table = describe(self.shards)
            self._table = table, signature(table)
        return self._table

    def shard_digests(self) -> bytes:
        """Hash the content of every shard, uint64 as bytes."""
        sums = np.zeros(len(self.shards), np.uint64)
        for i, shard in enumerate(self.shards):
            with self.copies.queued():
                data = dense(shard.data.cpu())
            sums[i] = xxhash.xxh3_64_intdigest(content_digest(data, shard.dtype))
        return sums.tobytes()

    def release(self) -> None:
        """Let go of the live tensors, which the caller changes from now on."""
        self.live = False
        self.shards = []
        self._table = None


def _value(key: TensorKey, data: torch.Tensor, dtype: str, *, merged: bool) -> Value:
    data = dense(data.detach().cpu())
    return Value(key, data, dtype, merged, content_digest(data, dtype))


def content_digest(data: torch.Tensor, dtype: str) -> bytes:
    """Hash a dense CPU tensor's dtype, shape and bytes."""
    digest = xxhash.xxh3_128(f"{dtype}{tuple(data.shape)}".encode())
    digest.update(flat_bytes(data).numpy())
    return digest.digest()


def signature(table: LocalTable) -> bytes:
    """Hash a table: tables that lead to the same plan have the same signature."""
    digest = xxhash.xxh3_128()
    for part in (*table.tensors, table.ndims, table.boxes):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
