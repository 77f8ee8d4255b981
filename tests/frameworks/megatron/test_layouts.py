"""Every layout of Megatron-Core resumes from every other: by coordinates, and by the losses of the next steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from tests.frameworks.megatron import jobs
from tests.frameworks.megatron.worlds import Layout, code
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)

DENSE = [
    Layout(),
    Layout(tp=2, sequence=True),
    Layout(dp=2, distributed=False),
    Layout(pp=2),
    Layout(dp=4, buckets=300),
    Layout(tp=2, dp=2, buckets=500),
    Layout(pp=2, vpp=2, dp=2),
    Layout(tp=2, pp=2, distributed=False),
]
MOE = [
    Layout(moe=True),
    Layout(moe=True, tp=2, sequence=True),
    Layout(moe=True, ep=2, dp=2),
    Layout(moe=True, ep=2, dp=2, distributed=False),
    Layout(moe=True, ep=2, dp=4, buckets=400),
    Layout(moe=True, ep=4, dp=4),
    Layout(moe=True, pp=2, ep=2, dp=2),
    Layout(moe=True, tp=2, ep=2, dp=2, sequence=True, etp=1),
]
HALF = [
    Layout(bf16=True),
    Layout(bf16=True, tp=2, sequence=True, distributed=False),
    Layout(bf16=True, dp=2),
    Layout(bf16=True, pp=2, dp=2, overlap=True),
    Layout(bf16=True, tp=2, pp=2),
    Layout(bf16=True, dp=4, buckets=300, overlap=True),
]
HALF_MOE = [
    Layout(bf16=True, moe=True),
    Layout(bf16=True, moe=True, ep=2, dp=2),
    Layout(bf16=True, moe=True, ep=2, dp=4, overlap=True),
    Layout(bf16=True, moe=True, ep=4, dp=4, distributed=False),
    Layout(bf16=True, moe=True, tp=2, ep=2, dp=2, sequence=True, etp=1),
]
FAMILIES = {"dense": DENSE, "moe": MOE, "half": HALF, "half-moe": HALF_MOE}
# Sums come in another order in another layout; in bfloat16 the gradients of each step do.
TOLERANCE = {"dense": 3e-6, "moe": 3e-6, "half": 5e-3, "half-moe": 5e-3}
CASES = [pytest.param(name, layout, id=f"{name}-{layout}") for name, members in FAMILIES.items() for layout in members]


@dataclass
class Family:
    """What the layouts of one family have saved, as far as tests have asked for it.

    Attributes:
        losses: of the steps after the save, by layout; "plain": as a module of torch.
        saved: path of the checkpoint, by layout.
    """

    name: str
    folder: Path
    losses: dict[str, list[float]] = field(default_factory=dict)
    saved: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name = request.param
    worlds.close()  # of the groups that Megatron forgets some threads stay: not more than one family's
    made = Family(name, tmp_path_factory.mktemp(name))
    one = FAMILIES[name][0]
    start = str(made.folder / "start")
    worlds.run(1, jobs.start, one, start)
    for layout in FAMILIES[name]:
        path = made.saved[str(layout)] = str(made.folder / f"from-{layout}")
        made.losses[str(layout)] = worlds.run(layout.world, jobs.train_and_save, layout, start, path, timeout=200)[0]
    if not one.bf16:
        path = made.saved["plain"] = str(made.folder / "from-plain")
        (made.losses["plain"],) = worlds.run(1, jobs.plain_train_and_save, one, path)
    return made


@pytest.mark.parametrize(("family", "layout"), CASES, indirect=["family"])
def test_next_losses(worlds: Worlds, family: Family, layout: Layout) -> None:
    """The state that is loaded is the one that was saved, and training goes on as in the run that was not interrupted."""
    sources = {source: path for source, path in family.saved.items() if source != "plain"}
    results = worlds.run(
        layout.world, jobs.resume_all, layout, sources, str(family.folder / f"by-{layout}"), timeout=400
    )
    for source in sources:
        for found in results:
            assert found[source]["problems"] == [], source
            assert found[source]["losses"] == pytest.approx(family.losses[source], abs=TOLERANCE[family.name]), source
    # What was saved again is what had been loaded.
    for source, path in sources.items():
        same(path, str(family.folder / f"by-{layout}" / source))


@pytest.mark.parametrize(
    ("family", "layout"),
    [case for case in CASES if not case.values[1].bf16],  # type: ignore[union-attr]
    indirect=["family"],
)
def test_plain_modules(worlds: Worlds, family: Family, layout: Layout) -> None:
    """The same model as an ordinary module, with torch's AdamW: from there, and back."""
    want = family.losses["plain"]
    (found,) = worlds.run(1, jobs.plain_resume, FAMILIES[family.name][0], family.saved[str(layout)])
    assert found["problems"] == []
    assert found["losses"] == pytest.approx(want, abs=TOLERANCE[family.name])
    for found in worlds.run(layout.world, jobs.resume_plain, layout, family.saved["plain"]):
        assert found["problems"] == []
        assert found["losses"] == pytest.approx(want, abs=TOLERANCE[family.name])


