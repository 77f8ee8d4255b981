"""Find out what a save with staging="background" must copy in the call, and prove the copy of the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from operator import attrgetter

import numpy as np
import torch
from msgspec.structs import replace

from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.engine.runs import Runs
from bytecheckpoint.engine.samples import CopiedRanges, SamplePlaces, TensorSamples
from bytecheckpoint.engine.staging import ImageFile
from bytecheckpoint.engine.tensor_bytes import movable
from bytecheckpoint.errors import StateChangedError, listed
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.shards import LiveShard, LiveState
from bytecheckpoint.step_fence import storage_identity, watch

__all__ = ["StateProof", "SteadyShards", "StillnessTrial", "copy_volatile", "current_trial", "versions_of"]

#: Names of changed tensors that an error carries to other ranks.
_MOST_NAMES = 10


def copy_volatile(states: Iterable[LiveState]) -> int:
    """Copy what may change before an optimizer steps, and detach the rest from the program's own tensors.

    Buffers, extra states and streams are copied, but not streams that are snapshots; a copy lies on the device of its
    tensor. A tensor whose memory the program exchanges (`.data =`) keeps the old memory here.

    Args:
        states: captured states.

    Returns:
        Bytes that were copied.
    """
    copied = 0
    with torch.no_grad():
        for state in states:
            if state.later is not None:
                copied += sum(state.later.copy(number, _copy) for number in state.later.moving)
            streamed = (shard for part in state.streams if part.fill is None for shard in part.shards)
            for shard in (*state.shards, *streamed):
                if not shard.stands_still:
                    shard.data = _copy(shard.data)
                    copied += shard.data.nbytes
                else:
                    shard.data = shard.data.detach()
    return copied


def _copy(data: torch.Tensor) -> torch.Tensor:
    return movable(data).clone().view(data.dtype)


class SteadyShards:
    """Shards that stand still, among all of a save: what does not depend on their content.

    Args:
        shards: all shards of the save.

    Attributes:
        numbers: numbers of those that stand still, [n].
        keys: their keys, [n].
        fragments: their fragments, None for one box, [n].
        places: places of their samples.
    """

    def __init__(self, shards: Sequence[LiveShard]) -> None:
        self.numbers = np.flatnonzero([shard.stands_still for shard in shards])
        steady = [shards[number] for number in self.numbers.tolist()]
        self.keys = [shard.key for shard in steady]
        self.fragments = [shard.fragments for shard in steady]
        self.places = SamplePlaces.of(self.all_bytes([shard.data for shard in steady]))

    def all_bytes(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | Runs]:
        """Return the bytes of the shards, whose tensors are given."""
        pairs = zip(tensors, self.fragments, strict=True)
        return [data if found is None else Runs(data, found.places, found.counts) for data, found in pairs]


class StateProof:
    """Facts about the shards that stand still, taken in the call, by which the copy made of them later is proven.

    The version counters of torch show changes by its operations. Fused optimizers and writes through `.data` or numpy do
    not raise them; samples show these, unless they change a few elements only.

    Args:
        tensors: tensors of all shards of the save; those that were copied in the call need no proof.
        steady: those that stand still, among these shards or earlier ones of the same objects.
        settle: function that calls `watch`, if it was not called before.
        full: True to hash all bytes too.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        steady: SteadyShards,
        settle: Callable[[], object] = tuple,
        *,
        full: bool = False,
    ) -> None:
        self._settle = settle
        self._full = full
        self._steady = steady
        self._tensors = [tensors[number] for number in steady.numbers.tolist()]
        self._versions = versions_of(self._tensors)
        self._open = np.ones(len(self._tensors), bool)  # those whose bytes are still read
        with torch.no_grad():
            self._samples = self._read_samples()

    def watch(self, shards: Sequence[LiveShard], exchanged: Sequence[int]) -> None:
        """Look at shards from now on, instead of the program's own tensors.

        Args:
            shards: all shards of the save.
            exchanged: numbers of those whose tensors have other memory meanwhile: only samples prove these.
        """
        tensors = [shards[number].data for number in self._steady.numbers.tolist()]
        if exchanged:
            others = np.isin(self._steady.numbers, exchanged)
            self._versions = np.where(others, versions_of(tensors), self._versions)
        self._tensors = tensors

    def storages(self) -> frozenset[int]:
        """Return the identities of the memory of all tensors that are not proven yet."""
        return frozenset(storage_identity(self._tensors[number]) for number in np.flatnonzero(self._open).tolist())

    def error_of_versions(self) -> StateChangedError | None:
        """Return an error if an operation of torch has changed a tensor since the call; None otherwise."""
        if (tensors := self._tensors) and (versions_of(tensors) != self._versions).any():
            self._settle()  # a tensor with other memory is not the one of the save
            return self._error(np.flatnonzero(versions_of(self._tensors) != self._versions))
        return None

    def check(
        self,
        sources: Sequence[tuple[int, int, int]],
        files: Sequence[ImageFile],
        pool: StagingPool | None,
        later: Collection[int] = (),
    ) -> None:
        """Check a copy, and release the tensors if nothing is left to check.

        Args:
            sources: shard, first and end box of each tensor of the image, as in `RankImage`.
            files: files of the image.
            pool: pool that holds the image; None if it was too small.
            later: shards of which bytes are still to be read: only they are looked at when this is called again.

        Raises:
            StateChangedError: the program has changed tensors since the call.
        """
        left = np.zeros(len(self._open), bool)
        try:
            with torch.no_grad():
                # The tensors too: of an operation that is at work now, the copy may have a part without samples, and the
                # counter rises at its end.
                differing = self._samples.differing_from(self._read_samples())
                if pool is not None:
                    # A rank that writes nothing has no memory in the pool.
                    memory = pool.tensor().numpy() if pool.capacity else np.zeros(0, np.uint8)
                    differing = np.union1d(differing, self._samples.differing(self._copied(sources, files), memory))
            # Versions last: an operation raises them when it has ended.
            if (error := self._error(differing) or self.error_of_versions()) is not None:
                raise error
            left = np.isin(self._steady.numbers, [*later])
        finally:
            self._open = left
            if not left.any():
                self._tensors = []

    def _read_samples(self) -> TensorSamples:
        return self._steady.places.read(self._steady.all_bytes(self._tensors), full=self._full)

    def _copied(self, sources: Sequence[tuple[int, int, int]], files: Sequence[ImageFile]) -> CopiedRanges:
        """Return where the image holds the bytes of the shards."""
        number_of: dict[int, int] = {shard: number for number, shard in enumerate(self._steady.numbers.tolist())}
        columns: list[tuple[int, int, int]] = []
        for file in files:
            for source, start, size in zip(file.shards, file.starts.tolist(), file.sizes.tolist(), strict=True):
                shard, first, _ = sources[source]
                number = number_of.get(shard)
                if number is None:
                    continue
                found = self._steady.fragments[number]
                before = 0 if found is None else int(found.counts[:first].sum()) * self._tensors[number].element_size()
                begin = int(self._samples.starts[number]) + before
                columns.append((begin, begin + size, file.start + start))
        return CopiedRanges(*np.array(sorted(columns), np.int64).reshape(-1, 3).T)

    def _error(self, numbers: Int64s) -> StateChangedError | None:
        names = [str(self._steady.keys[number]) for number in numbers[self._open[numbers]].tolist()]
        if not names:
            return None
        return StateChangedError(
            f"{listed(names, _MOST_NAMES)} changed while a save copied it in the background: call bytecheckpoint.fence() "
            "before code of your own changes the state, or save with staging='blocking'",
            tensors=tuple(names[:_MOST_NAMES]),
        )


