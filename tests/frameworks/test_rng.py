# ruff: noqa: NPY002  it is the generator of the old functions that is meant
"""`rng_state`: exact at the layout of the save, derived by rank elsewhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.errors import CheckpointError, UsageError
from tests.support.worlds import Worlds

KINDS = ("PCG64", "MT19937", "Philox", "SFC64")


def own_generators(seed: int = 0) -> dict[str, Any]:
    kinds = {kind: np.random.Generator(getattr(np.random, kind)(seed)) for kind in KINDS}
    return {"torch": torch.Generator().manual_seed(seed), "python": random.Random(seed), **kinds}


def draw(generators: dict[str, Any]) -> list[Any]:
    """Draw from every generator. Some hold back every second normal number."""
    found = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]
    for generator in generators.values():
        if isinstance(generator, torch.Generator):
            found.append(torch.randn((), generator=generator).item())
        else:
            normal = generator.gauss if isinstance(generator, random.Random) else generator.normal
            found += [generator.random(), normal(0, 1)]
        if isinstance(generator, np.random.Generator):
            found.append(generator.spawn(1)[0].random())
    return found


def test_a_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    generators = own_generators()
    states = {"rng": bytecheckpoint.rng_state(generators=generators)}
    for drawn in range(3):  # the length of the states changes; the plan of the first save serves the others
        draw(generators)
        report = bytecheckpoint.save(tmp_path / "c", states).result()
        assert report.plan_cached or not drawn
        wanted = [draw(generators) for _ in range(3)]
        draw(generators)
        assert not bytecheckpoint.load(tmp_path / "c", states).notes
        assert [draw(generators) for _ in range(3)] == wanted


def test_inside_of_other_values(tmp_path: Path) -> None:
    generators = own_generators()
    rng = bytecheckpoint.rng_state(generators=generators)
    extra = {"step": 4, "rng": rng}
    bytecheckpoint.save(tmp_path / "c", {"extra_states": extra})
    wanted = draw(generators)
    bytecheckpoint.load(tmp_path / "c", {"extra_states": {"step": 0, "rng": rng}})
    assert draw(generators) == wanted


@pytest.mark.parametrize("nested", [False, True])
def test_another_number_of_ranks_gets_new_numbers_for_each(
    tmp_path: Path, nested: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranks are threads, which share the process's own generators: only those of each rank are looked at."""

    def states(rng: Any) -> dict[str, Any]:
        return {"extra_states": {"rng": rng}} if nested else {"rng": rng}

    def save(collective: Collective) -> list[Any]:
        generators = own_generators(collective.rank)
        rng = bytecheckpoint.rng_state(rank=collective.rank, ranks=collective.world_size, generators=generators)
        bytecheckpoint.save(tmp_path / "c", states(rng))
        return draw(generators)[5:]

    def load(collective: Collective, seed: int) -> tuple[list[Any], tuple[str, ...]]:
        generators = own_generators(seed)
        rng = bytecheckpoint.rng_state(rank=collective.rank, ranks=collective.world_size, generators=generators)
        report = bytecheckpoint.load(tmp_path / "c", states(rng))
        return draw(generators)[5:], report.notes

    exact = ThreadWorld(3).run(save, timeout=60)
    assert [found for found, _ in ThreadWorld(3).run(load, 7, timeout=60)] == exact
    for ranks in (1, 2, 5):
        first, second = (ThreadWorld(ranks).run(load, seed, timeout=60) for seed in (7, 8))
        numbers = [found for found, _ in first]
        assert numbers == [found for found, _ in second]
        everything = [n for found in (*numbers, *exact) for n in found]
        assert len({*everything}) == len(everything)
        for rank, (_, notes) in enumerate(first):
            said = caplog.text if nested else notes[0]
            assert nested or f"saved for 3 ranks, and this is rank {rank} of {ranks} rank" in said
            assert "are seeded anew" in said


