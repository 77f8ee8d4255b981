"""Saves whose boxes are planned and listed together, as thousands of ranks make them, by a few dozen threads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.cli.main import run as run_command
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.saving import coordinator
from bytecheckpoint.storage import resolve
from bytecheckpoint.tuning import tuned
from bytecheckpoint.world import _worlds
from tests.support.layouts import Leaf, coded
from tests.support.ranks import outcomes
from tests.support.settings import using

FSDP, TP = 8, 2
SHAPES = {f"w{i}": (64, 6) for i in range(8)} | {"rowwise": (16, 8), "norm": (24,), "step": (), "bias": (7, 2)}


def box(name: str, rank: int, fsdp: int, tp: int) -> Any:
    """The box of a rank: matrices are cut by both, `norm` by FSDP only, and `step` and `bias` are on all ranks."""
    shape, f, t = SHAPES[name], rank // tp, rank % tp
    if name == "norm":
        share = -(-24 // fsdp)
        return (min(f * share, 24),), (min((f + 1) * share, 24) - min(f * share, 24),)
    if name == "rowwise":
        return (16 * f // fsdp, t * 8 // tp), (16 // fsdp, 8 // tp)
    if len(shape) == 2 and name != "bias":
        share = 64 // (fsdp * tp)
        return ((t * fsdp + f) * share, 0), (share, 6)
    return (0,) * len(shape), shape


def states(rank: int, fsdp: int, tp: int, *, salt: int, fresh: bool = False, names: Any = SHAPES) -> dict[str, Any]:
    model = {}
    for number, name in enumerate(names):
        full = coded(SHAPES[name], torch.float32, number + salt)
        model[name] = Leaf(SHAPES[name], [box(name, rank, fsdp, tp)]).fill(full * (not fresh), False)
    return {"model": model, "extra_states": {} if fresh else {"rank": rank, "salt": salt}}


def check(path: Path, salt: int, fsdp: int, tp: int, *, strict: bool = True) -> None:
    def load(collective: Collective) -> None:
        destination = states(collective.rank, fsdp, tp, salt=0, fresh=True)
        bytecheckpoint.load(path, destination, strict=strict, timeout=60)
        for number, name in enumerate(SHAPES):
            destination["model"][name].check(coded(SHAPES[name], torch.float32, number + salt))
        assert destination["extra_states"]["salt"] == salt

    with using(writer="thread"):
        assert outcomes(ThreadWorld(fsdp * tp), load) == [None] * (fsdp * tp)


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many replies of each kind the coordinators sent."""
    for world in list(_worlds):
        world.drain()  # a load of the test before may still prepare a save
    found: Counter[str] = Counter()
    encode = coordinator.encode

    def counted(reply: Any) -> bytes:
        found[type(reply).__name__] += 1
        return encode(reply)

    monkeypatch.setattr(coordinator, "encode", counted)
    return found


@pytest.mark.parametrize("group_bytes", [1, 1 << 22])
def test_a_mesh_saves_and_any_loads(tmp_path: Path, group_bytes: int, replies: Counter[str]) -> None:
    """One rank describes the tensors for all; later saves use the plan; the tools read what is there."""
    path = tmp_path / "step"

    def save(collective: Collective) -> list[bool]:
        cached = []
        for number in range(3):
            mine = states(collective.rank, FSDP, TP, salt=number)
            report = bytecheckpoint.save(path, mine, async_checkpoint=number == 1).result(60)
            cached.append(report.plan_cached)
        return cached

    tiled = {"tiled_rows": 0, "all_tables_bytes": 0, "catalog_group_bytes": group_bytes}
    with tuned(**tiled), using(writer="thread"):
        assert outcomes(ThreadWorld(FSDP * TP), save) == [[False, True, True]] * FSDP * TP
        assert replies["DescribeRequest"] == 1
        assert b"bytecheckpoint03" in (path / CATALOG_NAME).read_bytes()
        for fsdp, tp in ((8, 2), (1, 1), (2, 4), (16, 1)):
            check(path, 2, fsdp, tp)
        catalog, _ = read_catalog(resolve(path))
        boxes = dict.fromkeys(SHAPES, 16) | {"norm": 8, "step": 1, "bias": 1}
        assert Counter(catalog.fqn[i] for i in catalog.boxes.tensor.tolist() if catalog.fqn[i]) == boxes
        with bytecheckpoint.open(path) as checkpoint:
            for number, name in enumerate(SHAPES):
                assert torch.equal(checkpoint[f"model/{name}"][...], coded(SHAPES[name], torch.float32, number + 2))
    assert run_command(["verify", str(path)]) == 0


def test_a_rank_with_another_state_in_a_later_save(tmp_path: Path) -> None:
    """The others follow the old plan, and write the same rows by the new one."""

    def save(collective: Collective) -> None:
        for number in range(2):
            mine = states(collective.rank, FSDP, TP, salt=number)
            if number and collective.rank == 3:
                mine["model"]["more"] = torch.ones(5)
            bytecheckpoint.save(tmp_path / str(number), mine)

    with tuned(tiled_rows=0, all_tables_bytes=0), using(writer="thread"):
        assert outcomes(ThreadWorld(FSDP * TP), save) == [None] * FSDP * TP
        check(tmp_path / "1", 1, 4, 2, strict=False)


def test_copies_are_compared(tmp_path: Path) -> None:
    def save(collective: Collective) -> None:
        mine = states(collective.rank, FSDP, TP, salt=0)
        if collective.rank == 5:
            mine["model"]["norm"].tensors[0].add_(1)
        bytecheckpoint.save(tmp_path / "step", mine, check_replicas=True)

    with tuned(tiled_rows=0, all_tables_bytes=0), using(writer="thread"):
        found = outcomes(ThreadWorld(FSDP * TP), save)
    assert all(isinstance(e, IncompatibleCheckpointError) and "model/norm" in str(e) for e in found), found
    assert "rank 4 and rank 5" in str(found[0])


@pytest.mark.parametrize("fault", ["hole", "other shape"])
def test_a_rank_that_does_not_fit_is_named(tmp_path: Path, fault: str) -> None:
    def save(collective: Collective) -> None:
        mine = states(collective.rank, FSDP, TP, salt=0)
        if collective.rank == 9:
            if fault == "hole":
                del mine["model"]["w3"]
            else:
                mine["model"]["w3"] = torch.ones(3)
        bytecheckpoint.save(tmp_path / "step", mine)

    with tuned(tiled_rows=0, all_tables_bytes=0), using(writer="thread"):
        found = outcomes(ThreadWorld(FSDP * TP), save)
    assert all(isinstance(e, CheckpointError) and "model/w3" in str(e) for e in found), found
    assert "leave a hole" in str(found[0]) if fault == "hole" else "on rank 9" in str(found[0])
