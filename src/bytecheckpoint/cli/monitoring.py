"""`bytecheckpoint report`: what the metrics of a run say. Torch is not imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from bytecheckpoint.cli.format import format_time, plural, print_json, print_notes, print_table, printable
from bytecheckpoint.cli.pages import chosen_rules, write_files
from bytecheckpoint.cli.tiers import parse_age
from bytecheckpoint.errors import CheckpointNotFoundError
from bytecheckpoint.monitoring.alerts import Alert, Evaluation
from bytecheckpoint.monitoring.analysis.findings import Finding, findings
from bytecheckpoint.monitoring.analysis.run import RunSummary, summarize_run
from bytecheckpoint.monitoring.analysis.summary import OperationSummary, summarize
from bytecheckpoint.monitoring.analysis.words import bandwidth_text, rank_text, seconds_text, size_text
from bytecheckpoint.monitoring.reading import RunMetrics, read_run

__all__ = ["Report", "make_report", "report"]

_SHOWN_STRAGGLERS = 20


@dataclass(frozen=True, slots=True)
class Report:
    """What there is to say about a run.

    Attributes:
        root: of the run.
        metrics: that were read.
        operations: in order of time.
        run: the sum of them.
        findings: the worst first.
        alerts: in order of time.
    """

    root: str
    metrics: RunMetrics
    operations: Sequence[OperationSummary]
    run: RunSummary
    findings: Sequence[Finding]
    alerts: Sequence[Alert]


def make_report(root: str, *, newest: int | None = None, bandwidth: float | None = None, rules: str = "") -> Report:
    """Read the metrics of a run and judge them.

    Args:
        root: folder or URL of the run.
        newest: so many operations, the newest ones; None: all.
        bandwidth: bytes per second that the storage takes; None: the best that the run has reached.
        rules: file of rules of alerts; "": those of the setting `alerts`, or the built-in ones.

    Raises:
        CheckpointNotFoundError: there are no metrics.
    """
    metrics = read_run(root, newest)
    if not metrics.records:
        damaged = f"; {plural(metrics.skipped, 'file')} cannot be read" if metrics.skipped else ""
        raise CheckpointNotFoundError(f"{root} holds no metrics of saves and loads (the setting `metrics`){damaged}")
    summaries = [summarize(record) for record in metrics.records]
    evaluation = Evaluation(chosen_rules(rules))
    alerts = [alert for summary in summaries for alert in evaluation.after(summary)]
    return Report(root, metrics, summaries, summarize_run(summaries), findings(summaries, bandwidth), alerts)


def report(
    root: str,
    *,
    newest: int | None,
    bandwidth: float | None,
    mtbf: str | None,
    rules: str,
    output: str | None,
    trace: str | None,
    json: bool,
) -> int:
    """Print what the metrics of a run say, or write it to files. Return 1 if something is critical."""
    made = make_report(root, newest=newest, bandwidth=bandwidth, rules=rules)
    if made.metrics.skipped and not json:
        print_notes([f"{plural(made.metrics.skipped, 'damaged or foreign file')} skipped"])
    if output is not None or trace is not None:
        write_files(root, made.metrics, chosen_rules(rules), output, trace)
        return int(any(finding.severity == "critical" for finding in made.findings))
    expected = made.run.at(parse_age(mtbf)) if mtbf else None
    if json:
        print_json(
            {
                "root": root,
                "skipped": made.metrics.skipped,
                "operations": [
                    asdict(summary) | {"failed": summary.failed, "spared_share": summary.spared_share}
                    for summary in made.operations
                ],
                "run": asdict(made.run),
                "expected": None if expected is None else asdict(expected),
                "findings": [asdict(finding) for finding in made.findings],
                "alerts": [msgspec.to_builtins(alert) for alert in made.alerts],
            }
        )
    else:
        _print(made)
        if expected is not None:
            print(f"with a failure every {mtbf}: {expected.effective:.2%} of the time is training that counts (ETTR)")
    return int(any(finding.severity == "critical" for finding in made.findings))


def _print(made: Report) -> None:
    _title("operations")
    _table(
        ["operation", "began", "ranks>", "took>", "blocked>", "bytes>", "bandwidth>", "retries>", "slowest phase", "state"],
        [
            [
                f"{o.kind} {'' if o.step is None else o.step}".rstrip(), format_time(o.began), str(o.world_size),
                seconds_text(o.seconds), seconds_text(o.blocking_seconds), size_text(o.nbytes),
                bandwidth_text(o.bandwidth) if o.bandwidth else "", str(o.retries or ""), _slowest(o),
                "failed" if o.failed else f"{plural(len(o.missing), 'rank')} missing" if o.missing else "done",
            ]
            for o in made.operations
        ],
    )  # fmt: skip
    last = made.operations[-1]
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
    print(
        f"\nreplicas spare {last.spared_share:.0%} of the bytes; the busiest rank has {last.balance:.2f} times the mean; "
        f"{plan} of {plural(last.world_size, 'rank')} used a cached plan"
    )
    slow = [(o, s) for o in reversed(made.operations) for s in o.stragglers]
    if slow:
        _title("stragglers, the newest first")
        _table(
            ["operation", "rank>", "host", "phase", "took>", "median>", "bytes over mean>"],
            [
                [f"{o.kind} {o.step}", str(s.rank), s.host, s.phase, seconds_text(s.seconds), seconds_text(s.median),
                 f"{s.load:.2f}"]
                for o, s in slow[:_SHOWN_STRAGGLERS]
            ],
        )  # fmt: skip
        if len(slow) > _SHOWN_STRAGGLERS:
            print(f"and {len(slow) - _SHOWN_STRAGGLERS} more")
    if made.alerts:
        _title("alerts")
        _table(
            ["time", "severity", "rule", "alert"],
            [[format_time(a.time), a.severity, a.rule, a.text] for a in made.alerts],
        )
    _title("findings")
    for finding in made.findings:
        print(printable(f"{finding.severity}: {finding.title}"))
        print(printable(f"    {finding.text}"))
        print(printable(f"    {finding.advice}"))
    if not made.findings:
        print("nothing is wrong")
    run = made.run
    print(
        f"{plural(run.saves, 'save')}, {plural(run.loads, 'load')} and {run.failed} that failed, by "
        f"{plural(run.jobs, 'job')} in {seconds_text(run.seconds)}: "
        f"the training waited {seconds_text(run.stalled_seconds)}, at most {seconds_text(run.undone_seconds)} of work were "
        f"undone; {run.effective:.2%} of the time counts (ETTR)"
    )


def _slowest(operation: OperationSummary) -> str:
    """Name the longest part of what everybody waited for."""
    if not operation.critical_path:
        return ""
    phase, rank, _, seconds = max(operation.critical_path, key=lambda part: part[3])
    host = next((s.host for s in operation.stragglers if s.rank == rank), "")
    return f"{phase} of {rank_text(rank, host)}: {seconds_text(seconds)}"


def _title(text: str) -> None:
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(f"\n[bold]{text}[/bold]")
    else:
        print(f"\n{text}:")


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table, in colour and fitted to the terminal where there is one."""
    if not sys.stdout.isatty():
        print_table(titles, rows)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(title.rstrip(">"), justify="right" if title.endswith(">") else "left")
    for row in rows:
        style = "red" if {"failed", "critical"} & set(row) else "yellow" if "warning" in row else ""
        table.add_row(*(Text(printable(cell)) for cell in row), style=style)
    Console().print(table)
