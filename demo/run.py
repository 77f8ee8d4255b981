"""The demo: train, kill a rank in the middle of a save, resume at other layouts, and compare with an undisturbed run.

    python demo/run.py            # about 4 minutes on 2 cores
    python demo/run.py --short    # a smaller model and fewer steps

What is shown, and what is asserted, is told in demo/README.md. The exit status is 0 only if every check holds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from figure import draw

T = TypeVar("T")

HERE = Path(__file__).resolve().parent

#: Largest difference of two losses (nats per byte) that is taken for rounding. All arithmetic is float32, and every
#: layout adds up in another order, so gradients differ in their last bits (about 1e-7 of their size) and training
#: spreads that out. Anything that a resume could get wrong moves the loss a hundred times further: see the README.
TOLERANCE = 2e-3


@dataclass(frozen=True)
class Scale:
    size: str
    save_every: int
    kill_at: int  # the step whose save is killed
    switch_at: int  # the step after which the last run takes over
    total: int


FULL = Scale("10M", save_every=10, kill_at=30, switch_at=40, total=60)
SHORT = Scale("1M", save_every=6, kill_at=18, switch_at=24, total=36)


class DemoError(Exception):
    """A check failed, or a run did not do what it was started for."""


@dataclass
class Run:
    """One start of the worker, and what it reported so far."""

    name: str
    layout: str
    ranks: int
    stop: int
    output: Path
    losses: dict[int, float] = field(default_factory=dict)
    stalls: dict[int, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    resumed_from: int = 0

    def start(self, scale: Scale, *, save: bool = True) -> subprocess.Popen[bytes]:
        threads = max(1, len(os.sched_getaffinity(0)) // self.ranks)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        command += [str(HERE / "train.py"), f"--layout={self.layout}", f"--size={scale.size}", f"--stop={self.stop}"]
        command += [f"--total={scale.total}", f"--save-every={scale.save_every if save else 0}"]
        command += [f"--checkpoints={self.output / 'checkpoints'}", f"--record={self.output / self.name}.jsonl"]
        with (self.output / f"{self.name}.log").open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def read(self) -> None:
        """Take in what the worker has recorded."""
        events = [json.loads(line) for line in (self.output / f"{self.name}.jsonl").read_text().splitlines()]
        steps = [e for e in events if e["event"] == "step"]
        self.losses = {e["step"]: e["loss"] for e in steps}
        self.stalls = {e["step"]: e["stall"] for e in events if e["event"] == "save"}
        self.resumed_from = next((e["step"] for e in events if e["event"] == "load"), 0)
        self.step_seconds = statistics.median(b["time"] - a["time"] for a, b in itertools.pairwise(steps))

    def complete(self, scale: Scale, *, save: bool = True) -> None:
        """Run to the end."""
        began = time.monotonic()
        job = self.start(scale, save=save)
        with ended(job):
            job.wait(timeout=900)
        if job.returncode:
            raise DemoError(f"the run '{self.name}' failed with exit status {job.returncode}:\n{self.last_words()}")
        self.read()
        check(max(self.losses) == self.stop, f"the run '{self.name}' ended at step {max(self.losses)}")
        print(f"    {time.monotonic() - began:.0f} s, {self.step_seconds:.2f} s per step")

    def last_words(self) -> str:
        return "\n".join((self.output / f"{self.name}.log").read_text(errors="replace").splitlines()[-30:])


class ended:
    """Context that leaves no job behind, whatever happens inside."""

    def __init__(self, job: subprocess.Popen[bytes]) -> None:
        self.job = job

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self.job.poll() is None:
            self.job.terminate()  # torchrun passes it on to its ranks
            self.job.wait(timeout=60)


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DemoError(otherwise)


def process_of_rank(job: subprocess.Popen[bytes], rank: int) -> int:
    """Process id of one rank: the child of torchrun with that RANK in its environment."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == job.pid and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise DemoError(f"found no process of rank {rank}")


def wait_for(job: subprocess.Popen[bytes], run: Run, what: str, condition: Callable[[], T]) -> T:
    """Poll `condition` until it holds something, as long as the job lives."""
    while not (found := condition()):
        if job.poll() is not None:
            raise DemoError(f"the run '{run.name}' ended before {what}:\n{run.last_words()}")
        time.sleep(0.001)
    return found


def unfinished(folder: Path) -> list[Path]:
    """The storage files in `folder` without a header. It is written last, so these are still being written."""
    found = []
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if not any(file.read(8)):
                found.append(path)
    return found


