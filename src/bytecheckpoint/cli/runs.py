"""Run `bytecheckpoint report`, `monitor`, `measure` and `plan-interval`: verbs about a run. Torch is not imported."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, BinaryIO

import msgspec

from bytecheckpoint.cli.format import (
    format_time,
    parse_age,
    parse_size,
    plural,
    print_json,
    print_notes,
    print_table,
    printable,
    progress_bar,
)
from bytecheckpoint.errors import CheckpointNotFoundError, UsageError
from bytecheckpoint.monitoring.alerts import load_rules
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.analysis.words import bandwidth_text, rank_text, seconds_text, size_text
from bytecheckpoint.monitoring.reading import read_run
from bytecheckpoint.monitoring.record import path_without_secrets
from bytecheckpoint.monitoring.report.report import Report, Reporter
from bytecheckpoint.monitoring.report.server import RunView, make_app, require_token
from bytecheckpoint.settings import settings

__all__ = ["make_reporter", "measure", "monitor", "plan_interval", "report"]

_SHOWN_STRAGGLERS = 20


def make_reporter(rules: str, bandwidth: str | None, mtbf: str | None) -> Reporter:
    """Return the maker of reports for the options of a command.

    Args:
        rules: file of rules for alerts; "" for those of the setting `alerts`, or the built-in ones.
        bandwidth: bytes per second that the storage takes, as "40GB".
        mtbf: mean time between two failures, as "4h".

    Raises:
        UsageError: an option is wrong.
    """
    chosen = rules or settings().monitoring.alerts
    seconds = None if mtbf is None else parse_age(mtbf)
    if seconds == 0:
        raise UsageError("--mtbf: failures have some time between them: write 30m, 12h or 7d")
    limit = None if bandwidth is None else float(parse_size(bandwidth))
    return Reporter(load_rules("" if chosen == "off" else chosen), limit, seconds)


def report(
    root: str, *, newest: int | None, reporter: Reporter, output: str | None, trace: str | None, json: bool
) -> int:
    """Print the report of a run, or write it to files. Return 1 if a finding is critical."""
    if output == trace == "-":
        raise UsageError("--output and --trace: only one of them can be written to stdout")
    with progress_bar("reading metrics", unit="files") as progress:
        metrics = read_run(root, newest, progress)
    if not metrics.operations:
        damaged = f"; {plural(metrics.skipped, 'file')} cannot be read" if metrics.skipped else ""
        raise CheckpointNotFoundError(
            f"{root} holds no metrics of saves and loads (the setting `metrics`){damaged}; give the folder of the run, in "
            "which the folders of its checkpoints lie"
        )
    if metrics.skipped and not json:
        print_notes([f"{plural(metrics.skipped, 'damaged or foreign file')} skipped"])
    made = reporter.report(metrics)
    if output is not None or trace is not None:
        _write_files(root, made, output, trace)
    elif json:
        _print_json(root, made)
    else:
        _print(made)
    return int(any(finding.severity == "critical" for finding in made.findings))


def monitor(root: str, *, reporter: Reporter, host: str, port: int, token: str) -> int:
    """Serve the page of a run until interrupted."""
    host, token = host.strip("[]"), token.strip()  # a token that comes from a file may end with a line break
    require_token(host, token)
    try:
        import uvicorn

        app = make_app(RunView(root, reporter), token)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("uvicorn", "starlette"):
            raise
        raise UsageError("the monitor needs an extra: pip install 'bytecheckpoint[monitor]'") from None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    shown = f"[{host}]" if family is socket.AF_INET6 else host
    print(f"http://{shown}:{listener.getsockname()[1]}/  (Ctrl-C ends it)", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
    uvicorn.Server(config).run([listener])
    return 0


def measure(root: str, *, size: str, threads: int, json: bool) -> int:
    """Measure the storage of a run and print its bandwidths."""
    from bytecheckpoint import tools
    from bytecheckpoint.tools.bandwidth import keeps_limits

    limit = tools.measure(root, parse_size(size), threads)
    if not keeps_limits(root):
        print_notes([f"the bandwidths are kept nowhere: {root} has no metrics of saves yet (the setting `metrics`)"])
    if json:
        print_json(msgspec.to_builtins(limit))
        return 0
    read = "from this machine's memory, so not measured" if limit.read is None else bandwidth_text(limit.read)
    print(
        f"{plural(limit.threads, 'file')} of {size_text(limit.nbytes / limit.threads)} from {printable(limit.host)}: "
        f"write {bandwidth_text(limit.write)}, read {read}"
    )
    return 0


def plan_interval(
    *,
    stall: str,
    write: str,
    mtbf: str,
    machines: int,
    restart: str,
    step_time: str | None,
    most_stall: float | None,
    json: bool,
) -> int:
    """Print the interval between saves that loses least."""
    from bytecheckpoint.manager.interval import plan_interval as plan

    between = parse_age(mtbf) / machines
    found = plan(parse_age(stall), parse_age(write), between, restart=parse_age(restart), most_stall=most_stall)
    steps = None
    if step_time is not None:
        if (seconds := parse_age(step_time)) <= 0:
            raise UsageError(f"--step-time {step_time}: give a time above 0")
        steps = max(1, round(found.seconds / seconds))
    if json:
        print_json({**asdict(found), "steps": steps, "seconds_between_failures": between})
        return 0
    every = f"save every {found.seconds:.1f} s" + (f", which is every {steps} steps" if steps else "")
    print(f"{every} (decided by: {found.why})")
    print(f"stalls cost {found.stall_share:.2%} of the time")
    print(f"failures, one in {between / 3600:.2f} h, undo {found.lost_share:.2%}")
    print(f"training that counts: {found.effective:.2%}")
    return 0


def _write_files(root: str, report: Report, page: str | None, trace: str | None) -> None:
    """Write the page and the trace of a run to files.

    Args:
        root: folder or URL of the run.
        report: report of the run.
        page: file for the page; "-" for stdout; None for no page.
        trace: file for the trace; "-" for stdout; None for no trace.
    """
    from bytecheckpoint.monitoring.report.page import make_page, page_data
    from bytecheckpoint.monitoring.report.trace import write_trace

    if page is not None:
        content = make_page(page_data(report, path_without_secrets(root), time.time()))
        with _opened(page) as file:
            file.write(content)
        _say(page, f"{size_text(len(content))}, opens in any browser")
    if trace is not None:
        with _opened(trace) as file:
            count = write_trace(report.metrics.records, file)
        known = len(report.metrics.operations)
        left_out = f", the newest of {known:,}" if count < known else ""
        _say(trace, f"{plural(count, 'operation')}{left_out}, for https://ui.perfetto.dev")


def _say(path: str, content: str) -> None:
    """Print what a file has, unless it is stdout itself."""
    if path != "-":
        print(f"{printable(path)}: {content}")


def _opened(path: str) -> AbstractContextManager[BinaryIO]:
    if path == "-":
        return contextlib.nullcontext(sys.stdout.buffer)
    try:
        return open(path, "wb")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def _print_json(root: str, made: Report) -> None:
    operations = [
        asdict(one) | {"failed": one.failed, "spared_share": one.spared_share} for one in made.metrics.operations
    ]
    print_json(
        {
            "root": path_without_secrets(root),
            "skipped": made.metrics.skipped,
            "operations": operations,
            "run": asdict(made.run),
            "expected": None if made.expected is None else asdict(made.expected),
            "findings": [asdict(finding) for finding in made.findings],
            "limits": [msgspec.to_builtins(limit) for limit in made.metrics.limits],
            "alerts": [msgspec.to_builtins(alert) for alert in made.alerts],
        }
    )


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
            for o in made.metrics.operations
        ],
    )  # fmt: skip
    last = made.metrics.operations[-1]
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
    slow = [(o, s) for o in reversed(made.metrics.operations) for s in o.stragglers]
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
        print(printable(f"{finding.severity if finding.ended is None else 'over'}: {finding.title}"))
        print(printable(f"    {finding.text}"))
        print(printable(f"    {finding.advice}"))
    if all(finding.ended is not None for finding in made.findings):
        print("nothing is wrong now")
    for sentence in made.words:
        print(sentence)


def _slowest(operation: OperationSummary) -> str:
    """Return the longest part of the critical path."""
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
