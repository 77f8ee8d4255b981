"""The coordinator's plans: around ranks that have written, and recognised by reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import IncompatibleCheckpointError, UsageError
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.engine.save_resources import PlanCache
from bytecheckpoint.planning.local_table import LocalTable, describe
from bytecheckpoint.planning.save_plan import plan_save
from bytecheckpoint.representation.shards import LiveShard, TensorKey
from bytecheckpoint.saving import copies
from bytecheckpoint.saving.copies import differing_copies
from bytecheckpoint.saving.messages import RankChecks, WriteReport
from bytecheckpoint.saving.plans import GlobalPlan, check_arguments, check_reports, plan_around
from bytecheckpoint.world import world_of
from tests.support.layouts import Declared
from tests.support.settings import using


def table(*names: str, elements: int = 4) -> LocalTable:
    """A rank that holds whole tensors of these names."""
    shape = (elements,)
    return describe(
        [LiveShard(TensorKey("model", n, ""), "float32", shape, (0,), shape, torch.zeros(shape)) for n in names]
    )


def report(plan: str, url: str = "url") -> WriteReport:
    return WriteReport(url, plan, [], [])


def test_ranks_that_have_written_are_planned_around() -> None:
    tables = [table("a", "b"), table("a", "b", "c")]
    plan, reason = plan_around(tables, {0: np.array([0, 1])})
    assert reason == ""
    assert plan.locals_of(0).tolist() == [0, 1] and plan.locals_of(1).tolist() == [2]


def test_a_replica_that_nobody_wrote_makes_all_write_anew() -> None:
    """Rank 0 wrote nothing of `a`, because rank 1 used to; rank 1 no longer holds it."""
    plan, reason = plan_around([table("a"), table("b")], {0: np.zeros(0, np.int64)})
    assert "model/a" in reason
    assert plan.locals_of(0).tolist() == [0] and plan.locals_of(1).tolist() == [0]


def test_tables_that_belong_to_different_states() -> None:
    tables = [table("a"), table("a", elements=5)]
    written = np.array([0])
    with pytest.raises(IncompatibleCheckpointError, match=r"different save plans.*model/a has global shape"):
        plan_around(tables, {0: written, 1: written})
    with pytest.raises(IncompatibleCheckpointError, match=r"^model/a has global shape"):
        plan_around(tables, {0: written})


def test_reports_belong_to_one_plan_and_one_path() -> None:
    tables = [table("a"), table("a")]
    known = GlobalPlan("new", plan_save(tables), tables, ["old", "new"])
    good = {0: report("old"), 1: report("new")}
    assert known.fits(good) and known.fits({1: report("new")}) and not known.fits({0: report("new")})
    check_reports(good, known)
    with pytest.raises(IncompatibleCheckpointError, match="rank 0 followed another save plan"):
        check_reports({0: report("new"), 1: report("new")}, known)
    with pytest.raises(UsageError, match=r"different paths: rank . to "):
        check_arguments({0: report("new", "two"), 1: report("new", "one")})


def test_copies_that_differ_are_named() -> None:
    tables = [table("a", "b"), table("a", "b"), table("b", "c"), table("c")]

    def check(*digests: tuple[int, ...]) -> None:
        rows = [np.flatnonzero(found).tobytes() for found in digests]
        data = [np.array([one for one in found if one], np.uint64).tobytes() for found in digests]
        facts = list(zip(rows, data, strict=True))
        sampled = differing_copies({r: RankChecks(rows=a, digests=b) for r, (a, b) in enumerate(facts)}, tables)
        full = {r: RankChecks(rows=a, digests=b, check_replicas="full") for r, (a, b) in enumerate(facts)}
        assert (differing_copies(full, tables) is None) == (sampled is None)

    check((1, 2), (1, 2), (2, 3), (3,))
    check((1, 2), (), (2, 3), (3,))  # rank 1 has been compared before
    check((1, 2), (1, 0), (2, 3), (3,))  # rank 1 does not train b
    with pytest.raises(IncompatibleCheckpointError, match=r"^model/a .*between rank 0 and rank 1\. Keep"):
        check((1, 2), (4, 2), (2, 3), (3,))
    with pytest.raises(
        IncompatibleCheckpointError, match=r"^model/b .*between ranks 0, 1 and rank 2, .*those of model/c\."
    ):
        check((1, 2), (1, 2), (9, 3), (4,))


def test_the_cache_keeps_what_was_used_last() -> None:
    cache: PlanCache[str, int] = PlanCache(2)
    cache.add("a", 1)
    cache.add("b", 2)
    assert cache.get("a") == 1
    cache.add("c", 3)
    assert "b" not in cache and cache.get("b") is None
    assert list(cache.newest_first()) == [3, 1]
    cache.clear()
    assert list(cache.newest_first()) == []


def test_the_coordinator_keeps_equal_columns_of_ranks_once(tmp_path: Path) -> None:
    """The names of a few thousand tensors from each of ten thousand ranks are more than a gigabyte."""

    def save(collective: Collective) -> None:
        part = torch.zeros(1, 3)
        states = {"model": {name: Declared(((3, 3), (collective.rank, 0), part)) for name in ("a", "b")}}
        bytecheckpoint.save(tmp_path / "step", states)
        if collective.rank == 0:
            plan = next(iter(world_of(collective).resources.global_plans.newest_first()))
            first, *others = plan.tables
            for table in others:
                assert table.tensors[0] is first.tensors[0] and table.ndims is first.ndims
                assert table.boxes is first.boxes and table.axes is first.axes and table.place != first.place

    with using(writer="thread"):
        ThreadWorld(3).run(save, timeout=60)


def test_copies_are_not_compared_where_no_box_has_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find the copies among the rows of ten thousand ranks takes rank 0 seconds and gigabytes."""
    monkeypatch.setattr(copies, "all_rows", None)

    def save(collective: Collective) -> None:
        part = torch.full((1, 3), float(collective.rank))
        states = {"model": {"a": Declared(((3, 3), (collective.rank, 0), part))}}
        bytecheckpoint.save(tmp_path / "step", states, check_replicas=True)

    with using(writer="thread"):
        ThreadWorld(3).run(save, timeout=60)
