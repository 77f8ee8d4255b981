"""Pieces whose tokens tell that they are unchanged: their files are used again, in any sequence of changes."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint import FileProvider, ReplayBuffer
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.tools import repair, verify
from tests.support.modes import MODES
from tests.support.providers import MIB, Rows
from tests.support.ranks import outcomes
from tests.support.variants import quick


class Segments(Rows):
    """Pieces with tokens, which it gives anew to a piece that changes."""

    def put(self, name: str, size: int) -> None:
        self.rows[name] = os.urandom(size)
        self.tokens[name] = os.urandom(8)


def save(path: Path, provider: Any, mode: str = "sync", incremental: Any = True, **states: Any) -> Any:
    saved = {"replay": provider, "extra_states": {"step": 1}} | states
    return bytecheckpoint.save(path, saved, incremental=incremental, **MODES[mode]).result(60)


def check(path: Path, rows: dict[str, bytes]) -> None:
    """Fail unless a checkpoint is whole and holds these pieces, also if its catalog is made anew from the headers."""
    for _ in range(2):
        loaded = Rows()
        bytecheckpoint.load(path, {"replay": loaded, "extra_states": {"step": 0}})
        assert loaded.rows == rows and not verify(path).findings
        repair(path, force=True)


@pytest.mark.parametrize("mode", MODES)
def test_pieces_with_equal_tokens_are_not_read(tmp_path: Path, mode: str) -> None:
    provider = Segments(MIB)  # without a token
    for number in range(4):
        provider.put(f"segment.{number}", 300_000 + number)
        provider.read.clear()
        report = save(tmp_path / str(number), provider, mode)
        assert provider.read == {"rows.0", f"segment.{number}"}
        assert report.bytes_adopted >= number * 300_000 and report.bytes_written < MIB + 400_000
        assert provider.ended.total() == provider.handed_out
    rows = dict(provider.rows)
    for number in range(3):
        shutil.rmtree(tmp_path / str(number))
    check(tmp_path / "3", rows)
    provider.read.clear()
    assert save(tmp_path / "full", provider, mode, "full").bytes_adopted == 0
    assert provider.read == rows.keys()


def test_a_load_forgets_the_tokens(tmp_path: Path) -> None:
    provider = Segments()
    provider.put("a", 1000)
    save(tmp_path / "0", provider)
    bytecheckpoint.load(tmp_path / "0", {"replay": provider, "extra_states": {"step": 0}})
    provider.rows["a"] = bytes(1000)
    save(tmp_path / "1", provider)
    check(tmp_path / "1", {"a": bytes(1000)})


def test_nothing_changes_but_the_step(tmp_path: Path) -> None:
    provider = Segments()
    provider.put("a", MIB)
    for step in range(3):
        report = save(tmp_path / str(step), provider, extra_states={"step": step})
        assert (report.bytes_written > MIB) == (step == 0)
    for step in range(2):
        shutil.rmtree(tmp_path / str(step))
    check(tmp_path / "2", provider.rows)
    os.unlink(next((tmp_path / "2" / "replay").glob("rank-00000.*")))
    (tmp_path / "2" / "metadata.parquet").unlink()
    with pytest.raises(bytecheckpoint.CorruptCheckpointError, match="is missing"):
        repair(tmp_path / "2")


@pytest.mark.parametrize("seed", quick(range(6), every=3))
def test_any_sequence_of_changes(tmp_path: Path, seed: int) -> None:
    dice, provider = random.Random(seed), Segments()
    steps: list[tuple[Path, dict[str, bytes]]] = []
    for number in range(25):
        for _ in range(dice.randrange(3)):
            match dice.randrange(3):
                case 0:
                    provider.put(f"segment.{number}.{dice.random()}", dice.randrange(20_000))
                case 1 if provider.rows:
                    provider.put(dice.choice(list(provider.rows)), dice.randrange(20_000))
                case 2 if provider.rows:
                    name = dice.choice(list(provider.rows))
                    del provider.rows[name], provider.tokens[name]
        path = tmp_path / str(number if dice.random() < 0.8 else max(number - 1, 0))  # some replace the last one
        save(path, provider, dice.choice(list(MODES)), dice.choice([True, True, True, False, "full"]))
        steps = [(step, rows) for step, rows in steps if step != path] + [(path, dict(provider.rows))]
        if len(steps) > 3:
            shutil.rmtree(steps.pop(dice.randrange(3))[0])
    for step, rows in steps:
        check(step, rows)


def test_files_do_not_become_many(tmp_path: Path) -> None:
    provider = Segments()
    for number in range(40):
        provider.put(f"segment.{number}", 1000)
        save(tmp_path / str(number), provider)
    assert len(list((tmp_path / "39" / "replay").iterdir())) <= 18
    check(tmp_path / "39", provider.rows)


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_save_and_a_removed_source(tmp_path: Path, mode: str) -> None:
    provider = Segments()
    provider.put("a", MIB)
    save(tmp_path / "0", provider, mode)
    provider.fault = "raising"
    provider.put("b", 17 * MIB)
    with pytest.raises(bytecheckpoint.CheckpointError, match="segment 7"):
        save(tmp_path / "1", provider, mode)
    assert not list((tmp_path / "1").rglob("*.safetensors"))
    provider.fault = ""
    shutil.rmtree(tmp_path / "0")
    provider.read.clear()
    save(tmp_path / "2", provider, mode)
    assert provider.read == {"a", "b"}
    check(tmp_path / "2", provider.rows)


def test_ranks_have_pieces_of_their_own(tmp_path: Path) -> None:
    def train(collective: Collective) -> None:
        provider = Segments()
        for number in range(3):
            provider.put(f"segment.{number}", 1000)
            provider.read.clear()
            save(tmp_path / str(number), provider)
            assert provider.read == {f"segment.{number}"}
        loaded = Rows()
        bytecheckpoint.load(tmp_path / "2", {"replay": loaded, "extra_states": {"step": 0}})
        assert loaded.rows == provider.rows

    assert outcomes(ThreadWorld(2), train) == [None] * 2


def test_the_providers_that_ship(tmp_path: Path) -> None:
    index = tmp_path / "index"
    index.write_bytes(os.urandom(MIB))
    old = time.time() - 60
    buffer = ReplayBuffer({"x": ((4,), np.float32)})
    buffer.append(x=np.ones((70_000, 4)))

    def written(name: str, **options: Any) -> int:
        states = {"index": FileProvider(index, **options), "replay": buffer, "extra_states": {"step": 1}}
        return int(bytecheckpoint.save(tmp_path / name, states, incremental=True).result(60).bytes_written)

    assert written("0", trust_times=True) > 2 * MIB  # changed just now
    time.sleep(2.1)
    assert MIB < written("1", trust_times=True) < MIB + 200_000
    assert written("2", trust_times=True) < 200_000
    assert MIB < written("3") < MIB + 200_000
    buffer.append(x=np.zeros((1, 4)))
    with index.open("r+b") as file:
        file.write(os.urandom(8))
    os.utime(index, (old, old))
    assert written("4", trust_times=True) > 2 * MIB
    target = ReplayBuffer({"x": ((4,), np.float32)})
    bytecheckpoint.load(tmp_path / "4", {"replay": target, "index": FileProvider(tmp_path / "new")}, strict=False)
    assert len(target) == 70_001 and (tmp_path / "new").read_bytes() == index.read_bytes()
