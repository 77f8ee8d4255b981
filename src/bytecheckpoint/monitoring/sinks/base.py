"""Define the protocol of sinks, and make sinks by address."""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from bytecheckpoint._distribution import install_command
from bytecheckpoint.errors import UsageError
from bytecheckpoint.monitoring.record import without_secrets

if TYPE_CHECKING:
    from bytecheckpoint.monitoring.alert import Alert
    from bytecheckpoint.monitoring.analysis.summary import OperationSummary
    from bytecheckpoint.monitoring.progress import OperationProgress
    from bytecheckpoint.monitoring.table import OperationRecord

__all__ = ["Sink", "make_sink", "shown", "split_address"]

#: Module, class and extra by scheme. A module is imported when its scheme is used.
_SINKS = {
    "files": ("files", "FilesSink", ""),
    "console": ("console", "ConsoleSink", "cli"),
    "clickhouse": ("clickhouse", "ClickHouseSink", ""),
    "clickhouses": ("clickhouse", "ClickHouseSink", ""),
    "mlflow": ("scalars", "MlflowSink", "mlflow"),
    "mlflows": ("scalars", "MlflowSink", "mlflow"),
    "otlp": ("otlp", "OtlpSink", "otlp"),
    "otlps": ("otlp", "OtlpSink", "otlp"),
    "prometheus": ("prometheus", "PrometheusSink", "prometheus"),
    "tensorboard": ("scalars", "TensorBoardSink", "tensorboard"),
    "webhook+http": ("webhook", "WebhookSink", ""),
    "webhook+https": ("webhook", "WebhookSink", ""),
    "wandb": ("scalars", "WandbSink", "wandb"),
}
_WEBHOOK = "webhook+"
_SCHEME = re.compile(r"[a-z][a-z0-9]*")


class Sink(ABC):
    """Takes the metrics of operations, on rank 0. One thread at a time calls its methods.

    A method may raise any error: the record is then lost, and one log line says so. It must end within seconds.

    Args:
        address: address, as in the setting `metrics`.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    @abstractmethod
    def deliver(self, record: OperationRecord, summary: OperationSummary) -> None:
        """Take the metrics of one operation, and their summary."""

    def progress(self, progress: OperationProgress) -> None:
        """Take the progress of a running operation: about once a second, and once when it ends."""
        return

    def alert(self, alert: Alert) -> None:
        """Take an alert."""
        return

    def close(self) -> None:
        """Send buffered metrics, and close connections."""
        return


def shown(address: str) -> str:
    """Return an address for logs: without credentials, and without any part that may belong to badly written ones."""
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
        UsageError: the address is no URL. The message shows only the scheme, as the rest may be a password.
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
        # The text after a comma may be a part of a password.
        what = f"no sink is called {scheme!r}" if _SCHEME.fullmatch(scheme) and "://" in address else "no sink"
        raise UsageError(f"setting metrics: {what}; there are: off, {', '.join(_SINKS)}")
    module, name, extra = _SINKS[scheme]
    try:
        sink: Sink = getattr(importlib.import_module(f"bytecheckpoint.monitoring.sinks.{module}"), name)(address)
    except ImportError as error:
        if not extra:
            raise
        raise UsageError(f"{scheme}:// needs a package: {install_command(extra)} ({error})") from None
    return sink
