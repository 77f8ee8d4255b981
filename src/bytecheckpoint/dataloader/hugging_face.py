"""Feed the examples of streaming data sets of Hugging Face, and resume exactly at any data-parallel degree."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from bytecheckpoint.dataloader.checks import check_rank, check_shared, share
from bytecheckpoint.dataloader.hugging_face_steps import part_of, passes_all_rows, steps_of
from bytecheckpoint.dataloader.sources.facts import changed_facts, data_facts
from bytecheckpoint.dataloader.trained import TrainedBatches
from bytecheckpoint.errors import UsageError

__all__ = ["HuggingFaceLoader", "check_exact"]

_END = object()


class HuggingFaceLoader:
    """Feeds the examples of a `datasets.IterableDataset`; implements `SupportsStreams`.

    `split_dataset_by_node` divides the data set into a fixed number of *streams*. A global batch takes equally many
    examples from every stream, in the order of the streams, and a rank feeds a run of streams that follow each other. So
    the global batch is the same for every number of ranks.

    Iterate over the loader for this rank's part of one global batch after the other. It never ends: a stream that has
    been read starts its next epoch (`set_epoch`) by itself, so that every batch is full. Count steps. A second `for`
    continues where the first one ended. The loader reads in the calling thread.

    The position of a stream is `IterableDataset.state_dict`. That is not exact behind a shuffle buffer, whose examples it
    leaves out, nor behind a batched `map` in a table format, nor behind any `map` or `filter` before `datasets` 5.2. Such
    data sets need `replay`.

    Args:
        dataset: streaming data set. Shuffle it with a fixed seed: `shuffle(seed=..., buffer_size=1)` shuffles the shards.
        global_batch: number of examples that all ranks together feed in a step.
        streams: number of streams, at least the largest number of ranks. It divides `global_batch`, and never changes
            during a run. If it is a divisor of the number of shards, no stream reads examples of others.
        rank: number of this rank among those that feed different data (the data-parallel rank).
        ranks: number of these ranks.
        collate: function list of examples -> batch; by default, the list itself.
        replay: True to read each stream again from the start of its epoch after a load, and to skip the fed examples. That
            is exact for every data set whose order is fixed, and takes as long as feeding it did.
        fingerprint: version or hash that identifies the data set; None: what is known of it without reading it is compared
            (rows, features, names and sizes of files).
        kept: number of batches before the last one behind which `trained` can set the position. None is kept by default,
            because that takes the state of the data set at every batch.

    Raises:
        UsageError: an argument is out of its range, or the data set needs `replay`.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        *,
        streams: int,
        rank: int | None = None,
        ranks: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        replay: bool = False,
        fingerprint: str | int | None = None,
        kept: int = 0,
    ) -> None:
        from datasets import IterableDataset

        if not isinstance(dataset, IterableDataset):
            raise UsageError(
                f"a HuggingFaceLoader takes a streaming data set (load_dataset(..., streaming=True)), and this is a "
                f"{type(dataset).__name__}; a map-style one goes into a DataLoader with a ResumableSampler"
            )
        self._rank, self._ranks = check_rank(rank, ranks)
        if type(streams) is not int or streams < self._ranks:
            raise UsageError(f"streams is {streams!r}, which is no stream for each of {self._ranks} ranks")
        if type(global_batch) is not int or global_batch < 1 or global_batch % streams:
            raise UsageError(
                f"a global batch of {global_batch!r} examples cannot take equally many from {streams} streams"
            )
        if not replay:
            check_exact(dataset, "pass replay=True to read the fed examples again")
        self._global_batch, self._count, self._fingerprint = global_batch, streams, fingerprint
        self._collate, self._replay = collate, replay
        self._seeds = _seeds(dataset)
        self._facts = data_facts(dataset) if fingerprint is None else {}
        self._between_batches, self._counts = True, TrainedBatches(kept)
        self._past: dict[int, Mapping[int, Any]] = {}  # states by number of batches
        self._streams = {
            n: _ExampleStream(dataset, n, streams, replay) for n in share(streams, self._rank, self._ranks)
        }

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's parts of the global batches, without end."""
        while True:
            yield self._next()

    def _next(self) -> Any:
        self._check_between_batches()
        self._counts.check_next()
        if self._counts.kept:
            self._past[self.batches] = self._states_now()
        each = self._global_batch // self._count
        self._between_batches = False
        examples = [stream.next() for stream in self._streams.values() for _ in range(each)]
        self._between_batches = True
        self._counts.taken += 1
        self._past = {n: states for n, states in self._past.items() if n >= self._counts.oldest}
        return examples if self._collate is None else self._collate(examples)

    @property
    def batches(self) -> int:
        """Number of global batches of the run that were taken so far."""
        return self._counts.taken

    def trained(self, batches: int) -> None:
        """Set how many batches of the run were trained, as `TokenBufferLoader.trained` does. It needs `kept`."""
        self._counts.train(batches)

    def close(self) -> None:
        """End the threads and files with which the data set reads. The next batch opens them again, at the position.

        Without it they end with this object: in whichever thread the garbage collector runs then, even if that one holds a
        lock for which the threads of the data set wait.
        """
        for stream in self._streams.values():
            stream.close()

    def __enter__(self) -> HuggingFaceLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_between_batches(self) -> None:
        if not self._between_batches:
            raise UsageError(
                "reading was broken off in the middle of a batch, so the position of this loader is not known: load a "
                "checkpoint into it to continue"
            )

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def stream_count(self) -> int:
        """Number of streams of all ranks."""
        return self._count

    def shared_state(self) -> Any:
        """Return the facts that decide the global batches, and the number of those before the position."""
        return self._settings() | {"batches": self._counts.position}

    def _settings(self) -> dict[str, Any]:
        return {
            "loader": type(self).__name__,
            "streams": self._count,
            "global_batch": self._global_batch,
            "replay": self._replay,
            "shuffle_seeds": self._seeds,
            "dataset_fingerprint": self._fingerprint,
            "data": self._facts,
        }

    def _states_now(self) -> dict[int, Any]:
        return {number: stream.state() for number, stream in self._streams.items()}

    def stream_states(self) -> Mapping[int, Any]:
        """Return the positions of this rank's streams.

        Raises:
            UsageError: an error or a signal has broken off the reading of a batch.
        """
        self._check_between_batches()
        position = self._counts.position
        return self._states_now() if position == self.batches else self._past[position]

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Return the streams of this rank.

        Raises:
            IncompatibleCheckpointError: the checkpoint is of other data, or has other streams.
        """
        check_shared(shared, self._settings(), compare={"data": changed_facts})
        return [*self._streams]

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Continue from the positions of this rank's streams."""
        for number, stream in self._streams.items():
            stream.resume(states[number])
        self._between_batches = True
        self._counts.begin(shared.get("batches", 0))


