"""Exchanges: every byte is read once, ranks copy it from each other, and the failure of one rank fails all."""

from __future__ import annotations

import gc
import math
import tempfile
import threading
import time
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.engine import peer_memory
from bytecheckpoint.engine.exchange import ChunkExchange
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.testing.fault_rule import FaultRule
from bytecheckpoint.tuning import tuned
from tests.support.layouts import Leaf, coded
from tests.support.memory import as_on_disk
from tests.support.ranks import outcomes
from tests.support.variants import crossed

#: 4.5 chunks of a tensor, a tensor whose bytes are no multiple of 16, and one that is cut by columns.
SHAPES = {"a": (1500, 8192), "b": (3, 1_000_001), "c": (512, 4096)}
NBYTES = sum(2 * math.prod(shape) for shape in SHAPES.values())


@cache
def full() -> dict[str, torch.Tensor]:
    """Return the tensors; every worker collects this file, and they take a while."""
    return {name: coded(shape, torch.int16, number) for number, (name, shape) in enumerate(SHAPES.items())}


MACHINES = {
    "one machine": ["m"] * 4,
    "two and two": ["m", "n", "m", "n"],
    "three and one": ["m", "m", "m", "n"],
    "each alone": ["k", "l", "m", "n"],
}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exchange") / "step"
    bytecheckpoint.save(path, {"model": full()})
    return path


def boxes(rank: int, world: int, replicated: bool) -> dict[str, Leaf]:
    """Boxes that a rank wants: everything, or all of "a", rows of "b" that overlap its neighbours', columns of "c"."""
    if replicated:
        return {name: Leaf(shape, [((0,) * len(shape), shape)]) for name, shape in SHAPES.items()}
    wide = SHAPES["c"][1] // world
    return {
        "a": Leaf(SHAPES["a"], [((0, 0), SHAPES["a"])]),
        "b": Leaf(SHAPES["b"], [((min(rank, 1), 0), (2, SHAPES["b"][1]))]),
        "c": Leaf(SHAPES["c"], [((0, wide * rank), (SHAPES["c"][0], wide))]),
    }


def load(
    collective: Collective, step: Path, hosts: list[str], replicated: bool, strided: bool, on_disk: bool = True
) -> Any:
    collective.host = hosts[collective.rank]
    wanted = boxes(collective.rank, len(hosts), replicated)
    state = {name: leaf.fill(torch.zeros_like(full()[name]), strided) for name, leaf in wanted.items()}
    source = as_on_disk(step) if on_disk else step
    report = bytecheckpoint.load(source, {"model": state}, timeout=30)
    for name, leaf in wanted.items():
        leaf.check(full()[name])
    return report


@pytest.mark.parametrize(("machines", "replicated", "strided"), crossed(list(MACHINES), [True, False], [False, True]))
def test_every_byte_is_read_once(step: Path, machines: str, replicated: bool, strided: bool) -> None:
    hosts = MACHINES[machines]
    reports = ThreadWorld(4).run(load, step, hosts, replicated, strided, timeout=60)
    assert sum(r.bytes_read for r in reports) <= NBYTES * 1.01
    if replicated:
        assert sum(r.bytes_received for r in reports) == pytest.approx(3 * NBYTES, rel=0.02)
        assert max(r.bytes_read for r in reports) < NBYTES * 0.4


@pytest.mark.parametrize("machines", ["two and two", "each alone"])
def test_ranks_take_turns_where_a_machine_has_memory_for_few_chunks(step: Path, machines: str) -> None:
    bytecheckpoint.configure(chunk_bytes=1 << 20)
    with tuned(exchange_round_bytes=3 << 20):
        reports = ThreadWorld(4).run(load, step, MACHINES[machines], replicated=True, strided=False, timeout=60)
    assert sum(r.bytes_read for r in reports) <= NBYTES * 1.01


