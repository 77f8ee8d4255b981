"""States in streams: each is stored once, and loaded by whichever rank asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError, UsageError
from tests.support.catalogs import catalog_at
from tests.support.streams import Loader, state_of


def save(collective: Collective, path: Path, ranks: int, fed: int, **options: Any) -> None:
    """Save by `ranks` data-parallel ranks; each is two ranks of the world, which hold the same streams."""
    loader = Loader(7, collective.rank % ranks, ranks, fed=fed)
    bytecheckpoint.save(path, {"dataloader": loader}, step=fed, **options)


def load(collective: Collective, path: Path, fed: int) -> list[int]:
    loader = Loader(7, collective.rank, collective.world_size)
    report = bytecheckpoint.load(path, {"dataloader": loader})
    assert not report.unexpected and loader.states.keys() == set(loader.own)
    for number, state in loader.states.items():
        wanted = state_of(number, fed)
        assert torch.equal(state.pop("buffer"), wanted.pop("buffer")) and state == wanted
    return list(loader.states)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_goes_on(tmp_path: Path, ranks: int) -> None:
    world = ThreadWorld(2 * ranks)
    for fed in (3, 900, 0):  # the plan of the first save serves the others, whose buffers have other lengths
        world.run(save, tmp_path / "c", ranks, fed, timeout=60)
        for readers in (1, 2, 4, 9):
            found = ThreadWorld(readers).run(load, tmp_path / "c", fed, timeout=60)
            assert sorted(n for numbers in found for n in numbers) == list(range(7))
    catalog = catalog_at(tmp_path / "c")
    assert sum(name.startswith("streams.") for name in catalog.fqn.to_list()) == 14  # each once
    assert {f.rank for f in catalog.files if f.state == "dataloader"} == set(range(ranks))  # by the first that holds it


def test_open_shows_streams(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "c", {"dataloader": Loader(3, 0, 1, fed=2)})
    checkpoint = bytecheckpoint.open(tmp_path / "c")
    assert checkpoint["dataloader/seed"] == 0 and checkpoint["dataloader/streams.2.fed"] == 2
    assert torch.equal(checkpoint["dataloader/streams.2.buffer"][:], torch.arange(4) + 2)


def test_streams_that_differ_or_lack_fail_the_save(tmp_path: Path) -> None:
    def save_as(collective: Collective, how: str) -> str:
        loader = Loader(4, 0 if how in ("differ", "shared") else collective.rank, 1 if how == "differ" else 2)
        if how == "differ" and collective.rank:
            loader.states[2]["fed"] = 5
        if how == "shared":
            loader.seed = collective.rank
        states = {"model": {"w": torch.ones(1)}} | (
            {} if how == "absent" and collective.rank else {"dataloader": loader}
        )
        if how == "lack" and collective.rank:
            del loader.states[3]
        if how == "none":  # as with saves=False on all ranks
            loader.states = {}
        with pytest.raises(CheckpointError) as caught:
            bytecheckpoint.save(tmp_path / "c", states)
        return str(caught.value)

    for how, message in {
        "differ": "ranks 0 and 1 hold different states under dataloader/streams.2",
        "shared": "ranks 0 and 1 hold different states under dataloader:",
        "lack": "hold 3 of the 4 streams of dataloader",
        "absent": "hold 2 of the 4 streams of dataloader",
        "none": "hold 0 of the 4 streams of dataloader",
    }.items():
        for found in ThreadWorld(2).run(save_as, how, timeout=60):
            assert message in found
    assert not (tmp_path / "c" / "metadata.parquet").exists()


def test_other_data_is_refused_before_anything_changes(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "c", {"dataloader": Loader(3, 0, 1, fed=2), "model": {"w": torch.ones(3)}})
    loader, model = Loader(3, 0, 1, seed=1), {"w": torch.zeros(3)}
    with pytest.raises(IncompatibleCheckpointError, match="the seed was 0"):
        bytecheckpoint.load(tmp_path / "c", {"dataloader": loader, "model": model})
    assert not model["w"].any() and loader.states[1]["fed"] == 0


def test_streams_and_other_values_do_not_mix(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "streams", {"dataloader": Loader(3, 0, 1, fed=2)})
    bytecheckpoint.save(tmp_path / "plain", {"dataloader": {"position": 3}})
    with pytest.raises(IncompatibleCheckpointError, match="holds 3 streams of dataloader, which a dict cannot take"):
        bytecheckpoint.load(tmp_path / "streams", {"dataloader": {}})
    with pytest.raises(IncompatibleCheckpointError, match="dataloader is not in streams, so a Loader cannot"):
        bytecheckpoint.load(tmp_path / "plain", {"dataloader": Loader(3, 0, 1)})


def test_streams_that_nobody_loads_are_unexpected(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "c", {"dataloader": Loader(3, 0, 1)})
    loader = Loader(3, 0, 2)
    with pytest.raises(IncompatibleCheckpointError, match=r"dataloader/streams\.1"):
        bytecheckpoint.load(tmp_path / "c", {"dataloader": loader})
    report = bytecheckpoint.load(tmp_path / "c", {"dataloader": loader}, strict={"dataloader": False})
    assert "dataloader/streams.1" in report.unexpected


def test_bad_states_are_named(tmp_path: Path) -> None:
    loader = Loader(3, 0, 1)
    loader.states[1]["hook"] = print
    with pytest.raises(UsageError, match=r"dataloader/streams\.1\.hook"):
        bytecheckpoint.save(tmp_path / "c", {"dataloader": loader})
    loader.states = {3: {}}
    with pytest.raises(UsageError, match="3 is not the number of one of 3 streams"):
        bytecheckpoint.save(tmp_path / "c", {"dataloader": loader})


def test_positions_of_single_ranks_are_not_lost_silently(tmp_path: Path) -> None:
    def save_own(collective: Collective) -> None:
        bytecheckpoint.save(tmp_path / "c", {"dataloader": {"position": collective.rank}})

    def load_own(collective: Collective, strict: Any) -> Any:
        states: dict[str, Any] = {"dataloader": {}}
        return bytecheckpoint.load(tmp_path / "c", states, strict=strict).notes, states["dataloader"]

    ThreadWorld(2).run(save_own, timeout=60)
    assert [own for _, own in ThreadWorld(2).run(load_own, True, timeout=60)] == [{"position": 0}, {"position": 1}]
    with pytest.raises(IncompatibleCheckpointError, match="2 ranks of the checkpoint's 2 have positions of their own"):
        ThreadWorld(3).run(load_own, True, timeout=60)
    for notes, _ in ThreadWorld(3).run(load_own, {"dataloader": False}, timeout=60):
        assert "lost or fed twice" in notes[0]
