"""The demo's data and checks by themselves; the whole of it is `make demo`, and `demo/run.py --short` in CI."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

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


def test_the_hash_of_a_batch_sees_every_token_and_every_row_number() -> None:
    table = torch.arange(8 * 20).reshape(8, 20)
    hashes = {data.describe(table)["batch"], data.describe(table.flip(0))["batch"]}
    for place in [(3, 0), (3, 2), (7, 18)]:
        changed = table.clone()
        changed[place] ^= 1
        hashes.add(data.describe(changed)["batch"])
    assert len(hashes) == 5


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
