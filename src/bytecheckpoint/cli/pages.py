"""`bytecheckpoint report --output/--trace` and `bytecheckpoint monitor`: the metrics of a run for a browser."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import BinaryIO

from bytecheckpoint.cli.format import format_size, plural, printable
from bytecheckpoint.errors import UsageError
from bytecheckpoint.monitoring.alerts import Rule, load_rules
from bytecheckpoint.monitoring.reading import RunMetrics
from bytecheckpoint.monitoring.record import without_secrets
from bytecheckpoint.monitoring.report.server import RunView, make_app, require_token
from bytecheckpoint.settings import settings

__all__ = ["chosen_rules", "monitor", "write_files"]


def chosen_rules(path: str) -> list[Rule]:
    """Return the rules of a file; "": those of the setting `alerts`, or the built-in ones."""
    chosen = path or settings().alerts
    return load_rules("" if chosen == "off" else chosen)


def write_files(root: str, run: RunMetrics, rules: Sequence[Rule], page: str | None, trace: str | None) -> None:
    """Write the page and the trace of a run to files.

    Args:
        root: folder or URL of the run.
        run: its metrics.
        rules: of the alerts to show.
        page: file for the page; None: none.
        trace: file for the trace; None: none.
    """
    from bytecheckpoint.monitoring.report.data import page_data
    from bytecheckpoint.monitoring.report.page import make_page
    from bytecheckpoint.monitoring.report.trace import write_trace

    if page is not None:
        content = make_page(page_data(run, without_secrets(root), time.time(), rules))
        with _opened(page) as file:
            file.write(content)
        print(f"{printable(page)}: {format_size(len(content))}, opens in any browser")
    if trace is not None:
        with _opened(trace) as file:
            count = write_trace(run.records, file)
        left_out = f", the newest of {len(run.records):,}" if count < len(run.records) else ""
        print(f"{printable(trace)}: {plural(count, 'operation')}{left_out}, for https://ui.perfetto.dev")


def _opened(path: str) -> BinaryIO:
    try:
        return open(path, "wb")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def monitor(root: str, *, host: str, port: int, token: str, rules: str) -> int:
    """Serve the page of a run until interrupted."""
    require_token(host, token)
    try:
        import uvicorn

        app = make_app(RunView(root, chosen_rules(rules)), token)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("uvicorn", "starlette"):
            raise
        raise UsageError("the monitor needs an extra: pip install 'bytecheckpoint[monitor]'") from None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    shown = f"[{host}]" if family is socket.AF_INET6 else host
    print(f"http://{shown}:{listener.getsockname()[1]}/  (Ctrl-C ends it)", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
    uvicorn.Server(config).run([listener])
    return 0