class StillnessTrial:
    """Finds out whether a program leaves its state alone between a save and the next step of an optimizer.

    Attributes:
        begun: True when the save has captured its state.
        outcome: None until a step or another fence comes; then "" if nothing has changed, else the reason.
    """

    def __init__(self) -> None:
        self.begun = False
        self.outcome: str | None = None

    @contextlib.contextmanager
    def behind_save(self) -> Iterator[None]:
        """Begin behind the save that this thread makes in a `with` block."""
        token = _trial.set(self)
        try:
            yield
        finally:
            _trial.reset(token)

    def begin(self, shards: Iterable[LiveShard], reason: str) -> None:
        """Begin with the shards of a save, or with a reason for which they cannot be copied in the background."""
        self.begun = True
        if reason:
            self.outcome = reason
            return
        own = [replace(shard, data=shard.data.detach()) for shard in shards]
        proof = StateProof([shard.data for shard in own], SteadyShards(own))
        watch(partial(self._look, proof))

    def _look(self, proof: StateProof) -> None:
        try:
            proof.check((), (), None)
        except StateChangedError as error:
            self.outcome = f"{listed(error.tensors, 3)} changed before the next step of an optimizer"
        except Exception as error:  # noqa: BLE001  training continues
            self.outcome = f"the state could not be looked at: {error}"
        else:
            self.outcome = ""


_trial: ContextVar[StillnessTrial | None] = ContextVar("bytecheckpoint_trial", default=None)


def current_trial() -> StillnessTrial | None:
    """Return the trial that begins behind this thread's save, if there is one."""
    return _trial.get()


_version_of = attrgetter("_version")


def versions_of(tensors: Sequence[torch.Tensor]) -> Int64s:
    """Return torch's counts of the changes of tensors. Tensors of the inference mode have none."""
    try:
        return np.fromiter(map(_version_of, tensors), np.int64, len(tensors))
    except RuntimeError:
        return np.array([0 if tensor.is_inference() else tensor._version for tensor in tensors], np.int64)
