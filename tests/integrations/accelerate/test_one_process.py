"""Accelerate with `attach`, in one process: what is saved and kept, names and numbers, and what is refused."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.integrations.accelerate import attach
from bytecheckpoint.manager import Best, SaveOptions
from tests.integrations.accelerate.jobs import Counter, Found, Numbers, Run, StatefulStream, go_on, model, run, samples
from tests.integrations.conformance import after, collected_warnings
from tests.integrations.transformers.jobs import prepare_rank
from tests.support.runs import steps_in
from tests.support.worlds import Worlds, on_ranks

# --- names and numbers ------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_automatic_naming(tmp_path: Path) -> None:
    """Number and limit steps as accelerate does, which deletes before it saves and refuses to save after a load."""
    project = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True, "total_limit": 2}
    job = Run("", project=project, attached={"root": None})
    assert job.accelerator.load_state() is None
    for number in range(4):
        path = job.accelerator.save_state()
        assert path == f"{tmp_path}/checkpoints/step_{number:08d}"
        assert job.accelerator.save_iteration == number + 1
        job.accelerator.bytecheckpoint.wait()
    job.end()
    assert steps_in(tmp_path / "checkpoints") == [2, 3]
    again = Run("", project=project, attached={"root": None})
    assert again.accelerator.load_state() == 3
    again.accelerator.save_state("any name, which accelerate ignores too")
    again.end()
    assert steps_in(tmp_path / "checkpoints") == [3, 4]


@on_ranks(1)
def test_names_with_a_number(tmp_path: Path) -> None:
    """A folder of the run is a step, by its number, and a load knows it by its name."""
    job = Run(tmp_path)
    for number in (5, 10):
        job.counter.step = number
        assert job.accelerator.save_state(tmp_path / f"epoch_{number}") == f"{tmp_path}/step_{number:08d}"
    job.accelerator.save_state(str(tmp_path / "epoch_10"))  # once more, as at the end of a training
    with pytest.raises(UsageError, match="step 7 is saved after step 10"):
        job.accelerator.save_state(tmp_path / "epoch_7")
    with pytest.raises(UsageError, match="pass a folder or a number, not both"):
        job.accelerator.save_state(tmp_path / "epoch_11", step=11)
    job.end()
    assert steps_in(tmp_path) == [5, 10]
    again = Run(tmp_path)
    assert again.accelerator.load_state(tmp_path / "epoch_5") == again.counter.step == 5
    with pytest.raises(UsageError, match="step 4 is saved after step 5"):
        again.accelerator.save_state(step=4)
    again.accelerator.save_state(tmp_path / "epoch_6")  # the run went back: step 10 counts as older
    again.end()
    assert Run(tmp_path).accelerator.load_state() == 6


@on_ranks(1)
def test_a_folder_apart(tmp_path: Path) -> None:
    """Other folders get one checkpoint, which no rule deletes."""
    job = Run(tmp_path / "run", attached={"keep": 1})
    job.counter.step = 3
    for place in (tmp_path / "run" / "best", tmp_path / "export" / "step_9"):
        assert job.accelerator.save_state(place) == str(place)
    job.accelerator.save_state(step=1)
    job.accelerator.save_state(step=2)
    job.end()
    assert steps_in(tmp_path / "run") == [2]
    for place in (tmp_path / "run" / "best", tmp_path / "export" / "step_9"):
        again = Run(tmp_path / "other")
        assert again.accelerator.load_state(place) is None
        assert again.counter.step == 3
        again.accelerator.save_state()
        again.end()
        bytecheckpoint.CheckpointManager(tmp_path / "other", {}).close()
        (tmp_path / "other").rename(tmp_path / f"other of {place.name}")


@on_ranks(1)
def test_the_folder_of_the_run(tmp_path: Path) -> None:
    """A program that always names one folder."""
    job = Run(tmp_path)
    assert [job.accelerator.save_state(tmp_path)[-3:] for _ in range(2)] == ["000", "001"]
    job.end()
    assert Run(tmp_path).accelerator.load_state(tmp_path) == 1


@on_ranks(1)
def test_attach_before_prepare(tmp_path: Path) -> None:
    from accelerate import Accelerator

    def make() -> tuple[Any, Any]:
        prepare_rank()
        accelerator = Accelerator(cpu=True)
        attach(accelerator, tmp_path)
        return accelerator, accelerator.prepare(model(), DataLoader(Numbers(), 8, shuffle=True))[1]

    accelerator, loader = make()
    batches = iter(loader)
    next(batches)
    accelerator.save_state()
    wanted = torch.cat(list(batches))
    accelerator.bytecheckpoint.close()
    prepare_rank()
    early = Accelerator(cpu=True)
    attach(early, tmp_path)
    with pytest.raises(IncompatibleCheckpointError, match="of 1 models, now 0; 1 data loaders, now 0: prepare"):
        early.load_state()
    accelerator, loader = make()
    accelerator.load_state()
    assert torch.equal(torch.cat(list(loader)), wanted)


@pytest.mark.parametrize(
    "options", [{}, {"stateful": True}, {"stateful": True, "workers": 2}, {"stateful": True, "data": StatefulStream}]
)
@on_ranks(1)
def test_a_job_that_runs_is_switched(tmp_path: Path, options: dict[str, Any]) -> None:
    """It goes on as with accelerate itself, and from then on exactly."""
    stock = Run("", attached=False, **options)
    stock.train(stop=8, save=lambda _: False)
    stock.accelerator.save_state(tmp_path / "step_8")
    (tmp_path / "step_9").mkdir()
    (tmp_path / "step_9" / "model.safetensors").touch()  # of a killed save
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("step_?/*")}
    stock = Run("", attached=False, **options)
    stock.accelerator.load_state(tmp_path / "step_8")
    wanted = go_on(stock, save=lambda _: False)
    job = Run(tmp_path, **options)
    with collected_warnings() as said:
        assert job.accelerator.load_state() == 8
    assert said[0].endswith("step_9 of accelerate is passed over: it lacks random_states_*.pkl")
    assert said[1].endswith(f"step_8, saved by accelerate: {tmp_path} has no step yet")
    assert said[2:] == ([] if options else [
        f"{tmp_path}/step_8 holds no position in the data: skip the done batches by accelerator.skip_first_batches"
    ])  # fmt: skip
    got = go_on(job, stop=10, save=lambda step: step == 10)
    job.end()
    job = Run(tmp_path, **options)
    assert job.accelerator.load_state() == 10
    assert {**got, **job.train(save=lambda _: False)} == wanted
    job.end()
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("step_?/*")}


@on_ranks(1)
def test_checkpoints_of_accelerate_itself(tmp_path: Path) -> None:
    """They are loaded by a name too, and count among the numbers of the run."""
    project = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True}
    stock = Run("", project=project, attached=False)
    stock.counter.step = 7
    stock.accelerator.save_state()
    job = Run("", project=project, attached={"root": None})
    assert job.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0") == 0
    assert job.counter.step == 7
    job = Run("", project=project, attached={"root": None})
    assert job.accelerator.load_state() == 0 and job.counter.step == 7
    job.accelerator.save_state()
    job.end()
    assert Run("", project=project, attached={"root": None}).accelerator.load_state() == 1


@on_ranks(1)
def test_the_newest_checkpoint_of_accelerate(tmp_path: Path) -> None:
    """By its number, not by its text; without numbers by its time."""
    stock = Run(tmp_path, attached=False)
    for count, name in enumerate(("first", "last", "step_12", "step_8")):
        stock.counter.step = count
        stock.accelerator.save_state(tmp_path / name)
        os.utime(tmp_path / "first" / "random_states_0.pkl", (2e9, 2e9))
        job = Run(tmp_path)
        assert job.accelerator.load_state() == (None if count < 2 else 12)
        assert job.counter.step == (0 if count < 2 else 2)


@on_ranks(1)
def test_folders_whose_last_files_lack(tmp_path: Path) -> None:
    """A kill leaves no registered objects, on which accelerate fails, or no random numbers, which it does not say."""
    stock = Run(tmp_path, attached=False)
    for step in (4, 8):
        stock.counter.step = step
        stock.accelerator.save_state(tmp_path / f"step_{step}")
    (tmp_path / "step_8" / "custom_checkpoint_0.pkl").unlink()
    (tmp_path / "step_4" / "random_states_0.pkl").write_bytes(b"")
    job = Run(tmp_path)
    with collected_warnings() as said:
        assert job.accelerator.load_state() == 4 and job.counter.step == 4
    assert said[0].endswith("step_8 of accelerate is passed over: it lacks registered objects")
    assert any("step_4/random_states_0.pkl is not there or not whole" in line for line in said)
    (tmp_path / "step_4" / "custom_checkpoint_0.pkl").unlink()
    with pytest.raises(UsageError, match=r"has saved .*step_8 without registered objects, and .* has no step"):
        job.accelerator.load_state()


@on_ranks(1)
def test_a_job_is_switched_back_and_forth(tmp_path: Path) -> None:
    job = Run(tmp_path)
    job.accelerator.save_state(step=8)
    job.end()
    stock = Run(tmp_path, attached=False)
    stock.counter.step = 12
    stock.accelerator.save_state(tmp_path / "step_12")
    job = Run(tmp_path)
    assert job.accelerator.load_state(tmp_path / "step_00000008") == 8
    assert job.accelerator.load_state() == 12
    job.accelerator.save_state()
    job.end()
    again = Run(tmp_path)
    assert again.accelerator.load_state() == 13
    assert again.counter.step == 12


# --- what is saved ----------------------------------------------------------------------------------------------------


def several(folder: Path, seed: int) -> tuple[Any, list[nn.Module], list[Any], nn.Module]:
    """Return an accelerator with two models that have the same names, three optimizers, and a registered model."""
    from accelerate import Accelerator

    prepare_rank()
    accelerator = Accelerator(cpu=True)
    models = [model(seed), model(seed + 1)]
    third = nn.Linear(2, 2)
    optimizers = [
        torch.optim.AdamW(models[0][0].parameters(), lr=0.1 * seed),
        torch.optim.SGD(chain(models[0][3].parameters(), models[1].parameters()), lr=0.2 * seed, momentum=0.9),
    ]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]
    prepared = accelerator.prepare(*models, *optimizers, *schedules)
    accelerator.register_for_checkpointing(third, Counter())
    attach(accelerator, folder)
    for _ in range(seed):
        sum(m(torch.ones(2, 4, dtype=torch.float64)).sum() for m in models).backward()
        for part in prepared[2:]:
            part.step()
    return accelerator, models, [part.state_dict() for part in prepared[2:]], third


@on_ranks(1)
def test_several_of_each(tmp_path: Path) -> None:
    accelerator, models, wanted, third = several(tmp_path, 3)
    accelerator.save_state()
    accelerator.bytecheckpoint.wait()
    again, loaded, _, other = several(tmp_path, 1)
    assert again.load_state() == 0
    for one, two in zip([*models, third], [*loaded, other], strict=True):
        assert all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))
    found = [part.state_dict() for part in (*again._optimizers, *again._schedulers)]
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    less, _, _, _ = several(tmp_path, 1)
    less._custom_objects.pop()
    less._schedulers.pop()
    with pytest.raises(IncompatibleCheckpointError, match="2 schedulers, now 1; 2 registered objects, now 1"):
        less.load_state()


@on_ranks(1)
def test_random_numbers_that_are_missing(tmp_path: Path) -> None:
    """Accelerate itself continues without them, with a message at level INFO."""
    run(tmp_path, attached={"save_options": SaveOptions(exclude=["rng/*"])})
    with pytest.raises(CheckpointError, match="rng"):
        run(tmp_path)


# --- what is kept -----------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_the_best_step(tmp_path: Path) -> None:
    job = Run(tmp_path, attached={"keep": [Best("loss")], "save_options": SaveOptions(async_checkpoint=False)})
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 5.0)):
        job.accelerator.save_state(step=step, metrics={"loss": loss})
    job.end()
    assert steps_in(tmp_path) == [2, 4]


# --- the position -----------------------------------------------------------------------------------------------------


def positions(folder: Path, count: int, **options: Any) -> tuple[Run, Found]:
    """Return a run that has saved behind `count` batches of its second epoch, and what it did later."""
    job = Run(folder, **options)
    found = job.train(save=lambda step: step == 6 + count)
    job.end()
    return job, after(6 + count, found)


@on_ranks(1)
def test_a_program_that_skips_batches_itself(tmp_path: Path) -> None:
    """Skip batches as accelerate's examples do: the number is checked, and `skip_first_batches` alone works too."""
    _, wanted = positions(tmp_path, 2)
    job = Run(tmp_path)
    job.accelerator.load_state()
    with pytest.raises(UsageError, match=r"continues behind 2 batches of epoch 1, and skip_first_batches is to skip 3"):
        job.train(rest=3)
    assert job.train(rest=2, save=lambda _: False) == wanted
    fresh = Run(tmp_path / "other")
    whole = fresh.train(1, save=lambda _: False)
    fresh = Run(tmp_path / "other")
    rest = fresh.train(1, rest=4, save=lambda _: False)
    assert [ids for _, ids in rest.values()] == [whole[step][1] for step in (5, 6)]
    assert fresh.loader.iteration == 1


