"""The page of a run: one HTML file with its styles, scripts, chart library and data, which opens without a network."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

import msgspec

__all__ = ["content_security_policy", "make_page"]

_ASSETS = files("bytecheckpoint.monitoring.report") / "assets"
#: In the order in which they run, in one scope.
_SCRIPTS = (
    "format.js",
    "data.js",
    "theme.js",
    "summary.js",
    "history.js",
    "heatmap.js",
    "timeline.js",
    "live.js",
    "main.js",
)
_ECHARTS = "echarts/echarts.min.js"
#: Inside a script element a browser ends the text at "</script"; JSON may write these characters as escapes.
_MARKUP = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def make_page(data: Any, *, live: bool = False) -> bytes:
    """Return the page as HTML.

    Args:
        data: of `page_data`; None where the page asks the monitor for it.
        live: the page asks the monitor for what is new, about once a second.
    """
    page = Template(_asset("page.html"))
    text = page.substitute(
        policy=content_security_policy(live=live).replace("'", "&#39;"),
        style=_asset("style.css"),
        echarts=_asset(_ECHARTS),
        scripts=_scripts(),
        live="true" if live else "false",
        data=msgspec.json.encode(data).decode().translate(_MARKUP),
    )
    return text.encode()


def content_security_policy(*, live: bool) -> str:
    """Return which content a browser takes from the page: its own two scripts, and no other, and nothing from elsewhere."""
    scripts = " ".join(f"'sha256-{_digest(text)}'" for text in (_asset(_ECHARTS), _scripts()))
    policy = f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:"
    policy += "; base-uri 'none'; form-action 'none'"
    return policy + ("; connect-src 'self'" if live else "")


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text("utf-8")


@cache
def _scripts() -> str:
    return '"use strict";\n(() => {\n' + "\n".join(_asset(name) for name in _SCRIPTS) + "\n})();"


@cache
def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
