"""Loads that read once what several ranks want: who reads, who takes from whom, and what happens when one fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.engine import peer_memory
from bytecheckpoint.engine.exchange import Exchange, _Answer
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError
from tests.support.layouts import Leaf, coded

#: 4.5 chunks of a tensor, a tensor whose bytes are no multiple of 16, and one that is cut by columns.
SHAPES = {"a": (1500, 8192), "b": (3, 1_000_001), "c": (512, 4096)}
FULL = {name: coded(shape, torch.int16, number) for number, (name, shape) in enumerate(SHAPES.items())}
NBYTES = sum(t.nbytes for t in FULL.values())

MACHINES = {
    "one machine": ["m"] * 4,
    "two and two": ["m", "n", "m", "n"],
    "three and one": ["m", "m", "m", "n"],
    "each alone": ["k", "l", "m", "n"],
}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exchange") / "step"
    bytecheckpoint.save(path, {"model": dict(FULL)})
    return path


def boxes(rank: int, world: int, replicated: bool) -> dict[str, Leaf]:
    """What a rank wants: everything, or all of "a", some rows of "b" that overlap its neighbours', columns of "c"."""
    if replicated:
        return {name: Leaf(shape, [((0,) * len(shape), shape)]) for name, shape in SHAPES.items()}
    wide = SHAPES["c"][1] // world
    return {
        "a": Leaf(SHAPES["a"], [((0, 0), SHAPES["a"])]),
        "b": Leaf(SHAPES["b"], [((min(rank, 1), 0), (2, SHAPES["b"][1]))]),
        "c": Leaf(SHAPES["c"], [((0, wide * rank), (SHAPES["c"][0], wide))]),
    }


def load(collective: Collective, step: Path, hosts: list[str], replicated: bool, strided: bool) -> Any:
    collective.host = hosts[collective.rank]
    wanted = boxes(collective.rank, len(hosts), replicated)
    state = {name: leaf.fill(torch.zeros_like(FULL[name]), strided) for name, leaf in wanted.items()}
    report = bytecheckpoint.load(step, {"model": state}, timeout=30)
    for name, leaf in wanted.items():
        leaf.check(FULL[name])
    return report


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("replicated", [True, False], ids=["replicas", "overlapping"])
@pytest.mark.parametrize("machines", MACHINES)
def test_every_byte_is_read_once(step: Path, machines: str, replicated: bool, strided: bool) -> None:
    hosts = MACHINES[machines]
    reports = ThreadWorld(4).run(load, step, hosts, replicated, strided, timeout=60)
    assert sum(r.bytes_read for r in reports) <= NBYTES * 1.01
    if replicated:
        assert sum(r.bytes_received for r in reports) == pytest.approx(3 * NBYTES, rel=0.02)
        assert max(r.bytes_read for r in reports) < NBYTES * 0.4


def test_memory_that_cannot_be_read_goes_over_the_wire(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_readv", None)
    reports = ThreadWorld(3).run(load, step, ["m"] * 3, True, False, timeout=60)
    assert sum(r.bytes_read for r in reports) <= NBYTES * 1.01


def test_a_process_is_known_by_its_secret() -> None:
    words = peer_memory.introduction()
    assert peer_memory.sees(words) > 0
    forged = words[:-1] + bytes([words[-1] ^ 1])
    assert peer_memory.sees(forged) == 0
    assert peer_memory.sees(b"") == 0


def test_parts_of_segments() -> None:
    run = peer_memory.segments([(100, 10), (500, 5), (900, 20)])

    def parts(*wanted: tuple[int, int]) -> list[list[int]]:
        starts, lengths = np.array(wanted, np.int64).reshape(-1, 2).T
        found: list[list[int]] = peer_memory.parts_of(run, starts, lengths).tolist()
        return found

    assert parts((0, 35)) == run.tolist()
    assert parts((8, 9)) == [[108, 2], [500, 5], [900, 2]]
    assert parts((15, 20)) == [[900, 20]]
    assert parts((15, 20), (9, 1), (9, 2)) == [[900, 20], [109, 1], [109, 1], [500, 1]]
    assert parts() == []


def test_memory_is_pulled_in_pieces_of_any_number_and_size() -> None:
    """More pieces than one call takes, cut differently on both sides."""
    rng = np.random.default_rng(7)
    there = rng.integers(0, 255, 1 << 20, dtype=np.uint8)
    here = np.zeros(1 << 20, np.uint8)
    ends = np.sort(rng.choice(np.arange(1, 1 << 20), 5000, replace=False))
    starts, stops = ends[:-1:2], ends[1::2]
    at = rng.permutation(len(starts))
    total = int((stops - starts).sum())
    remote = np.column_stack((there.ctypes.data + starts[at], (stops - starts)[at]))
    cuts = np.concatenate(([0], np.sort(rng.choice(np.arange(1, total), 3000, replace=False)), [total]))
    local = np.column_stack((here.ctypes.data + cuts[:-1], np.diff(cuts)))
    peer_memory.pull(os.getpid(), remote, local)
    assert np.array_equal(here[:total], np.concatenate([there[starts[i] : stops[i]] for i in at]))
    assert not here[total:].any()


@pytest.mark.parametrize("hosts", [["m"] * 3, ["m", "m", "n"]], ids=["one machine", "two machines"])
@pytest.mark.parametrize("call", [0, 3])
def test_a_reader_that_fails_fails_the_load_everywhere(
    step: Path, hosts: list[str], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name and soon, whichever chunk it is."""
    original, calls = FileSet.fetch, []

    def fetch(self: FileSet, file: int, start: int, stop: int, buffers: Any) -> None:
        if stop - start > 1 << 19:
            calls.append(start)
            if len(calls) == call + 1:
                raise CorruptCheckpointError("a chunk is damaged", file="x")
        original(self, file, start, stop, buffers)

    monkeypatch.setattr(FileSet, "fetch", fetch)
    seen: list[str] = []

    def run(collective: Collective) -> None:
        with pytest.raises(CheckpointError, match="a chunk is damaged") as caught:
            load(collective, step, hosts, True, False)
        seen.append(str(caught.value))

    ThreadWorld(3).run(run, timeout=25)
    assert len(seen) == 3


def test_a_peer_whose_memory_is_gone_fails_the_load_everywhere(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = peer_memory.pull, []

    def broken(pid: int, remote: Any, local: Any) -> None:
        if sum(n for _, n in local) > 1 << 19:
            calls.append(pid)
            if len(calls) == 2:
                raise OSError(3, "No such process")
        original(pid, remote, local)

    monkeypatch.setattr("bytecheckpoint.engine.exchange.pull", broken)

    def run(collective: Collective) -> None:
        with pytest.raises(CheckpointError, match="went away during an exchange"):
            load(collective, step, ["m"] * 3, True, False)

    ThreadWorld(3).run(run, timeout=25)


def test_addresses_go_to_neighbours_only(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank hears in a round does not grow with the number of machines."""
    heard: list[tuple[int, _Answer]] = []
    original = Exchange._meet

    def meet(self: Exchange, name: str, word: Any) -> _Answer:
        answer = original(self, name, word)
        heard.append((self._me, answer))
        return answer

    monkeypatch.setattr(Exchange, "_meet", meet)
    hosts = MACHINES["two and two"]
    ThreadWorld(4).run(load, step, hosts, True, False, timeout=60)
    assert any(answer.held for _, answer in heard)
    assert all(hosts[rank] == hosts[other] for rank, answer in heard for other in answer.held)