@on_ranks(1)
def test_a_copy_of_a_loader(tmp_path: Path) -> None:
    from accelerate import skip_first_batches

    job = Run(tmp_path)
    with pytest.raises(UsageError, match=r"use accelerator\.skip_first_batches in place of accelerate.skip_first"):
        next(iter(skip_first_batches(job.loader, 2)))


@on_ranks(1)
def test_a_loader_is_pickled(tmp_path: Path) -> None:
    """Pickle and copy a loader as one of accelerate itself, which stays as it is."""
    job = Run(tmp_path)
    copies = pickle.loads(pickle.dumps(job.loader)), copy.deepcopy(job.loader)
    next(iter(job.loader))
    assert [len(list(loader)) for loader in copies] == [6, 6]
    assert job.loader.bytecheckpoint_position.shared_state()["epoch"] == 0


@on_ranks(1)
def test_what_is_dropped_is_freed(tmp_path: Path) -> None:
    """Free loaders at once: workers of a loader that the garbage collector frees end five seconds late."""
    job = Run(tmp_path)
    job.train(1)
    job.end()
    gone = weakref.ref(job.accelerator), weakref.ref(job.loader)
    gc.disable()
    try:
        del job
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


@on_ranks(1)
def test_the_epoch_of_the_program(tmp_path: Path) -> None:
    _, wanted = positions(tmp_path, 2)
    job = Run(tmp_path)
    job.accelerator.load_state()
    with pytest.raises(UsageError, match=r"continues in epoch 1, and set_epoch\(0\) would lose its position"):
        job.loader.set_epoch(0)
    job.loader.set_epoch(1)
    assert job.train(save=lambda _: False) == wanted


