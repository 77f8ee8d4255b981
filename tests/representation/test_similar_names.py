"""The names like a misspelled one, and what it costs to find them."""

from __future__ import annotations

import time

import pytest

from bytecheckpoint.representation.similar_names import SimilarNames

NAMES = [f"model/layers.{i}.{m}.{p}" for i in range(12) for m in ("attn", "mlp") for p in ("weight", "lora_A.weight")]


@pytest.mark.parametrize(
    ("text", "like"),
    [
        ("model/layers.3.attn.wieght", "model/layers.3.attn.weight"),
        ("model/base_model.model.layers.3.mlp.weight", "model/layers.3.mlp.weight"),
        ("model/layer.7.attn.weight", "model/layers.7.attn.weight"),
        ("optimizer/unlike", None),
    ],
)
def test_a_name(text: str, like: str | None) -> None:
    assert SimilarNames(NAMES).of(text) == ([like] if like else [])


def test_a_pattern_stands_for_longer_names() -> None:
    assert all("lora_A" in name for name in SimilarNames(NAMES).of("model/*lroa_A*", 3, 0.0))
    assert SimilarNames([]).of("model/*") == []


def test_many_names_cost_little() -> None:
    names = SimilarNames(f"model/layers.{i}.block.{j}.weight" for i in range(1000) for j in range(100))
    begin = time.process_time()
    for wrong in ("layers.70.blok.3.weight", "base_model.layers.3.block.9.weight", "layers.999.block.10.wieght"):
        right = wrong.replace("blok", "block").replace("base_model.", "").replace("wieght", "weight")
        assert names.of(f"model/{wrong}") == [f"model/{right}"]
    assert time.process_time() - begin < 6, "difflib alone takes minutes"
