"""Follow the versions of a publisher with the weights of an engine, which may change its own after a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bytecheckpoint.integrations.engines.lazy_weights import WantedWeight
from bytecheckpoint.layouts.layout import Layout
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.publishing import Follower, FollowReport

__all__ = ["FollowedWeights"]


class FollowedWeights:
    """The parts of a rank of an engine in host memory, to which changes are applied.

    Args:
        root: folder to which versions are published.
        layouts: layouts through which they are seen.
        state: name of the state that is the model.
        ranks: process group of the engine's ranks; None for one rank.
        wanted: parts of each tensor that the model copies.
        dtypes: dtype of each tensor in the versions.

    Attributes:
        parts: memory of the parts in these dtypes.
    """

    def __init__(
        self,
        root: str,
        layouts: Sequence[Layout] | None,
        state: str,
        ranks: Any,
        wanted: Mapping[str, WantedWeight],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self.parts = {name: weight.kept(dtypes[name]) for name, weight in wanted.items()}
        self._state = state
        options = LoadOptions(strict={state: False})
        self._follower = Follower(root, layout=layouts, options=options, process_group=ranks)

    @property
    def path(self) -> str:
        """The address of the version that the parts have."""
        assert self._follower.version is not None
        return self._follower.version.path

    def update(self) -> FollowReport | None:
        """Bring the parts to the newest version, or leave all as they are. Returns and raises as `Follower.update`."""
        return self._follower.update({self._state: dict(self.parts)})

    def fill(self, wanted: Mapping[str, WantedWeight]) -> None:
        """Copy the parts into the memory of the same ones of a model."""
        for name, weight in wanted.items():
            for box, memory in weight.boxes.items():
                memory.copy_(self.parts[name].boxes[box])
            for memory, first in weight.copies:
                memory.copy_(first)
