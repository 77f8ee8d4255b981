"""A part of a run's states under the frameworks; tests/distributed/test_selection.py has the layouts of torch."""

from __future__ import annotations

import pytest

from tests.support.interchange.families import FAMILIES
from tests.support.interchange.jobs import load_model_alone, load_part
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)

PARTS = [
    ("tiny-adamw", "z0x2"),
    ("tiny-bf16", "b2x3"),
    ("tiny-bf16", "b3x2"),
    ("dense-bf16", "dp2-bf16"),
    ("dense-bf16", "tp2-sequence-bf16-whole"),
    ("dense-adamw", "tp2-sequence"),
    ("dense-adamw", "pp2"),
    ("moe-adamw", "ep2-dp2-moe"),
]
MASTERS = [("tiny-bf16", "b2x3"), ("tiny-bf16", "b3x2"), ("dense-bf16", "dp2-bf16")]


def pattern_of(family: str) -> str:
    return "*blocks.1.*" if family.startswith("tiny") else "*layers.1.*"


@pytest.mark.parametrize(("family", "name"), PARTS)
def test_a_part_of_the_states(worlds: Worlds, family: str, name: str, path: str) -> None:
    member = FAMILIES[family].member(name)
    worlds.run(member.size, load_part, member, pattern_of(family), path, timeout=200)


@pytest.mark.parametrize(("family", "name"), MASTERS)
def test_the_model_alone(worlds: Worlds, family: str, name: str, path: str) -> None:
    member = FAMILIES[family].member(name)
    worlds.run(member.size, load_model_alone, member, pattern_of(family), path, timeout=200)
