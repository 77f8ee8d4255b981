"""Send alerts to an HTTP server, as JSON."""

from __future__ import annotations

import base64
import urllib.request
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from bytecheckpoint.errors import UsageError
from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.sinks.base import Sink, split_address
from bytecheckpoint.monitoring.table import OperationRecord

__all__ = ["WebhookSink"]

_PREFIX = "webhook+"
_TIMEOUT = 10.0


class WebhookSink(Sink):
    """Posts each alert as one JSON object: the fields of `Alert`, and `message`, a text for people."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        split_address(address)
        if any(not "!" <= character <= "~" for character in address):  # errors of `urllib` would show the path
            raise UsageError("setting metrics: write blanks and other special characters of a webhook's address as %20")

    def deliver(self, record: OperationRecord, summary: OperationSummary) -> None:
        """Do nothing: only alerts are sent."""

    def alert(self, alert: Alert) -> None:
        """Post an alert."""
        body = {**msgspec.to_builtins(alert), "message": f"{alert.severity}: {alert.text}"}
        url = urlsplit(self.address.removeprefix(_PREFIX))
        user, _, host = url.netloc.rpartition("@")
        headers = {"Content-Type": "application/json"}
        if user:
            headers["Authorization"] = f"Basic {base64.b64encode(unquote(user).encode()).decode()}"
        request = urllib.request.Request(url._replace(netloc=host).geturl(), msgspec.json.encode(body), headers)
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT) as response:
            response.read()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a followed redirect becomes a GET without the alert, and takes the password along."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request, so that the redirect is an error."""
        return
