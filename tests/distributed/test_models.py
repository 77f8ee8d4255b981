"""Wrappers, gathered modules, tied weights, low precision and optimizers in real layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import model_jobs as jobs
from tests.distributed.layouts import WORLD_SIZE
from tests.support.worlds import Worlds

TIED = ["one", "fsdp3", "tp2-fsdp2", "pp2", "pp2-fsdp2"]


@pytest.mark.parametrize("layout", ["ddp2", "fsdp3"])
def test_wrapped_modules_save_under_the_names_of_the_bare_ones(worlds: Worlds, layout: str, tmp_path: Path) -> None:
    size = WORLD_SIZE[layout]
    assert worlds.run(size, jobs.wrapped_names, layout, str(tmp_path / "step")) == [[]] * size


def test_a_module_that_is_still_gathered_after_an_evaluation(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(3, jobs.gathered_after_evaluation, str(tmp_path / "step")) == [[]] * 3


def test_unreduced_values_are_refused_by_name(worlds: Worlds, tmp_path: Path) -> None:
    for message in worlds.run(2, jobs.partial_is_refused, str(tmp_path / "step")):
        assert "model/inner.w" in message
        assert "partial" in message
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.timeout(300)
def test_tied_weights_in_every_kind_of_layout(worlds: Worlds, tmp_path: Path) -> None:
    folder = str(tmp_path)
    losses = {layout: worlds.run(WORLD_SIZE[layout], jobs.save_tied, layout, folder)[0] for layout in TIED}
    for layout in TIED:
        assert losses[layout] == pytest.approx(losses["one"], abs=1e-9, rel=0), layout
    for layout in TIED:
        for rank, found in enumerate(worlds.run(WORLD_SIZE[layout], jobs.load_tied, layout, TIED, folder)):
            for source, (wrong, after) in found.items():
                assert wrong == [], f"{source} into rank {rank} of {layout}"
                assert after == pytest.approx(losses["one"], abs=1e-9, rel=0), (source, layout)
    assert worlds.run(1, jobs.open_tied, TIED, folder) == [[]]


@pytest.mark.parametrize(("source", "destination"), [("ddp2", "fsdp3"), ("fsdp3", "one"), ("ep2-fsdp2", "tp2")])
def test_state_of_bf16_parameters_stays_fp32(worlds: Worlds, source: str, destination: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    worlds.run(WORLD_SIZE[source], jobs.low_precision, source, path)
    for wrong in worlds.run(WORLD_SIZE[destination], jobs.load_low_precision, destination, path):
        assert wrong == []


def test_lists_of_virtual_stages(worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "stages")
    assert worlds.run(2, jobs.save_virtual_stages, path) == [[]] * 2
    for layout in ("one", "fsdp3"):
        size = WORLD_SIZE[layout]
        assert worlds.run(size, jobs.load_coordinates, layout, path) == [[]] * size
        worlds.run(size, jobs.save_coordinates, layout, path + layout)
        assert worlds.run(2, jobs.load_virtual_stages, path + layout) == [[]] * 2


# (optimizer, layout that saves, layouts that continue, tolerance of the losses after the first step).
# torch's Adafactor and LBFGS cannot work on uneven shards; its Muon computes in bfloat16.
@pytest.mark.parametrize(
    ("kind", "source", "others", "tolerance"),
    [
        ("sgd", "fsdp3", ["fsdp2", "one"], 1e-9),
        ("adafactor", "ddp2", ["one"], 1e-9),
        ("lbfgs", "ddp2", ["one"], 1e-9),
        ("muon-adamw", "fsdp3", ["fsdp2", "one"], 0.02),
    ],
)
def test_optimizers_continue(
    worlds: Worlds, kind: str, source: str, others: list[str], tolerance: float, tmp_path: Path
) -> None:
    path = str(tmp_path / "step")
    size = WORLD_SIZE[source]
    expected = worlds.run(size, jobs.save_optimizer, kind, source, path)
    again = worlds.run(size, jobs.load_optimizer, kind, source, path)
    assert again == expected, "the same layout continues bit for bit"
    for layout in others:
        for losses in worlds.run(WORLD_SIZE[layout], jobs.load_optimizer, kind, layout, path):
            assert losses[0] == pytest.approx(expected[0][0], abs=1e-9, rel=0), layout
            assert losses == pytest.approx(expected[0], abs=tolerance, rel=0), layout
