"""Incremental saves: files of frozen parameters are shared with earlier checkpoints, and only if they hold the same."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import signal
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import (
    CheckpointError,
    CheckpointManager,
    IncompatibleCheckpointError,
    StateChangedError,
    StorageError,
)
from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.manager import Retention
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.storage.posix.storage import PosixStorage
from bytecheckpoint.tools import repair, verify
from bytecheckpoint.tools.removal import collect_garbage
from bytecheckpoint.tuning import tuned
from tests.support.catalogs import catalog_at
from tests.support.damage import damage, flip_bit
from tests.support.faulty_storage import Faults
from tests.support.frozen import Training, check_alone, frozen_file, load_into, save_steps
from tests.support.memory import folder_in_memory, new_memory
from tests.support.modes import MODES
from tests.support.ranks import outcomes
from tests.support.settings import using
from tests.support.system_calls import failing
from tests.support.variants import crossed
from tests.support.worlds import Worlds

FROZEN = 500 * 500 * 4 + 3 * 500 * 4


def in_world(function: Callable[[Training], Any]) -> Any:
    """Run a function with a new training in a world that knows no earlier files."""
    return ThreadWorld(1).run(lambda _: function(Training()), timeout=120)[0]


@pytest.mark.parametrize("mode", MODES)
def test_unchanged_parameters_are_written_once(mode: str, tmp_path: Path) -> None:
    _, reports = save_steps(tmp_path, 1, 2, 3, **MODES[mode])
    assert [report.bytes_adopted > FROZEN for report in reports] == [False, True, True]
    assert [report.bytes_written < 60_000 for report in reports] == [False, True, True]
    assert os.stat(frozen_file(tmp_path / "step_1")).st_nlink == 3
    for step in (1, 2, 3):
        check_alone(tmp_path / f"step_{step}", step)


def test_other_saves_have_the_files_that_they_always_had(tmp_path: Path) -> None:
    training = Training()
    training.step()
    bytecheckpoint.save(tmp_path, training.states())
    assert len(list(tmp_path.glob("model/*"))) == 1
    assert b"bytecheckpoint.adopted" not in next(tmp_path.glob("model/*")).read_bytes()


def by_data(weight: torch.nn.Parameter, index: int) -> None:
    weight.data.view(-1)[index] += 1


def by_numpy(weight: torch.nn.Parameter, index: int) -> None:
    weight.detach().numpy().reshape(-1)[index] += 1


def by_storage(weight: torch.nn.Parameter, index: int) -> None:
    storage = weight.untyped_storage()
    storage[4 * index] = storage[4 * index] ^ 1


def by_exchange(weight: torch.nn.Parameter, index: int) -> None:
    weight.data = weight.data.clone()
    weight.data.view(-1)[index] += 1


@pytest.mark.parametrize(("mode", "write"), crossed(list(MODES), [by_data, by_numpy, by_storage, by_exchange]))
def test_a_changed_element_is_written(
    write: Callable[[torch.nn.Parameter, int], None], mode: str, tmp_path: Path
) -> None:
    def change(training: Training) -> None:
        dice = random.Random(write.__name__)
        for number in range(5):
            training.save(tmp_path / "a", **MODES[mode])
            weight = training.model.base[0].weight
            write(weight, dice.choice([0, weight.numel() - 1, dice.randrange(weight.numel())]))
            assert training.save(tmp_path / str(number), **MODES[mode]).bytes_adopted == 0
            assert torch.equal(load_into(tmp_path / str(number)).model.base[0].weight, weight)

    in_world(change)


def other_dtype(training: Training) -> None:
    training.model.base.bfloat16()


def trained_now(training: Training) -> None:
    training.model.base[1].requires_grad_(True)


def other_shape(training: Training) -> None:
    training.model.base[0] = torch.nn.Linear(500, 400).requires_grad_(False)


def other_name(training: Training) -> None:
    training.model.base = torch.nn.Sequential(OrderedDict(zip("ab", training.model.base, strict=True)))


def other_values(training: Training) -> None:
    torch.nn.init.zeros_(training.model.base[1].weight)


@pytest.mark.parametrize("change", [other_dtype, trained_now, other_shape, other_name, other_values])
def test_other_layouts_are_written(change: Callable[[Training], None], tmp_path: Path) -> None:
    def save(training: Training) -> None:
        training.save(tmp_path / "1")
        change(training)
        assert training.save(tmp_path / "2").bytes_adopted == 0
        assert verify(tmp_path / "2").ok
        # And the next one shares that.
        assert training.save(tmp_path / "3").bytes_adopted > FROZEN // 3
        loaded = Training(seed=1)
        change(loaded)
        bytecheckpoint.load(tmp_path / "3", loaded.states(), prepare_save=False)
        for name, tensor in training.model.state_dict().items():
            assert torch.equal(loaded.model.state_dict()[name], tensor), name

    in_world(save)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_job_goes_on_where_another_one_ended(ranks: int, tmp_path: Path) -> None:
    save_steps(tmp_path, 1, world=ThreadWorld(2))

    def resume(_: Collective) -> Any:
        training = Training(seed=1)
        bytecheckpoint.load(tmp_path / "step_1", training.states())
        return training.save(tmp_path / "step_2")

    reports = outcomes(ThreadWorld(ranks), resume)
    assert (sum(report.bytes_adopted for report in reports) > FROZEN) == (ranks == 2)
    shutil.rmtree(tmp_path / "step_1")
    check_alone(tmp_path / "step_2", 2)


def test_ranks_that_disagree_fail_by_name(tmp_path: Path) -> None:
    def one(collective: Collective) -> Any:
        training = Training()
        training.model.base[1].requires_grad_(collective.rank == 1)
        return training.save(tmp_path)

    def other(collective: Collective) -> Any:
        return bytecheckpoint.save(tmp_path, Training().states(), incremental=collective.rank == 0)

    for function in (one, other):
        for error in outcomes(ThreadWorld(2), function):
            assert isinstance(error, IncompatibleCheckpointError) and "frozen" in str(error)


def test_ranks_without_anything_to_write_name_their_files(tmp_path: Path) -> None:
    """Rank 1 has frozen parameters only; a lost catalog comes back all the same."""

    def save(collective: Collective) -> list[Any]:
        layer = torch.nn.Linear(90, 90).requires_grad_(collective.rank == 0)
        torch.nn.init.constant_(layer.weight, 1 + collective.rank)
        states = {f"model_{collective.rank}": layer}
        return [bytecheckpoint.save(tmp_path / str(n), states, incremental=True).result().bytes_written for n in (1, 2)]

    assert outcomes(ThreadWorld(2), save)[1] == [36_856, 4096]
    (tmp_path / "2/metadata.parquet").unlink()
    shutil.rmtree(tmp_path / "1")
    assert repair(tmp_path / "2").written and verify(tmp_path / "2").ok
    with bytecheckpoint.open(tmp_path / "2") as checkpoint:
        assert torch.equal(checkpoint["model_1/weight"][:], torch.full((90, 90), 2.0))


def test_a_path_that_is_saved_again_keeps_its_file(tmp_path: Path) -> None:
    _, reports = save_steps(tmp_path, 1, 1, 1)
    assert reports[2].bytes_adopted > FROZEN
    check_alone(tmp_path / "step_1", 3)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES])
def test_where_nothing_can_be_linked_everything_is_written(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "link", code, lambda _, new: new.endswith(".safetensors"))
    _, reports = save_steps(tmp_path, 1, 2)
    assert [report.bytes_adopted for report in reports] == [0, 0]
    check_alone(tmp_path / "step_2", 2)


def test_storages_without_links_write_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PosixStorage, "adopt")
    assert [report.bytes_adopted for report in save_steps(tmp_path, 1, 2)[1]] == [0, 0]
    check_alone(tmp_path / "step_2", 2)


def test_memory_has_links() -> None:
    with new_memory() as run:
        assert save_steps(run, 1, 2)[1][1].bytes_adopted > FROZEN
        check_alone(folder_in_memory(run) / "step_2", 2)


@pytest.mark.parametrize("how", ["header", "cut", "remove", "other"])
def test_damaged_sources_are_not_shared(how: str, tmp_path: Path) -> None:
    def save(training: Training) -> None:
        training.save(tmp_path / "step_1")
        file = frozen_file(tmp_path / "step_1")
        if how == "header":
            flip_bit(file, 900)
        elif how == "other":
            os.replace(next(file.parent.glob("rank-00000.*")), file)
        else:
            damage(file, how)
        assert training.save(tmp_path / "step_2").bytes_adopted == 0

    in_world(save)
    check_alone(tmp_path / "step_2", 2)


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3, 4)))[::5])
def test_steps_are_deleted_in_any_order(order: tuple[int, ...], tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    *gone, last = order
    for step in gone:
        shutil.rmtree(tmp_path / f"step_{step}")
    collect_garbage(str(tmp_path), older_than=0)
    check_alone(tmp_path / f"step_{last}", last)


def test_a_manager_keeps_the_last_step(tmp_path: Path) -> None:
    def train(training: Training) -> None:
        options = SaveOptions(incremental=True)
        with CheckpointManager(
            tmp_path, training.states(), keep=Retention(1, grace=0), save_options=options
        ) as manager:
            for step in range(1, 6):
                training.step()
                manager.save(step).result(60)

    in_world(train)
    (step,) = tmp_path.glob("step_*/metadata.parquet")
    assert os.stat(frozen_file(step.parent)).st_nlink == 1
    check_alone(step.parent, 5)


def test_a_copied_run_loads(tmp_path: Path) -> None:
    save_steps(tmp_path / "run", 1, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved/step_1")
    for path in ("copy/step_1", "copy/step_2", "moved/step_2"):
        check_alone(tmp_path / path, int(path[-1]))


@pytest.mark.parametrize("call", ["create", "finish", "publish"])
def test_a_failed_save_leaves_no_links(call: str, tmp_path: Path) -> None:
    faults = Faults()

    def save(training: Training) -> None:
        training.save(tmp_path / "step_1")
        faults.add(call, StorageError("broken"), times=1)
        with pytest.raises(CheckpointError, match="broken"):
            training.save(faults.at(tmp_path / "step_2"))
        assert not list((tmp_path / "step_2").glob("*/*"))
        assert os.stat(frozen_file(tmp_path / "step_1")).st_nlink == 1
        # A failure over a committed checkpoint leaves that as it was.
        faults.add(call, StorageError("broken"), times=1)
        with pytest.raises(CheckpointError, match="broken"):
            training.save(faults.at(tmp_path / "step_1"))
        check_alone(tmp_path / "step_1", 1)
        assert training.save(tmp_path / "step_2").bytes_adopted > FROZEN

    in_world(save)
    check_alone(tmp_path / "step_2", 4)


def save_and_die(run: Path) -> None:
    faults = Faults()
    faults.add("publish", before=lambda: os.kill(os.getpid(), signal.SIGKILL))
    training = Training()
    training.save(run / "step_1")
    training.save(faults.at(run / "step_2"))


def test_a_kill_between_link_and_commit(worlds: Worlds, tmp_path: Path) -> None:
    ((succeeded, _),) = worlds.fresh(1).start(save_and_die, tmp_path).outcomes()
    assert not succeeded
    assert os.stat(frozen_file(tmp_path / "step_2")).st_nlink == 2
    check_alone(tmp_path / "step_1", 1)
    save_steps(tmp_path, 2)
    check_alone(tmp_path / "step_2", 1)


@pytest.mark.parametrize("mode", ["async", "background"])
def test_chunks_through_a_small_pool(mode: str, tmp_path: Path) -> None:
    def save(_: Collective) -> list[int]:
        training = Training(width=1500)  # 9 MB, and 4 MB that are written each time
        training.model.add_module("free", torch.nn.Linear(1000, 1000))
        saves = [
            bytecheckpoint.save(tmp_path / str(n), training.states(), incremental=True, **MODES[mode]) for n in range(3)
        ]
        return [handle.result(60).bytes_adopted for handle in saves]

    with using(staging_bytes=2 << 20, chunk_bytes=1 << 20):
        ((*_, adopted),) = outcomes(ThreadWorld(1), save)
    assert adopted > 9_000_000 and verify(tmp_path / "2").ok


def test_files_of_few_tensors(tmp_path: Path) -> None:
    with tuned(max_entries_per_file=1):
        _, reports = save_steps(tmp_path, 1, 2)
    assert reports[1].bytes_adopted > FROZEN
    assert len(generations(tmp_path / "step_2")) == 2
    check_alone(tmp_path / "step_2", 2)


def generations(path: Path) -> set[str]:
    return {file.generation for file in catalog_at(path).files}


def test_values_that_differ_after_the_plan_are_written_beside(tmp_path: Path) -> None:
    def save(collective: Collective) -> list[int]:
        training, adopted = Training(), []
        for step in (1, 2, 3):
            training.step()
            states = {**training.states(), "extra_states": {"own": step == 3 and collective.rank}}
            report = bytecheckpoint.save(tmp_path / f"step_{step}", states, incremental=True).result(60)
            adopted.append(report.bytes_adopted)
        return adopted

    for adopted in outcomes(ThreadWorld(2), save):
        assert adopted[0] == 0 < min(adopted[1:])
    assert verify(tmp_path / "step_3").ok
    for rank in (0, 1):
        with bytecheckpoint.open(tmp_path / "step_3", rank=rank) as checkpoint:
            assert checkpoint["extra_states/own"] == rank


# --- repair and garbage -------------------------------------------------------------------------------------------


def test_a_lost_catalog_comes_back(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 2)
    shutil.rmtree(tmp_path / "step_1")
    (tmp_path / "step_2/metadata.parquet").unlink()
    assert {removal.kept != "" for removal in collect_garbage(str(tmp_path), older_than=-1)} == {True}
    assert repair(tmp_path / "step_2").written
    check_alone(tmp_path / "step_2", 3)


def test_a_lost_adopted_file_is_named(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "step_2/metadata.parquet").unlink()
    frozen_file(tmp_path / "step_2").unlink()
    with pytest.raises(CheckpointError, match="adopted from an earlier one"):
        repair(tmp_path / "step_2")


def test_garbage_is_collected_beside_a_save(tmp_path: Path) -> None:
    """The bytes of an adopted file are old, and its name is new."""
    faults = Faults()
    faults.add("create", before=lambda: collect_garbage(str(tmp_path), older_than=60), times=1)
    faults.add("publish", before=lambda: collect_garbage(str(tmp_path), older_than=60), times=1)

    def save(training: Training) -> None:
        training.save(tmp_path / "step_1")
        for file in tmp_path.glob("step_1/*/*"):
            os.utime(file, (1, 1))
        assert training.save(faults.at(tmp_path / "step_2")).bytes_adopted > FROZEN

    in_world(save)
    check_alone(tmp_path / "step_2", 2)


def test_a_change_back_to_the_old_bytes_is_seen(tmp_path: Path) -> None:
    """The state of the call had other bytes than the file; what is hashed later has its bytes."""

    def save(training: Training) -> None:
        weight = training.model.base[0].weight
        training.save(tmp_path / "step_1")
        weight.data += 1
        handle = bytecheckpoint.save(tmp_path / "step_2", training.states(), incremental=True, **MODES["background"])
        weight.data -= 1
        with contextlib.suppress(StateChangedError):
            handle.result(60)
            assert torch.equal(load_into(tmp_path / "step_2").model.base[0].weight, weight + 1)

    for _ in range(5):
        in_world(save)
