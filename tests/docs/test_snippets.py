"""Runs the `python` blocks of docs/: the blocks of one page in order, in one namespace.

A block that cannot run is marked on the line above it with `<!-- no-run: why -->`; it is skipped with that reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import python_blocks
from tests.support.processes import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))  # test_readme.py runs the README


class Page:
    """The blocks of one page, the folder that they run in and the names that they share."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.blocks = python_blocks(path.read_text(encoding="utf-8"))
        self.done = 0

    def run(self, number: int) -> None:
        """Runs block `number`, after those before it that have not run yet."""
        while self.done <= number:
            block = self.blocks[self.done]
            self.done += 1  # a block that fails is not tried again for the sake of a later one
            if not block.no_run:
                # Padded, so that a traceback points at the page's own line.
                exec(compile("\n" * (block.line - 1) + block.code, str(self.path), "exec"), self.names)


def _cases() -> list[Any]:
    return [
        pytest.param(page, number, block.no_run, id=f"{page.relative_to(ROOT)}:{block.line}")
        for page in PAGES
        for number, block in enumerate(python_blocks(page.read_text(encoding="utf-8")))
    ]


@pytest.fixture(scope="module")
def open_pages() -> dict[Path, Page]:
    return {}


@pytest.mark.parametrize(("path", "number", "no_run"), _cases())
def test_block_runs(
    path: Path,
    number: int,
    no_run: str,
    open_pages: dict[Path, Page],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if no_run:
        pytest.skip(f"no-run: {no_run}")
    if path not in open_pages:
        open_pages[path] = Page(path, tmp_path_factory.mktemp(path.stem))
    page = open_pages[path]
    monkeypatch.chdir(page.folder)
    page.run(number)
