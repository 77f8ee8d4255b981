"""Agreement of the ranks of a save: cached plans, values that differ, order, failures."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld, current
from bytecheckpoint.errors import StorageUnavailableError
from bytecheckpoint.saving.messages import SaveStep, reply_tag, tag
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import verify
from tests.support.catalogs import catalog_at
from tests.support.faulty_storage import Faults
from tests.support.layouts import Leaf, coded
from tests.support.ranks import attempt
from tests.support.settings import using


@pytest.fixture(autouse=True)
def _settings() -> Any:
    with using(writer="thread", timeout=20.0):
        yield


def rows(rank: int, world: int, salt: int = 0) -> dict[str, Any]:
    """A replicated tensor and one that is divided by rows."""
    full = coded((world * 4, 8), torch.float32, salt)
    part = Leaf(tuple(full.shape), [((rank * 4, 0), (4, 8))]).fill(full, False)
    return {"part": part, "copy": coded((100,), torch.int64, salt)}


def test_the_second_save_sends_nothing_before_its_report(tmp_path: Path) -> None:
    sent: list[tuple[int, str]] = []
    world = ThreadWorld(3)

    def run(collective: Collective) -> list[bytecheckpoint.SaveReport]:
        original = collective.send

        def send(to: int, name: str, payload: bytes) -> None:
            sent.append((collective.rank, name))
            original(to, name, payload)

        collective.send = send  # type: ignore[method-assign]
        reports = []
        for step in range(3):
            states = {"model": rows(collective.rank, 3, step), "extra_states": {"step": step}}
            handle = bytecheckpoint.save(tmp_path / str(step), states, async_checkpoint=True)
            reports.append(handle.result(30))
        return reports

    for reports in world.run(run, timeout=60):
        assert [r.plan_cached for r in reports] == [False, True, True]
    # From each rank its table and its report, and later only a report; each has one reply.
    steps = [(1, SaveStep.FIRST), (1, SaveStep.REPORT), (2, SaveStep.FIRST), (3, SaveStep.FIRST)]
    assert Counter(name for _, name in sent) == {name(*step): 3 for step in steps for name in (tag, reply_tag)}


def test_a_rank_with_new_state_is_planned_around_the_others(tmp_path: Path) -> None:
    """One rank misses the plan cache, the others hit it: the save works and later ones hit again."""

    def states(rank: int, step: int) -> dict[str, Any]:
        model = rows(rank, 3, step)
        if rank == 1 and step >= 1:
            model["late"] = coded((7,), torch.float64, step)
        return {"model": model}

    def run(collective: Collective) -> list[bool]:
        return [
            bytecheckpoint.save(tmp_path / str(step), states(collective.rank, step)).result().plan_cached
            for step in range(3)
        ]

    assert ThreadWorld(3).run(run, timeout=60) == [[False, True, True], [False, False, True], [False, True, True]]
    for step in range(3):
        checkpoint = bytecheckpoint.open(tmp_path / str(step))
        assert torch.equal(checkpoint["model/part"][...], coded((12, 8), torch.float32, step))
        assert torch.equal(checkpoint["model/copy"][...], coded((100,), torch.int64, step))
        assert ("model/late" in checkpoint) == (step >= 1)


def test_plans_that_do_not_belong_together_fail_the_save_and_not_the_next(tmp_path: Path) -> None:
    def run(collective: Collective) -> str:
        rank = collective.rank
        bytecheckpoint.save(tmp_path / "a", {"model": rows(rank, 2)})
        bytecheckpoint.save(tmp_path / "b", {"model": {"other": torch.ones(3)}})
        message = ""
        states = {"model": rows(rank, 2)} if rank == 0 else {"model": {"other": torch.ones(3)}}
        try:
            bytecheckpoint.save(tmp_path / "c", states)
        except bytecheckpoint.IncompatibleCheckpointError as error:
            message = str(error)
        bytecheckpoint.save(tmp_path / "d", {"model": rows(rank, 2)})
        return message

    messages = ThreadWorld(2).run(run, timeout=60)
    assert all("different save plans" in m for m in messages), messages
    assert not (tmp_path / "c" / "metadata.parquet").exists()
    assert [p for p in (tmp_path / "c").rglob("*") if p.is_file()] == []
    assert (tmp_path / "d" / "metadata.parquet").exists()


@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_saves_go_on_after_a_failure_that_one_rank_has_not_asked_for(tmp_path: Path, staging: str) -> None:
    """Rank 0 asks its handle, as programs do that log there. The next save raises the failure on rank 1, once."""
    together = threading.Barrier(2)

    def run(collective: Collective) -> list[str]:
        rank, messages = collective.rank, []
        for step in range(6):
            states = {"model": {"w": torch.full((3,), float(rank if step == 1 else 0))}}
            try:
                handle = bytecheckpoint.save(
                    tmp_path / str(step),
                    states,
                    async_checkpoint=True,
                    staging=staging,
                    check_replicas=True,
                    timeout=20,
                )
            except bytecheckpoint.IncompatibleCheckpointError as error:
                messages.append(f"{step}: {error}")
            else:
                wait([handle.committed], 60)  # asks for no failure
                if rank == 0 and step == 1:
                    assert isinstance(handle.committed.exception(), bytecheckpoint.IncompatibleCheckpointError)
            together.wait(60)
        return messages

    (_, of_rank_1) = ThreadWorld(2).run(run, timeout=90)
    (message,) = of_rank_1
    assert message.startswith("2: ") and "an earlier asynchronous save failed" in message
    committed = [step for step in range(6) if (tmp_path / str(step) / "metadata.parquet").exists()]
    assert committed == [0, 3, 4, 5]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_plan_that_only_the_ranks_remember_is_still_good(tmp_path: Path, asynchronous: bool) -> None:
    """Rank 0 forgets plans by age, ranks by use; many prepares of another state age the first plan."""

    def run(collective: Collective) -> bool:
        states = {"model": rows(collective.rank, 3), "extra_states": {"own": collective.rank}}
        bytecheckpoint.save(tmp_path / "a", states)
        for _ in range(20):
            bytecheckpoint.prepare({"model": {"other": torch.ones(3)}}).result(30)
        handle = bytecheckpoint.save(tmp_path / "b", states, async_checkpoint=asynchronous)
        return handle.result(30).plan_cached

    assert ThreadWorld(3).run(run, timeout=60) == [True, True, True]
    checkpoint = bytecheckpoint.open(tmp_path / "b")
    assert torch.equal(checkpoint["model/part"][...], coded((12, 8), torch.float32))
    assert checkpoint.info["layout"] == bytecheckpoint.open(tmp_path / "a").info["layout"]
    assert verify(resolve(tmp_path / "b")).ok


def test_ranks_whose_states_change_back_and_forth_keep_their_plans(tmp_path: Path) -> None:
    """Ranks 1 and 2 gain and lose a tensor of their own at different steps, so their plans come from different saves."""
    holders = [(), (1,), (2,), (1, 2), (), (1, 2)]  # of a tensor of their own, at each step

    def run(collective: Collective) -> list[bool]:
        cached = []
        for step, ranks in enumerate(holders):
            model = rows(collective.rank, 3, step)
            if collective.rank in ranks:
                model[f"late{collective.rank}"] = coded((7,), torch.float64, step)
            cached.append(bytecheckpoint.save(tmp_path / str(step), {"model": model}).result().plan_cached)
        return cached

    cached = ThreadWorld(3).run(run, timeout=60)
    assert [row[3:] for row in cached] == [[True] * 3] * 3
    for step, ranks in enumerate(holders):
        checkpoint = bytecheckpoint.open(tmp_path / str(step))
        assert verify(resolve(tmp_path / str(step))).ok
        assert torch.equal(checkpoint["model/part"][...], coded((12, 8), torch.float32, step))
        assert {k for k in checkpoint if "late" in k} == {f"model/late{rank}" for rank in ranks}
        for rank in ranks:
            assert torch.equal(checkpoint[f"model/late{rank}"][...], coded((7,), torch.float64, step))


def moved(rank: int, before: bool) -> dict[str, Any]:
    """Two ranks hold `a`, which rank 1 writes, having less to write; afterwards rank 1 has something else."""
    name = "a" if before or rank == 0 else "b"
    model = {name: coded((512,), torch.float32), f"own{rank}": coded((4000 if rank == 0 else 4,), torch.int64, rank)}
    return {"model": model, "extra_states": {"rank": rank, "same": 1, "before": before}}


@pytest.mark.parametrize("remembered", [True, False], ids=["remembered", "described"])
def test_a_replica_that_its_writer_has_no_more_is_written_by_another_holder(tmp_path: Path, remembered: bool) -> None:
    """The other holder did not write it, by its plan, so the coordinator asks it to write again."""

    def run(collective: Collective) -> list[bool]:
        rank = collective.rank
        bytecheckpoint.save(tmp_path / "1", moved(rank, True))
        for _ in range(0 if remembered else 20):
            bytecheckpoint.prepare({"model": {"other": torch.ones(3)}}).result(30)
        saved = [bytecheckpoint.save(tmp_path / name, moved(rank, False)).result() for name in ("2", "3")]
        return [report.plan_cached for report in saved]

    assert ThreadWorld(2).run(run, timeout=60) == [[False, True], [False, True]]
    for name in ("2", "3"):
        assert verify(resolve(tmp_path / name)).ok
        for rank in (0, 1):
            checkpoint = bytecheckpoint.open(tmp_path / name, rank=rank)
            assert [checkpoint[f"extra_states/{key}"] for key in ("rank", "same", "before")] == [rank, 1, False]
            for key, tensor in moved(rank, False)["model"].items():
                assert torch.equal(checkpoint[f"model/{key}"][...], tensor)
        files = list((tmp_path / name).rglob("*.safetensors"))
        assert len(files) == len(catalog_at(tmp_path / name).files)


def test_files_that_a_rewrite_could_not_remove_go_with_the_failed_save(tmp_path: Path) -> None:
    faults = Faults()

    def run(collective: Collective) -> str:
        rank = collective.rank
        bytecheckpoint.save(tmp_path / "1", moved(rank, True))
        if rank == 0:
            faults.add("delete", StorageUnavailableError("down"), times=1)
        return str(attempt(bytecheckpoint.save, faults.at(tmp_path / "2"), moved(rank, False)))

    assert all("down" in error for error in ThreadWorld(2).run(run, timeout=60))
    assert [p for p in (tmp_path / "2").rglob("*") if p.is_file()] == []


def test_an_asynchronous_save_cannot_write_what_it_has_not_copied(tmp_path: Path) -> None:
    """Nobody knew that `a` was wanted of rank 0 when its caller went on: one save fails, and says so."""

    def run(collective: Collective) -> str:
        rank = collective.rank
        bytecheckpoint.save(tmp_path / "1", moved(rank, True))
        handle = bytecheckpoint.save(tmp_path / "2", moved(rank, False), async_checkpoint=True)
        message = str(handle.committed.exception(60))
        bytecheckpoint.save(tmp_path / "4", moved(rank, False))
        return message

    messages = ThreadWorld(2).run(run, timeout=60)
    assert all("the next save plans anew" in m and "model/a" in m for m in messages), messages
    assert not (tmp_path / "2" / "metadata.parquet").exists()
    assert [p for p in (tmp_path / "2").rglob("*") if p.is_file()] == []
    assert "model/a" in bytecheckpoint.open(tmp_path / "4")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_values_that_begin_to_differ_are_stored_per_rank(tmp_path: Path, asynchronous: bool) -> None:
    """The plan assumes that one copy stands for all; the digests of a later save say otherwise."""

    def run(collective: Collective) -> list[Any]:
        seen = []
        for step in range(4):
            own = collective.rank if step >= 2 else 7
            states = {"extra_states": {"own": own, "rng": torch.full((5,), own), "same": "x" * 100}}
            bytecheckpoint.save(tmp_path / str(step), states, async_checkpoint=asynchronous).result(30)
            destination: dict[str, Any] = {"extra_states": {}}
            bytecheckpoint.load(tmp_path / str(step), destination)
            seen.append((destination["extra_states"]["own"], destination["extra_states"]["rng"].tolist()))
        return seen

    for rank, seen in enumerate(ThreadWorld(3).run(run, timeout=60)):
        assert seen == [(7, [7] * 5), (7, [7] * 5), (rank, [rank] * 5), (rank, [rank] * 5)]
    assert sum(f.state == "extra_states" for f in catalog_at(tmp_path / "1").files) == 1

    def load_wider(collective: Collective) -> tuple[int, tuple[str, ...]]:
        destination: dict[str, Any] = {"extra_states": {}}
        report = bytecheckpoint.load(tmp_path / "3", destination)
        return destination["extra_states"]["own"], report.notes

    wider = ThreadWorld(5).run(load_wider, timeout=60)
    assert [own for own, _ in wider] == [0, 1, 2, 0, 0]
    assert all(("rank 0" in " ".join(notes)) == (rank >= 3) for rank, (_, notes) in enumerate(wider))


def test_a_value_that_differs_is_written_as_it_was_staged(tmp_path: Path) -> None:
    """A rank learns only at the commit that its copy must be written; the caller has changed it long before."""

    def run(collective: Collective) -> list[float]:
        tensor = torch.zeros(1000)
        bytecheckpoint.save(tmp_path / "0", {"extra_states": {"x": tensor}})
        tensor += collective.rank
        handle = bytecheckpoint.save(tmp_path / "1", {"extra_states": {"x": tensor}}, async_checkpoint=True)
        tensor.fill_(99.0)
        handle.result(30)
        destination: dict[str, Any] = {"extra_states": {}}
        bytecheckpoint.load(tmp_path / "1", destination)
        found: list[float] = destination["extra_states"]["x"].unique().tolist()
        return found

    assert ThreadWorld(3).run(run, timeout=60) == [[0.0], [1.0], [2.0]]


def test_ranks_that_disagree_about_a_shape_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match="model/w has global shape"):
        ThreadWorld(2).run(
            lambda c: bytecheckpoint.save(tmp_path / "s", {"model": {"w": torch.ones(3 + c.rank)}}), timeout=60
        )
    assert not (tmp_path / "s").exists() or not list((tmp_path / "s").rglob("*.safetensors"))


def test_prepare_makes_the_first_save_a_cached_one(tmp_path: Path) -> None:
    def run(collective: Collective) -> bool:
        states = {"model": rows(collective.rank, 2), "extra_states": {"step": 1}}
        bytecheckpoint.prepare(states).result(30)
        return bytecheckpoint.save(tmp_path / "s", states, async_checkpoint=True).result(30).plan_cached

    assert ThreadWorld(2).run(run, timeout=60) == [True, True]


def test_ranks_in_different_working_directories_may_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Home directories of machines may differ. `prepare` has no path on which the ranks could disagree."""
    monkeypatch.setattr("os.getcwd", lambda: f"/home/{current().rank}")
    ThreadWorld(2).run(lambda c: bytecheckpoint.prepare({"model": rows(c.rank, 2)}).result(30), timeout=60)


def test_threads_of_one_process_may_save_at_the_same_time(tmp_path: Path) -> None:
    def run(number: int) -> None:
        for _ in range(5):
            bytecheckpoint.save(tmp_path / str(number), {"model": {"w": torch.full((100,), float(number))}})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    for number in range(4):
        assert bytecheckpoint.open(tmp_path / str(number))["model/w"][0].item() == number
