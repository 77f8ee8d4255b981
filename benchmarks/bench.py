"""The context of a case: its options, its world, the peers, and the results so far."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import Arm, Result, World, measure
from benchmarks.peers import Peer

__all__ = ["Bench", "Options"]


@dataclass(frozen=True)
class Options:
    """The options of one run.

    Attributes:
        nbytes: bytes of the large state, over all ranks.
        tensors: number of tensors in the state of small tensors.
        rounds: counted repetitions of each arm.
        seconds: how long each part of the interference case runs.
        planning_rows: rows of the catalog in the planning case.
        places: name of a file system -> folder on it.
        only: names of the cases to run; empty for all.
        peers: names of the peers to run beside bytecheckpoint; empty for all.
    """

    nbytes: int
    tensors: int
    rounds: int
    seconds: float
    planning_rows: int
    places: dict[str, str]
    only: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()

    @property
    def short(self) -> bool:
        """True if cases of many variants run a few of them only."""
        return self.seconds <= 1.0


@dataclass
class Bench:
    """One world's run of all cases."""

    options: Options
    world: World
    peers: list[Peer]
    results: list[Result] = field(default_factory=list)
    place: str = ""

    @property
    def folder(self) -> Path:
        """The folder that the case may write to."""
        return Path(self.options.places[self.place])

    def clear(self, name: str) -> None:
        """Remove a checkpoint or file; rank 0 does so for all ranks."""
        if self.world.rank == 0:
            path = self.folder / name
            if path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)

    def clear_all(self) -> None:
        """Remove everything from the folder."""
        self.world.barrier()
        if self.world.rank == 0:
            for path in self.folder.glob("[!.]*"):  # a thread may be writing metrics, here and in checkpoints
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        self.world.barrier()

    def measure(
        self,
        case: str,
        nbytes: int,
        arms: Sequence[Arm],
        *,
        rounds: int | None = None,
        warm: bool = True,
        place: str | None = None,
    ) -> list[Result]:
        """Measure the arms in turn, and store the results."""
        new = measure(
            self.world,
            case,
            self.place if place is None else place,
            nbytes,
            arms,
            self.options.rounds if rounds is None else rounds,
            warm=warm,
        )
        self.add(*new)
        return new

    def add(self, *results: Result) -> None:
        """Store results, and print them as progress."""
        self.results += results
        if self.world.rank == 0:
            for r in results:
                print(
                    f"  {r.world} rank(s) {r.place:6} {r.case:28} {r.arm:32} "
                    + (f"FAILED {r.error}" if r.error else f"{r.median:9.4f} s  {r.core_per_gib:7.3f} core-s/GiB"),
                    flush=True,
                )
