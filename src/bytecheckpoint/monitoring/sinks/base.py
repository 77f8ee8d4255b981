"""The protocol of sinks, and the table of those that exist."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from bytecheckpoint.errors import UsageError
from bytecheckpoint.monitoring.record import without_secrets

if TYPE_CHECKING:
    from bytecheckpoint.monitoring.alert import Alert
    from bytecheckpoint.monitoring.progress import OperationProgress
    from bytecheckpoint.monitoring.table import OperationRecord

__all__ = ["Sink", "make_sink", "shown_address"]

#: scheme -> module and class. A module is imported when its scheme is used.
_SINKS = {
    "console": ("bytecheckpoint.monitoring.sinks.console", "ConsoleSink"),
    "webhook+http": ("bytecheckpoint.monitoring.sinks.webhook", "WebhookSink"),
    "webhook+https": ("bytecheckpoint.monitoring.sinks.webhook", "WebhookSink"),
    "files": ("bytecheckpoint.monitoring.sinks.files", "FilesSink"),
}


class Sink(ABC):
    """Takes the metrics of operations, on rank 0. One thread at a time calls it.

    It may raise anything: the record is then lost, and a log line says so, once. It must end within seconds.

    Args:
        address: as in the setting.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    @abstractmethod
    def deliver(self, record: OperationRecord) -> None:
        """Take the metrics of one operation."""

    def progress(self, progress: OperationProgress) -> None:
        """Take how far a running operation is: about once a second, and once when it ends."""
        return

    def alert(self, alert: Alert) -> None:
        """Take what a rule has found."""
        return

    def close(self) -> None:
        """Send what is still held back, and close connections."""
        return


def make_sink(address: str) -> Sink:
    """Make the sink of an address.

    Raises:
        UsageError: its scheme is unknown.
    """
    scheme = address.split(":", 1)[0]
    if scheme not in _SINKS:
        raise UsageError(f"settings.metrics: no sink is called {scheme!r}; there are: off, {', '.join(_SINKS)}")
    module, name = _SINKS[scheme]
    sink: Sink = getattr(importlib.import_module(module), name)(address)
    return sink


def shown_address(address: str) -> str:
    """Return the address of a sink for log lines: without credentials, and without the path of a webhook, a token often."""
    shown = without_secrets(address)
    return "/".join(shown.split("/")[:3]) if shown.startswith("webhook+") else shown