def test_machines_that_get_the_same_get_one_array(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thousand machines there would be a thousand copies."""
    world = ThreadWorld(4)
    kind = type(world.ranks[0])
    exchange, arrays = kind.exchange, []

    def seen(self: Collective, tag: str, outgoing: Any, incoming: Any, *, timeout: float) -> None:
        arrays.append({array.ctypes.data for array in outgoing.values()})
        assert len(outgoing) in (0, 3)
        exchange(self, tag, outgoing, incoming, timeout=timeout)

    monkeypatch.setattr(kind, "exchange", seen)
    world.run(load, step, MACHINES["each alone"], replicated=True, strided=False, timeout=60)
    assert len(arrays) >= 4 and all(len(each) <= 1 for each in arrays)


def test_each_rank_reads_from_memory_for_itself() -> None:
    """A copy from another rank would cost as much as a read from a tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "step"
        bytecheckpoint.save(path, {"model": full()})
        reports = ThreadWorld(3).run(load, path, ["m"] * 3, True, False, False, timeout=60)
    assert [r.bytes_received for r in reports] == [0, 0, 0]


def test_each_rank_reads_from_the_page_cache_for_itself(step: Path) -> None:
    for path in filter(Path.is_file, step.rglob("*")):
        path.read_bytes()
    reports = ThreadWorld(3).run(load, step, ["m"] * 3, True, False, False, timeout=60)
    assert [r.bytes_received for r in reports] == [0, 0, 0]


def test_what_the_page_cache_lacks_is_exchanged(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if resolve(step).capabilities.in_memory:
        pytest.skip("the temporary files are on a tmpfs")
    monkeypatch.setattr("bytecheckpoint.storage.posix.storage.in_page_cache", lambda fd, offsets: False)
    reports = ThreadWorld(3).run(load, step, ["m"] * 3, True, False, False, timeout=60)
    assert all(r.bytes_received > NBYTES / 2 for r in reports)


@tuned(peer_memory=False)
def test_memory_that_cannot_be_read_is_sent_over_the_network(step: Path) -> None:
    reports = ThreadWorld(3).run(load, step, ["m"] * 3, True, False, timeout=60)
    assert sum(r.bytes_read for r in reports) <= NBYTES * 1.01


@pytest.mark.parametrize("hosts", [["m"] * 3, ["m", "m", "n"]], ids=["one machine", "two machines"])
@pytest.mark.parametrize("call", [0, 3])
def test_a_reader_that_fails_fails_the_load_everywhere(
    step: Path, hosts: list[str], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once and with the cause, whichever chunk it is."""
    original, rule = FileSet.fetch, FaultRule(lambda nbytes: nbytes > 1 << 19, skip=call)

    def fetch(self: FileSet, file: int, start: int, stop: int, buffers: Any) -> None:
        if rule.hit(stop - start):
            raise CorruptCheckpointError("a chunk is damaged", file="x")
        original(self, file, start, stop, buffers)

    monkeypatch.setattr(FileSet, "fetch", fetch)
    got = outcomes(ThreadWorld(3), lambda collective: load(collective, step, hosts, True, False), timeout=25)
    assert all(isinstance(raised, CheckpointError) and "a chunk is damaged" in str(raised) for raised in got), got


def test_a_peer_whose_memory_is_gone_fails_the_load_everywhere(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, rule = peer_memory.read_peer_memory, FaultRule(lambda nbytes: nbytes > 1 << 19, skip=1)

    def broken(pid: int, remote: Any, local: Any) -> None:
        if rule.hit(sum(n for _, n in local)):
            raise OSError(3, "No such process")
        original(pid, remote, local)

    monkeypatch.setattr("bytecheckpoint.engine.exchange_chunks.read_peer_memory", broken)
    got = outcomes(ThreadWorld(3), lambda collective: load(collective, step, ["m"] * 3, True, False), timeout=25)
    said = "went away during an exchange"
    assert all(isinstance(raised, CheckpointError) and said in str(raised) for raised in got), got


def test_addresses_go_to_ranks_of_the_same_machine_only(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a decision does not grow with the number of machines."""
    received: list[tuple[int, Any]] = []
    original = Agreement.agree_each

    def agree_each(self: Agreement, *args: Any, **types: Any) -> Any:
        decision = original(self, *args, **types)
        received.append((self.rank, decision))
        return decision

    monkeypatch.setattr(Agreement, "agree_each", agree_each)
    hosts = MACHINES["two and two"]
    ThreadWorld(4).run(load, step, hosts, True, False, timeout=60)
    rounds = [(rank, decision) for rank, decision in received if hasattr(decision, "segments")]
    assert any(decision.segments for _, decision in rounds)
    assert all(hosts[rank] == hosts[other] for rank, decision in rounds for other in decision.segments)


def test_a_ranks_memory_stays_until_all_ranks_have_copied(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank to end its exchange still finds the exchanges of all others, none of them released."""
    run, release = ChunkExchange.run, ChunkExchange.release
    begun: list[weakref.ref[ChunkExchange]] = []
    ended, released, alive = [], [], []
    others_ended = threading.Semaphore(0)

    def slow_run(self: ChunkExchange) -> None:
        begun.append(weakref.ref(self))
        run(self)
        if self.rank == 2:
            assert others_ended.acquire(timeout=20) and others_ended.acquire(timeout=20)
            time.sleep(0.2)  # the others wait for the agreement now
            gc.collect()
            alive.append([reference() is not None for reference in begun])
        ended.append(self.rank)
        others_ended.release()

    def noted_release(self: ChunkExchange) -> None:
        released.append(len(ended))
        release(self)

    monkeypatch.setattr(ChunkExchange, "run", slow_run)
    monkeypatch.setattr(ChunkExchange, "release", noted_release)
    ThreadWorld(3).run(load, step, ["m"] * 3, True, True, timeout=60)
    assert alive == [[True] * 3]
    assert released == [3] * 3