def kill_during_save(run: Run, scale: Scale, rank: int) -> None:
    """Start `run`, and kill -9 one rank while the checkpoint of step `scale.kill_at` is being written."""
    target = run.output / "checkpoints" / f"step_{scale.kill_at:08d}"
    catalog = target / "metadata.parquet"
    job = run.start(scale)
    with ended(job):
        wait_for(job, run, "its first step", (run.output / f"{run.name}.jsonl").exists)
        victim = process_of_rank(job, rank)
        partial = wait_for(
            job, run, f"the save of step {scale.kill_at} was under way", lambda: unfinished(target / "model")
        )
        os.kill(victim, signal.SIGKILL)
        committed = catalog.exists()
        job.wait(timeout=180)
    run.read()
    left = sum(f.is_file() for f in target.rglob("*"))
    print(
        f"    kill -9 of rank {rank} while step {scale.kill_at} was saved. Without a header at that moment, so unfinished:"
    )
    for path in partial:
        print(f"      {path.relative_to(target.parent)}")
    print(f"    no metadata.parquet, then or now; {left} files are left of that save")
    print(f"    the job died with exit status {job.returncode}; its last step was {max(run.losses)}")
    check(not committed and not catalog.exists(), f"the save of step {scale.kill_at} was committed before the kill")
    check(job.returncode != 0, "the job outlived its killed rank")


def compare(before: Run, run: Run, reference: Run) -> None:
    """Print the losses around the resume of `run`, and check all of them against the reference."""
    start = run.resumed_from
    print(f"    {'step':>6}  {'reference':>10}  {'this job':>10}  {'difference':>10}")
    for step in range(start - 1, start + 4):
        loss = (before if step <= start else run).losses[step]
        difference = loss - reference.losses[step]
        print(f"    {step:>6}  {reference.losses[step]:>10.5f}  {loss:>10.5f}  {difference:>+10.1e}", end="")
        print(f"   <- resumed, {run.ranks} rank(s), {run.layout}" if step == start + 1 else "")
    worst = max(abs(loss - reference.losses[step]) for step, loss in run.losses.items())
    print(f"    largest difference over steps {min(run.losses)} to {max(run.losses)}: {worst:.1e}")
    check(worst <= TOLERANCE, f"'{run.name}' is {worst:.1e} off the reference run; {TOLERANCE:.0e} is allowed")


def demo(scale: Scale, output: Path) -> None:
    reference = Run("reference", "plain", 1, scale.total, output)
    first = Run("first", "fsdp2", 2, scale.switch_at, output)
    second = Run("second", "tp2_fsdp2", 4, scale.switch_at, output)
    third = Run("third", "plain", 1, scale.total, output)

    print(f"[1/4] reference: {scale.total} steps on 1 rank, nothing saved, nothing killed")
    reference.complete(scale, save=False)

    print(f"[2/4] FSDP2 on 2 ranks, an asynchronous save every {scale.save_every} steps")
    kill_during_save(first, scale, rank=1)

    print("[3/4] resume from the newest committed step, on 4 ranks: TP 2 x FSDP 2")
    second.complete(scale)
    newest = scale.kill_at - scale.save_every
    check(
        second.resumed_from == newest, f"resumed from step {second.resumed_from}, the newest committed one is {newest}"
    )
    compare(first, second, reference)

    print("[4/4] resume on 1 rank, no parallelism")
    third.complete(scale)
    check(third.resumed_from == scale.switch_at, f"resumed from step {third.resumed_from}, not {scale.switch_at}")
    compare(second, third, reference)

    print("stall per save: how long the training loop waited")
    for run in (first, second, third):
        for step, stall in run.stalls.items():
            share = stall / run.step_seconds
            print(
                f"    step {step:>3}  {run.layout:<9}  {run.ranks} rank(s)  {1e3 * stall:>6.0f} ms = {share:.2f} steps"
            )

    losses = list(reference.losses.values())
    check(losses[-1] < 0.75 * losses[0], f"the reference run did not learn: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    draw(reference, [first, second, third], scale.kill_at, output / "losses.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a smaller model, fewer steps")
    parser.add_argument("--output", type=Path, default=HERE.parent / "demo-output", help="replaced by every run")
    args = parser.parse_args()
    began = time.monotonic()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    try:
        demo(SHORT if args.short else FULL, args.output.resolve())
    except (DemoError, subprocess.TimeoutExpired) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    print(f"all checks hold. {time.monotonic() - began:.0f} s. Curves: {args.output / 'losses.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
