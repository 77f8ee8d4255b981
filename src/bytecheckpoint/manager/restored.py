"""What a restore did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bytecheckpoint.handles import LoadReport

__all__ = ["Restored"]


@dataclass(frozen=True)
class Restored:
    """What a restore did.

    Attributes:
        step: that was loaded, or None: there was none, and the run begins.
        report: of the load.
        skipped: newer steps that could not be loaded, with the reason.
    """

    step: int | None
    report: LoadReport | None = None
    skipped: Mapping[int, str] = field(default_factory=dict)
