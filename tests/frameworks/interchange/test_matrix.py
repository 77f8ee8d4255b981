"""Every layout of every framework loads what every other one saved: equal bit for bit, and in the losses that follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.interchange import jobs
from tests.support.interchange.families import CI_MEMBERS, FAMILIES, Family
from tests.support.interchange.feed import global_batches
from tests.support.interchange.runs import Member
from tests.support.real_frameworks import assert_losses
from tests.support.worlds import RankError, Worlds

# The first test that asks for a destination pays for all of its sources.
pytestmark = pytest.mark.timeout(600)


def pairs() -> list[Any]:
    """Return every ordered pair of members, grouped by destination."""
    found = []
    for family in FAMILIES.values():
        in_ci = CI_MEMBERS.get(family.name, set())
        for destination in family.members:
            for source in family.members:
                marks = [pytest.mark.short] if {source.name, destination.name} <= in_ci else []
                name = f"{family.name}-{source.name}-to-{destination.name}"
                found.append(pytest.param(family.name, source.name, destination.name, id=name, marks=marks))
    return found


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
    """Makes the matrix of one family at a time."""

    def __init__(self, session: pytest.Session, worlds: Worlds, folder: Path) -> None:
        self._session = session
        self._worlds = worlds
        self._folder = folder
        self._last: Matrix | None = None

    def of(self, name: str) -> Matrix:
        if self._last is None or self._last.family.name != name:
            self._worlds.close()  # each family starts with new processes: frameworks patch theirs
            folder = self._folder / name
            folder.mkdir()
            self._last = Matrix(FAMILIES[name], self._worlds, folder, self._selected(name))
        return self._last

    def _selected(self, name: str) -> dict[str, list[str]]:
        """Return destination -> sources, of the selected tests."""
        selected: dict[str, list[str]] = {}
        for item in self._session.items:
            if isinstance(item, pytest.Function) and item.originalname == "test_interchange":
                params = item.callspec.params
                if params["family"] == name:
                    selected.setdefault(params["destination"], []).append(params["source"])
        return selected


@pytest.fixture(scope="session")
def matrices(request: pytest.FixtureRequest, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Matrices:
    return Matrices(request.session, worlds, tmp_path_factory.mktemp("interchange"))


def _check_data(matrix: Matrix, source: str, fed: list[Any]) -> None:
    """Fail unless a resumed run was fed the global batches of the run that it continues, from the save on."""
    own = global_batches(fed)
    for step, (rows, _) in enumerate(own, jobs.BEFORE):
        assert rows == [*range(step * len(rows), (step + 1) * len(rows))]
    assert own == global_batches([result["fed"] for result in matrix.saved(source)])
    # Every layout trains on the same data.
    assert own == global_batches([result["fed"] for result in matrix.saved(matrix.family.members[0].name)])


@pytest.mark.parametrize(("family", "source", "destination"), pairs())
def test_interchange(matrices: Matrices, family: str, source: str, destination: str) -> None:
    matrix = matrices.of(family)
    ranks = matrix.loaded(destination)
    for rank, result in enumerate(ranks):
        assert not result[source]["problems"], f"rank {rank}: {result[source]['problems'][:5]}"
        assert result[source]["losses"] == ranks[0][source]["losses"]
    _check_data(matrix, source, [result[source]["fed"] for result in ranks])
    uninterrupted = matrix.saved(source)[0]["after"]
    assert len(uninterrupted) == jobs.AFTER
    assert_losses(ranks[0][source]["losses"], uninterrupted, matrix.family.tolerance)
    if source == destination:
        assert ranks[0][source]["losses"] == uninterrupted, "the same layout goes on bit for bit"
    tolerance = matrix.family.member_tolerance
    if tolerance is not None:
        reference = matrix.saved(matrix.family.members[0].name)[0]
        assert_losses(matrix.saved(source)[0]["before"], reference["before"], tolerance)
        assert_losses(uninterrupted, reference["after"], tolerance)
