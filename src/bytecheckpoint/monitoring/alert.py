"""Describe a save or load that needs attention."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["DATES_END", "Alert", "Time"]

#: Seconds from 1970 to the year 10,000, which Python's dates do not reach.
DATES_END = 253_402_300_800
#: Seconds since 1970 that a date can show.
Time = Annotated[float, msgspec.Meta(ge=0, lt=DATES_END)]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of an alert rule.

    Attributes:
        rule: name of the rule.
        severity: "info", "warning" or "critical".
        text: description of the problem, in one line.
        path: path of the checkpoint, without credentials.
        operation: id of the save or load; "" for none.
        step: the training step; None where it is not known.
        rank: rank with the problem; None for no single rank.
        host: machine of the rank.
        phase: phase with the problem; "" for none.
        value: measured value.
        limit: limit of the rule.
        time: beginning of the operation, or time of the alert; seconds since 1970.
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
