"""Run `bytecheckpoint report`, `monitor`, `measure` and `plan-interval`: verbs about a run. Torch is not imported."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import asdict
from typing import BinaryIO

import msgspec

from bytecheckpoint._distribution import install_command
from bytecheckpoint.cli.format import (
    parse_age,
    parse_size,
    plural,
    print_json,
    print_notes,
    printable,
    progress_bar,
)
from bytecheckpoint.cli.report_text import print_comparison, print_report
from bytecheckpoint.errors import CheckpointNotFoundError, UsageError
from bytecheckpoint.monitoring.alerts import load_rules
from bytecheckpoint.monitoring.analysis.comparison import compare_runs
from bytecheckpoint.monitoring.analysis.words import bandwidth_text, size_text
from bytecheckpoint.monitoring.reading import RunMetrics, read_run
from bytecheckpoint.monitoring.record import path_without_secrets
from bytecheckpoint.monitoring.report.report import Report, Reporter
from bytecheckpoint.monitoring.report.server import RunView, make_app, require_token
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.optional import folder_exists
from bytecheckpoint.storage.time_limits import with_time_limits

__all__ = ["make_reporter", "measure", "monitor", "plan_interval", "report"]


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


def _read(root: str, newest: int | None = None) -> RunMetrics:
    with progress_bar("reading metrics", unit="files") as progress:
        metrics = read_run(root, newest, progress)
    if not metrics.operations:
        damaged = f"; {plural(metrics.skipped, 'file')} cannot be read" if metrics.skipped else ""
        raise CheckpointNotFoundError(
            f"{root} holds no metrics of saves and loads (the setting `metrics`){damaged}; give the folder of the run, in "
            "which the folders of its checkpoints lie, or a checkpoint that belongs to no run"
        )
    return metrics


def report(
    root: str,
    *,
    newest: int | None,
    reporter: Reporter,
    everything: bool,
    output: str | None,
    trace: str | None,
    json: bool,
) -> int:
    """Print the report of a run, or write it to files. Return 1 if a finding is critical."""
    if (output == "-") + (trace == "-") + json > 1:
        raise UsageError("--output, --trace and --json: only one of them can be written to stdout")
    metrics = _read(root, newest)
    if metrics.skipped and not json:
        print_notes([f"{plural(metrics.skipped, 'damaged or foreign file')} skipped"])
    made = reporter.report(metrics)
    lines = _write_files(root, made, output, trace)
    if json:
        _print_json(root, made)
    elif lines is not None:
        for line in lines:
            print(line)
    else:
        print_report(made, everything=everything)
    return int(any(finding.severity == "critical" for finding in made.findings))


def compare(root: str, other: str, *, json: bool) -> int:
    """Print the metrics of two runs side by side."""
    rows = list(compare_runs(*(_read(run).operations for run in (root, other))))
    if json:
        print_json({"first": path_without_secrets(root), "second": path_without_secrets(other),
                    "numbers": [asdict(row) | {"ratio": row.ratio} for row in rows]})  # fmt: skip
    else:
        print_comparison(rows)
    return 0


def monitor(root: str, *, reporter: Reporter, host: str, port: int, token: str, json: bool) -> int:
    """Serve the page of a run until interrupted."""
    host, token = host.strip("[]"), token.strip()  # a token that comes from a file may end with a line break
    require_token(host, token)
    if not folder_exists(with_time_limits(resolve(root))):
        raise CheckpointNotFoundError(f"{root} does not exist; give the folder of a run")
    try:
        import uvicorn

        app = make_app(RunView(root, reporter), token)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("uvicorn", "starlette"):
            raise
        raise UsageError(f"the monitor needs an extra: {install_command('monitor')}") from None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    shown = f"[{host}]" if family is socket.AF_INET6 else host
    address = f"http://{shown}:{listener.getsockname()[1]}/"
    if json:
        print_json({"address": address})
    else:
        print(f"{address}  (Ctrl-C ends it)")
    sys.stdout.flush()
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
    uvicorn.Server(config).run([listener])
    return 0


def measure(root: str, *, size: str, threads: int, json: bool) -> int:
    """Measure the storage of a run and print its bandwidths."""
    from bytecheckpoint import tools
    from bytecheckpoint.tools.bandwidth import keeps_limits

    limit = tools.measure(root, parse_size(size), threads)
    kept = keeps_limits(root)
    if json:
        print_json({**msgspec.to_builtins(limit), "kept": kept})
        return 0
    if not kept:
        print_notes([f"the bandwidths are kept nowhere: {root} has no metrics of saves yet (the setting `metrics`)"])
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


def _write_files(root: str, report: Report, page: str | None, trace: str | None) -> list[str] | None:
    """Write the page and the trace of a run to files.

    Args:
        root: folder or URL of the run.
        report: report of the run.
        page: file for the page; "-" for stdout; None for no page.
        trace: file for the trace; "-" for stdout; None for no trace.

    Returns:
        A line about each file but stdout; None without files.
    """
    if page is None and trace is None:
        return None
    from bytecheckpoint.monitoring.report.page import make_page, page_data
    from bytecheckpoint.monitoring.report.trace import write_trace

    lines = []
    if page is not None:
        content = make_page(page_data(report, path_without_secrets(root), time.time()))
        with _opened(page) as file:
            file.write(content)
        if page != "-":
            lines.append(f"{printable(page)}: {size_text(len(content))}, opens in any browser")
    if trace is not None:
        with _opened(trace) as file:
            count = write_trace(report.metrics.records, file)
        known = len(report.metrics.operations)
        left_out = f", the newest of {known:,}" if count < known else ""
        if trace != "-":
            lines.append(f"{printable(trace)}: {plural(count, 'operation')}{left_out}, for https://ui.perfetto.dev")
    return lines


def _opened(path: str) -> BinaryIO:
    try:
        if path == "-":  # `sys.stdout.buffer` may be unbuffered, and then writes a part if the reader ends
            return open(sys.stdout.fileno(), "wb", closefd=False)
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
