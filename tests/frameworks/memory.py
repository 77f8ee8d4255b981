"""A checkpoint in memory, to test adapters without planning, engine and storage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.base import Destination, Framework, SavedPiece, SavedTensor
from bytecheckpoint.frameworks.native import NativeFramework
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey
from tests.support.layouts import bits


def detached(states: list[LiveState]) -> list[LiveState]:
    """Copy the shards, so that later changes of the live objects do not change them, and let go of the objects."""
    for state in states:
        state.layout, state.again = dict, None
        for shard in state.shards:
            shard.data = shard.data.clone(memory_format=torch.contiguous_format)
    return states


class MemoryCheckpoint:
    """The captures of all ranks of one save, as the `SavedStates` of rank `rank`."""

    def __init__(self, ranks: Sequence[list[LiveState]], rank: int = 0) -> None:
        self.rank = rank
        self.shown_names: Mapping[str, Sequence[str]] = {}
        self.is_foreign = False
        self.ranks: list[dict[str, LiveState]] = [{s.name: s for s in states} for states in ranks]
        self.whole: dict[TensorKey, torch.Tensor] = {}
        self.filled: dict[TensorKey, torch.Tensor] = {}
        self.content: dict[tuple[int, TensorKey], torch.Tensor] = {}
        self.dtypes: dict[TensorKey, str] = {}
        self.aliases: dict[tuple[str, str], str] = {}
        for number, states in enumerate(self.ranks):
            for state in states.values():
                for shard in state.shards:
                    self._store(number, shard)
        for key, mask in self.filled.items():
            assert bool(mask.all()), f"the ranks do not hold all of {key}"

    def _store(self, number: int, shard: LiveShard) -> None:
        key = shard.key
        assert tuple(shard.data.shape) == shard.lengths
        assert str(shard.data.dtype) == "torch." + shard.dtype
        assert self.dtypes.setdefault(key, shard.dtype) == shard.dtype
        for alias in shard.aliases:
            self.aliases[key.state, alias] = key.fqn
        if shard.by_content:
            assert shard.lengths == shard.global_shape
            self.content[number, key] = shard.data
            return
        whole = self.whole.setdefault(key, torch.zeros(shard.global_shape, dtype=shard.data.dtype))
        assert tuple(whole.shape) == shard.global_shape
        mask = self.filled.setdefault(key, torch.zeros(shard.global_shape, dtype=torch.bool))
        box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.lengths, strict=True))
        if bool(mask[box].all()) and mask[box].numel():
            assert torch.equal(bits(whole[box]), bits(shard.data)), f"replicas of {key} differ"
        whole[box] = shard.data
        mask[box] = True

    def states(self) -> Collection[str]:
        return {name for states in self.ranks for name in states}

    def _saved(self, key: TensorKey) -> SavedTensor | None:
        tensor = self.whole.get(key)
        if tensor is None:
            tensor = next((t for (_, k), t in self.content.items() if k == key), None)
        return None if tensor is None else SavedTensor(key, self.dtypes[key], tuple(tensor.shape))

    def find(self, state: str, names: Sequence[str], slot: str = "") -> SavedTensor | None:
        found = (self._saved(TensorKey(state, fqn, slot)) for fqn in self._with_aliases(state, names))
        return next(filter(None, found), None)

    def slots(self, state: str, names: Sequence[str]) -> list[SavedTensor]:
        for fqn in self._with_aliases(state, names):
            if found := [k for k in self.whole if k.state == state and k.fqn == fqn and k.slot]:
                return [SavedTensor(k, self.dtypes[k], tuple(self.whole[k].shape)) for k in found]
        return []

    def names_of(self, state: str, names: Sequence[str], *, parameter: bool = False) -> Sequence[str]:
        return names

    def tensors_of(self, state: str, live: Collection[str]) -> dict[str, SavedTensor]:
        found = {key.fqn: t for key in self.whole if key.state == state and not key.slot and (t := self._saved(key))}
        return found | {alias: found[fqn] for (of, alias), fqn in self.aliases.items() if of == state and fqn in found}

    def substitute(self, state: str, found: Mapping[str, SavedTensor | None]) -> None:
        assert not found, "no test with this checkpoint has such hooks"

    def stored(self, key: TensorKey) -> SavedTensor | None:
        return self.find(key.state, (key.fqn,), key.slot)

    def _with_aliases(self, state: str, names: Sequence[str]) -> Iterator[str]:
        for name in names:
            yield name
            if (state, name) in self.aliases:
                yield self.aliases[state, name]

    def keys(self, state: str) -> list[TensorKey]:
        return [k for k in self.dtypes if k.state == state]

    def tree(self, state: str) -> bytes | None:
        own = self.ranks[self._source_rank()].get(state)
        return own.tree if own is not None else None

    def _source_rank(self) -> int:
        return self.rank if self.rank < len(self.ranks) else 0

    def trees(self, state: str) -> list[bytes]:
        found = [s[state].tree for s in self.ranks if state in s]
        return list(dict.fromkeys(t for t in found if t is not None))

    def number(self, state: str, names: Sequence[Sequence[str]]) -> bool:
        return False

    def trees_about(self, state: str, names: Collection[str]) -> Iterator[bytes]:
        own = self.tree(state)
        yield from ([] if own is None else [own]) + [t for t in self.trees(state) if t != own]

    def streams(self, state: str) -> list[SavedTensor]:
        return []

    def pieces(self, state: str, others: Collection[TensorKey]) -> list[SavedPiece]:
        return []  # no test with this checkpoint streams states

    def find_by_content(self, state: str, fqn: str) -> SavedTensor | None:
        key = TensorKey(state, fqn)
        tensor = self.content.get((self._source_rank(), key))
        return None if tensor is None else SavedTensor(key, str(tensor.dtype)[6:], tuple(tensor.shape))

    def fill(self, destination: Destination, *, cast: bool = False) -> None:
        for shard in destination.wanted:
            source = self.content.get((self._source_rank(), shard.key)) if shard.by_content else None
            if source is None:
                source = self.whole[shard.key]
            fits = tuple(source.shape) == shard.global_shape
            fits &= source.dtype == shard.data.dtype or shard.converts or cast
            if not fits:
                raise IncompatibleCheckpointError(f"{shard.key} does not fit")
            box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.lengths, strict=True))
            shard.data.copy_(source[box])

    def load(
        self,
        states: MutableMapping[str, Any],
        framework: Framework | None = None,
        *,
        cast: bool = False,
        **options: Any,
    ) -> Destination:
        destination = (framework or NativeFramework()).destination(states, self, **options)
        self.fill(destination, cast=cast)
        destination.apply()
        return destination


def save(states: MutableMapping[str, Any], **options: Any) -> MemoryCheckpoint:
    """Save in one process."""
    return MemoryCheckpoint([detached(NativeFramework().capture(states, **options))])
