"""The versions of DeepSpeed that are admitted are those that the Makefile tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.deepspeed import detection

_ROOT = Path(__file__).parents[2]


def admitted(version: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    module = type("Deepspeed", (), {"__version__": version})
    monkeypatch.setitem(detection.sys.modules, "deepspeed", module)
    try:
        detection.check_version()
    except UsageError:
        return False
    return True


def test_what_is_admitted_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = re.findall(r"^deepspeed==(\S+)", (_ROOT / "constraints-frameworks.txt").read_text(), re.MULTILINE)
    (others,) = re.findall(r"^DEEPSPEED_VERSIONS :=(.*)", (_ROOT / "Makefile").read_text(), re.MULTILINE)
    versions = [f"0.{minor}.{micro}" for minor in (18, 19, 20) for micro in range(12)]
    versions += ["0.19", "0.190.8", "1.19.8", "unknown"]
    assert [version for version in versions if admitted(version, monkeypatch)] == sorted([*pinned, *others.split()])