@on_ranks(1)
def test_the_seed_of_the_data(tmp_path: Path) -> None:
    """The order is that of the checkpoint, also if the program seeds otherwise this time."""
    _, wanted = positions(tmp_path, 2)
    job = Run(tmp_path, seed=99)
    job.accelerator.load_state()
    assert job.train(save=lambda _: False) == wanted


@on_ranks(1)
def test_other_data(tmp_path: Path) -> None:
    run(tmp_path, stop=8)
    with pytest.raises(IncompatibleCheckpointError, match="began with 48 samples, and the data set has 40"):
        run(tmp_path, data=Numbers(40))


@on_ranks(1)
def test_another_batch_size(tmp_path: Path) -> None:
    """No sample twice, none left out; and a remark."""
    first = run(tmp_path, stop=8)
    with collected_warnings() as warnings:
        got = run(tmp_path, batch=4)
    assert any("loader_0: an optimizer step took 8 samples, and takes 4 now" in line for line in warnings)
    assert samples(after(6, first) | {-step: value for step, value in got.items()}) == list(range(48)) and len(got) == 8


@on_ranks(1)
def test_loops_that_end_early(tmp_path: Path) -> None:
    """A `break` in training keeps the position; one in an evaluation does not."""

    def make() -> tuple[Run, Any]:
        job = Run(tmp_path)
        return job, job.accelerator.prepare(DataLoader(Numbers(16), batch_size=2))

    job, evaluation = make()
    job.train(stop=4, save=lambda _: False)
    job.model.eval()
    for _ in islice(evaluation, 3):
        pass
    job.accelerator.save_state(step=4)
    job.end()
    again, evaluation = make()
    again.accelerator.load_state()
    assert len(list(evaluation)) == 8
    assert len(again.train(1, save=lambda _: False)) == 2


