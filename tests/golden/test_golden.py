"""Checkpoints of every released format version stay readable."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.cli.main import run
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.publishing import Follower
from bytecheckpoint.representation.values.codec import equal
from bytecheckpoint.tools import fingerprint
from tests.golden.make import (
    ARRAYS,
    EVERY_DTYPE,
    FINGERPRINTS,
    FOLDER,
    FOREIGN,
    GROUPS,
    NAMES,
    SHAPES,
    STREAMS,
    TILED,
    TILES,
    VALUES,
    VERSIONS,
    WORLD,
    arrays,
    foreign_state,
    full,
    odd,
    published,
    states,
    tiled_shape,
    tiled_states,
)
from tests.support.layouts import coded
from tests.support.pretrained import Own, check
from tests.support.streams import Loader, state_of

BOTH = pytest.mark.parametrize("folder", [FOLDER, GROUPS], ids=lambda path: path.name)


@BOTH
def test_versions_1_and_2_open(folder: Path) -> None:
    with bytecheckpoint.open(folder) as checkpoint:
        for name in SHAPES:
            assert torch.equal(checkpoint[f"model/{name}"][...], full(name))
        for dtype in EVERY_DTYPE:
            read = checkpoint[f"model/{dtype}"][...]
            assert read.dtype == dtype
            assert torch.equal(read.view(torch.uint8), odd(dtype).view(torch.uint8))
        assert torch.equal(checkpoint["tied/a.weight"][...], checkpoint["tied/b.weight"][...])
        assert checkpoint["optimizer/state/a.weight/exp_avg"].shape == (3, 3)
        assert checkpoint["optimizer/param_groups"][0]["lr"] == 0.125
        assert checkpoint["extra_states/values.big"] == 2**200


@BOTH
def test_versions_1_and_2_load_in_another_world(folder: Path) -> None:
    def load(collective: Collective) -> dict[str, Any]:
        destination = states(0)
        whole = {name: torch.zeros_like(full(name)) for name in SHAPES}
        destination["model"] = whole | {str(d): torch.zeros_like(odd(d)) for d in EVERY_DTYPE}
        destination["extra_states"] = {}
        bytecheckpoint.load(folder, destination, timeout=20)
        return destination

    for rank, destination in enumerate(ThreadWorld(WORLD + 1).run(load)):
        for name in SHAPES:
            assert torch.equal(destination["model"][name], full(name))
        own = rank if rank < WORLD else 0
        assert equal(destination["extra_states"]["values"], VALUES)
        assert destination["extra_states"]["rank"] == own
        assert destination["extra_states"]["noise"].tolist() == [own] * 4


def test_fingerprints_stay_what_they_are() -> None:
    found = fingerprint(FINGERPRINTS)
    assert found == fingerprint(FINGERPRINTS, recompute=True) == fingerprint(FOLDER) == fingerprint(GROUPS)
    assert found.states == {
        "model": "c5942d5d9500aa97cbe49d29847e9bed",
        "tied": "50abc2947307b1ef5314eacb707e4fe2",
        "optimizer": "33cde9231d17da24d1b991d99f95d4af",
    }


def test_version_5_is_kept_as_differences() -> None:
    path = VERSIONS / "step_00000002"
    found = {name: torch.zeros_like(full(name)) for name in SHAPES}
    follower = Follower(VERSIONS)
    for step, versions in ((1, 0), (2, 1)):
        report = follower.update({"model": found}, step=step)
        assert report is not None and report.versions == versions
        assert equal(found, published(step))
    assert fingerprint(path) == fingerprint(path, recompute=True)
    assert run(["verify", str(path)]) == 0
    assert (path / "metadata.parquet").read_bytes().count(b"bytecheckpoint05") == 1


def test_version_1_hands_out_streams() -> None:
    def load(collective: Collective) -> dict[int, Any]:
        destination = Loader(5, collective.rank, 2)
        bytecheckpoint.load(STREAMS, {"dataloader": destination}, timeout=20)
        return destination.states

    for rank, found in enumerate(ThreadWorld(2).run(load)):
        assert equal(found, {n: state_of(n, 3) for n in range(rank, 5, 2)})


def test_plain_values_of_version_2_load_in_another_world() -> None:
    """Large numpy arrays, which are tensors in the checkpoint."""

    def load(collective: Collective) -> dict[str, Any]:
        destination: dict[str, Any] = {"extra_states": {}}
        bytecheckpoint.load(ARRAYS, destination, timeout=20)
        return destination

    for rank, destination in enumerate(ThreadWorld(WORLD + 1).run(load)):
        assert equal(destination, arrays(rank if rank < WORLD else 0))


def test_version_4_opens_loads_and_verifies() -> None:
    expected = foreign_state()
    with bytecheckpoint.open(FOREIGN) as checkpoint:
        for name, value in expected["model"].items():
            assert torch.equal(checkpoint[f"model/{name}"][...], value)
        assert checkpoint["extra_states/lr"] == 0.125
    empty = {name: torch.zeros_like(value) for name, value in expected["model"].items()}
    destination: dict[str, Any] = {"model": empty, "extra_states": {}}
    bytecheckpoint.load(FOREIGN, destination, timeout=20)
    assert equal(destination["model"], expected["model"]) and destination["extra_states"]["step"] == 3
    assert bytecheckpoint.tools.verify(FOREIGN).ok


def test_files_with_names_of_another_program_load_and_verify(tmp_path: Path) -> None:
    check(NAMES, architecture=None)
    lost = tmp_path / "lost"
    shutil.copytree(NAMES, lost)
    (lost / "metadata.parquet").unlink()
    bytecheckpoint.tools.repair(lost)
    for folder in (NAMES, lost):
        model = Own(0.0, turned=False)
        bytecheckpoint.load(folder, {"model": model})
        assert torch.equal(model.both, Own(turned=False).both)
        assert bytecheckpoint.tools.verify(folder).ok


def test_version_3_opens_and_loads_in_another_world() -> None:
    with bytecheckpoint.open(TILES) as checkpoint:
        for number, name in enumerate(TILED):
            assert torch.equal(checkpoint[f"model/{name}"][...], coded(tiled_shape(name), torch.float32, number))

    def load(collective: Collective) -> int:
        destination = tiled_states(collective.rank, fresh=True)
        bytecheckpoint.load(TILES, destination, timeout=20)
        for number, name in enumerate(TILED):
            destination["model"][name].check(coded(tiled_shape(name), torch.float32, number))
        rank: int = destination["extra_states"]["rank"]
        return rank

    for world in (1, 5, 8):
        assert ThreadWorld(world).run(load) == [*range(world)]
