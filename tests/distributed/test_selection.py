"""A part of the states in the layouts of torch: saved, and loaded while the rest stays as it is."""

from __future__ import annotations

import pytest

import bytecheckpoint
from tests.support.fsdp1_layouts import build, full_state, in_layout
from tests.support.interchange.families import TORCH_FAMILIES
from tests.support.interchange.jobs import load_part
from tests.support.tiny_model import source_values, target_values
from tests.support.variants import quick
from tests.support.worlds import Worlds


@pytest.mark.parametrize("name", quick(["ddp2", "fsdp2", "tp2", "pp2", "full2-deep", "grad2-flat"], every=2))
def test_a_part_of_the_states(worlds: Worlds, name: str, path: str) -> None:
    member = next(m for family in TORCH_FAMILIES for m in family.members if m.name == name)
    worlds.run(member.size, load_part, member, "*blocks.1.*", path)


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
