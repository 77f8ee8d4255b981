"""Resume map-style data sets with torch's own DataLoader exactly at any data-parallel degree."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from bytecheckpoint.dataloader.checks import check_allow, check_in_order, check_rank, check_shared, share
from bytecheckpoint.dataloader.sources.facts import changed_facts, data_facts
from bytecheckpoint.dataloader.trained import TrainedBatches
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError

__all__ = ["ResumableLoader", "ResumableSampler"]

#: Names of changes between a save and a load that a caller may allow -> their effect.
_ALLOWED = {
    "global_batch": "each batch takes another number of samples, from where the last one ended",
    "drop_last": "the samples that do not fill a batch are fed, or not, from this epoch on",
}


class ResumableSampler(Sampler[list[int]]):
    """Batches of the indices of a map-style data set: `batch_sampler=` of a DataLoader.

    Each epoch has one order of all samples, the order of torch's DistributedSampler of the same seed and epoch. Global
    batch b is the b-th `global_batch` of these, and a rank feeds its share of each: a run that follows the one of the
    rank before it. So the global batches are those of a DistributedSampler, and the same for every number of ranks.

    Wrap the DataLoader in a `ResumableLoader`, which counts the batches that the training takes: workers ask the sampler
    for indices long before that.

    Args:
        dataset: data set, of which the length is used, and some items if they are plain values.
        global_batch: number of samples that all ranks together feed in a step. If the number of ranks does not divide it,
            the first ranks feed a sample more: weigh their losses by the samples.
        rank: number of this rank among those that feed different data (the data-parallel rank).
        ranks: number of these ranks.
        shuffle: True for an order of its own in each epoch, False for the order of the data set.
        seed: seed of all orders.
        drop_last: True to drop the samples of an epoch that do not fill a global batch; False to feed them as a smaller
            one. Nothing is fed twice in an epoch.
        fingerprint: version or hash that identifies the data set among those of its length; None: some items are compared,
            of lists, tensors and data sets of Hugging Face, and file names of torchvision's folders.
        allow: changes since the checkpoint that are accepted: "global_batch", "drop_last".

    Attributes:
        epoch: number of the epoch, from 0 on.
        taken: number of samples of the epoch that all ranks together have fed.

    Raises:
        UsageError: an argument is out of its range; the message names it.
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch: int,
        *,
        rank: int | None = None,
        ranks: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        fingerprint: str | int | None = None,
        allow: Collection[str] = (),
    ) -> None:
        self._rank, self._ranks = check_rank(rank, ranks)
        self._allow = check_allow(allow, _ALLOWED)
        self.length, self.global_batch = len(dataset), global_batch
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._fingerprint, self._facts = fingerprint, data_facts(dataset) if fingerprint is None else {}
        self.epoch = self.taken = 0
        if type(global_batch) is not int or not self._ranks <= global_batch:
            raise UsageError(f"global_batch is {global_batch!r}, which is no sample for each of {self._ranks} ranks")
        if not self._count(0):
            raise UsageError(f"a data set of {self.length} samples has no global batch of {global_batch}")
        rest = self._too_few(0)
        if rest:
            raise UsageError(f"{rest}: pass drop_last=True, or another global_batch")

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._count(0)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the indices of this rank, from the position to the end of the epoch."""
        return self._batches(self.epoch, self.taken)  # the position now, not that when the first one is asked for

    def _batches(self, epoch: int, taken: int) -> Iterator[list[int]]:
        order = None
        if self._shuffle:
            generator = torch.Generator()
            generator.manual_seed(self._seed + epoch)  # as DistributedSampler does
            order = torch.randperm(self.length, generator=generator)
        for _ in range(self._count(taken)):
            size = min(self.global_batch, self.length - taken)
            own = share(size, self._rank, self._ranks)
            first, end = taken + own.start, taken + own.stop
            yield [*range(first, end)] if order is None else order[first:end].tolist()
            taken += size

    def advance(self) -> None:
        """Count a batch that the training took. After the last batch of an epoch, the position is the start of the next."""
        self.taken += min(self.global_batch, self.length - self.taken)
        if not self._count(self.taken):
            self.epoch, self.taken = self.epoch + 1, 0

    def seek(self, epoch: int, taken: int = 0) -> None:
        """Set the position to an epoch, behind its first `taken` samples."""
        if epoch < 0 or not 0 <= taken <= self.length:
            raise UsageError(
                f"there is no position behind {taken} samples of epoch {epoch}; an epoch has {self.length}"
            )
        if rest := self._too_few(taken):
            raise UsageError(f"{rest}: pass drop_last=True, or another global_batch")
        self.epoch, self.taken = epoch, taken
        if not self._count(taken):
            self.epoch, self.taken = epoch + 1, 0

    def settings(self) -> dict[str, Any]:
        """Return the facts that decide the order, for a checkpoint."""
        return {
            "dataset_length": self.length,
            "dataset_fingerprint": self._fingerprint,
            "data": self._facts,
            "global_batch": self.global_batch,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }

    def check(self, saved: Any, own: Mapping[str, Any]) -> None:
        """Check that this sampler has the order of a checkpoint.

        Raises:
            IncompatibleCheckpointError: the order or the data set is another one.
        """
        check_shared(saved, own, allow=self._allow, allowed=_ALLOWED, compare={"data": changed_facts})
        if rest := self._too_few(saved["taken"]):
            raise IncompatibleCheckpointError(f"{rest}: pass drop_last=True, or another global_batch")

    def _count(self, taken: int) -> int:
        """Return the number of batches that follow in the epoch."""
        return (self.length - taken + (0 if self._drop_last else self.global_batch - 1)) // self.global_batch

    def _too_few(self, taken: int) -> str:
        """Return an error text, or "", if a rank has no sample in the last batch of the epoch and would hang."""
        last = (self.length - taken) % self.global_batch
        if self._drop_last or not 0 < last < self._ranks:
            return ""
        return f"the last global batch of the epoch has {last} samples, which is none for some of {self._ranks} ranks"


class ResumableLoader:
    """Counts the batches that the training takes from a DataLoader, so that a checkpoint holds its position.

    Iterate over it instead of over the DataLoader, and pass it as `states["dataloader"]` to save and load; it implements
    `SupportsStreams`. It feeds the rest of the epoch, and the next `for` the next epoch: `set_epoch` is not needed. After a
    `break`, the next `for` continues behind the last batch that was taken. Workers, pinning and collation are the
    DataLoader's own: a `StatefulDataLoader` of torchdata serves too. Random numbers that augmentations draw in the workers
    are not a part of the state: seed them by epoch and index.

    >>> from torch.utils.data import DataLoader
    >>> loader = ResumableLoader(DataLoader(range(6), batch_sampler=ResumableSampler(range(6), 3, shuffle=False)))
    >>> [batch.tolist() for batch in loader]
    [[0, 1, 2], [3, 4, 5]]
    >>> loader.sampler.epoch, loader.sampler.taken
    (1, 0)

    Args:
        loader: DataLoader whose `batch_sampler` is a `ResumableSampler`.
        kept: number of batches before the last one behind which `trained` can still set the position.

    Attributes:
        loader: the DataLoader.
        sampler: sampler of the DataLoader, which holds the position.

    Raises:
        UsageError: the DataLoader has another sampler or data set, or yields batches out of their order.
    """

    stream_count = 1  # all ranks have one position

    def __init__(self, loader: Iterable[Any], *, kept: int = 4) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, ResumableSampler):
            raise UsageError(
                f"a ResumableLoader needs a DataLoader with batch_sampler=ResumableSampler(...), and this "
                f"{type(loader).__name__} has a {type(sampler).__name__}"
            )
        length = len(loader.dataset)  # type: ignore[attr-defined]
        if length != sampler.length:
            raise UsageError(
                f"the data set has {length} samples in the DataLoader, and {sampler.length} in its sampler"
            )
        check_in_order(loader)
        self.loader, self.sampler = loader, sampler
        self._iteration = 0
        self._loaded = False
        self._counts = TrainedBatches(kept)
        self._positions = {0: (0, 0)}  # by number of batches: epoch, samples that were taken

    @property
    def batches(self) -> int:
        """Number of global batches of the run that were taken so far."""
        return self._counts.taken

    def trained(self, batches: int) -> None:
        """Set how many batches of the run were trained, as `TokenBufferLoader.trained` does."""
        self._counts.train(batches)

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, at which a loop over epochs starts after a load."""
        return self.sampler.epoch

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches from the position to the end of the epoch.

        Raises:
            UsageError: another iteration, a load or `set_epoch` has moved the position meanwhile.
        """
        self._loaded = False
        self._iteration += 1
        return self._counted(self._batches(), self._iteration)

    def _batches(self) -> Iterator[Any]:
        """Begin an iteration. The rest of an epoch draws no random number: its beginning has drawn that of the epoch."""
        if not self.sampler.taken:
            return iter(self.loader)
        generator: torch.Generator = getattr(self.loader, "generator", None) or torch.default_generator
        before = generator.get_state()
        try:
            return iter(self.loader)
        finally:
            generator.set_state(before)

    def _counted(self, batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        for batch in batches:
            if iteration != self._iteration:
                raise UsageError("the position of this loader has moved since this iteration began: begin another one")
            self._counts.check_next()
            self._positions[self.batches] = (self.sampler.epoch, self.sampler.taken)
            self.sampler.advance()
            self._counts.taken += 1
            self._positions = {n: place for n, place in self._positions.items() if n >= self._counts.oldest}
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch. This changes nothing if the position lies in that epoch.

        Raises:
            UsageError: a checkpoint was just loaded, and its position is in another epoch.
        """
        if epoch == self.epoch:
            return
        if self._loaded:
            raise UsageError(
                f"the checkpoint continues in epoch {self.epoch}, and epoch {epoch} would lose its position: start the "
                "loop over epochs there (range(loader.epoch, ...))"
            )
        self.sampler.seek(epoch)
        self._iteration += 1

    # --- state ----------------------------------------------------------------------------------------------------

    def shared_state(self) -> Any:
        """Return the position, and the facts that decide the order."""
        batches, place = self._counts.position, (self.sampler.epoch, self.sampler.taken)
        epoch, taken = place if batches == self.batches else self._positions[batches]
        return {
            "loader": "ResumableLoader",
            **self.sampler.settings(),
            "epoch": epoch,
            "taken": taken,
            "batches": batches,
        }

    def stream_states(self) -> Mapping[int, Any]:
        """Return the one stream. It is empty, since the position is shared."""
        return {0: {}}

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Check that this loader has the order of a checkpoint.

        Raises:
            IncompatibleCheckpointError: the order or the data set is another one; the message has the differences.
        """
        self.sampler.check(shared, {"loader": "ResumableLoader"} | self.sampler.settings())
        return saved

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Continue from the position of a checkpoint. An iteration that has begun ends with an error."""
        self.sampler.seek(shared["epoch"], shared["taken"])
        before = shared["epoch"] * len(self) + -(-shared["taken"] // self.sampler.global_batch)  # where nothing counted
        self._counts.begin(shared.get("batches", before))
        self._loaded = True
        self._iteration += 1
