"""Restore random number generators later than the other states."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from bytecheckpoint.frameworks.rng.state import RngState

__all__ = ["DelayedGenerators"]

_log = logging.getLogger("bytecheckpoint")


class DelayedGenerators(RngState):
    """All random number generators, as `rng_state` returns them. A load has no effect until `restore` is called.

    Between a load and the first step tools draw numbers, for example when they skip batches.

    Args:
        layout: sizes of the parallel dimensions, as for `rng_state`.
    """

    def __init__(self, layout: Mapping[str, int] | None = None) -> None:
        super().__init__(None, {}, layout or {})
        self._loaded: tuple[Any, Mapping[int, Any]] | None = None

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> list[str]:
        """Keep the states for `restore`."""
        self._loaded = shared, states
        return []

    def restore(self) -> None:
        """Set the generators to the loaded states, if any."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        for note in super().load_streams(*loaded):
            if self._place[0] == 0:
                _log.warning("random number generators: %s", note)
