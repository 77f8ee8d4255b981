"""Worlds of real processes for tests: a template process imports torch once, and every rank is forked from it.

`Worlds.get(n)` returns n processes in one gloo process group (none for one process). Later tests of that size use the same
world, so that a run costs milliseconds. A world in which anything went wrong is killed, and the next test gets a new one.
So is a world whose jobs have left many threads, as those of gloo's groups, which wake a hundred times a second each.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import pytest

__all__ = ["RankError", "World", "Worlds", "on_ranks"]

_Test = TypeVar("_Test", bound=Callable[..., Any])

PRELOADED = ["tests.support.preloaded"]
"""Modules that the template process imports; a folder's conftest.py may add some before the first world."""
_GRACE = 15.0
_LOG_TAIL = 3000
_MOST_PROCESSES = 16  # of idle worlds: those of 1, 2, 3, 4 and 6 ranks
_MOST_THREADS = 200  # of a rank of an idle world


class RankError(AssertionError):
    """Some ranks failed, died or hung; the message has the traceback or log of each."""


class World:
    """A world of `size` processes.

    Args:
        size: number of ranks.
        folder: new folder for logs and the rendezvous.
        group: True to initialise torch.distributed (never for one process).

    Attributes:
        worn: True if its jobs have left so many threads that the next ones would be slow.
    """

    def __init__(self, size: int, folder: Path, *, group: bool = True) -> None:
        folder.mkdir(parents=True)
        self.size = size
        self._folder = folder
        self._alive = True
        self.worn = False
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.processes: list[Any] = []
        self._links: list[Connection] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, str(folder), theirs, group and size > 1), daemon=False
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._links.append(ours)

    @property
    def usable(self) -> bool:
        """True if all processes live, and none has failed."""
        return self._alive and all(p.is_alive() for p in self.processes)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 90.0, **kwargs: Any) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank; return the results in order of rank.

        Args:
            function: function that can be imported by its module and name.
            *args: arguments to pickle, the same on all ranks.
            timeout: seconds for all ranks.
            **kwargs: further arguments, as `args`.

        Raises:
            RankError: a rank raised, died or took too long. The world is killed.
        """
        outcomes = self.start(function, *args, **kwargs).outcomes(timeout)
        if all(ok for ok, _ in outcomes):
            return [value for _, value in outcomes]
        text = "\n".join(f"--- rank {r}: {value}" for r, (ok, value) in enumerate(outcomes) if not ok)
        raise RankError(f"{function.__name__} failed\n{text}")

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> World:
        """Begin a run, for tests that kill ranks before they ask for the `outcomes`."""
        assert self.usable, "this world has ended"
        for link in self._links:
            link.send((function.__module__, function.__name__, args, kwargs))
        return self

    def outcomes(self, timeout: float = 90.0, grace: float = _GRACE) -> list[tuple[bool, Any]]:
        """Return (succeeded, result or traceback) of every rank; kill the world unless all succeeded.

        Args:
            timeout: seconds for all ranks.
            grace: seconds that the other ranks have after one has failed.
        """
        found: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        ranks = {id(link): rank for rank, link in enumerate(self._links)}
        pending = list(self._links)
        while pending and time.monotonic() < deadline:
            for ready in wait(pending, max(0.0, deadline - time.monotonic())):
                assert isinstance(ready, Connection)
                rank = ranks[id(ready)]
                pending.remove(ready)
                try:
                    *outcome, threads = ready.recv()
                    found[rank] = tuple(outcome)
                    self.worn |= threads > _MOST_THREADS
                except (EOFError, OSError):
                    self.processes[rank].join(5)
                    code = self.processes[rank].exitcode
                    found[rank] = (False, f"died with exit code {code}\n{self._log(rank)}")
                if not found[rank][0]:
                    deadline = min(deadline, time.monotonic() + grace)
        for link in pending:
            rank = ranks[id(link)]
            self._show_stacks(rank)
            found[rank] = (
                False,
                f"still running after {timeout:g} s, or {grace:g} s after a failure\n{self._log(rank)}",
            )
        if not all(ok for ok, _ in found.values()):
            self.kill()
        return [found[rank] for rank in range(self.size)]

    def _show_stacks(self, rank: int) -> None:
        process = self.processes[rank]
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)

    def _log(self, rank: int) -> str:
        log = self._folder / f"rank{rank}.log"
        return log.read_text(errors="replace")[-_LOG_TAIL:] if log.exists() else "(no log)"

    def kill(self) -> None:
        """End all processes at once, and those that frameworks have begun in them (Megatron's queues outlive it)."""
        self._alive = False
        begun = _spawned_by({process.pid for process in self.processes})
        for process in self.processes:
            process.kill()
        for pid in begun:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process, link in zip(self.processes, self._links, strict=True):
            process.join(10)
            link.close()

    def close(self, timeout: float = 30.0) -> list[int | None]:
        """Let all processes end by themselves; return their exit codes (None: had to be killed)."""
        if not self._alive:
            return [p.exitcode for p in self.processes]
        for link in self._links:
            try:
                link.send(None)
            except OSError:
                pass
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [p.exitcode for p in self.processes]
        self.kill()
        return codes


def _spawned_by(parents: set[int]) -> list[int]:
    """Return the children of processes that `multiprocessing` has spawned; those of this package end by themselves."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in parents and b"multiprocessing.spawn" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


class Worlds:
    """The pool of worlds of one test session: one world of each size, as long as there are not too many processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._idle: dict[int, World] = {}

    def fresh(self, size: int, *, group: bool = True) -> World:
        """A new world; the caller closes it."""
        self._number += 1
        return World(size, self._folder / f"world{self._number}", group=group)

    def get(self, size: int) -> World:
        """Return the pool's world of that size, or a new one if it is missing, broken or worn."""
        world = self._idle.pop(size, None)
        if world is not None and (world.worn or not world.usable):
            world.kill()
            world = None
        if world is None:
            while self._idle and size + sum(self._idle) > _MOST_PROCESSES:
                self._idle.pop(next(iter(self._idle))).close()
            world = self.fresh(size)
        self._idle[size] = world  # the last one used is the last to be closed
        return world

    def run(self, size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function` in the world of that size; see `World.run`."""
        return self.get(size).run(function, *args, **kwargs)

    def close(self) -> None:
        """End all worlds of the pool."""
        for world in self._idle.values():
            world.close()
        self._idle.clear()


def on_ranks(size: int | Callable[..., int], *, timeout: float = 90.0) -> Callable[[_Test], _Test]:
    """Make a test run on every rank of a world of the fixture `worlds`; the test fails if a rank raises.

    The ranks import the test by its name, and get equal copies of its arguments. conftest.py sends it to them.

    Args:
        size: number of ranks, or a function that computes it from the test's arguments.
        timeout: seconds for all ranks.
    """

    def mark(test: _Test) -> _Test:
        return pytest.mark.usefixtures("worlds")(pytest.mark.ranks.with_args(size, timeout)(test))

    return mark


def _serve(rank: int, size: int, folder: str, link: Connection, group: bool) -> None:
    """Be one rank: run the jobs that arrive, until None arrives or the other side ends."""
    import faulthandler

    import torch
    import torch.distributed as dist

    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    torch.set_num_threads(1)
    initialised = not group
    try:
        while True:
            try:
                job = link.recv()
            except EOFError:
                return
            if job is None:
                return
            module, name, args, kwargs = job
            try:
                if not initialised:
                    dist.init_process_group(
                        "gloo",
                        init_method=f"file://{folder}/rendezvous",
                        rank=rank,
                        world_size=size,
                        timeout=timedelta(seconds=60),
                    )
                    initialised = True
                result = (True, getattr(importlib.import_module(module), name)(*args, **kwargs))
            except BaseException:  # noqa: BLE001 - reported by the test
                result = (False, traceback.format_exc())
            sys.stdout.flush()
            sys.stderr.flush()
            link.send((*result, len(os.listdir("/proc/self/task"))))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
