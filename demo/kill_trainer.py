"""Run demo/trainer.py on two ranks, kill all of it, go on with one rank, and compare with a run that was left alone.

make demo-trainer
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

STEPS, KILLED_AFTER = 150, 60
#: Bound for the relative difference of two losses: the model is in double precision, but Trainer adds losses in single.
TOLERANCE = 1e-5


def start(folder: Path, ranks: int, *, quiet: bool = True) -> subprocess.Popen[bytes]:
    """Start the training in a session of its own."""
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *run, str(Path(__file__).with_name("trainer.py")), str(folder), str(STEPS)]
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.DEVNULL if quiet else None,
        start_new_session=True,
    )


def committed(folder: Path) -> list[int]:
    """Return the committed steps."""
    return sorted(int(path.parent.name.removeprefix("step_")) for path in folder.glob("step_*/metadata.parquet"))


def kill(job: subprocess.Popen[bytes]) -> None:
    """Kill torchrun and its ranks, which are in sessions of their own."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    for pid in [job.pid, *map(int, children)]:
        os.kill(pid, signal.SIGKILL)
    job.wait()


def finish(folder: Path, ranks: int) -> dict[int, float]:
    """Train to the end; return the losses by step."""
    if start(folder, ranks, quiet=False).wait():
        sys.exit("the training failed")
    return {int(step): loss for step, loss in json.loads((folder / "losses.json").read_text()).items()}


def main() -> None:
    """Show it; exit with an error if the losses differ."""
    root = Path("demo-output/trainer")
    shutil.rmtree(root, ignore_errors=True)
    print("a run of one rank that is left alone")
    whole = finish(root / "whole", 1)
    print("the same on two ranks, killed in the middle")
    job = start(root / "run", 2)
    while max(committed(root / "run"), default=0) < KILLED_AFTER:
        if job.poll() is not None:
            sys.exit("the training ended before it was killed")
        time.sleep(0.01)
    kill(job)
    print(f"killed; committed steps: {committed(root / 'run')}. One rank goes on:")
    found = finish(root / "run", 1)
    print(f"{'step':>6} {'left alone':>12} {'killed':>12} {'difference':>12}")
    for step in sorted({1, KILLED_AFTER - 1, KILLED_AFTER, KILLED_AFTER + 1, KILLED_AFTER + 20, STEPS}):
        print(f"{step:6} {whole[step]:12.6f} {found[step]:12.6f} {abs(whole[step] - found[step]):12.1e}")
    worst = max(abs(1 - found[step] / whole[step]) for step in whole)
    print(f"largest relative difference in {STEPS} steps: {worst:.1e}, at most {TOLERANCE:g} is allowed")
    sys.exit(whole.keys() != found.keys() or worst > TOLERANCE)


if __name__ == "__main__":
    main()
