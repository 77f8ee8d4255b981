"""Settings: limits, messages, the environment."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bytecheckpoint import Settings, UsageError, configure, settings
from bytecheckpoint.settings import (
    StagingSettings,
    StorageSettings,
    TransportSettings,
    _from_environment,
    flat_settings,
)

WRONG: list[tuple[str, list[Any], str]] = [
    ("timeout", [-1, 0, math.nan, math.inf, "5", "x", None, True, 10**5000], "give a positive number of seconds"),
    ("chunk_bytes", [0, -(1 << 20), 1 << 19, 1.5, "x"], "give a positive multiple of 1 MiB"),
    ("writer", ["fork", 3, None], "give 'process' or 'thread'"),
    ("write_threads", [0, True, "2"], "give an integer that is at least 1"),
    ("read_threads", [-1, 1.5], "give an integer that is at least 0"),
    ("tier_hot", ["", None], "give a str that is not empty"),
    ("listen_ports", ["80", "9-8", "0-5", "1-99999", "a-b", 5, None], "give a range of ports, as '29600-29700'"),
    ("listen_address", ["my host", "eth0", 5, None], "give an IP address of this machine"),
    ("message_tree", ["always", True], "give 'auto' or 'on' or 'off'"),
]


@pytest.mark.parametrize(("name", "values", "advice"), WRONG, ids=[name for name, _, _ in WRONG])
def test_a_wrong_value_is_refused_by_name(name: str, values: list[Any], advice: str) -> None:
    before = settings()
    for value in values:
        for make in (Settings().with_changes, configure):
            with pytest.raises(UsageError, match=rf"^setting {name} is .*: {advice}"):
                make(**{name: value})
    assert settings() is before


def test_numbers_of_numpy_are_numbers() -> None:
    assert Settings(timeout=np.float64(3)).timeout == 3
    assert Settings(timeout=3).timeout == 3


def test_an_unknown_setting_is_refused_with_all_names() -> None:
    with pytest.raises(UsageError, match=r"unknown setting 'tiemout'; the settings are: timeout, .*tier_waiting"):
        configure(tiemout=3)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"TIMEOUT": " 5 ", "CHUNK_BYTES": "1_048_576", "WRITER": "thread", "SPOOL_DIR": "12", "READ_THREADS": "3"}
    monkeypatch.delenv("BYTECHECKPOINT_METRICS")
    for name, text in given.items():
        monkeypatch.setenv(f"BYTECHECKPOINT_{name}", text)
    found = _from_environment()
    assert found == Settings(
        timeout=5.0,
        storage=StorageSettings(chunk_bytes=1 << 20, spool_dir="12", read_threads=3),
        staging=StagingSettings(writer="thread"),
    )


def test_a_group_refuses_what_configure_refuses() -> None:
    with pytest.raises(UsageError, match=r"^setting storage_timeout is -1: give a positive number of seconds"):
        StorageSettings(timeout=-1)
    with pytest.raises(UsageError, match=r"^setting listen_ports is '9-8': give a range of ports"):
        TransportSettings(listen_ports="9-8")


def test_every_setting_has_one_flat_name() -> None:
    assert len(flat_settings(Settings())) == 30
    changed = Settings().with_changes(tier_hot="mem://other", staging_bytes=1 << 20)
    assert (changed.tier.hot, changed.staging.bytes) == ("mem://other", 1 << 20)
    assert Settings().with_changes(**flat_settings(changed)) == changed


@pytest.mark.parametrize(("name", "text"), [("TIMEOUT", "soon"), ("TIMEOUT", "-1"), ("WRITER", "fork"), ("COMMIT", "")])
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(f"BYTECHECKPOINT_{name}", text)
    with pytest.raises(UsageError, match=f"^BYTECHECKPOINT_{name}='{text}': give "):
        _from_environment()
