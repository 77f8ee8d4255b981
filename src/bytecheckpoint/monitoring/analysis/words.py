"""Format numbers for people."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bandwidth_text", "plural", "rank_text", "ranks_text", "seconds_text", "size_text"]

_MINUTE, _HOUR = 60.0, 3600.0


def plural(count: object, one: str) -> str:
    """Format a count with its noun.

    >>> plural(1, "file"), plural(1200, "file")
    ('1 file', '1,200 files')
    """
    if not isinstance(count, int):
        return f"{count} {one}s"
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


def seconds_text(seconds: float) -> str:
    """Format a time.

    >>> seconds_text(0.0123), seconds_text(3.25), seconds_text(600), seconds_text(9000)
    ('12 ms', '3.2 s', '10 min', '2.5 h')
    """
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 2 * _MINUTE:
        return f"{seconds:.1f} s"
    return f"{seconds / _MINUTE:.0f} min" if seconds < 2 * _HOUR else f"{seconds / _HOUR:.1f} h"


def size_text(nbytes: float) -> str:
    """Format a number of bytes.

    >>> size_text(1536), size_text(12)
    ('1.5 KiB', '12 B')
    """
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def bandwidth_text(bandwidth: float) -> str:
    """Format bytes per second."""
    return f"{size_text(bandwidth)}/s"


def rank_text(rank: int, host: str) -> str:
    """Name a rank and its machine."""
    return f"rank {rank} on {host}" if host else f"rank {rank}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks, the first ones of many.

    >>> ranks_text([3]), ranks_text([1, 2]), ranks_text(range(7))
    ('rank 3', 'ranks 1, 2', 'ranks 0, 1, 2, 3, 4 and 2 more')
    """
    shown = ", ".join(map(str, ranks[:5]))
    more = f" and {len(ranks) - 5} more" if len(ranks) > 5 else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"
