"""The `python` blocks of a page."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markdown_it import MarkdownIt

_NO_RUN = re.compile(r"^<!-- *no-run: *(?P<reason>.*?) *-->$")


@dataclass(frozen=True)
class Block:
    """One `python` block: the line its code starts on (from 1), the code, and why it is not run ("" when it is)."""

    line: int
    code: str
    no_run: str


def python_blocks(text: str) -> list[Block]:
    """The `python` blocks of a Markdown text, in order. Blocks of other languages are passed over."""
    blocks: list[Block] = []
    lines, reason = text.splitlines(), ""
    for token in MarkdownIt().parse(text):
        if token.type == "fence":
            first, end = token.map or (0, 0)
            assert lines[end - 1].strip() == token.markup, f"line {first + 1}: the block is never closed"
            if token.info.split()[:1] in (["python"], ["py"]):
                blocks.append(Block(first + 2, token.content, reason))
        marked = _NO_RUN.match(token.content.strip()) if token.type == "html_block" else None
        assert not marked or marked["reason"], "no-run needs a reason"
        reason = marked["reason"] if marked else ""  # it counts for the block that follows it directly
    return blocks