@on_ranks(1)
def test_an_evaluation_in_between(tmp_path: Path) -> None:
    """An evaluation between a load and the loop draws numbers, which are no part of the run."""

    def evaluate(job: Run, evaluation: Any) -> None:
        job.model.eval()
        for _ in evaluation:
            torch.rand(3)
        job.model.train()

    def make(folder: Path) -> tuple[Run, Any]:
        job = Run(folder)
        return job, job.accelerator.prepare(DataLoader(Numbers(16), batch_size=2, shuffle=True))

    job, evaluation = make(tmp_path / "whole")
    wanted = job.train(at=lambda step: evaluate(job, evaluation) if step == 4 else None, save=lambda _: False)
    job, evaluation = make(tmp_path / "run")
    first = job.train(at=lambda step: evaluate(job, evaluation) if step == 4 else None, stop=8)
    job.end()
    assert first == {step: value for step, value in wanted.items() if step <= 8}
    again, evaluation = make(tmp_path / "run")
    again.accelerator.load_state()
    assert evaluation.iteration == 1
    evaluate(again, evaluation)
    assert again.train(save=lambda _: False) == after(8, wanted)


@on_ranks(1)
def test_a_run_that_goes_back(tmp_path: Path) -> None:
    """In the same process, after an epoch."""
    job = Run(tmp_path)
    wanted = job.train()
    assert job.accelerator.load_state(tmp_path / "step_00000004") == 4
    assert job.train() == after(4, wanted)
    job.end()
    assert steps_in(tmp_path) == [4, 8, 12]


