"""Print the report of a run as text: the last and the worst operations, fitted to a terminal where there is one."""

from __future__ import annotations

import shutil
import statistics
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from bytecheckpoint.cli.format import format_time, plural, print_table, printable
from bytecheckpoint.monitoring.analysis.comparison import RunComparison
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.analysis.words import bandwidth_text, rank_text, seconds_text, size_text
from bytecheckpoint.monitoring.report.report import Report

__all__ = ["print_comparison", "print_report"]

#: Rows of a table that are the last, and the worst, of many.
_ROWS = 10
#: Columns of tables that narrow terminals lack, in the order in which they go.
_OPTIONAL = ("retries", "ranks", "bytes", "bandwidth", "rule", "bytes over mean", "host", "blocked")
#: Characters of the last column that a terminal wraps.
_WRAPPED = 50


def print_report(made: Report, *, everything: bool) -> None:
    """Print a report.

    Args:
        made: the report.
        everything: print all rows of all tables, not only the last and the worst.
    """
    operations = made.metrics.operations
    if everything or len(operations) <= 2 * _ROWS:
        _title("operations")
        _print_operations(operations)
    else:
        last, before = operations[-_ROWS:], operations[:-_ROWS]
        _title(f"failed, incomplete and slowest operations before the last {len(last)}")
        _print_operations(_worst(before, _ROWS))
        _title(f"the last {len(last)} of {plural(len(operations), 'operation')} (--all shows all)")
        _print_operations(last)
    _print_phases(operations[-1])
    slow = [(o, s) for o in reversed(operations) for s in o.stragglers]
    if slow:
        _title("stragglers, the newest first")
        shown = slow if everything else slow[:_ROWS]
        _table(
            ["operation", "rank>", "host", "phase", "took>", "median>", "bytes over mean>"],
            [
                [_title_of(o), str(s.rank), s.host, s.phase, seconds_text(s.seconds), seconds_text(s.median),
                 f"{s.load:.2f}"]
                for o, s in shown
            ],
        )  # fmt: skip
        _print_rest(len(slow) - len(shown))
    if made.alerts:
        _title("alerts")
        alerts = made.alerts
        if not everything:
            ranked = sorted(alerts, key=lambda a: (a.severity == "critical", a.time))
            alerts = sorted(ranked[-_ROWS:], key=lambda a: a.time)
        _table(["time", "severity", "rule", "alert"], [[_when(a.time), a.severity, a.rule, a.text] for a in alerts])
        _print_rest(len(made.alerts) - len(alerts))
    _title("findings")
    for finding in made.findings:
        _print_text(f"{finding.severity if finding.ended is None else 'over'}: {finding.title}")
        _print_text(finding.text, indent=4)
        _print_text(finding.advice, indent=4)
    if all(finding.ended is not None for finding in made.findings):
        print("nothing is wrong now")
    for sentence in made.words:
        _print_text(sentence)


def _worst(operations: Sequence[OperationSummary], count: int) -> list[OperationSummary]:
    """Return the newest operations that failed or lack a rank, then the slowest of their kind, in order of time."""
    kinds = {o.kind for o in operations}
    median = {kind: statistics.median(o.seconds for o in operations if o.kind == kind) for kind in kinds}

    def badness(place: int) -> tuple[bool, float]:
        o = operations[place]
        bad = o.failed or bool(o.missing)
        return bad, place if bad else o.seconds / (median[o.kind] or 1.0)

    return [operations[place] for place in sorted(sorted(range(len(operations)), key=badness)[-count:])]


def _print_operations(operations: Sequence[OperationSummary]) -> None:
    _table(
        ["operation", "began", "ranks>", "took>", "blocked>", "bytes>", "bandwidth>", "retries>", "slowest phase", "state"],
        [
            [
                _title_of(o), _when(o.began), str(o.world_size),
                seconds_text(o.seconds), seconds_text(o.blocking_seconds), size_text(o.nbytes),
                bandwidth_text(o.bandwidth) if o.bandwidth else "", str(o.retries or ""), _slowest(o),
                o.state,
            ]
            for o in operations
        ],
    )  # fmt: skip


