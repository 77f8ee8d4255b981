"""The matrix of a family: what each layout saves, each layout loads, equal bit for bit, and in the losses that follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bytecheckpoint.tools import fingerprint
from tests.support.comparisons import wrong_entries
from tests.support.interchange import jobs
from tests.support.interchange.families import FAMILIES, Family
from tests.support.interchange.feed import global_batches
from tests.support.interchange.runs import Member
from tests.support.real_frameworks import assert_losses
from tests.support.worlds import RankError, Worlds

__all__ = ["Matrices", "Matrix"]


class Matrix:
    """The runs of one family: one run per layout saves, and one per layout loads from all its sources.

    Args:
        family: the family.
        worlds: worlds of processes.
        folder: folder of the checkpoints.
        selected: destination -> the sources whose tests are selected.
    """

    def __init__(self, family: Family, worlds: Worlds, folder: Path, selected: dict[str, list[str]]) -> None:
        self.family = family
        self._worlds = worlds
        self._folder = folder
        self._selected = selected
        self._done: dict[tuple[str, str], list[dict[str, Any]] | RankError] = {}

    def saved(self, name: str) -> list[dict[str, Any]]:
        """Return what each rank of the run that saved reports."""
        return self._once("save", name, self._save)

    def loaded(self, name: str) -> list[dict[str, dict[str, Any]]]:
        """Return what each rank of the run that loaded reports, by source."""
        return self._once("load", name, self._load)

    def path(self, name: str) -> str:
        """Return the path of the checkpoint of a layout, which it saves if it has not yet."""
        self.saved(name)
        return str(self._folder / name)

    def check(self, source: str, destination: str) -> None:
        """Fail unless `destination` loads what `source` saved, and continues with its data and its losses."""
        ranks = self.loaded(destination)
        for rank, result in enumerate(ranks):
            assert not result[source]["problems"], f"rank {rank}: {result[source]['problems'][:5]}"
            assert result[source]["losses"] == ranks[0][source]["losses"]
        self._check_data(source, [result[source]["fed"] for result in ranks])
        uninterrupted = self.saved(source)[0]["after"]
        assert len(uninterrupted) == jobs.AFTER
        assert_losses(ranks[0][source]["losses"], uninterrupted, self.family.tolerance)
        if source == destination:
            assert ranks[0][source]["losses"] == uninterrupted, "the same layout continues bit for bit"
        if self.family.member_tolerance is not None:
            reference = self.saved(self.family.members[0].name)[0]
            assert_losses(self.saved(source)[0]["before"], reference["before"], self.family.member_tolerance)
            assert_losses(uninterrupted, reference["after"], self.family.member_tolerance)

    def check_opened(self, name: str) -> None:
        """Fail unless an opened checkpoint shows the whole tensors of model and optimizer that the run had."""
        path = self.path(name)
        expected, _ = torch.load(f"{path}.pt")
        assert len(expected) > 50
        assert wrong_entries(path, expected) == []
        assert fingerprint(path) == fingerprint(path, recompute=True), "that of the save is that of the files"

    def _check_data(self, source: str, fed: list[Any]) -> None:
        """Fail unless a resumed run was fed the global batches of the run that it continues, from the save on."""
        own = global_batches(fed)
        for step, (rows, _) in enumerate(own, jobs.BEFORE):
            assert rows == [*range(step * len(rows), (step + 1) * len(rows))]
        # Every layout trains on the same data.
        for name in (source, self.family.members[0].name):
            assert own == global_batches([result["fed"] for result in self.saved(name)])

    def _once(self, verb: str, name: str, run: Callable[[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Run once, and raise the same error for each test that needs a run that failed."""
        if (verb, name) not in self._done:
            try:
                self._done[verb, name] = run(name)
            except RankError as error:
                self._done[verb, name] = error
        found = self._done[verb, name]
        if isinstance(found, RankError):
            raise found
        return found

    def _save(self, name: str) -> list[dict[str, Any]]:
        first = self.family.members[0].name
        if name != first:
            self.saved(first)
        start = None if name == first else str(self._folder / f"{first}.start")
        member = self.family.member(name)
        return self._run(member, jobs.save, member, start, str(self._folder / name), str(self._folder))

    def _load(self, name: str) -> list[dict[str, dict[str, Any]]]:
        sources = [self.family.member(source) for source in self._selected[name]]
        for source in sources:
            self.saved(source.name)
        member = self.family.member(name)
        return self._run(member, jobs.load_all, member, sources, str(self._folder), str(self._folder))

    def _run(self, member: Member, *job: Any) -> list[Any]:
        return self._worlds.run(member.size, *job, timeout=500)


class Matrices:
    """The matrices of a session, made one after the other.

    Args:
        session: the session, of whose tests those that are selected decide what a layout loads.
        worlds: worlds of processes.
        folder: folder of the checkpoints.
        test: name of the test with the parameters family, source and destination.
        fresh: start new processes for each family.
    """

    def __init__(
        self, session: pytest.Session, worlds: Worlds, folder: Path, test: str, *, fresh: bool = False
    ) -> None:
        self._session = session
        self._worlds = worlds
        self._folder = folder
        self._test = test
        self._fresh = fresh
        self._made: dict[str, Matrix] = {}

    def of(self, name: str) -> Matrix:
        if name not in self._made:
            if self._fresh:
                self._worlds.close()
            folder = self._folder / name
            folder.mkdir()
            self._made[name] = Matrix(FAMILIES[name], self._worlds, folder, self._selected(name))
        return self._made[name]

    def _selected(self, name: str) -> dict[str, list[str]]:
        """Return destination -> sources, of the selected tests."""
        selected: dict[str, list[str]] = {}
        for item in self._session.items:
            # Tests of other files may have the same name.
            if isinstance(item, pytest.Function) and item.originalname == self._test and "family" in item.fixturenames:
                params = item.callspec.params
                if params["family"] == name:
                    selected.setdefault(params["destination"], []).append(params["source"])
        return selected
