"""States that are streamed in pieces: round trips, bounded memory, and every fault of a provider by name."""

from __future__ import annotations

import os
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CheckpointError, FileProvider, Piece, ReplayBuffer, StorageFullError
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.representation.names import generation_of
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import compare, repair, verify
from bytecheckpoint.tuning import tuned
from tests.support.faulty_storage import Faults
from tests.support.layouts import Leaf
from tests.support.modes import MODES
from tests.support.providers import FAULTS, MIB, Buffer, Rows
from tests.support.ranks import outcomes
from tests.support.settings import forget_failure, using
from tests.support.variants import crossed

EVERY_MODE = pytest.mark.parametrize("mode", list(MODES))


@pytest.fixture(autouse=True)
def _short_chunks() -> Iterator[None]:
    with using(chunk_bytes=MIB, writer="thread"):
        yield


def save(path: Any, provider: Any, mode: str = "sync", **states: Any) -> None:
    saved = {"model": {"w": torch.ones(3)}, "replay": provider} | states
    bytecheckpoint.save(path, saved, **MODES[mode]).result(60)


def check_ends(provider: Rows) -> None:
    """Fail unless every piece that was handed out was ended exactly once."""
    assert sum(provider.ended.values()) == provider.handed_out
    assert provider.fault == "same name" or set(provider.ended.values()) <= {1}


@pytest.mark.parametrize(("mode", "stable", "world"), crossed(list(MODES), [True, False], [2, 1]))
def test_pieces_come_back_at_any_number_of_ranks(tmp_path: Path, mode: str, stable: bool, world: int) -> None:
    def made(rank: int) -> Buffer:
        return Buffer(5 * MIB // 2, 3, 0, 3 * MIB, stable=stable, seed=rank, cursor=rank)

    def saving(collective: Collective) -> None:
        provider = made(collective.rank)
        save(tmp_path, provider, mode)
        check_ends(provider)
        assert provider.threads == {"bytecheckpoint-pieces_0"}

    def loading(collective: Collective) -> None:
        provider = Buffer(cursor=9)
        report = bytecheckpoint.load(tmp_path, {"model": {"w": torch.ones(3)}, "replay": provider})
        own = collective.rank if collective.rank < world else 0
        assert provider.rows == made(own).rows and provider.cursor == own
        assert bool(report.notes) == (world > 1 and own != collective.rank)

    ThreadWorld(world).run(saving)
    ThreadWorld(3).run(loading)
    assert verify(tmp_path).ok


@EVERY_MODE
def test_memory_is_two_chunks(tmp_path: Path, mode: str) -> None:
    def read(offset: int, buffer: memoryview) -> None:
        np.frombuffer(buffer, np.uint8)[:] = offset >> 20

    class Large(Rows):
        def __bytecheckpoint_pieces__(self) -> Iterator[Piece]:
            yield Piece("all", 128 * MIB, read, stable=True)

        def load_pieces(self, pieces: Any) -> None:
            assert all(chunk[0] == 8 * number for number, chunk in enumerate(pieces["all"]))

    tracemalloc.start()
    try:
        save(tmp_path, Large(), mode)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
        tracemalloc.reset_peak()
        bytecheckpoint.load(tmp_path, {"model": {"w": torch.ones(3)}, "replay": Large()})
        assert tracemalloc.get_traced_memory()[1] < 48 * MIB
    finally:
        tracemalloc.stop()


def test_tools_see_tensors(tmp_path: Path) -> None:
    rows = Rows(100, 3000)
    save(tmp_path / "a", rows)
    with bytecheckpoint.open(tmp_path / "a") as checkpoint:
        assert bytes(checkpoint["replay/rows.1"][5:9].tolist()) == rows.rows["rows.1"][5:9]
    save(tmp_path / "b", rows)
    assert compare(tmp_path / "a", tmp_path / "b").equal
    (tmp_path / "b/metadata.parquet").unlink()
    assert repair(resolve(tmp_path / "b")).written and compare(tmp_path / "a", tmp_path / "b").equal
    (tmp_path / "a/metadata.parquet").unlink()
    next((tmp_path / "a/replay").glob("rank-*")).unlink()
    with pytest.raises(CheckpointError, match=r"1 of the . files that rank 0 wrote are missing"):
        repair(resolve(tmp_path / "a"))


def test_a_large_catalog(tmp_path: Path) -> None:
    rows = Rows(*range(1, 40))
    with tuned(catalog_group_bytes=1):
        save(tmp_path, rows)
    loaded = Rows()
    bytecheckpoint.load(tmp_path, {"model": {"w": torch.ones(3)}, "replay": loaded})
    assert loaded.rows == rows.rows


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize(("mode", "fault"), crossed(list(MODES), list(FAULTS)))
def test_a_fault_of_a_provider(tmp_path: Path, mode: str, fault: str, stable: bool) -> None:
    """The save fails on all ranks by the name of provider and piece, ends each piece once, and leaves no file."""
    providers = [Rows(MIB, 8 * MIB, seed=rank, stable=stable, fault=fault * rank) for rank in range(2)]
    world = ThreadWorld(2)
    with using(timeout=1.0 if fault == "slow" else 60.0):
        errors = outcomes(world, lambda ranks: save(tmp_path, providers[ranks.rank], mode))
        providers[1].release.set()
        for error in errors:
            assert isinstance(error, CheckpointError)
            assert re.search(FAULTS[fault], str(error)), error
    for provider in providers:
        check_ends(provider)
    assert [name for name, _ in resolve(tmp_path).list() if generation_of(name)] == []
    with using(timeout=60.0):
        outcomes(world, lambda ranks: forget_failure())
        outcomes(world, lambda ranks: save(tmp_path, Rows(10), mode))
    assert verify(tmp_path).ok


@EVERY_MODE
def test_the_storage_is_full(tmp_path: Path, mode: str) -> None:
    faults, rows = Faults(), Rows(MIB, 8 * MIB)
    faults.add("write", StorageFullError("no space"), name="replay/rank", skip=3)
    with pytest.raises(StorageFullError):
        save(faults.at(tmp_path), rows, mode)
    check_ends(rows)
    assert [name for name, _ in resolve(tmp_path).list() if generation_of(name)] == []


def test_arguments_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"extra_states/a\.0: a Rows is streamed in pieces: make it a state of its own"
    ):
        save(tmp_path, Rows(), extra_states={"a": [Rows(3)]})
    save(tmp_path / "names", Buffer(3, name="rows.0"))  # a tensor among its plain values has another name than a piece
    half = type("Half", (), {"__bytecheckpoint_pieces__": lambda self: []})
    with pytest.raises(CheckpointError, match="a Half has __bytecheckpoint_pieces__, and no load_pieces"):
        save(tmp_path, half())


