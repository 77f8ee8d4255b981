"""A part of the states in the layouts of torch: saved, and loaded while the rest stays as it is."""

from __future__ import annotations

import pytest

import bytecheckpoint
from tests.support.fsdp1_layouts import build, full_state, in_layout
from tests.support.selections import assert_part_loaded
from tests.support.tiny_model import source_values, target_values
from tests.support.variants import quick

PATTERN = "*/blocks.1.*"


@pytest.mark.parametrize("layout", quick(["ddp2", "fsdp2", "tp2", "pp2", "full2-deep", "grad2-flat"], every=2))
@in_layout
def test_a_part_of_the_states(layout: str, path: str) -> None:
    source = build(layout, source_values)
    source.train(2)
    saved = full_state(source)
    handle = bytecheckpoint.save(path, source.states(), include=[PATTERN], async_checkpoint=True)
    source.train(1)
    handle.result(60)
    with bytecheckpoint.open(path) as checkpoint:
        found = {key for key in checkpoint if key != "optimizer/param_groups"}
    assert found and all(".1." in key for key in found)
    target = build(layout, target_values)
    target.train(1)
    before = full_state(target)
    report = bytecheckpoint.load(path, target.states(), include=[PATTERN])
    assert not report.missing and not report.unexpected
    assert_part_loaded(saved, before, full_state(target), "*blocks.1.*", joined=layout == "grad2-flat")
    target.train(2)


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "full2-deep", "grad2-flat"])
@in_layout
def test_other_names_than_the_checkpoint(layout: str, path: str) -> None:
    """Blocks 0 and 1 change places, with their optimizer state."""
    places = {"model/blocks.0.": "model/blocks.1.", "model/blocks.1.": "model/blocks.0."}
    source, target = build(layout, source_values), build(layout, target_values)
    source.train(2)
    saved = full_state(source)
    bytecheckpoint.save(path, source.states())
    bytecheckpoint.load(path, target.states(), rename=places, include=["model/*", "optimizer/*"], exclude=["*.mlp.*"])
    after = full_state(target)
    for name, value in after.items():
        if ".mlp." not in name and ("blocks.0." in name or "blocks.1." in name):
            other = name.replace("blocks.0.", "@").replace("blocks.1.", "blocks.0.").replace("@", "blocks.1.")
            assert value.tolist() == saved[other].tolist(), name
    assert any(name.startswith("optimizer/state/blocks.0.") for name in after)
