"""The protocol of sinks, and the table of those that exist."""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from bytecheckpoint.errors import UsageError
from bytecheckpoint.monitoring.record import without_secrets

if TYPE_CHECKING:
    from bytecheckpoint.monitoring.alert import Alert
    from bytecheckpoint.monitoring.analysis.summary import OperationSummary
    from bytecheckpoint.monitoring.progress import OperationProgress
    from bytecheckpoint.monitoring.table import OperationRecord

__all__ = ["Sink", "make_sink", "shown", "split_address"]

#: scheme -> module and class, which are imported when the scheme is used, and the extra that installs what they need.
_SINKS = {
    "files": ("files", "FilesSink", ""),
    "console": ("console", "ConsoleSink", "cli"),
    "clickhouse": ("clickhouse", "ClickHouseSink", ""),
    "clickhouses": ("clickhouse", "ClickHouseSink", ""),
    "mlflow": ("mlflow", "MlflowSink", "mlflow"),
    "mlflows": ("mlflow", "MlflowSink", "mlflow"),
    "otlp": ("otlp", "OtlpSink", "otlp"),
    "otlps": ("otlp", "OtlpSink", "otlp"),
    "prometheus": ("prometheus", "PrometheusSink", "prometheus"),
    "tensorboard": ("tensorboard", "TensorBoardSink", "tensorboard"),
    "webhook+http": ("webhook", "WebhookSink", ""),
    "webhook+https": ("webhook", "WebhookSink", ""),
    "wandb": ("wandb", "WandbSink", "wandb"),
}
_WEBHOOK = "webhook+"
_SCHEME = re.compile(r"[a-z][a-z0-9]*")


class Sink(ABC):
    """Takes the metrics of operations, on rank 0. One thread at a time calls it.

    It may raise anything: the record is then lost, and a log line says so, once. It must end within seconds.

    Args:
        address: as in the setting.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    @abstractmethod
    def deliver(self, record: OperationRecord, summary: OperationSummary) -> None:
        """Take the metrics of one operation, and what they sum up to."""

    def progress(self, progress: OperationProgress) -> None:
        """Take how far a running operation is: about once a second, and once when it ends."""
        return

    def alert(self, alert: Alert) -> None:
        """Take what a rule has found."""
        return

    def close(self) -> None:
        """Send what is still held back, and close connections."""
        return


def shown(address: str) -> str:
    """Return an address as logs may show it: without credentials, and without what may be a part of badly written ones."""
    scheme, _, rest = address.partition("://")
    if scheme not in _SINKS:
        return "a sink of the setting metrics"
    try:
        path = split_address(address).path if rest else ""
    except UsageError:
        path = rest
    if "@" in path or rest.count(":") > 2 or len(rest.split()) > 1:
        return f"{scheme}://..."
    address = without_secrets(address).partition("#")[0]
    return "/".join(address.split("/")[:3]) if scheme.startswith(_WEBHOOK) else address  # a path often is a token


def split_address(address: str) -> SplitResult:
    """Return the parts of an address with a host.

    Raises:
        UsageError: it is no URL; the message shows nothing of it but the scheme, as the rest may be a password.
    """
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018  raises if it is no number
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    if not parts.netloc and not address.endswith("://"):
        scheme = address.split(":", 1)[0]
        raise UsageError(
            f"setting metrics: write {scheme}://host:port, and characters such as / @ , of a password as %2F %40 %2C"
        )
    return parts


def make_sink(address: str) -> Sink:
    """Make the sink of an address.

    Raises:
        UsageError: its scheme is unknown, or the package that it needs is not installed.
    """
    scheme = address.split(":", 1)[0]
    if scheme not in _SINKS:
        # What follows a comma may be a part of a password.
        what = f"no sink is called {scheme!r}" if _SCHEME.fullmatch(scheme) and "://" in address else "no sink"
        raise UsageError(f"setting metrics: {what}; there are: off, {', '.join(_SINKS)}")
    module, name, extra = _SINKS[scheme]
    try:
        sink: Sink = getattr(importlib.import_module(f"bytecheckpoint.monitoring.sinks.{module}"), name)(address)
    except ImportError as error:
        if not extra:
            raise
        raise UsageError(f"{scheme}:// needs a package: pip install 'bytecheckpoint[{extra}]' ({error})") from None
    return sink
