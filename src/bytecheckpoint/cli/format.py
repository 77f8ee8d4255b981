"""Format output for a terminal (escaped names, readable sizes, aligned columns) and as JSON; parse ages and sizes."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bytecheckpoint.errors import UsageError, shown
from bytecheckpoint.monitoring.analysis.words import plural, size_text

__all__ = [
    "Progress",
    "as_json",
    "format_time",
    "parse_age",
    "parse_size",
    "plural",
    "print_errors",
    "print_json",
    "print_notes",
    "print_table",
    "printable",
    "progress_bar",
    "size_text",
    "typed_value",
]

#: Function of (done, in all).
Progress = Callable[[int, int], None]
_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_MOST_BITS = 14_000  # of an integer in decimal: Python writes up to 4,300 digits
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str) -> str:
    r"""Escape control characters, so that a terminal shows `text` on one line and acts upon nothing in it.

    >>> printable("a\x1b[2Jb\n")
    'a\\x1b[2Jb\\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _ESCAPES.get(c) or _escape(ord(c)) for c in text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def format_time(seconds: object) -> str:
    """Format seconds since 1970 as ISO 8601 in UTC; "" for a value that is not a time."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return ""
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return ""


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns separated by two spaces. A title that ends in ">" aligns its column to the right."""
    names = [title.rstrip(">") for title in titles]
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for row in [names, *cells]:
        parts = [
            cell.rjust(width) if title.endswith(">") else cell.ljust(width)
            for cell, width, title in zip(row, widths, titles, strict=True)
        ]
        print("  ".join(parts).rstrip())


def print_notes(notes: Iterable[str]) -> None:
    """Print each note on a line of stderr."""
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)


def print_errors(errors: Mapping[str, str]) -> None:
    """Print the error of each place on a line of stderr."""
    for place, error in errors.items():
        print(f"{printable(place)}: {printable(error)}", file=sys.stderr)


def as_json(value: Any) -> Any:
    """Replace what JSON lacks: tuples become arrays, nan and infinity strings, other types their repr."""
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return value if abs(value).bit_length() < _MOST_BITS else hex(value)
    if type(value) is float:
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {key if isinstance(key, str) else shown(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return shown(value)


def typed_value(value: Any) -> dict[str, Any]:
    """Return a plain value for JSON, with the name of its type."""
    return {"type": type(value).__name__, "value": as_json(value)}


def print_json(value: Any) -> None:
    """Print one JSON document, ASCII only."""
    json.dump(as_json(value), sys.stdout, indent=2, allow_nan=False)
    print()


@contextlib.contextmanager
def progress_bar(title: str, *, unit: str = "bytes") -> Iterator[Progress | None]:
    """Draw a progress bar on stderr; yield a function to call with (done, in all), or None without a terminal.

    Args:
        title: text before the bar.
        unit: things that are counted.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    columns: list[bars.ProgressColumn] = [bars.TextColumn("{task.description}"), bars.BarColumn()]
    if unit == "bytes":
        columns += [bars.DownloadColumn(binary_units=True), bars.TransferSpeedColumn()]
    else:
        columns += [bars.MofNCompleteColumn(), bars.TextColumn(unit)]
    with bars.Progress(*columns, bars.TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def parse_age(text: str) -> float:
    """Parse an age such as "90", "30m", "12h", "7d" or "2w".

    Raises:
        UsageError: `text` is not an age.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not an age: write 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2].lower()]


def parse_size(text: str) -> int:
    """Parse a number of bytes such as "5GB" (decimal), "2GiB" (binary) or "1000000".

    Raises:
        UsageError: `text` is not a size, or less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    number = 0.0
    if match is not None:
        power = " KMGT".index(match[2].upper() or " ")
        number = float(match[1]) * (1024 if match[3] else 1000) ** power
    if number < 1:
        raise UsageError(f"{text!r} is not a size: write 5GB, 500MB, 2GiB or a number of bytes")
    return int(number)
