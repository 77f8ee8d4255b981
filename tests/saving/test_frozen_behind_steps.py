"""Frozen parameters are compared with earlier files behind the next step of an optimizer, which does not wait for that."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CheckpointTimeoutError, StateChangedError
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.saving.adoption import Adoption
from bytecheckpoint.tuning import tuned
from tests.support.frozen import Training, check_alone, frozen_file, load_into
from tests.support.programs import forked
from tests.support.settings import using
from tests.support.variants import crossed

BACKGROUND: dict[str, Any] = {"async_checkpoint": True, "staging": "background", "incremental": True}
FROZEN = 1_000_000


@pytest.fixture(autouse=True)
def small_looks() -> Iterator[None]:
    with tuned(frozen_look_bytes=100_000):
        yield


class Gate:
    """Stops the comparison behind the step until the test opens the gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        compare = Adoption.compare_rest

        def late(this: Adoption) -> Any:
            self.reached.set()
            assert self.open.wait(30)
            return compare(this)

        monkeypatch.setattr(Adoption, "compare_rest", late)

    def open_soon(self) -> None:
        threading.Timer(0.2, self.open.set).start()


def start(training: Training, path: Path, **options: Any) -> Any:
    training.step()
    return bytecheckpoint.save(path, training.states(), **BACKGROUND, **options)


def in_world(function: Callable[[Training], Any]) -> Any:
    return ThreadWorld(1).run(lambda _: function(Training()), timeout=120)[0]


def gradients(training: Training) -> None:
    for parameter in training.model.adapter.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)


def test_a_step_does_not_wait_for_frozen_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(training: Training) -> None:
        training.save(tmp_path / "step_1")
        gate = Gate(monkeypatch)
        handle = start(training, tmp_path / "step_2")
        before = training.model.adapter.weight.detach().clone()
        for _ in range(3):
            training.step()
        assert gate.reached.wait(60) and not handle.staged.done()
        gate.open.set()
        assert handle.result(60).bytes_adopted > FROZEN
        assert torch.equal(load_into(tmp_path / "step_2").model.adapter.weight, before)

    in_world(train)
    check_alone(tmp_path / "step_2", 2)


def fence(_: Training) -> None:
    bytecheckpoint.fence()


def load(training: Training) -> None:
    bytecheckpoint.load(training.path, training.states(), prepare_save=False)  # type: ignore[attr-defined]


def release(_: Training) -> None:
    bytecheckpoint.release_memory()


def step_of_a_parameter_that_is_trained_now(training: Training) -> None:
    weight = training.model.base[0].weight.requires_grad_(True)
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()