def test_states_that_are_not_saved_are_not_asked(tmp_path: Path) -> None:
    rows = Rows(3)
    bytecheckpoint.save(tmp_path, {"model": {"w": torch.ones(3)}, "replay": rows}, exclude=["replay"])
    bytecheckpoint.prepare({"replay": rows}).result(60)
    assert rows.handed_out == 0
    with pytest.raises(CheckpointError, match="replay"):
        bytecheckpoint.load(tmp_path, {"replay": rows})


def test_faults_of_a_load(tmp_path: Path) -> None:
    """They fail the load before anything else is installed; readers end with `load_pieces`."""
    save(tmp_path, Rows(100, 2 * MIB), extra_states={"step": 3})
    live, rows = {"step": 0}, Rows(fault="loading")
    with pytest.raises(CheckpointError, match=r"replay: Rows rejects its saved pieces \(ValueError: no rows wanted\)"):
        bytecheckpoint.load(tmp_path, {"replay": rows, "extra_states": live}, strict=False)
    assert live == {"step": 0}
    for call in (lambda: rows.kept["rows.0"].read_into(0, bytearray(3)), lambda: list(rows.kept["rows.0"])):
        with pytest.raises(CheckpointError, match="inside of load_pieces only"):
            call()
    with pytest.raises(CheckpointError, match="has no state_dict, unlike Buffer"):
        bytecheckpoint.load(tmp_path, {"replay": Buffer()}, strict=False)
    file = next((tmp_path / "replay").glob("rank-*"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"checksum mismatch in replay/rank-.*replay/rows\.1"):
        bytecheckpoint.load(tmp_path, {"replay": Rows(), "extra_states": live}, strict=False)
    assert live == {"step": 0}


def test_ranks_that_the_save_lacked_are_named(tmp_path: Path) -> None:
    ThreadWorld(2).run(lambda ranks: save(tmp_path, Rows(100, seed=ranks.rank)))

    def loading(collective: Collective) -> tuple[str, ...]:
        return bytecheckpoint.load(tmp_path, {"replay": Rows()}, strict=False).notes

    assert ThreadWorld(3).run(loading) == [(), (), ("rank 2 has no copy of its own and got rank 0's: replay",)]


@EVERY_MODE
@pytest.mark.parametrize("sizes", [(), (0,), (0, 0)])
def test_nothing_to_stream(tmp_path: Path, mode: str, sizes: tuple[int, ...]) -> None:
    save(tmp_path, rows := Rows(*sizes), mode)
    check_ends(rows)
    loaded = Rows(5)
    bytecheckpoint.load(tmp_path, {"model": {"w": torch.ones(3)}, "replay": loaded})
    assert loaded.rows == rows.rows and verify(tmp_path).ok


def test_a_name_that_is_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As that of a file may be."""

    found: dict[str, bytes] = {}

    class Files:
        def __bytecheckpoint_pieces__(self) -> Iterator[Piece]:
            yield Piece("no \udcff text", 3, lambda _, buffer: buffer.__setitem__(slice(None), b"abc"), stable=True)

        def load_pieces(self, pieces: Any) -> None:
            found.update({name: b"".join(piece) for name, piece in pieces.items()})

    save(tmp_path, Files())
    bytecheckpoint.load(tmp_path, {"replay": Files()})
    assert found == {"no \udcff text": b"abc"} and "replay/no \udcff text" in bytecheckpoint.open(tmp_path)
    assert "metrics" not in caplog.text


def test_pieces_need_a_provider(tmp_path: Path) -> None:
    counted = Rows(3)
    counted.state_dict = lambda: {"seen": 4}  # type: ignore[attr-defined]
    counted.load_state_dict = lambda state: None  # type: ignore[attr-defined]
    for number, rows in enumerate((Rows(3), counted)):
        save(tmp_path / str(number), rows)
        for live in ({}, {"x": torch.ones(3)}, {"seen": 0}, torch.optim.lr_scheduler.LambdaLR):
            with pytest.raises(CheckpointError, match=r"holds replay as pieces of a Rows, which a .* cannot take"):
                bytecheckpoint.load(tmp_path / str(number), {"replay": live}, strict=False)


def test_a_provider_needs_pieces(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path, {"replay": {"x": torch.ones(3)}})
    with pytest.raises(CheckpointError, match="the checkpoint holds no pieces for a Rows"):
        bytecheckpoint.load(tmp_path, {"replay": Rows(3)})


def test_tensors_of_other_ranks_are_no_pieces(tmp_path: Path) -> None:
    """A dict on each stage of a pipeline, with tensors of its own that are stored by name and box."""

    def states(rank: int) -> dict[str, Any]:
        return {"ema": {f"layer{rank}": Leaf((4,), [((0,), (4,))]).fill(torch.ones(4), False), "step": 3}}

    def loading(collective: Collective) -> int:
        live = states(collective.rank)
        live["ema"]["step"] = 0
        bytecheckpoint.load(tmp_path, live)
        step: int = live["ema"]["step"]
        return step

    world = ThreadWorld(2)
    world.run(lambda ranks: bytecheckpoint.save(tmp_path, states(ranks.rank)))
    assert world.run(loading) == [3, 3]


def test_ranks_that_plan_anew_keep_their_pieces(tmp_path: Path) -> None:
    """A cached plan that no longer fits the other rank: rank 0 writes its planned files again, not its pieces."""

    def saving(collective: Collective) -> list[bool]:
        cached = []
        for number in range(3):
            rows, names = Rows(3 * MIB, seed=number), ["a", "b"] if number < 2 or collective.rank == 0 else ["b"]
            states = {"model": {name: torch.full((1000,), number) for name in names}, "replay": rows}
            cached.append(bytecheckpoint.save(tmp_path, states).result(60).plan_cached)
            check_ends(rows)
        return cached

    assert ThreadWorld(2).run(saving) == [[False, True, True], [False, True, False]]
    loaded = Rows()
    bytecheckpoint.load(tmp_path, {"replay": loaded}, strict=False)
    assert loaded.rows == Rows(3 * MIB, seed=2).rows
    with bytecheckpoint.open(tmp_path) as checkpoint:
        assert checkpoint["model/a"][3] == checkpoint["model/b"][3] == 2
    assert verify(tmp_path).ok


# --- the providers of the package ------------------------------------------------------------------------------


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "data/index.bin"
    path.parent.mkdir()
    path.write_bytes(data := os.urandom(3 * MIB + 5))
    handle = bytecheckpoint.save(tmp_path / "c", {"index": FileProvider(path)}, async_checkpoint=True)
    new = tmp_path / "new"
    new.write_bytes(b"newer")
    new.replace(path)
    handle.result(60)
    bytecheckpoint.load(tmp_path / "c", {"index": FileProvider(path)})
    assert path.read_bytes() == data and os.listdir(path.parent) == ["index.bin"]
    bytecheckpoint.load(tmp_path / "c", {"index": FileProvider(tmp_path / "elsewhere/index")})
    assert (tmp_path / "elsewhere/index").read_bytes() == data


@pytest.mark.parametrize("change", ["longer", "shorter", "rewritten", "gone"])
def test_a_file_that_changes(tmp_path: Path, change: str) -> None:
    path = tmp_path / "index.bin"
    path.write_bytes(bytes(3 * MIB))
    provider = FileProvider(path)

    class Changing(FileProvider):
        def __bytecheckpoint_pieces__(self) -> Any:
            if change == "gone":
                path.unlink()
            yield from provider.__bytecheckpoint_pieces__()
            os.truncate(path, {"longer": 4 * MIB, "shorter": MIB}.get(change, 3 * MIB))
            path.touch()

    def open_files() -> list[str]:
        paths = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
        return [path for path in paths if "index.bin" in path]

    with pytest.raises(
        CheckpointError, match=r"(piece 'file' of index, a|index:) Changing.*(has changed|No such file)"
    ):
        bytecheckpoint.save(tmp_path / "c", {"index": Changing(path)})
    assert open_files() == []


def test_a_replay_buffer(tmp_path: Path) -> None:
    """Rows that are appended after the call are not in the checkpoint; those before are, bit for bit."""
    fields = {"observation": ((4, 3), "float32"), "reward": ((), "float64"), "empty": ((0,), "uint8")}

    def rows(first: int, count: int) -> dict[str, np.ndarray[Any, Any]]:
        reward = np.arange(first, first + count, dtype=np.float64)
        return {
            "observation": (reward[:, None, None] + np.arange(12).reshape(4, 3) / 16).astype(np.float32),
            "reward": reward,
            "empty": np.zeros((count, 0), np.uint8),
        }

    buffer = ReplayBuffer(fields, segment_rows=1000)
    for first in range(0, 30_000, 300):
        buffer.append(**rows(first, 300))
    handle = bytecheckpoint.save(tmp_path, {"replay": buffer}, async_checkpoint=True, staging="background")
    for first in range(30_000, 33_000, 300):
        buffer.append(**rows(first, 300))
    handle.result(60)
    loaded = ReplayBuffer(fields, segment_rows=700)
    loaded.append(**rows(7, 3))
    bytecheckpoint.load(tmp_path, {"replay": loaded})
    assert len(loaded) == 30_000 and len(buffer) == 33_000
    for numbers in (slice(None), [5, 29_999, 5], slice(690, 710)):
        found = loaded[numbers]
        expected = rows(0, 30_000)
        assert all(np.array_equal(found[name], expected[name][numbers]) for name in fields)
    with bytecheckpoint.open(tmp_path) as checkpoint:
        assert checkpoint["replay/observation"].shape == (30_000, 4, 3)
        assert checkpoint["replay/reward"][29_999] == 29_999
    with pytest.raises(CheckpointError, match="do not fit the fields"):
        bytecheckpoint.load(tmp_path, {"replay": ReplayBuffer(fields | {"reward": ((2,), "float64")})})
    for wrong in ({}, {"reward": [1.0]}, rows(0, 2) | {"reward": np.zeros(3)}):
        with pytest.raises(bytecheckpoint.UsageError):
            buffer.append(**wrong)
