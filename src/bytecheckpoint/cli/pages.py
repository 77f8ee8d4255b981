"""`bytecheckpoint report --output/--trace` and `bytecheckpoint monitor`: the metrics of a run for a browser."""

from __future__ import annotations

import socket
import time
from typing import BinaryIO

from bytecheckpoint.cli.format import plural, printable, size_text
from bytecheckpoint.cli.tiers import parse_age
from bytecheckpoint.cli.tools import parse_size
from bytecheckpoint.errors import UsageError
from bytecheckpoint.monitoring.alerts import load_rules
from bytecheckpoint.monitoring.record import path_without_secrets
from bytecheckpoint.monitoring.report.report import Report, Reporter
from bytecheckpoint.monitoring.report.server import RunView, make_app, require_token
from bytecheckpoint.settings import settings

__all__ = ["make_reporter", "monitor", "write_files"]


def make_reporter(rules: str, bandwidth: str | None, mtbf: str | None) -> Reporter:
    """Return what judges the metrics of a run, from the options of a command.

    Args:
        rules: file of rules of alerts; "": those of the setting `alerts`, or the built-in ones.
        bandwidth: what the storage takes per second, as "40GB".
        mtbf: mean time between two failures, as "4h".

    Raises:
        UsageError: one of them is wrong.
    """
    chosen = rules or settings().monitoring.alerts
    seconds = None if mtbf is None else parse_age(mtbf)
    if seconds == 0:
        raise UsageError("--mtbf: failures have some time between them: write 30m, 12h or 7d")
    limit = None if bandwidth is None else float(parse_size(bandwidth))
    return Reporter(load_rules("" if chosen == "off" else chosen), limit, seconds)


def write_files(root: str, report: Report, page: str | None, trace: str | None) -> None:
    """Write the page and the trace of a run to files.

    Args:
        root: folder or URL of the run.
        report: of the run.
        page: file for the page; None: none.
        trace: file for the trace; None: none.
    """
    from bytecheckpoint.monitoring.report.page import make_page, page_data
    from bytecheckpoint.monitoring.report.trace import write_trace

    if page is not None:
        content = make_page(page_data(report, path_without_secrets(root), time.time()))
        with _opened(page) as file:
            file.write(content)
        print(f"{printable(page)}: {size_text(len(content))}, opens in any browser")
    if trace is not None:
        with _opened(trace) as file:
            count = write_trace(report.metrics.records, file)
        known = len(report.metrics.operations)
        left_out = f", the newest of {known:,}" if count < known else ""
        print(f"{printable(trace)}: {plural(count, 'operation')}{left_out}, for https://ui.perfetto.dev")


def _opened(path: str) -> BinaryIO:
    try:
        return open(path, "wb")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


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
