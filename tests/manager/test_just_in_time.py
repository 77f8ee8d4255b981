"""Just-in-time saves: the ranks that are left save the step before the loss, and the run goes on from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import bytecheckpoint
from bytecheckpoint import CheckpointManager
from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager import LatestLink, SaveOptions
from bytecheckpoint.manager.run_folder import RunFolder
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import verify
from tests.support.lost_rank_job import EVERY, LEFT, train
from tests.support.runs import steps_in
from tests.support.worlds import RankError, Worlds

STOP = 12
SYNCHRONOUS = SaveOptions(async_checkpoint=False, on_commit=LatestLink())


def lose(
    worlds: Worlds,
    folder: Path,
    size: int,
    victims: tuple[int, ...],
    step: int,
    at: str = "forward",
    stop: int = STOP,
    **options: object,
) -> tuple[dict[int, float], str]:
    """Train on ranks of which some die in a step; return the losses until then, and what was logged."""
    world = worlds.fresh(size)
    try:
        world.start(
            train, str(folder / "run"), stop, victims=victims, at=(at, step), log=str(folder / "log"),
            just_in_time=True, **options,
        )  # fmt: skip
        for process in world.processes:
            process.join(60)
        codes = [process.exitcode for process in world.processes]
        outcomes = world.outcomes(1, grace=1)
    finally:
        world.kill()
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("log.?")))
    assert codes == [-9 if rank in victims else LEFT for rank in range(size)], f"{codes}\n{logs}\n{outcomes}"
    left = [json.loads(path.read_text()) for path in folder.glob("log.*.json")]
    assert len(left) == size - len(victims) and all(losses == left[0] for losses in left)
    return {int(number): loss for number, loss in left[0].items()}, logs


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "size", "victims", "step", "left"),
    [
        ("ddp", 4, (2,), 8, 3),
        ("hsdp", 4, (1,), 8, 3),
        # These wait for ranks of which nobody knows whether they live.
        pytest.param("ddp", 2, (0,), 8, 1, marks=pytest.mark.slow),
        pytest.param("ddp", 3, (0, 2), 3, 1, marks=pytest.mark.slow),  # before the first save
    ],
)
def test_the_step_before_is_saved(
    tmp_path: Path, worlds: Worlds, kind: str, size: int, victims: tuple[int, ...], step: int, left: int
) -> None:
    wanted, _ = train(str(tmp_path / "reference"), STOP)
    before, _ = lose(worlds, tmp_path, size, victims, step, kind=kind, save_options=SYNCHRONOUS)
    assert before == pytest.approx({number: wanted[number] for number in range(1, step)}, rel=1e-9)
    root = tmp_path / "run"
    assert steps_in(root) == [*range(EVERY, step, EVERY), step - 1]
    assert verify(resolve(root / f"step_{step - 1:08d}")).ok
    assert os.readlink(root / "latest") == f"step_{step - 1:08d}"
    for losses, drawn in worlds.run(left, train, str(root), STOP, kind=kind):
        assert losses == pytest.approx({number: wanted[number] for number in range(step, STOP + 1)}, rel=1e-9)
        assert drawn == STOP


@pytest.mark.timeout(300)
def test_what_nobody_holds_any_more(tmp_path: Path, worlds: Worlds) -> None:
    """Both replicas of one shard are lost: the save fails by name, and the committed step stands."""
    _, logs = lose(worlds, tmp_path, 4, (1, 3), 8, kind="hsdp", save_options=SYNCHRONOUS)
    assert logs.count("no step was saved just in time") == 2 and "model" in logs, logs
    assert steps_in(tmp_path / "run") == [EVERY]
    assert [losses for losses, _ in worlds.run(2, train, str(tmp_path / "run"), STOP, kind="hsdp")]


@pytest.mark.timeout(300)
def test_a_rank_lost_between_its_optimizer_and_the_boundary(tmp_path: Path, worlds: Worlds) -> None:
    """The others reach the boundary, which nobody but the lost rank has missed, and are in the next step."""
    wanted, _ = train(str(tmp_path / "reference"), STOP)
    lose(worlds, tmp_path, 3, (1,), 8, "boundary", save_options=SYNCHRONOUS)
    assert steps_in(tmp_path / "run") == [EVERY, 8]
    for losses, _ in worlds.run(2, train, str(tmp_path / "run"), STOP):
        assert losses == pytest.approx({number: wanted[number] for number in range(9, STOP + 1)}, rel=1e-9)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["top", "end"])
def test_a_moving_average(tmp_path: Path, worlds: Worlds, where: str) -> None:
    """At the top of a step it is another one than that of the boundary, and the save would be torn."""
    _, logs = lose(worlds, tmp_path, 2, (1,), 8, save_options=SYNCHRONOUS, average=where)
    assert steps_in(tmp_path / "run") == ([EVERY] if where == "top" else [EVERY, 7])
    assert logs.count("average/embed.weight") == (3 if where == "top" else 0), (
        logs
    )  # each rank early, and the one that is left
    for _, drawn in worlds.run(1, train, str(tmp_path / "run"), STOP, average=where):
        assert drawn == STOP


@pytest.mark.timeout(300)
def test_a_full_storage(tmp_path: Path, worlds: Worlds) -> None:
    """The files of retired steps go first."""
    lose(worlds, tmp_path, 2, (1,), 14, save_options=SYNCHRONOUS, stop=20, keep=1, full=True)
    assert steps_in(tmp_path / "run") == [10, 13]
    assert not (tmp_path / "run" / "step_00000005").exists()


@pytest.mark.timeout(300)
def test_a_save_in_flight(tmp_path: Path, worlds: Worlds) -> None:
    """It ends or it fails; the step before the loss is saved all the same."""
    lose(worlds, tmp_path, 3, (0,), EVERY + 1, keep=1)
    assert EVERY in steps_in(tmp_path / "run")
    assert verify(resolve(tmp_path / "run" / f"step_{EVERY:08d}")).ok


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ({"optimizer": {"lr": 0.1}}, "only optimizers of torch"),
        ({"dataloader": StatefulDataLoader([1, 2])}, "cannot feed again"),
        ({"data": StatefulDataLoader([1, 2])}, "cannot feed again"),
        ({"dataloader": {"position": 3}}, "cannot feed again"),
    ],
)
def test_states_of_which_no_boundary_is_known(tmp_path: Path, states: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        CheckpointManager(tmp_path, states, just_in_time=True)


def test_what_a_forward_pass_has_changed(tmp_path: Path) -> None:
    """Buffers changed in place and replaced, and plain values, as the saves of one rank that is left find them."""
    norm = torch.nn.BatchNorm1d(3)
    states = {"model": norm, "rng": bytecheckpoint.rng_state(), "progress": {"seen": [1]}}
    with CheckpointManager(tmp_path, states, just_in_time=True) as manager:
        noted = manager._just_in_time
        assert noted is not None
        for _ in range(2):
            manager.maybe_save(manager.step + 1)
            before = {name: value.clone() for name, value in norm.state_dict().items()}
            draws = torch.get_rng_state()
            norm(torch.randn(4, 3))
            norm.running_mean = norm.running_mean * 2  # another tensor
            states["progress"]["seen"].append(2)
            noted._boundary.restore()
            assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
            assert torch.equal(torch.get_rng_state(), draws) and states["progress"] == {"seen": [1]}


def move(model: torch.nn.Module, optimizer: torch.optim.Optimizer, how: str) -> None:
    """Change parameters or the optimizer's state outside of a step."""
    weight = model.weight
    moments = optimizer.state[weight]
    with torch.no_grad():
        if how == "operation":
            weight.mul_(2)
        elif how == "data":
            weight.data.mul_(2)
        elif how == "numpy":
            weight.numpy()[:] = 7
        elif how == "exchanged":
            weight.data = weight.data.clone()
        elif how == "replaced":
            model.weight = torch.nn.Parameter(weight.clone())
        elif how == "moment":
            moments["exp_avg"].zero_()
        elif how == "moments":
            optimizer.state.clear()


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("nothing", []),
        *((how, ["model/weight"]) for how in ("operation", "data", "numpy", "exchanged", "replaced")),
        ("moment", ["optimizer/state/0/exp_avg"]),
        ("moments", [f"optimizer/state/{n}/{slot}" for n in range(2) for slot in ("exp_avg", "exp_avg_sq", "step")]),
    ],
)
def test_what_has_changed_since_a_boundary(
    tmp_path: Path, how: str, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, every=100, just_in_time=True) as manager:
        noted = manager._just_in_time
        assert noted is not None
        for step in (1, 2, 3):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            assert noted._boundary.changed() == []
            optimizer.step()
            manager.maybe_save(step)
        model(torch.randn(4, 3)).sum().backward()
        assert not caplog.records
        move(model, optimizer, how)
        assert noted._boundary.changed() == names
        optimizer.param_groups[0]["lr"] = 5.0
        noted._boundary.restore()
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_program_that_changes_its_state_between_steps_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, every=100, just_in_time=True) as manager:
        for step in (1, 2, 3):
            model.weight.data.clamp_(-0.01, 0.01)
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            manager.maybe_save(step)
    (line,) = caplog.messages
    assert line.startswith("model/weight changed between maybe_save and the step of an optimizer")


