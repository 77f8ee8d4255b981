"""The demo's data and checks by themselves; the whole of it is `make demo`, and `demo/run.py --short` in CI."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bytecheckpoint.dataloader import TokenBufferLoader, TokenRecipe

DEMO = Path(__file__).resolve().parents[2] / "demo"


def demo_module(name: str) -> ModuleType:
    # The demo's files are scripts that import each other from their own folder.
    spec = importlib.util.spec_from_file_location(f"demo_{name}", DEMO / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(DEMO))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(DEMO))
    return module


data = demo_module("data")
run = demo_module("run")


def loader(rank: int = 0, ranks: int = 1, batch: int = 8) -> TokenBufferLoader:
    """The loader of train.py, with short rows."""
    recipe = TokenRecipe(
        data.standard_library(), 17, batch, tokenizer=data.to_bytes, document_end=data.NEWLINE, shuffle_buffer=4
    )
    return TokenBufferLoader(recipe, rank=rank, ranks=ranks)


def test_the_sources_are_the_same_on_every_call_and_large() -> None:
    first, second = data.standard_library(), data.standard_library()
    assert [source.describe() for source in first] == [source.describe() for source in second]
    assert all(len(source) > 1000 for source in first)
    assert sum(first.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_one_global_batch(ranks: int) -> None:
    whole, parts = loader(), [loader(rank, ranks) for rank in range(ranks)]
    seen = set()
    for _ in range(20):
        wanted = data.describe(data.as_table(next(whole)))
        assert data.describe(torch.cat([data.as_table(next(part)) for part in parts])) == wanted
        seen.add(wanted["batch"])
    assert len(seen) == 20


def test_the_hash_of_a_batch_sees_every_token_and_every_row_number() -> None:
    table = data.as_table(next(loader()))
    hashes = {data.describe(table)["batch"], data.describe(table.flip(0))["batch"]}
    for place in [(3, 0), (3, 2), (7, 18)]:
        changed = table.clone()
        changed[place] ^= 1
        hashes.add(data.describe(changed)["batch"])
    assert len(hashes) == 5


def test_the_sample_length_is_the_mean_over_the_documents_in_the_rows() -> None:
    batch = {
        "tokens": torch.zeros(2, 6, dtype=torch.int64),
        "documents": torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]], dtype=torch.int32),
        "rows": torch.arange(2),
    }
    assert data.describe(data.as_table(batch))["sample_length"] == 12 / 4


def recorded(resumed_from: int = 0, **changes: dict[int, Any]) -> Any:
    """What a run of six steps has recorded."""
    steps = range(resumed_from + 1, 7)
    found = run.Run("one", "plain", 1, 0, 6, Path())
    found.resumed_from = resumed_from
    found.losses = {step: 4.0 - step / 10 for step in steps} | changes.get("losses", {})
    found.batches = {step: f"{step:010x}" for step in steps} | changes.get("batches", {})
    return found


@pytest.mark.parametrize(
    ("changes", "allowed", "message"),
    [
        ({}, 0.0, None),
        ({"losses": {5: 3.501}}, 4e-3, None),
        ({"losses": {5: 3.501}}, 0.0, "off 'one'"),
        ({"losses": {5: 3.51}}, 4e-3, "off 'one'"),
        ({"batches": {6: "0000000000"}}, 4e-3, r"other batches than 'one', at steps \[6\]"),
    ],
)
def test_a_run_that_differs_from_the_reference_fails_the_demo(
    changes: dict[str, dict[int, Any]], allowed: float, message: str | None
) -> None:
    reference, resumed = recorded(), recorded(2, **changes)
    if message is None:
        run.compare(resumed, reference, reference, 2, allowed)
        return
    with pytest.raises(run.DemoError, match=message):
        run.compare(resumed, reference, reference, 2, allowed)


def test_a_run_that_resumes_elsewhere_fails_the_demo() -> None:
    with pytest.raises(run.DemoError, match="resumed from step 2"):
        run.compare(recorded(2), recorded(), recorded(), 3, 1.0)
