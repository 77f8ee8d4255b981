"""The ways to save: arguments of `bytecheckpoint.save` by name."""

from __future__ import annotations

from typing import Any

__all__ = ["MODES"]

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_checkpoint": True},
    "background": {"async_checkpoint": True, "staging": "background"},
}
