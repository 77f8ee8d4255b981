"""Measurements: arms in turn (A B C A B C ...), wall time and core-seconds of the process tree."""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Arm", "Result", "World", "core_seconds", "drop_cached", "measure", "peak_memory", "read_bytes"]

Extras = Mapping[str, float]


def core_seconds() -> float:
    """Return user and system seconds of this process and all its descendants, ended ones included."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def read_bytes() -> int:
    """Return the bytes that this process has read by system calls so far (cached or not; mapped files do not count)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@contextlib.contextmanager
def peak_memory(result: dict[str, float]) -> Any:
    """Store in `result["peak_bytes"]` the largest rise of resident memory during the block."""

    def status(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
        raise KeyError(name)

    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = status("VmRSS")
    yield
    result["peak_bytes"] = float(status("VmHWM") - before)


def drop_cached(folder: Path) -> None:
    """Drop the files under `folder` from the page cache."""
    for path in folder.rglob("*") if folder.is_dir() else [folder]:
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)  # only clean pages are dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


class World:
    """The ranks that measure together. A result is the slowest rank's wall time and the sum of core-seconds."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None
        if size > 1:
            import torch.distributed as dist

            # A peer's background thread may be using the default group, and operations of one group must not cross.
            self._group = dist.new_group(backend="gloo")

    def barrier(self) -> None:
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier(group=self._group)

    def _reduce(self, value: float, op: str) -> float:
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), group=self._group)
        return float(tensor[0])

    def max(self, value: float) -> float:
        return self._reduce(value, "MAX")

    def sum(self, value: float) -> float:
        return self._reduce(value, "SUM")


@dataclass
class Arm:
    """One contender in a case.

    Attributes:
        name: name of the peer or of the raw limit.
        run: function to measure; may return further figures, which are reduced over the ranks to the largest (to the sum
            for names that end in "_sum").
        before: function to call before each repetition, unmeasured.
        after: function to call after each repetition, unmeasured.
    """

    name: str
    run: Callable[[], Extras | None]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


@dataclass
class Result:
    """All repetitions of one arm.

    Attributes:
        case: name of the case.
        place: "tmpfs", "disk", or "" where no storage is involved.
        world: number of ranks.
        arm: name of the contender.
        nbytes: bytes of the state, over all ranks.
        wall: seconds, one per repetition.
        core: core-seconds, one per repetition.
        extra: further figures by name.
        error: why the arm failed; empty if it did not.
    """

    case: str
    place: str
    world: int
    arm: str
    nbytes: int
    wall: list[float] = field(default_factory=list)
    core: list[float] = field(default_factory=list)
    extra: dict[str, list[float]] = field(default_factory=dict)
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.wall) if self.wall else float("nan")

    @property
    def core_per_gib(self) -> float:
        return statistics.median(self.core) * 2**30 / self.nbytes if self.core and self.nbytes else float("nan")

    def extra_median(self, name: str) -> float:
        return statistics.median(self.extra[name]) if self.extra.get(name) else float("nan")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    world: World, case: str, place: str, nbytes: int, arms: Sequence[Arm], rounds: int, *, warm: bool = True
) -> list[Result]:
    """Run all arms in turn, `rounds` times; with `warm`, once more before that, uncounted."""
    results = {arm.name: Result(case, place, world.size, arm.name, nbytes) for arm in arms}
    for number in range(-1 if warm else 0, rounds):
        for arm in arms:
            result = results[arm.name]
            if result.error:
                continue
            failure, extra = "", None
            wall = core = 0.0
            try:
                arm.before()
                world.barrier()
                core, wall = core_seconds(), time.perf_counter()
                extra = arm.run()
                wall, core = time.perf_counter() - wall, core_seconds() - core
            except Exception as error:  # noqa: BLE001  a peer that fails is a result too
                failure = f"{type(error).__name__}: {error}"[:300]
            finally:
                world.barrier()
                with contextlib.suppress(OSError):
                    arm.after()
            if world.max(float(bool(failure))):
                result.error = failure or "failed on another rank"
                continue
            wall, core = world.max(wall), world.sum(core)
            merged = {}
            for name, value in sorted((extra or {}).items()):
                merged[name] = world.sum(value) if name.endswith("_sum") else world.max(value)
            if number >= 0:
                result.wall.append(wall)
                result.core.append(core)
                for name, value in merged.items():
                    result.extra.setdefault(name, []).append(value)
    return list(results.values())
