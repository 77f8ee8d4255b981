"""What a torchtitan training holds, as states of a save."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import OptimizersContainer

from bytecheckpoint.dataloader import TorchdataLoader
from bytecheckpoint.dataloader.hugging_face import check_exact
from bytecheckpoint.errors import UsageError
from bytecheckpoint.integrations.generators import DelayedGenerators

__all__ = ["begin_iteration", "generators_of", "loader_state", "optimizers_of"]

_log = logging.getLogger("bytecheckpoint")
_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


def optimizers_of(container: Any) -> list[Any]:
    """Return the optimizers inside of torchtitan's container, which is an Optimizer too, without any state.

    Raises:
        UsageError: the container has a state of its own.
    """
    for method in ("state_dict", "load_state_dict"):
        if getattr(type(container), method) is not getattr(OptimizersContainer, method):
            raise UsageError(
                f"a {type(container).__name__} has a {method} of its own, whose state would be lost: train with an "
                "OptimizersContainer"
            )
    return list(container.optimizers)


def loader_state(loader: Any) -> Any:
    """Return what saves a data loader, None for none.

    A loader with streams goes on at any data-parallel degree, torchtitan's own at the same one. Others are saved per rank.
    """
    if not isinstance(loader, ParallelAwareDataloader):
        return loader
    # torchtitan's data sets have that of Hugging Face inside.
    try:
        check_exact(
            getattr(loader.dataset, "_data", None), "feed it by TokenBufferLoader or HuggingFaceLoader(replay=True)"
        )
    except UsageError as error:
        _log.warning("a resumed run will not go on with exactly the next samples: %s", error)
    return _LoaderOfRank(loader, rank=loader.dp_rank, ranks=loader.dp_world_size)


def begin_iteration(loader: Any) -> None:
    """Have the next `iter(loader)` draw no random number; call it after a load, before generators are restored."""
    if isinstance(loader, StatefulDataLoader):
        loader.state_dict()  # makes the iterator, which draws a seed and is taken by the next `iter`


class _LoaderOfRank(TorchdataLoader):
    """The state of a loader of one data-parallel rank, without the pickle in which torchtitan wraps it."""

    def _divisible_sampler(self) -> None:
        super()._divisible_sampler()  # which refuses what is not exact

    @property
    def _wraps(self) -> bool:
        return type(self.loader).state_dict is ParallelAwareDataloader.state_dict

    def stream_states(self) -> Mapping[int, Any]:
        """Return the state of this rank; see `SupportsStreams`."""
        state = StatefulDataLoader.state_dict(self.loader) if self._wraps else self.loader.state_dict()
        return {self._rank: state}

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Go on from the state of this rank; see `SupportsStreams`."""
        load = StatefulDataLoader.load_state_dict if self._wraps else type(self.loader).load_state_dict
        load(self.loader, states[self._rank])


def generators_of(trainer: Any) -> DelayedGenerators:
    """Return the random number generators.

    torchtitan seeds ranks alike but for the stages of a pipeline, and its DTensors need that.

    Args:
        trainer: whose `parallel_dims` say how the ranks are seeded.
    """
    sizes = getattr(trainer, "parallel_dims", None)
    return DelayedGenerators({name: getattr(sizes, name) for name in _DIMENSIONS if hasattr(sizes, name)})
