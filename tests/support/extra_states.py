"""Modules with an extra state."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["LinearWithExtraState", "WithExtraState"]


class WithExtraState(nn.Module):
    """A module whose extra state is the attribute `extra`."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class LinearWithExtraState(WithExtraState, nn.Linear):
    """A linear layer with an extra state."""
