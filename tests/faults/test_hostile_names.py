"""Names of states and keys that look like paths or are hard to write: they round-trip, and no file leaves the folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bytecheckpoint
from bytecheckpoint import CheckpointError, UsageError
from tests.support.coded import files_of

HOSTILE = [
    "../../x", "/etc/passwd", "a/../../b", "..", ".", "a\0b", "x" * 10_000, "ünïcödé/Ω", "two\nlines", "\ud800lone",
    " ", "a\\b", "CON", "model/w", "metadata.parquet", "~", "$HOME", "a:b", "file:///etc/passwd", "\x7f", "%2e%2e%2f",
    "-rf", "*", "a" * 255, "\u202egnp", "0", "//values", "#", "Model", "model ", "é", "e\u0301",
]  # fmt: skip


def files_elsewhere(root: Path) -> list[str]:
    return sorted(name for name in files_of(root) if not name.startswith("place/s/"))


def round_trip(root: Path, states: dict[str, Any], blank: dict[str, Any]) -> None:
    """Save and load in root/place/s; fail if a file elsewhere below `root` changes, or a file has an odd name."""
    place = root / "place" / "s"
    before = files_elsewhere(root)
    bytecheckpoint.save(place, states)
    assert files_elsewhere(root) == before
    for name in files_of(place):
        assert len(os.fsencode(os.path.basename(name))) < 200 and name.isascii() and name.count("/") <= 1
    bytecheckpoint.load(place, blank)


@pytest.mark.parametrize("name", HOSTILE, ids=[ascii(name)[:30] for name in HOSTILE])
def test_a_hostile_name_of_a_state(tmp_path: Path, name: str) -> None:
    blank: dict[str, Any] = {name: {}}
    round_trip(tmp_path, {name: {"t": torch.arange(5.0), "v": 7}}, blank)
    assert torch.equal(blank[name]["t"], torch.arange(5.0)) and blank[name]["v"] == 7


@pytest.mark.parametrize("state", ["model", "extra_states", "optimizer"])
def test_hostile_keys_all_together(tmp_path: Path, state: str) -> None:
    saved = {name: torch.full((3,), float(i)) for i, name in enumerate(HOSTILE)}
    blank = {state: {name: torch.zeros(3) for name in HOSTILE} if state == "model" else {}}
    round_trip(tmp_path, {state: saved}, blank)
    for i, name in enumerate(HOSTILE):
        assert torch.equal(blank[state][name], torch.full((3,), float(i))), ascii(name)
    checkpoint = bytecheckpoint.open(tmp_path / "place" / "s")
    assert sum(key.startswith(f"{state}/") for key in checkpoint) >= len(HOSTILE)


def test_states_whose_names_differ_little_stay_apart(tmp_path: Path) -> None:
    names = ["model", "Model", "MODEL", "model ", "é", "e\u0301", "extra", "extra_states", "kind-0123456789abcdef"]
    blank: dict[str, Any] = {name: {} for name in names}
    round_trip(tmp_path, {name: {"v": i, "t": torch.tensor([i])} for i, name in enumerate(names)}, blank)
    assert [(blank[name]["v"], int(blank[name]["t"])) for name in names] == [(i, i) for i in range(len(names))]


@given(st.text(st.characters(exclude_categories=()), min_size=1, max_size=40), st.text(max_size=40))
def test_any_text_is_a_name(tmp_path_factory: pytest.TempPathFactory, state: str, key: str) -> None:
    root = tmp_path_factory.mktemp("names")
    blank: dict[str, Any] = {state: {}}
    round_trip(root, {state: {key: torch.arange(2.0), "n": {key: [1, key]}}}, blank)
    if key != "n":
        assert torch.equal(blank[state][key], torch.arange(2.0))
    assert blank[state]["n"] == {key: [1, key]} if key != "n" else True


def test_a_hostile_name_in_an_error_is_one_line(path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        bytecheckpoint.save(path, {"extra_states": {"two\nlines": object()}})
    assert "\n" not in str(caught.value) and "two" in str(caught.value)
    bytecheckpoint.save(path, {"model": {"two\nlines": torch.zeros(2)}})
    with pytest.raises(bytecheckpoint.IncompatibleCheckpointError) as other:
        bytecheckpoint.load(path, {"model": {"three\nlines": torch.zeros(2), "\ud800": torch.zeros(2)}})
    str(other.value).encode()  # can be printed
    assert "\n" not in str(other.value)


def test_a_log_takes_paths_that_are_not_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The handlers of logging raise nothing, and print a failure on stderr."""
    (tmp_path / "a\udcff").touch()
    handler = logging.FileHandler(tmp_path / "log", encoding="utf-8")
    logging.getLogger("bytecheckpoint").addHandler(handler)
    try:
        handle = bytecheckpoint.save(tmp_path / "a\udcff" / "x", {"model": {"w": torch.ones(2)}}, async_checkpoint=True)
        with pytest.raises(CheckpointError):
            handle.result(30)
    finally:
        logging.getLogger("bytecheckpoint").removeHandler(handler)
        handler.close()
    assert "Logging error" not in capsys.readouterr().err
    assert "a\\udcff/x failed: " in (tmp_path / "log").read_text("utf-8")