def _print_phases(last: OperationSummary) -> None:
    _title(f"phases of the last operation, the {last.name}")
    waited = {(phase, rank): seconds for phase, rank, _, seconds in last.critical_path}
    _table(
        ["phase", "median>", "longest>", "slowest rank>", "everybody waited for"],
        [
            [
                phase.name, seconds_text(phase.median), seconds_text(phase.longest), str(phase.slowest_rank),
                ", ".join(f"rank {r}: {seconds_text(s)}" for (name, r), s in waited.items() if name == phase.name),
            ]
            for phase in last.phases
        ],
    )  # fmt: skip
    plan = last.total("cached plan")[0]
    print()
    _print_text(
        f"replicas spare {last.spared_share:.0%} of the bytes; the busiest rank has {last.balance:.2f} times the mean; "
        f"{plan} of {plural(last.world_size, 'rank')} used a cached plan"
    )


def _slowest(operation: OperationSummary) -> str:
    """Return the longest part of the critical path."""
    if not operation.critical_path:
        return ""
    phase, rank, _, seconds = max(operation.critical_path, key=lambda part: part[3])
    host = next((s.host for s in operation.stragglers if s.rank == rank and not _width()), "")
    return f"{phase} of {rank_text(rank, host)}: {seconds_text(seconds)}"


def _when(seconds: float) -> str:
    """Format a time in UTC, to the minute in a terminal."""
    text = format_time(seconds)
    return text[:16].replace("T", " ") if _width() else text


def _width() -> int:
    """Return the number of columns of the terminal; 0 without a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def print_comparison(rows: Sequence[RunComparison]) -> None:
    """Print numbers of two runs side by side."""

    def shown(name: str, value: float | None) -> str:
        if value is None:
            return ""
        if name in ("operations", "failed", "retries"):
            return f"{value:,.0f}"
        return {"nbytes": size_text, "bandwidth": bandwidth_text}.get(name, seconds_text)(value)

    _table(
        ["kind", "number", "first>", "second>", "ratio>"],
        [
            [row.kind, row.name, shown(row.name, row.first), shown(row.name, row.second),
             "" if row.ratio is None else f"{row.ratio:.2f}"]
            for row in rows
        ],
    )  # fmt: skip


def _title_of(operation: OperationSummary) -> str:
    return operation.kind if operation.step is None else f"{operation.kind} {operation.step}"


def _title(text: str) -> None:
    if _width():
        from rich.console import Console

        Console().print(f"\n[bold]{text}[/bold]", highlight=False)
    else:
        print(f"\n{text}:")


def _print_rest(count: int) -> None:
    if count:
        print(f"and {count:,} more (--all)")


def _print_text(text: str, indent: int = 0) -> None:
    """Print sentences, wrapped at spaces in a terminal."""
    lines = [printable(text)]
    if _width():
        lines = textwrap.wrap(
            lines[0], max(_width() - indent, _WRAPPED), break_long_words=False, break_on_hyphens=False
        )
    for line in lines:
        print(" " * indent + line)


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table, in colour and fitted to the terminal where there is one."""
    width = _width()
    if not width:
        print_table(titles, rows)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    names = [title.rstrip(">") for title in titles]
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    widths[-1] = min(widths[-1], _WRAPPED)
    kept = [*range(len(names))]
    for name in _OPTIONAL:
        if name in names and sum(widths[place] + 2 for place in kept) - 2 > width:
            kept.remove(names.index(name))
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for place in kept:
        table.add_column(
            names[place], justify="right" if titles[place].endswith(">") else "left", no_wrap=place < len(names) - 1
        )
    for row in cells:
        style = "red" if {"failed", "critical"} & set(row) else "yellow" if "warning" in row else ""
        table.add_row(*(Text(row[place]) for place in kept), style=style)
    Console(width=width).print(table)
