"""The demo: train, kill a rank during a save, resume at other layouts, and compare with an uninterrupted run.

    python demo/run.py            # some 300 core-seconds: about 3 minutes on 2 idle cores
    python demo/run.py --short    # a smaller model and fewer steps

demo/README.md explains what the demo shows and checks. The exit status is 0 only if every check holds.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

HERE = Path(__file__).resolve().parent

#: Largest difference of two losses (nats per byte) that counts as rounding. All arithmetic is float32, and every layout
#: adds in another order, so gradients differ by about 1e-7 of their size; training amplifies that to about 1e-4 within
#: 60 steps. Anything that a resume can lose (optimizer, schedule, data order) makes a difference of 2e-2 or more within
#: five steps: see the table in demo/README.md.
TOLERANCE = 2e-3


@dataclass(frozen=True)
class Scale:
    size: str
    batch: int
    save_every: int
    kill_at: int  # the step whose save is killed
    switch_at: int  # the step after which the last run takes over
    total: int


FULL = Scale("10M", batch=16, save_every=10, kill_at=30, switch_at=40, total=60)
SHORT = Scale("1M", batch=8, save_every=6, kill_at=18, switch_at=24, total=36)


class DemoError(Exception):
    """A check failed, or a run did not do what it should."""


class TooLateError(DemoError):
    """The save was committed before the kill."""


@dataclass
class Run:
    """One start of the worker, and what it has reported so far."""

    name: str
    layout: str
    ranks: int
    workers: int  # of each rank's data loader
    stop: int
    output: Path
    losses: dict[int, float] = field(default_factory=dict)
    batches: dict[int, str] = field(default_factory=dict)  # hash of each step's global batch
    sample_lengths: dict[int, float] = field(default_factory=dict)
    stalls: dict[int, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    resumed_from: int = 0

    def start(self, scale: Scale, *options: str) -> subprocess.Popen[bytes]:
        """Start the worker under torchrun; `options` override those that the scale asks for."""
        # Waiting threads must not spin: they would take another rank's core.
        threads = max(1, len(os.sched_getaffinity(0)) // self.ranks)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        command += [str(HERE / "train.py"), f"--layout={self.layout}", f"--size={scale.size}", f"--stop={self.stop}"]
        command += [f"--batch={scale.batch}", f"--total={scale.total}", f"--workers={self.workers}"]
        command += [f"--checkpoints={self.output / 'checkpoints'}", f"--record={self.output / self.name}.jsonl"]
        command += [f"--save-every={scale.save_every}", *options]
        with (self.output / f"{self.name}.log").open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def read(self) -> None:
        """Read what the worker has recorded."""
        events = [json.loads(line) for line in (self.output / f"{self.name}.jsonl").read_text().splitlines()]
        steps = [e for e in events if e["event"] == "step"]
        self.losses = {e["step"]: e["loss"] for e in steps}
        self.batches = {e["step"]: e["batch"] for e in steps}
        self.sample_lengths = {e["step"]: e["sample_length"] for e in steps}
        self.stalls = {e["step"]: e["stall"] for e in events if e["event"] == "save"}
        self.resumed_from = next((e["step"] for e in events if e["event"] == "load"), 0)
        self.step_seconds = statistics.median(b["time"] - a["time"] for a, b in itertools.pairwise(steps))

    def complete(self, scale: Scale, *options: str) -> None:
        """Run the worker to its end."""
        began = time.monotonic()
        job = self.start(scale, *options)
        with terminated_at_end(job):
            job.wait(timeout=900)
        if job.returncode:
            raise DemoError(f"the run '{self.name}' failed with exit status {job.returncode}:\n{self.log_tail()}")
        self.read()
        check(max(self.losses) == self.stop, f"the run '{self.name}' ended at step {max(self.losses)}")
        print(f"    {time.monotonic() - began:.0f} s, {self.step_seconds:.2f} s per step")

    def log_tail(self) -> str:
        return "\n".join((self.output / f"{self.name}.log").read_text(errors="replace").splitlines()[-60:])


@contextlib.contextmanager
def terminated_at_end(job: subprocess.Popen[bytes]) -> Iterator[None]:
    """Terminate `job` at the end of the block, if it still runs."""
    try:
        yield
    finally:
        if job.poll() is None:
            job.terminate()  # torchrun passes it on to its ranks
            job.wait(timeout=60)


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DemoError(otherwise)


def process_of_rank(job: subprocess.Popen[bytes], rank: int) -> int:
    """Return the process id of one rank: the child of torchrun with that RANK in its environment."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == job.pid and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise DemoError(f"found no process of rank {rank}")


