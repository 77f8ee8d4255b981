"""The rules on the page about layouts are right."""

import re
from pathlib import Path

import pytest

from bytecheckpoint.layouts import Layout

PAGE = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()
BLOCKS = [block for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) if "<->" in block]


@pytest.mark.parametrize("block", BLOCKS)
def test_rules(block):
    layout = Layout.from_text(block if block.startswith("layout") else f"layout page a <-> b\nrules\n{block}")
    assert Layout.from_text(layout.to_text()) == layout