@on_ranks(1)
def test_a_load_inside_of_a_loop(tmp_path: Path) -> None:
    """Go back after a spike of the loss: the loop continues with the next data, with a warning."""
    run(tmp_path, stop=4)
    job = Run(tmp_path)
    job.accelerator.load_state(tmp_path / "step_00000004")
    with collected_warnings() as warnings:
        loaded = []

        def go_back(step: int) -> None:
            if step == 6 and not loaded:
                loaded.append(job.accelerator.load_state(tmp_path / "step_00000004"))

        found = job.train(at=go_back, save=lambda _: False)
    assert loaded == [4] and any("is being iterated over" in line for line in warnings)
    assert max(found) == 10


@on_ranks(1)
def test_a_stateful_stream_is_not_read_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"stateful": True, "data": StatefulStream, "dispatch": False}
    run(tmp_path, stop=4, **options)
    StatefulStream.read = 0
    assert len(run(tmp_path, epochs=1, **options)) == 2
    assert StatefulStream.read == 16


@on_ranks(1)
def test_saves_before_the_loop_goes_on(tmp_path: Path) -> None:
    """A second resume, of a step that was saved between a load and the loop."""
    _, wanted = positions(tmp_path, 2)
    for number in (9, 10):
        job = Run(tmp_path)
        job.accelerator.load_state()
        job.accelerator.save_state(step=number)
        job.end()
    job = Run(tmp_path)
    assert job.accelerator.load_state() == 10
    assert job.train(save=lambda _: False) == wanted


