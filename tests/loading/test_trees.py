"""Plain values: of the ranks of a machine one reads each tree from a storage that is far away, whoever wants it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CorruptCheckpointError
from bytecheckpoint.collectives import Collective, SingleProcess, ThreadWorld, use
from bytecheckpoint.engine.catalogs import CatalogHead
from bytecheckpoint.errors import UsageError
from bytecheckpoint.loading.decision import OpenReport, decide_open
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.optional import CacheProbe
from bytecheckpoint.storage.wrappers import Call, WrappedStorage
from tests.support.ranks import outcomes

T = TypeVar("T")
RANKS = 4
VALUES = {"dataloader": {"position": 5}, "extra_states": {"step": 3, "text": "x" * 1000}}


class FarStorage(WrappedStorage, CacheProbe):
    """Count opens by folder, and say of all files that they are in this machine's memory, or not."""

    def __init__(self, path: Path, *, cached: bool = False) -> None:
        super().__init__(resolve(path))
        self._cached = cached
        self.opened: Counter[str] = Counter()
        self._counting = threading.Lock()

    def is_cached(self, name: str, offsets: Sequence[int]) -> bool:
        return self._cached

    def around(self, call: Call, do: Callable[[], T]) -> T:
        if call.operation == "open":
            with self._counting:
                self.opened[call.names[0].partition("/")[0]] += 1
        return do()


def states(collective: Collective, *, own: bool) -> dict[str, Any]:
    found = {state: dict(value) for state, value in VALUES.items()}
    if own:
        found["extra_states"]["rank"] = collective.rank
    return {"model": {"w": torch.ones(8)}, **found}


def save(path: Path, *, own: bool = False) -> None:
    ThreadWorld(RANKS).run(lambda collective: bytecheckpoint.save(path, states(collective, own=own)))


def load(storage: FarStorage, hosts: list[str] | None = None) -> list[Any]:
    world = ThreadWorld(RANKS)
    for collective, host in zip(world.ranks, hosts or (), strict=False):
        collective.host = host

    def run(collective: Collective) -> Any:
        destination: dict[str, Any] = {
            "model": {"w": torch.zeros(8)},
            "dataloader": {"position": 0},
            "extra_states": {},
        }
        report = bytecheckpoint.load(storage, destination, strict=False, prepare_save=False)
        return destination["extra_states"], destination["dataloader"], report

    return outcomes(world, run)


def test_shared_values_are_read_once(tmp_path: Path) -> None:
    save(tmp_path / "s")
    storage = FarStorage(tmp_path / "s")
    found = load(storage)
    for extra, dataloader, _ in found:
        assert (dataloader, extra) == (VALUES["dataloader"], VALUES["extra_states"])
    assert storage.opened["dataloader"] == storage.opened["extra"] == 1
    reports = [report for _, _, report in found]
    assert sum(report.bytes_received >= 1000 for report in reports) == RANKS - 1, "of what the fourth has read"


def test_every_machine_reads_for_itself(tmp_path: Path) -> None:
    save(tmp_path / "s")
    storage = FarStorage(tmp_path / "s")
    load(storage, hosts=["a", "b", "a", "b"])
    assert storage.opened["extra"] == 2


def test_values_of_the_ranks(tmp_path: Path) -> None:
    """Each rank gets its own, whichever rank has read them."""
    save(tmp_path / "s", own=True)
    storage = FarStorage(tmp_path / "s")
    found = load(storage)
    assert [extra["rank"] for extra, _, _ in found] == list(range(RANKS))
    assert storage.opened["extra"] == RANKS
    assert sum(report.bytes_received >= 1000 for _, _, report in found) == 0, "each has read its own"


def test_files_in_memory_are_read_by_all(tmp_path: Path) -> None:
    """A file in the page cache costs less than a message."""
    save(tmp_path / "s")
    storage = FarStorage(tmp_path / "s", cached=True)
    load(storage)
    assert storage.opened["extra"] == RANKS


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_file_is_reported_by_all(tmp_path: Path, damage: str) -> None:
    save(tmp_path / "s")
    (file,) = (tmp_path / "s" / "extra").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data)
    for raised in load(FarStorage(tmp_path / "s")):
        assert isinstance(raised, CorruptCheckpointError), raised
        assert file.name in str(raised)


def test_one_rank_serves_nobody(tmp_path: Path) -> None:
    save(tmp_path / "s")
    storage = FarStorage(tmp_path / "s")
    with use(SingleProcess()):
        destination: dict[str, Any] = {"extra_states": {}}
        bytecheckpoint.load(storage, destination, strict=False)
    assert destination["extra_states"] == VALUES["extra_states"]


def test_the_ranks_of_each_machine() -> None:
    head = partial(CatalogHead, b"x")
    reports = [OpenReport(b"x", host) for host in ("a", "b", "", "a", "")]
    decided = decide_open(reports, head)
    assert [decided.servers(rank) for rank in range(5)] == [[0, 3], [1], [], [0, 3], []]
    assert decided.alike and decided.head is None
    assert not decide_open([*reports, OpenReport(b"y")], head).alike
    for_others = decide_open([*reports, OpenReport(b"")], head)
    assert for_others.alike and for_others.head == head()


def test_a_catalog_that_rank_0_sends_is_for_its_path() -> None:
    head = partial(CatalogHead, b"x")
    assert decide_open([OpenReport(b"x", url="/mnt/a"), OpenReport(b"x", url="/data/a")], head).alike, (
        "mounted elsewhere"
    )
    reports = [OpenReport(b"x", url="s3://b/1"), OpenReport(b"", url="s3://b/1"), OpenReport(b"", url="s3://b/2")]
    with pytest.raises(
        UsageError, match="different paths: rank 2 at s3://b/2, the others at s3://b/1; give all the same"
    ):
        decide_open(reports, head)
