"""Variants of the GPT model at other layouts: every element of every tensor is saved, and loaded to its place."""

from __future__ import annotations

from pathlib import Path

import pytest

import bytecheckpoint
from tests.frameworks.megatron import variants
from tests.support.comparisons import assert_same_checkpoints
from tests.support.megatron.models import Layout
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)

CASES = [
    ("thirds", Layout(tp=3, vocabulary=33)),
    ("thirds", Layout(dp=3, buckets=300)),
    ("thirds", Layout(pp=3, dp=1, distributed=False)),
    ("thirds", Layout(tp=3, tied=False, bf16=True, vocabulary=36)),
    ("grouped queries", Layout(tp=2, dp=2)),
    ("layer norm", Layout(tp=2, pp=2, sequence=True, bf16=True)),
    ("softmax offset", Layout(tp=2, dp=2, bf16=True)),
    ("gated attention", Layout(tp=3, vocabulary=36)),
    ("shared expert", Layout(ep=3, dp=3)),
    ("shared expert", Layout(tp=2, ep=2, dp=2, sequence=True, etp=1)),
    ("some experts", Layout(pp=2, ep=2, dp=2, bf16=True)),
    ("some experts", Layout(tp=2, ep=2, dp=2, sequence=True, etp=1, distributed=False)),
    # Megatron itself cannot save tied embeddings of one that predicts more on several stages.
    ("predicts more", Layout(pp=2, dp=2, tied=False)),
    ("predicts more", Layout(tp=2, sequence=True)),
    ("uneven stages", Layout(pp=3)),
]


@pytest.mark.parametrize(("variant", "layout"), CASES, ids=str)
def test_variants(worlds: Worlds, variant: str, layout: Layout, tmp_path: Path) -> None:
    one = Layout(tied=layout.tied, bf16=layout.bf16)
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    (tensors,) = worlds.run(1, variants.save_variant, variant, one, first)
    with bytecheckpoint.open(first) as saved:
        assert len([key for key in saved.keys() if key.startswith("model/")]) >= tensors  # noqa: SIM118 - not a dict
    worlds.run(layout.world, variants.load_and_save_variant, variant, layout, first, second, stepped=False)
    padded = layout.vocabulary != one.vocabulary
    if not padded:
        assert_same_checkpoints(first, second)
    worlds.run(1, variants.load_and_save_variant, variant, one, second, third, stepped=True, strict=not padded)
    assert_same_checkpoints(first, third)