def test_ranks_that_draw_the_same(tmp_path: Path) -> None:
    """Equal generators, as in a tensor-parallel group, are stored once, and any number of ranks continue from the copy."""

    def save(collective: Collective, peers: int, apart: int = 0) -> list[Any]:
        rank, ranks = collective.rank // peers, collective.world_size // peers
        generators = own_generators(rank + apart * collective.rank)
        bytecheckpoint.save(
            tmp_path / "c", {"rng": bytecheckpoint.rng_state(rank=rank, ranks=ranks, generators=generators)}
        )
        return draw(generators)[5:]

    def load(collective: Collective, peers: int) -> list[Any]:
        generators = own_generators(9)
        rank, ranks = collective.rank // peers, collective.world_size // peers
        states = {"rng": bytecheckpoint.rng_state(rank=rank, ranks=ranks, generators=generators)}
        assert not bytecheckpoint.load(tmp_path / "c", states).notes
        return draw(generators)[5:]

    wanted = ThreadWorld(4).run(save, 2, timeout=60)
    assert wanted[0] == wanted[1] != wanted[2] == wanted[3]
    assert ThreadWorld(2).run(load, 1, timeout=60) == [wanted[0], wanted[2]]
    assert ThreadWorld(6).run(load, 3, timeout=60) == [*wanted[:1] * 3, *wanted[2:3] * 3]
    with pytest.raises(CheckpointError, match=r"rng/streams\.0"):
        ThreadWorld(2).run(save, 2, 1, timeout=60)


def test_ranks_that_the_program_has_seeded(tmp_path: Path) -> None:
    """Alike, by its parallel sizes: ranks draw alike at another layout too, and as the seed of that job says."""

    def states(tp: int, generator: torch.Generator) -> dict[str, Any]:
        return {"rng": bytecheckpoint.rng_state(generators={"own": generator}, layout={"tp": tp})}

    def draw_after_load(tp: int, seed: int) -> float:
        generator = torch.Generator()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            bytecheckpoint.load(tmp_path / "c", states(tp, generator))
        return torch.rand((), generator=generator).item()

    saved = torch.Generator().manual_seed(3)
    bytecheckpoint.save(tmp_path / "c", states(2, saved))
    wanted = torch.rand((), generator=saved).item()
    assert draw_after_load(2, 7) == draw_after_load(2, 8) == wanted
    assert draw_after_load(1, 7) == draw_after_load(1, 7) != draw_after_load(1, 8)


def test_what_the_checkpoint_or_the_process_lacks(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "c", {"rng": bytecheckpoint.rng_state(generators={"old": torch.Generator()})})
    found = []
    for seed in (1, 2):
        new = torch.Generator().manual_seed(seed)
        report = bytecheckpoint.load(tmp_path / "c", {"rng": bytecheckpoint.rng_state(generators={"new": new})})
        assert "lacks own.new" in report.notes[0] and "no own.old" in report.notes[1]
        found.append(torch.rand(3, generator=new).tolist())
    assert found[0] == found[1]


def test_bad_arguments() -> None:
    for place in ({"rank": 1}, {"rank": 2, "ranks": 2}, {"rank": -1, "ranks": 2}):
        with pytest.raises(UsageError, match="pass rank= and ranks= together"):
            bytecheckpoint.rng_state(**place)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"generators\['x'\] is a int"):
        bytecheckpoint.rng_state(generators={"x": 3})


def run_rank(path: Path, save: bool) -> list[float]:
    """Be one rank of a job with generators of its own: seed or load, then draw."""
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()  # of a process that other tests use again
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    states = {"rng": bytecheckpoint.rng_state()}
    if save:
        bytecheckpoint.save(path, states)
    else:
        draw({})
        bytecheckpoint.load(path, states)
    found = draw({})
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    np.random.set_state(kept[2])
    return found


def test_processes(worlds: Worlds, tmp_path: Path) -> None:
    exact = worlds.get(2).run(run_rank, tmp_path / "c", True)
    assert worlds.get(2).run(run_rank, tmp_path / "c", False) == exact
    for size in (1, 3):
        found = worlds.get(size).run(run_rank, tmp_path / "c", False)
        assert found == worlds.get(size).run(run_rank, tmp_path / "c", False)
        everything = [n for numbers in (*found, *exact) for n in numbers]
        assert len({*everything}) == len(everything)