class _ExampleStream:
    """One part of the data set, fed again and again."""

    def __init__(self, dataset: Any, number: int, count: int, replay: bool) -> None:
        self._dataset, self._number, self._count, self._replay = dataset, number, count, replay
        self._examples: Generator[Any] | None = None
        self._part: Any = None
        self._epoch = self._fed = 0  # of the epoch
        self._state: Any = None  # to resume from, until the first example

    def next(self) -> Any:
        """Return the next example.

        Raises:
            UsageError: the part is empty.
        """
        while True:
            if self._examples is None:
                self._examples = self._open()
            example = next(self._examples, _END)
            if example is not _END:
                self._fed += 1
                return example
            if not self._fed:
                raise UsageError(
                    f"stream {self._number} of {self._count} has no examples: the data set needs fewer streams"
                )
            self._epoch, self._fed, self._state, self._examples = self._epoch + 1, 0, None, None

    def _open(self) -> Generator[Any]:
        # A data set that was told a state starts from it each time, so every epoch has a part of its own.
        self._part = part_of(self._dataset, self._number, self._count, self._epoch)
        if self._state is not None:
            self._part.load_state_dict(self._state)
        examples: Generator[Any] = iter(self._part)
        if self._replay:
            for _ in range(self._fed):
                next(examples, None)
        return examples

    def state(self) -> dict[str, Any]:
        started = self._examples is not None and self._fed
        state = self._part.state_dict() if started and not self._replay else self._state
        return {"epoch": self._epoch, "fed": self._fed, "dataset": state}

    def resume(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._fed, self._state = state["epoch"], state["fed"], state["dataset"]
        examples, self._examples = self._examples, None
        if examples is not None:
            examples.close()

    def close(self) -> None:
        self.resume(self.state())


def check_exact(dataset: Any, remedy: str) -> None:
    """Check that the state of a data set is complete; the documentation of its `state_dict` names the exceptions.

    Args:
        dataset: any object; others than streaming data sets pass.
        remedy: advice for the error.

    Raises:
        UsageError: the state would leave something out.
    """
    for step in steps_of(dataset):
        reason = ""
        if type(step).__name__ == "BufferShuffledExamplesIterable" and step.buffer_size > 1:
            reason = f"its shuffle buffer of {step.buffer_size} examples"
        if getattr(step, "batched", False) and getattr(getattr(step, "formatting", None), "is_table", False):
            reason = "its batched map in a table format"
        if hasattr(step, "function") and not passes_all_rows():
            reason = "examples behind its map or filter, before version 5.2 of datasets"
        if reason:
            raise UsageError(
                f"the state of this data set leaves out {reason}: {remedy}, or make the data set without it"
            )


def _seeds(dataset: Any) -> str:
    """Describe the seeds of a data set. A seed that was not given is another one in each process."""
    generators = [
        step.generator for step in steps_of(dataset) if hasattr(getattr(step, "generator", None), "bit_generator")
    ]
    return xxhash.xxh3_64_hexdigest(repr([generator.bit_generator.state for generator in generators]).encode())
