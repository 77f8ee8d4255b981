"""Runs the examples in the package's docstrings."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"


def _modules_with_examples() -> list[str]:
    # By text, so that modules without examples (and their optional packages) are not imported for nothing.
    found = [path for path in SOURCE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")]
    return sorted(".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in found)


@pytest.mark.parametrize("name", _modules_with_examples())
def test_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert attempted
    assert not failed, f"{failed} of {attempted} examples of {name} fail; see the output above"