def step_with_an_old_gradient(training: Training) -> None:
    weight = training.model.base[0].weight
    optimizer = torch.optim.SGD(training.model.parameters(), lr=1.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def step_with_a_closure(training: Training) -> None:
    weight = training.model.base[0].weight

    def closure() -> float:
        weight.requires_grad_(True).grad = torch.ones_like(weight)
        return 0.0

    torch.optim.SGD([weight], lr=1.0).step(closure)


def step_of_a_view(training: Training) -> None:
    view = torch.nn.Parameter(training.model.base[0].weight.detach()[3])
    view.grad = torch.ones_like(view)
    torch.optim.SGD([view], lr=1.0).step()


CHANGES = [
    fence, load, release, step_of_a_parameter_that_is_trained_now, step_with_an_old_gradient, step_with_a_closure,
    step_of_a_view,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_all_else_waits(change: Callable[[Training], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(training: Training) -> None:
        training.save(tmp_path / "step_1")
        training.path = tmp_path / "step_1"  # type: ignore[attr-defined]
        gate = Gate(monkeypatch)
        handle = start(training, tmp_path / "step_2")
        gradients(training)
        training.optimizer.step()
        assert not handle.staged.done()
        gate.open_soon()
        change(training)
        assert handle.staged.done()
        assert handle.result(60).bytes_adopted > FROZEN

    in_world(train)
    check_alone(tmp_path / "step_2", 2)


def in_place(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight[3, 3] += 1


def by_data(weight: torch.nn.Parameter) -> None:
    weight.data.add_(1)


def by_numpy(weight: torch.nn.Parameter) -> None:
    weight.detach().numpy()[250:] = 7


@pytest.mark.parametrize(("write", "changed"), crossed([in_place, by_data, by_numpy], [False, True]))
def test_a_change_behind_the_step_is_named(
    write: Callable[[torch.nn.Parameter], None], changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it makes the bytes those of the file again, or the file is written anew."""

    def train(training: Training) -> None:
        weight = training.model.base[0].weight
        training.save(tmp_path / "step_1")
        if changed:
            weight.data[201, 7] += 1
        gate = Gate(monkeypatch)
        handle = start(training, tmp_path / "step_2")
        training.step()
        assert gate.reached.wait(30)
        write(weight)
        gate.open.set()
        with pytest.raises(StateChangedError, match=r"model/base\.0\.weight changed"):
            handle.result(60)
        assert not list((tmp_path / "step_2").glob("*/*"))
        assert frozen_file(tmp_path / "step_1").stat().st_nlink == 1
        # The next save is right.
        assert start(training, tmp_path / "step_3").result(60).bytes_adopted == 0
        assert torch.equal(load_into(tmp_path / "step_3").model.base[0].weight, weight)

    in_world(train)


@pytest.mark.parametrize("path", ["step_1", "step_2"])
@pytest.mark.parametrize(
    "options", [{}, {"staging_bytes": 2 << 20, "chunk_bytes": 1 << 20}], ids=["pool", "small pool"]
)
def test_a_file_whose_rest_differs_is_written(
    path: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(_: Any) -> None:
        training = Training(width=1500)
        training.model.add_module("free", torch.nn.Linear(1000, 1000))
        training.save(tmp_path / "step_1")
        weight = training.model.base[0].weight
        weight.data[733, 7] += 1
        gate = Gate(monkeypatch)
        handle = start(training, tmp_path / path)
        training.step()
        assert gate.reached.wait(30)
        gate.open.set()
        report = handle.result(60)
        assert report.bytes_adopted == 0 and report.bytes_written > 9_000_000
        found = Training(seed=1, width=1500)
        found.model.add_module("free", torch.nn.Linear(1000, 1000))
        bytecheckpoint.load(tmp_path / path, found.states(), prepare_save=False)
        assert torch.equal(found.model.base[0].weight, weight)
        assert torch.equal(found.model.free.weight, training.model.free.weight)
        # That file is what the next save uses again.
        assert start(training, tmp_path / "step_3").result(60).bytes_adopted > 9_000_000
        assert len(list((tmp_path / path).glob("model/rank-00000-p001.*"))) == 1

    with using(**options):
        ThreadWorld(1).run(train, timeout=120)


def test_frozen_parameters_that_change_behind_each_step(tmp_path: Path) -> None:
    """A teacher is frozen for autograd, and follows the weights behind each step: it is copied in front of the step."""

    def train(training: Training) -> None:
        for number in range(5):
            handle = start(training, tmp_path / str(number))
            before = [tensor.detach().clone() for tensor in training.model.parameters()]
            training.step()
            with torch.no_grad():
                for parameter in training.model.base.parameters():
                    parameter.mul_(0.9).add_(0.1)
            handle.result(60)
            found = load_into(tmp_path / str(number)).model.parameters()
            assert all(map(torch.equal, found, before)), number

    in_world(train)


def test_saves_in_flight(tmp_path: Path) -> None:
    def train(training: Training) -> None:
        handles = [start(training, tmp_path / f"step_{step}") for step in (1, 2, 3, 4)]
        training.step()
        assert [handle.result(60).bytes_adopted > FROZEN for handle in handles] == [False, True, True, True]

    in_world(train)
    for step in (1, 2, 3, 4):
        check_alone(tmp_path / f"step_{step}", step)


def test_a_comparison_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(training: Training) -> None:
        training.save(tmp_path / "step_1")
        gate = Gate(monkeypatch)
        handle = start(training, tmp_path / "step_2", timeout=1.0)
        training.step()
        bytecheckpoint.fence()
        gate.open.set()
        with pytest.raises(CheckpointTimeoutError, match="fence ran"):
            handle.result(60)
        assert not list((tmp_path / "step_2").glob("*/*"))

    in_world(train)


PROGRAM = """
import sys
from pathlib import Path
from bytecheckpoint.tuning import tuned
from tests.saving.test_frozen_behind_steps import Training, start
with tuned(frozen_look_bytes=100_000):
    training = Training()
    training.save(Path(sys.argv[1]) / "step_1")
    start(training, Path(sys.argv[1]) / "step_2")
    training.step()
"""


def test_a_program_that_ends(tmp_path: Path) -> None:
    subprocess.run(forked("-c", PROGRAM, tmp_path), check=True, timeout=120)
    check_alone(tmp_path / "step_2", 2)


def test_guarded_accesses_wait_for_frozen_parameters_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(training: Training) -> None:
        training.save(tmp_path / "step_1")
        gate = Gate(monkeypatch)
        handle = start(training, tmp_path / "step_2")
        training.step()
        training.model.adapter.weight.data.add_(1)
        assert not handle.staged.done()
        gate.open_soon()
        training.model.base[0].weight.data.add_(1)
        assert handle.staged.done()
        handle.result(60)

    with using(staging_guard=True):
        in_world(train)
    check_alone(tmp_path / "step_2", 2)