# --- the end of a job -------------------------------------------------------------------------------------------------


def save_and_leave(folder: Path) -> None:
    Run(folder).train(1, save=lambda step: step == 6)


@on_ranks(1)
def test_the_end_of_a_training(tmp_path: Path) -> None:
    job = Run(tmp_path)
    job.train(1, save=lambda step: step == 6)
    job.accelerator.end_training()
    assert steps_in(tmp_path) == [6]


def test_a_program_that_ends_with_its_last_save(worlds: Worlds, tmp_path: Path) -> None:
    """Without `end_training`."""
    world = worlds.fresh(1)
    world.run(save_and_leave, tmp_path)
    assert world.close() == [0]
    assert steps_in(tmp_path) == [6]


# --- what is refused --------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_an_accumulation_in_the_middle(tmp_path: Path) -> None:
    """Gradients are not saved: accelerate itself loses them without a word."""
    job = Run(tmp_path, accumulation=2)
    with job.accelerator.accumulate(job.model), pytest.raises(UsageError, match="in the middle of an accumulation"):
        job.accelerator.save_state()
    with job.accelerator.accumulate(job.model):
        job.accelerator.save_state()
    job.end()


@on_ranks(1)
def test_calls(tmp_path: Path) -> None:
    job = Run(tmp_path)
    with pytest.raises(UsageError, match="attached already"):
        attach(job.accelerator, tmp_path)
    with pytest.raises(UsageError, match="only DeepSpeed takes that"):
        job.accelerator.save_state(client_state=1)
    with pytest.raises(UsageError, match="pass load_options= to attach"):
        job.accelerator.load_state(strict=False)
    with pytest.raises(CheckpointNotFoundError, match="step_00000003"):
        job.accelerator.load_state(tmp_path / "step_00000003")
    with pytest.raises(CheckpointNotFoundError, match="elsewhere"):
        job.accelerator.load_state(tmp_path / "elsewhere")


@on_ranks(1)
def test_refusals_of_attach(tmp_path: Path) -> None:
    job = Run(tmp_path, attached=False)
    with pytest.raises(UsageError, match="attach needs a root="):
        attach(job.accelerator)
    batches = iter(job.loader)
    next(batches)
    with pytest.raises(UsageError, match="is being iterated over"):
        attach(job.accelerator, tmp_path)

    out_of_order = DataLoader(Numbers(), 8, num_workers=2, in_order=False)
    other = Run(tmp_path / "other")
    with pytest.raises(UsageError, match="in_order=False"):
        other.accelerator.prepare(out_of_order)

    class Other:
        pass

    with pytest.raises(UsageError, match=r"a Other of accelerate .* has no save_state"):
        attach(Other(), tmp_path)


@pytest.mark.parametrize("name", ["DEEPSPEED", "MEGATRON_LM", "XLA"])
@on_ranks(1)
def test_frameworks(tmp_path: Path, name: str) -> None:
    from accelerate.utils import DistributedType

    job = Run(tmp_path, attached=False)
    job.accelerator.state.__dict__["distributed_type"] = DistributedType[name]
    with pytest.raises(UsageError, match="an Accelerator is not supported with"):
        attach(job.accelerator, tmp_path)


@on_ranks(1)
def test_a_subclass_of_the_program(tmp_path: Path) -> None:
    """Its overrides run, and their calls of `super()` save and load with this package."""
    from accelerate import Accelerator

    called = []

    class Own(Accelerator):  # type: ignore[misc]
        def save_state(self, *args: Any, **kwargs: Any) -> Any:
            called.append("save")
            return super().save_state(*args, **kwargs)

        def load_state(self, *args: Any, **kwargs: Any) -> Any:
            called.append("load")
            return super().load_state(*args, **kwargs)

    job = Run(tmp_path, attached=False)
    job.accelerator.__class__ = Own
    attach(job.accelerator, tmp_path)
    job.accelerator.save_state(step=3)
    assert job.accelerator.load_state() == 3
    job.end()
    assert called == ["save", "load"] and isinstance(job.accelerator, Own)
