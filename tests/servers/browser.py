"""A real browser: headless Chromium, driven by playwright."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["LAPTOP", "PHONE", "Visit", "chromium", "visit"]

LAPTOP, PHONE = (1366, 768), (390, 844)
_ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Run a browser inside the block; without one skip the test, or fail it if servers are required."""
    program = shutil.which("chromium")
    if program is None:
        reason = "Chromium is not installed: run scripts/install-servers.sh chromium"
        if os.environ.get("BYTECHECKPOINT_REQUIRE_SERVERS") and shutil.which("apt-get"):
            pytest.fail(reason)
        pytest.skip(f"NOT TESTED HERE: {reason}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, headless=True, args=_ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """A page in a tab of its own.

    Attributes:
        page: playwright's.
        troubles: output of the page on the console, and its errors.
        requests: URLs that it has asked for, itself included.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.troubles: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.troubles.append(message.text))
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def text(self, selector: str) -> str:
        """Return the visible text of an element."""
        return str(self.page.inner_text(selector))

    def drawn(self) -> int:
        """Wait until the heat map is drawn; return how many milliseconds after the navigation that was."""
        self.page.wait_for_selector("html[data-drawn]", state="attached")
        return int(self.page.get_attribute("html", "data-drawn"))


@contextlib.contextmanager
def visit(
    browser: Any, url: str, size: tuple[int, int] = LAPTOP, scheme: str = "light", **options: Any
) -> Iterator[Visit]:
    """Open a page inside the block; afterwards it must have written nothing to the console."""
    context = browser.new_context(
        viewport=dict(zip(("width", "height"), size, strict=True)), color_scheme=scheme, **options
    )
    try:
        made = Visit(context.new_page())
        made.page.goto(url)
        yield made
        assert made.troubles == []
    finally:
        context.close()
