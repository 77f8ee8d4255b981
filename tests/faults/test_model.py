"""A model of the guarantee that a load gives the last committed step, after any failure.

Hypothesis draws sequences of saves, replacements, failures, kills and loads of two ranks on local disk. The model keeps
the steps that the checkpoint may hold. A load must return one of them, whole, and settles which one it is.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import bytecheckpoint
from bytecheckpoint import CheckpointError, StorageFullError, StorageUnavailableError
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.handles import SaveReport
from bytecheckpoint.world import world_of
from tests.support.coded import files_of, found_step
from tests.support.faulty_storage import Faults
from tests.support.modes import MODES
from tests.support.ranks import load_all, save_all, succeeded
from tests.support.settings import undisturbed

RANKS = 2
ROWS = 6
#: Storage calls of a save at which a rank fails or dies.
CALLS = ("create", "write", "finish", "sync", "publish", "list", "delete", "stat")


class Checkpoints(RuleBasedStateMachine):
    """One path, saved and loaded by worlds of two ranks on threads."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="model-"))
        self.path = self.folder / "step"
        self.faults = Faults()
        self.calm = undisturbed()
        self.calm.__enter__()
        bytecheckpoint.configure(writer="thread", timeout=30.0)
        self.world = ThreadWorld(RANKS)
        self.last_step = 0
        #: Steps that the checkpoint may hold, 0 for none. A failed save that may have committed adds one.
        self.possible = {0}

    def teardown(self) -> None:
        self.faults.clear()
        self.calm.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    def save(self, mode: str) -> list[Any]:
        """Let every rank save the next step; return each rank's report or error."""
        self.last_step += 1
        return save_all(self.world, self.path, self.last_step, rows=ROWS, faults=self.faults, **MODES[mode])

    @initialize(mode=st.sampled_from(list(MODES)))
    def first_save(self, mode: str) -> None:
        self.save_works(mode)

    @rule(mode=st.sampled_from(list(MODES)))
    def save_works(self, mode: str) -> None:
        succeeded(self.save(mode))
        self.possible = {self.last_step}

    @rule(
        mode=st.sampled_from(list(MODES)),
        call=st.sampled_from(CALLS),
        rank=st.integers(0, RANKS - 1),
        skip=st.integers(0, 4),
        partial=st.booleans(),
        error=st.sampled_from([StorageFullError("the disk is full"), StorageUnavailableError("the device is gone")]),
    )
    def save_meets_an_error(self, mode: str, call: str, rank: int, skip: int, partial: bool, error: Exception) -> None:
        fault = self.faults.add(call, error, rank=rank, skip=skip, partial=partial)
        got = self.save(mode)
        self.faults.clear()
        if all(isinstance(report, SaveReport) for report in got):
            self.possible = {self.last_step}
            return
        assert fault.hits, got
        assert all(isinstance(raised, CheckpointError) for raised in got), got
        self.possible.add(self.last_step)

    @rule(
        mode=st.sampled_from(list(MODES)),
        call=st.sampled_from(CALLS),
        victim=st.integers(0, RANKS - 1),
        skip=st.integers(0, 4),
    )
    def rank_is_killed_during_a_save(self, mode: str, call: str, victim: int, skip: int) -> None:
        """From one storage call on, the rank reaches neither the storage nor other ranks. Then a new job begins."""
        world, faults, gone = self.world, self.faults, StorageUnavailableError("this rank was killed")

        def kill() -> None:
            world.kill(victim, silent=False)
            faults.add("*", gone, rank=victim, times=-1)

        fault = self.faults.add(call, gone, rank=victim, skip=skip, before=kill)
        got = self.save(mode)
        for collective in world.ranks:
            world_of(collective).saves.close()  # no thread of a dead rank continues once the faults are cleared
        self.faults.clear()
        if fault.hits:
            self.possible.add(self.last_step)
        else:
            succeeded(got)
            self.possible = {self.last_step}
        self.world = ThreadWorld(RANKS)

    @rule()
    def load(self) -> None:
        """Two ranks load, and both get the same whole step."""
        got = load_all(self.world, self.path, rows=ROWS)
        if self.possible == {0}:
            assert all(isinstance(raised, bytecheckpoint.CheckpointNotFoundError) for raised in got), got
            return
        assert got[0] == got[1], got
        self.settle(got[0])

    @rule()
    def load_in_another_layout(self) -> None:
        """One rank loads what two have saved."""
        self.settle(found_step(self.path, rows=ROWS))

    def settle(self, step: int) -> None:
        """Note that the checkpoint holds `step`."""
        assert step in self.possible
        self.possible = {step}

    @invariant()
    def files_are_few(self) -> None:
        """No failed save leaves more than its own files behind, and the next save removes them."""
        assert len(files_of(self.path)) < 40


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)