@pytest.mark.parametrize("name", FAMILIES)
def test_coordinates(worlds: Worlds, name: str, tmp_path: Path) -> None:
    """From hand to hand through all layouts, and straight from the one process."""
    last = first = str(tmp_path / "coordinates")
    worlds.run(1, jobs.save_coordinates, FAMILIES[name][0], first)
    expect_coordinates(first, half=name.startswith("half"))
    for layout in FAMILIES[name]:
        folder = tmp_path / f"passed-{layout}"
        sources = {"first": first, "last": last}
        for problems in worlds.run(layout.world, jobs.pass_on, layout, sources, str(folder), timeout=200):
            assert problems == {"first": [], "last": []}, layout
        for source in sources:
            expect_coordinates(str(folder / source), half=name.startswith("half"))
        last = str(folder / "last")


def expect_coordinates(path: str, *, half: bool) -> None:
    """Every element of a checkpoint has the value that says where it stands."""
    seen = set()
    for key, found in jobs.tensors(path).items():
        kind, _, name = key.partition("/")
        if kind == "model":
            parameter, slot, want = name, "", code(5, canonical(name), found.shape)
            want = want.bfloat16() if half else want
        elif kind == "optimizer":
            parameter, slot = name.removeprefix("state/").rsplit("/", 1)
            if slot == "step":
                want = torch.tensor(jobs.step_of(canonical(parameter)))
            else:
                want = code(5, f"{canonical(parameter)}/{slot}", found.shape)
        else:
            continue
        seen.add((parameter, slot))
        assert found.dtype == want.dtype, key
        assert torch.equal(found, want), key
    slots = {"", "step", "exp_avg", "exp_avg_sq"} | ({"master"} if half else set())
    frozen = "embedding.position_embeddings.weight"
    assert (frozen, "") in seen
    for parameter in {p for p, _ in seen} - {frozen}:
        assert {s for p, s in seen if p == parameter} == slots
    assert len(seen) > 100


def canonical(name: str) -> str:
    """The name by which the module knows a parameter that Megatron's own checkpoints call otherwise."""
    return name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
        "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
    )


def same(first: str, second: str) -> None:
    """Two checkpoints hold the same tensors, bit by bit, and the same settings of each parameter."""
    assert jobs.unlike(first, second) == []
    with bytecheckpoint.open(first) as one, bytecheckpoint.open(second) as other:
        assert settings_of(one) == settings_of(other)


def settings_of(checkpoint: Any) -> dict[str, Any]:
    """The hyperparameters of each parameter, by name."""
    found: dict[str, Any] = {}
    for group in checkpoint["optimizer/param_groups"]:
        for name in group["params"]:
            found[name] = {key: value for key, value in group.items() if key != "params"}
    assert len({value["lr"] for value in found.values()}) == 2
    assert len({value["weight_decay"] for value in found.values()}) == 2
    return found
