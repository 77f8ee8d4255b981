"""What tells that a job is to stop, and what else signals mean to the process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bytecheckpoint import CheckpointManager
from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager import Preemption, SaveOptions
from bytecheckpoint.manager.boundary import SaveDue
from bytecheckpoint.manager.preemption import PreemptionWatch
from tests.support.processes import ROOT, environment, python, wait_until
from tests.support.runs import steps_in

CLUSTER_JOB = ROOT / "tests" / "support" / "cluster_job.py"


def manager_of(root: Path, signals: tuple[int, ...] = (signal.SIGUSR1,), **options: Any) -> CheckpointManager:
    return CheckpointManager(root, {"model": {"w": torch.zeros(4)}}, preemption=Preemption(signals), **options)


def train(manager: CheckpointManager, first: int = 1) -> int:
    """Take steps until the job is to stop; return the last one."""
    for step in range(first, first + 2000):
        manager.maybe_save(step)
        if manager.preempted:
            break
        time.sleep(0.005)
    return step


def test_ctrl_c_ends_no_training_in_the_middle_of_a_step(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest ignore it
    try:
        with manager_of(tmp_path, (signal.SIGINT,)) as manager:
            os.kill(os.getpid(), signal.SIGINT)
            step = train(manager)
            assert manager.preempted and [info.step for info in manager.steps()] == [step]
            signal.raise_signal(signal.SIGINT)  # the same notice
            with pytest.raises(KeyboardInterrupt):  # the third one
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


class _Usual(Exception):
    """The usual effect of a signal."""


@pytest.mark.parametrize("late", [False, True])
def test_launchers_pass_on_a_signal_that_ranks_have_already(late: bool) -> None:
    """The second one is the same notice within the grace period; a third one, or one after that, has its usual effect."""
    notices: list[float] = []
    heard: list[int] = []

    def usual(number: int, _: Any) -> None:
        heard.append(number)
        if len(heard) > 1:
            raise _Usual

    before = signal.signal(signal.SIGUSR1, usual)
    try:
        grace = 0.2 if late else 30.0
        with PreemptionWatch(Preemption((signal.SIGUSR1,), grace=grace), lambda: notices.append(0)) as watch:
            signal.raise_signal(signal.SIGUSR1)
            deadline = watch.deadline()
            if late:
                time.sleep(2 * grace)
            else:
                signal.raise_signal(signal.SIGUSR1)
            assert len(heard) == 1 and watch.deadline() == deadline
            with pytest.raises(_Usual):
                signal.raise_signal(signal.SIGUSR1)
        assert len(notices) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_sigterm_to_every_process_of_a_torchrun_job(tmp_path: Path) -> None:
    """As Slurm and Kubernetes send it: the ranks get it from torchrun once more."""
    run, log = tmp_path / "run", tmp_path / "run.log"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, CLUSTER_JOB]
    job: subprocess.Popen[Any] = subprocess.Popen(
        python(*launch, run, 100_000, "--pace", 0.2, "--preemption"), env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert wait_until(lambda: bool(steps_in(run)), 120)
        processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children()]
        for process in processes:
            process.terminate()
        job.wait(60)
    finally:
        if job.poll() is None:
            for process in psutil.Process(job.pid).children(recursive=True):
                process.kill()
            job.kill()
            job.wait()
    ends = sorted(line for line in log.read_text().splitlines() if "ends at" in line)
    assert ends == [f"rank {rank} of 2 ends at {steps_in(run)[-1]}" for rank in range(2)]


def test_a_forked_child_ends_when_it_is_told_to(tmp_path: Path) -> None:
    with manager_of(tmp_path, (signal.SIGTERM,)) as manager:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()

        def live() -> None:
            there.send("alive")  # Python forgets a signal that comes before it has dealt with the fork
            time.sleep(60)

        child = context.Process(target=live)
        child.start()
        assert here.recv() == "alive"
        child.terminate()
        child.join(30)
        assert child.exitcode == -signal.SIGTERM
        manager.maybe_save(1)
        assert not manager.preempted


def test_managers_that_end_in_the_order_of_their_beginning(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        first, second = manager_of(tmp_path / "1"), manager_of(tmp_path / "2")
        first.close()
        second.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert not first.preempted
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_manager_that_cannot_be_made_leaves_no_thread(tmp_path: Path) -> None:
    def make() -> None:
        with pytest.raises(UsageError, match="main thread"):
            manager_of(tmp_path)

    before = {*threading.enumerate()}
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    left = [one for one in {*threading.enumerate()} - before if one.name.startswith("bytecheckpoint-b")]
    for one in left:
        one.join(30)
        assert not one.is_alive()


def test_a_notice_between_a_restore_and_the_next_step(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(10).result(60)
        manager.maybe_save(1000)
        manager.restore(10)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)  # the ranks agree
        assert train(manager, 11) < 1000


def test_the_last_save_may_fail_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(1, 2001):
        (tmp_path / f"step_{step:08d}").write_text("in the way")
    with manager_of(tmp_path, save_options=SaveOptions(on_error="warn")) as manager:
        os.kill(os.getpid(), signal.SIGUSR1)
        step = train(manager)
    assert manager.preempted and f"the save of step {step} failed" in caplog.text


def test_a_file_is_noticed_once_each_time_that_it_appears(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notices: list[float] = []
    file = tmp_path / "stop"
    caplog.clear()
    with PreemptionWatch(Preemption((), file=file), lambda: notices.append(time.monotonic())):
        for count in (1, 2):
            file.touch()
            assert wait_until(lambda count=count: len(notices) == count, 20)
            time.sleep(2.2)  # the next looks notice nothing new
            assert len(notices) == count
            file.unlink()
            time.sleep(1.2)
    assert caplog.text.count(f"{file} exists, so the job is to stop: remove it, or each later job stops too") == 2


def test_a_function_that_fails_is_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([ValueError("no answer"), SystemExit("nor now"), True])

    def check() -> bool:
        if isinstance(answer := next(answers, False), BaseException):
            raise answer
        return bool(answer)

    noticed = threading.Event()
    with PreemptionWatch(Preemption((), check=check), noticed.set):
        assert noticed.wait(20)
    assert "no answer" in caplog.text and "nor now" in caplog.text


def test_a_function_that_hangs_keeps_no_save_back(tmp_path: Path) -> None:
    end, called = threading.Event(), threading.Event()

    def hang() -> bool:
        called.set()
        return end.wait(30)

    with CheckpointManager(
        tmp_path, {"model": {"w": torch.zeros(4)}}, preemption=Preemption((), check=hang)
    ) as manager:
        assert called.wait(20)
        manager.maybe_save(1)
        manager._boundaries.request(SaveDue())
        assert wait_until(lambda: manager.maybe_save(manager.step + 1) is not None, 20)
        end.set()