def wait_for(job: subprocess.Popen[bytes], run: Run, what: str, condition: Callable[[], T]) -> T:
    """Poll `condition` until it is true, and return its value; fail if the job ends first."""
    while not (found := condition()):
        if job.poll() is not None:
            raise DemoError(f"the run '{run.name}' ended before {what}:\n{run.log_tail()}")
        time.sleep(0.001)
    return found


def unfinished(checkpoint: Path, rank: int) -> list[Path]:
    """Return the files of `rank` that are being written: the first bytes of a storage file are written last."""
    found = []
    for path in checkpoint.glob(f"*/*-{rank:05d}.*.safetensors"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if not any(file.read(8)):
                found.append(path)
    return found


def kill_during_save(run: Run, scale: Scale, rank: int) -> None:
    """Start `run`, and kill -9 one rank while the checkpoint of step `scale.kill_at` is being written."""
    target = run.output / "checkpoints" / f"step_{scale.kill_at:08d}"
    catalog = target / "metadata.parquet"
    job = run.start(scale)
    with terminated_at_end(job):
        wait_for(job, run, "its first step", (run.output / f"{run.name}.jsonl").exists)
        victim = process_of_rank(job, rank)
        what = f"the save of step {scale.kill_at} was under way"
        wait_for(job, run, what, lambda: unfinished(target, rank) or catalog.exists())
        partial = unfinished(target, rank)
        os.kill(victim, signal.SIGKILL)
        if not partial or catalog.exists():
            raise TooLateError(f"step {scale.kill_at} was committed before the kill")
        job.wait(timeout=180)
    run.read()
    print(f"    kill -9 of rank {rank} in the middle of the save of step {scale.kill_at}, while it was writing")
    for path in partial:
        print(f"      {path.relative_to(target.parent)}")
    check(
        not catalog.exists(), f"step {scale.kill_at} was committed although a rank died before it had written its part"
    )
    check(job.returncode != 0, "the job outlived its killed rank")
    print(f"    step {scale.kill_at} has no metadata.parquet; the job died with exit status {job.returncode}")


def compare(run: Run, reference: Run, before: Run, expected: int, allowed: float) -> None:
    """Check a run against the reference, and print their first steps beside each other.

    Args:
        run: what to check: the step it resumed from, all its losses, all its batches.
        reference: a run that was not stopped there.
        before: the run that `run` resumed from.
        expected: the step that `run` has to resume from; 0: it began.
        allowed: largest allowed difference of two losses.
    """
    start = run.resumed_from
    check(start == expected, f"'{run.name}' resumed from step {start}, and the newest committed one is {expected}")
    print(f"    {'step':>6}  {'loss':>8}  {'difference':>10}  {'batch':<10}  of the {reference.name}")
    for step in range(max(start - 1, 1), start + 4):
        shown = before if step <= start else run
        difference = shown.losses[step] - reference.losses[step]
        line = f"    {step:>6}  {shown.losses[step]:>8.5f}  {difference:>+10.1e}  {shown.batches[step]}"
        line += f"  {reference.batches[step]}"
        if step == start + 1:
            line += f"  <- {'resumed' if start else 'begun'}: {run.ranks} rank(s), {run.workers} worker(s) each"
        print(line)
    other = [step for step, batch in run.batches.items() if batch != reference.batches[step]]
    worst = max(abs(loss - reference.losses[step]) for step, loss in run.losses.items())
    print(f"    steps {min(run.losses)} to {max(run.losses)}: largest difference of a loss {worst:.1e}, and", end=" ")
    print(f"{len(run.batches) - len(other)} of {len(run.batches)} global batches are the same")
    check(not other, f"'{run.name}' was fed other batches than '{reference.name}', at steps {other}")
    check(worst <= allowed, f"'{run.name}' is {worst:.1e} off '{reference.name}'; {allowed:.0e} is allowed")


def demo(scale: Scale, output: Path) -> None:
    reference = Run("reference", "plain", 1, 0, scale.total, output)
    first = Run("first", "fsdp2", 2, 2, scale.switch_at, output)
    second = Run("second", "tp2_fsdp2", 4, 1, scale.switch_at, output)
    third = Run("third", "plain", 1, 0, scale.total, output)
    again = Run("again", "plain", 1, 1, scale.total, output)

    print(f"[1/5] reference: {scale.total} steps on 1 rank, nothing saved, nothing killed")
    reference.complete(scale, "--save-every=0")

    print(f"[2/5] FSDP2 on 2 ranks, an asynchronous save every {scale.save_every} steps")
    for attempts_left in (2, 1, 0):
        try:
            kill_during_save(first, scale, rank=1)
            break
        except TooLateError as error:
            if not attempts_left:
                raise
            print(f"    {error}: once more")
            shutil.rmtree(output / "checkpoints")
            (output / f"{first.name}.jsonl").unlink()
    compare(first, reference, first, 0, TOLERANCE)

    print("[3/5] resume from the newest committed step, on 4 ranks: TP 2 × FSDP 2")
    second.complete(scale)
    compare(second, reference, first, scale.kill_at - scale.save_every, TOLERANCE)
    saved_again = (output / "checkpoints" / f"step_{scale.kill_at:08d}").glob("*/*.safetensors")
    generations = {path.name.split(".")[1] for path in saved_again}
    check(len(generations) == 1, f"files of the killed save of step {scale.kill_at} are still there")
    print(f"    step {scale.kill_at} was saved again, and nothing is left of the killed save")

    print("[4/5] resume on 1 rank, no parallelism")
    third.complete(scale)
    compare(third, reference, second, scale.switch_at, TOLERANCE)

    middle = scale.switch_at + scale.save_every
    print(f"[5/5] the same layout again, from step {middle}: exactly the losses of [4/5]")
    again.complete(scale, f"--resume-from={middle}", "--save-every=0")
    compare(again, third, third, middle, 0.0)

    print("stall per save: how long the training loop waited")
    for run in (first, second, third):
        for step, stall in run.stalls.items():
            share = stall / run.step_seconds
            print(
                f"    step {step:>3}  {run.layout:<9}  {run.ranks} rank(s)  {1e3 * stall:>6.0f} ms = {share:.2f} steps"
            )

    losses = list(reference.losses.values())
    check(losses[-1] < 0.75 * losses[0], f"the reference run did not learn: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    from figure import draw  # matplotlib takes seconds, which the tests of this file need not wait

    draw(reference, [first, second, third], again, scale.kill_at, TOLERANCE, output / "curves.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a smaller model, fewer steps")
    parser.add_argument("--output", type=Path, default=HERE.parent / "demo-output", help="replaced by every run")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # progress shows through a pipe too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds through `terminated_at_end`
    began = time.monotonic()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    try:
        demo(SHORT if args.short else FULL, args.output.resolve())
    except (DemoError, subprocess.TimeoutExpired) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    print(f"all checks hold. {time.monotonic() - began:.0f} s. Curves: {args.output / 'curves.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
