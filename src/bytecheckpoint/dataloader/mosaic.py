"""Carry and check the state of MosaicML Streaming, which resumes at any data-parallel degree by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bytecheckpoint.dataloader.checks import check_in_order, check_shared
from bytecheckpoint.errors import UsageError

__all__ = ["MosaicLoader"]


class MosaicLoader:
    """Carries the position of a `StreamingDataLoader` (mosaicml-streaming 0.13); implements `SupportsStreams`.

    The position is one for all ranks. Streaming itself feeds the same global batches at any number of ranks, as long as the
    global batch, the seed and the number of canonical nodes stay as they were. Give the data set all of them, because the
    default of canonical nodes depends on the number of machines.

    Iterate over it instead of over the `StreamingDataLoader`.

    Args:
        loader: `StreamingDataLoader` over a `StreamingDataset`.

    Attributes:
        loader: the wrapped loader.

    Raises:
        UsageError: the loader is another one, or yields batches out of their order.
    """

    stream_count = 1  # all ranks have one position

    def __init__(self, loader: Any) -> None:
        from streaming import StreamingDataLoader, StreamingDataset

        if not isinstance(loader, StreamingDataLoader) or not isinstance(loader.dataset, StreamingDataset):
            raise UsageError(
                "a MosaicLoader wraps a StreamingDataLoader over a StreamingDataset, not a "
                f"{type(loader).__name__} over a {type(getattr(loader, 'dataset', None)).__name__}"
            )
        check_in_order(loader)
        if loader.batch_size is None:
            raise UsageError("the StreamingDataLoader needs a batch_size, of which the global batch is made")
        self.loader = loader
        self._ended = False  # True if the last iteration has come to the end of its epoch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches from the position to the end of the epoch."""
        self._ended = False
        yield from self.loader
        self._ended = True

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.loader)

    # --- state ----------------------------------------------------------------------------------------------------

    def shared_state(self) -> Any:
        """Return Streaming's own state, and the facts that decide the global batches."""
        state = self.loader.state_dict()  # it sets the default of canonical nodes too
        if self._ended:  # Streaming would feed an epoch of nothing after a load
            state |= {"epoch": state["epoch"] + 1, "sample_in_epoch": 0}
        return self._settings() | {"state": state}

    def _settings(self) -> dict[str, Any]:
        from streaming.base.world import World

        data = self.loader.dataset
        settings = {
            "loader": type(self).__name__,
            "samples": data.num_samples,
            "epoch_size": data.epoch_size,
            "global_batch": self.loader.batch_size * World.detect().num_ranks // (data.replication or 1),
            "batching_method": data.batching_method,
            "sampling_method": data.sampling_method,
            "shuffle": data.shuffle,
            "shuffle_algo": data.shuffle_algo,
            "shuffle_seed": data.shuffle_seed,
        }
        # None until the data set is used: the default is taken from the checkpoint then.
        nodes = data.num_canonical_nodes
        return settings | ({"num_canonical_nodes": nodes} if nodes else {})

    def stream_states(self) -> Mapping[int, Any]:
        """Return the one stream. It is empty, since the position is shared."""
        return {0: {}}

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Check that this loader has the order of a checkpoint.

        Raises:
            IncompatibleCheckpointError: the order or the data set is another one; the message has the differences.
        """
        check_shared(shared, self._settings())
        return saved

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Continue from the position of a checkpoint."""
        self.loader.load_state_dict(shared["state"])
        self.loader.num_samples_yielded = 0  # since the position, which Streaming forgets
        self._ended = False
