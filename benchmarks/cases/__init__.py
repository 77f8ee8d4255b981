"""The cases. Each is a function of a `Bench`; `CASES` says in which worlds and on which file systems it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.bench import Bench
from benchmarks.cases.adopted import adopted
from benchmarks.cases.cuts import cuts
from benchmarks.cases.ddp import ddp_load
from benchmarks.cases.fingerprints import fingerprints
from benchmarks.cases.fresh_process import first_calls
from benchmarks.cases.frozen import frozen
from benchmarks.cases.guarded import guarded
from benchmarks.cases.interference import interference
from benchmarks.cases.irregular import irregular
from benchmarks.cases.lazy import lazy
from benchmarks.cases.loader_speed import loader_speed
from benchmarks.cases.loader_state import loader_state
from benchmarks.cases.loader_upload import loader_upload
from benchmarks.cases.megatron import megatron
from benchmarks.cases.pieces import pieces
from benchmarks.cases.planning_scale import planning
from benchmarks.cases.publishing import publishing, rollouts
from benchmarks.cases.reshard import reshard
from benchmarks.cases.roundtrip import roundtrip
from benchmarks.cases.slices import slices
from benchmarks.cases.small import small_tensors
from benchmarks.cases.views import views

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """A case, and where it runs.

    Attributes:
        run: the case.
        worlds: numbers of ranks.
        places: file systems.
        only_by_name: True for a case that runs only if `--only` names it.
    """

    run: Callable[[Bench], None]
    worlds: tuple[int, ...] = (1,)
    places: tuple[str, ...] = ("tmpfs",)
    only_by_name: bool = False


CASES: dict[str, Case] = {
    "roundtrip": Case(roundtrip, (1, 2, 4), ("tmpfs", "disk")),
    "small": Case(small_tensors),
    "first": Case(first_calls),
    "interference": Case(interference),
    "lazy": Case(lazy),
    "frozen": Case(frozen, places=("tmpfs", "disk")),
    "pieces": Case(pieces, places=("tmpfs", "disk")),
    "slice": Case(slices),
    "reshard": Case(reshard, (1, 2, 4)),
    "fingerprints": Case(fingerprints),
    "publishing": Case(publishing),
    "rollouts": Case(rollouts, only_by_name=True),
    "cuts": Case(cuts, (1, 2, 4), ("tmpfs", "disk")),
    "adopted": Case(adopted, (1, 2, 4)),
    "ddp": Case(ddp_load, (2, 4)),
    "views": Case(views, (2, 4)),
    "irregular": Case(irregular, (2, 4)),
    "loader": Case(loader_speed),
    "loader-state": Case(loader_state),
    "loader-upload": Case(loader_upload, (4,), ("tmpfs", "disk")),
    "planning": Case(planning),
    "guard": Case(guarded, (1, 2), only_by_name=True),
    # Last, since it makes torch treat the CPU as a CUDA device.
    "megatron": Case(megatron, (1, 2, 4)),
}
