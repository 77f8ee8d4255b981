"""`rng_state`: the states of all random number generators of a process, as one of the states of a save."""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed
import xxhash

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.rng.sources import (
    RandomSource,
    framework_layout,
    framework_sources,
    own_source,
    process_sources,
)

__all__ = ["RngState", "rng_state"]

_log = logging.getLogger("bytecheckpoint")

#: States of the generators of one rank, by name: uint8 [n].
States = Mapping[str, torch.Tensor]


def rng_state(
    *,
    rank: int | None = None,
    ranks: int | None = None,
    generators: Mapping[str, Any] | None = None,
    layout: Mapping[str, int] | None = None,
) -> RngState:
    """Return the random number generators of this process, to save and load as `states["rng"]`.

    They are those of Python, NumPy (its global one) and torch, on the CPU and on all devices of the accelerator; the
    states in the trackers of Megatron and DeepSpeed; and those in `generators`.

    A load at the layout of the save continues bit for bit. At another layout, where no rank's numbers can continue, every
    generator is seeded by the checkpoint's first rank and by `rank`: the same in every such load, and different on
    ranks that differ. Where Megatron has seeded the generators, its seed stands for `rank`, because it knows which
    ranks must draw the same numbers. The `LoadReport` says so.

    Args:
        rank: number of this rank among those that draw different numbers; by default its number in the job. Ranks that
            must draw the same (of one tensor-parallel group, say) pass the same one, and a save proves that they do.
        ranks: number of these ranks. A layout with another number, or with other sizes of Megatron, is another one.
        generators: further generators by name: `torch.Generator`, `random.Random` or `numpy.random.Generator`.
        layout: sizes by which the program has seeded torch, alike on ranks that must draw the same: {"pp": 2, "tp": 4}.
            A layout with other sizes is another one; there torch's seed stands for `rank`, as with Megatron.

    Raises:
        UsageError: `rank` and `ranks` do not fit each other, or a generator is of another kind.
    """
    if (rank is None) != (ranks is None) or (rank is not None and ranks is not None and not 0 <= rank < ranks):
        raise UsageError(f"rank {rank!r} of {ranks!r}: pass rank= and ranks= together, 0 <= rank < ranks")
    own = {f"own.{name}": own_source(name, generator) for name, generator in (generators or {}).items()}
    return RngState(None if rank is None or ranks is None else (rank, ranks), own, layout or {})


class RngState:
    """The state that `rng_state` returns. It implements `SupportsStreams`, with one stream for each rank.

    Inside another state it saves and loads by `state_dict` and `load_state_dict`, per rank.

    Args:
        place: `rank` and `ranks`, or None for those of the job.
        own: generators of the program, by name.
        layout: sizes by which the program has seeded torch.
    """

    takes_all_streams = False

    def __init__(
        self, place: tuple[int, int] | None, own: Mapping[str, RandomSource], layout: Mapping[str, int]
    ) -> None:
        self._given, self._own, self._seeded_by = place, own, dict(layout)

    def for_ranks(self, rank: int, ranks: int) -> RngState:
        """Return the same generators under another rank number, for a save by the ranks that are left."""
        return RngState((rank, ranks), self._own, self._seeded_by)

    @property
    def _place(self) -> tuple[int, int]:
        if self._given is not None:
            return self._given
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    @property
    def _layout(self) -> dict[str, int]:
        return framework_layout() | self._seeded_by

    def _sources(self) -> dict[str, RandomSource]:
        # Anew each time: devices and trackers may have come since.
        return {**process_sources(), **framework_sources(), **self._own}

    # --- in streams -----------------------------------------------------------------------------------------------

    @property
    def stream_count(self) -> int:
        """Number of ranks that draw different numbers."""
        return self._place[1]

    def shared_state(self) -> dict[str, Any]:
        """Return what must be equal for an exact load; see `SupportsStreams`."""
        return {"ranks": self._place[1], "layout": self._layout}

    def stream_states(self) -> dict[int, Any]:
        """Return the states of this rank's generators; see `SupportsStreams`."""
        return {self._place[0]: {name: source.get() for name, source in self._sources().items()}}

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Choose this rank's own states, or the first rank's at another layout; see `SupportsStreams`."""
        return [self._place[0] if shared == self.shared_state() else saved[0]]

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> list[str]:
        """Continue from these states, or from seeds derived from them; see `SupportsStreams`."""
        (found,) = states.values()
        return self._load(found, shared)

    # --- inside another state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's generators, with the rank and the layout."""
        return {"rank": self._place[0], "shared": self.shared_state(), "states": self.stream_states()[self._place[0]]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the states of this rank, or from seeds derived from those of another rank or layout."""
        shared = state["shared"] if state["rank"] == self._place[0] else None
        for note in self._load(state["states"], shared):
            _log.warning("random number generators: %s", note)

    def _load(self, states: States, shared: Any) -> list[str]:
        """Set all generators; return remarks for the user."""
        rank = self._place[0]
        sources, notes = self._sources(), []
        exact = shared == self.shared_state()
        if not exact:
            saved = "another rank" if shared is None else _place_in_words(shared)
            notes.append(
                f"saved for {saved}, and this is rank {rank} of {_place_in_words(self.shared_state())}: all generators are "
                "seeded anew, from the checkpoint and the rank"
            )
        elif lacking := sorted(sources.keys() - states.keys()):
            notes.append(f"the checkpoint lacks {', '.join(lacking)}: seeded from the checkpoint and the rank")
        if gone := sorted(states.keys() - sources.keys()):
            notes.append(f"this process has no {', '.join(gone)}")
        place = torch.initial_seed() if self._layout else rank
        for name, source in sources.items():
            if exact and name in states:
                source.set(states[name])
            else:
                known = states[name] if name in states else torch.cat([states[other] for other in sorted(states)])
                source.set(source.seeded(_seed(name, known, place if source.seed is None else source.seed)))
        return notes


def _place_in_words(shared: Mapping[str, Any]) -> str:
    ranks = "1 rank" if shared["ranks"] == 1 else f"{shared['ranks']} ranks"
    sizes = ", ".join(f"{name} {size}" for name, size in shared["layout"].items())
    return f"{ranks} ({sizes})" if sizes else ranks


def _seed(name: str, saved: torch.Tensor, place: int) -> int:
    """Return 64 bits that depend on all arguments, and are the same in every version."""
    seed = struct.pack("<Q", place % 2**64) + name.encode() + b"\0" + saved.numpy().tobytes()
    return xxhash.xxh3_64_intdigest(seed)
