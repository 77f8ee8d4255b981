"""One thing that somebody has to look at."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["DATES_END", "Alert", "Time"]

#: Seconds from 1970 to the year 10,000, which Python's dates do not reach.
DATES_END = 253_402_300_800
#: Seconds since 1970 that a date can show.
Time = Annotated[float, msgspec.Meta(ge=0, lt=DATES_END)]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule has found.

    Attributes:
        rule: name of the rule.
        severity: "info", "warning" or "critical".
        text: what is wrong, in one line.
        path: of the checkpoint, without credentials.
        operation: id of the save or load; "" if it is about none.
        step: the training step; None where it is not known.
        rank: that it is about; None: no single one.
        host: machine of the rank.
        phase: that it is about.
        value: what was measured.
        limit: that the rule allows.
        time: of the operation's beginning, or of the alert; seconds since 1970.
    """

    rule: str
    severity: str
    text: str
    path: str = ""
    operation: str = ""
    step: int | None = None
    rank: int | None = None
    host: str = ""
    phase: str = ""
    value: float | None = None
    limit: float | None = None
    time: Time = 0.0