class _Counted(torch.nn.Linear):
    """A module whose forward pass changes extra state."""

    passes = 0

    def get_extra_state(self) -> Any:
        return {"passes": self.passes}

    def set_extra_state(self, state: Any) -> None:
        self.passes = state["passes"]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(values)


def test_extra_state_of_modules(tmp_path: Path) -> None:
    model = _Counted(3, 2)
    with CheckpointManager(tmp_path, {"model": model}, every=100, just_in_time=True) as manager:
        model(torch.randn(4, 3))
        manager.maybe_save(1)
        model(torch.randn(4, 3))
        assert manager._just_in_time is not None and model.passes == 2
        manager._just_in_time._boundary.restore()
        assert model.passes == 1


def fail_on_all(root: str, step: int, *, own: str = "") -> None:
    """Train, and raise an exception of the program in the forward pass of a step, perhaps behind a change of weights."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    options = SaveOptions(on_commit=LatestLink())
    states, facts = {"model": model, "optimizer": optimizer}, dict[str, int]()  # facts that change in each step
    with CheckpointManager(root, states, every=4, just_in_time=True, save_options=options) as manager:
        for number in range(1, 12):
            loss = model(torch.ones(3, 4) * number).sum()
            facts["number"] = number
            if number == step:
                if own == "changed":
                    model[0].weight.data.mul_(2)
                raise KeyError("a bad document") if own != "ours" else UsageError("our own")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.maybe_save(number, facts, facts)
            torch.save(model.state_dict(), f"{root}-{number}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_exception_of_the_program_on_all_ranks(tmp_path: Path, worlds: Worlds, ranks: int) -> None:
    """The last boundary is saved: without what the forward pass has changed since. A program that changes its weights in
    between, and a failure of this package, save nothing.
    """
    for own, error, steps in (
        ("", "a bad document", [4, 6]),
        ("changed", "a bad document", [4]),
        ("ours", "our own", [4]),
    ):
        root = str(tmp_path / f"run{own}")
        with pytest.raises(RankError, match=error):
            worlds.run(ranks, fail_on_all, root, 7, own=own)
        assert steps_in(Path(root)) == steps, own
        saved = RunFolder(root).steps()[-1]
        assert saved.metrics == saved.metadata == {"number": steps[-1]}
        assert os.readlink(f"{root}/latest") == f"step_{steps[-1]:08d}"
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    bytecheckpoint.load(tmp_path / "run/step_00000006", {"model": model})
    wanted = torch.load(tmp_path / "run-6")
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
