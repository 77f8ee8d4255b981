"""Every layout of every framework loads what every other one saved."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.interchange.families import CI_MEMBERS, FRAMEWORK_FAMILIES
from tests.support.interchange.matrix import Matrices
from tests.support.worlds import Worlds

# The first test that asks for a destination pays for all of its sources.
pytestmark = pytest.mark.timeout(600)


def pairs() -> list[Any]:
    """Return every ordered pair of members, grouped by destination."""
    found = []
    for family in FRAMEWORK_FAMILIES:
        in_ci = CI_MEMBERS.get(family.name, set())
        for destination in family.members:
            for source in family.members:
                marks = [pytest.mark.short] if {source.name, destination.name} <= in_ci else []
                name = f"{family.name}-{source.name}-to-{destination.name}"
                found.append(pytest.param(family.name, source.name, destination.name, id=name, marks=marks))
    return found


@pytest.fixture(scope="session")
def matrices(request: pytest.FixtureRequest, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Matrices:
    """The matrices, each in new processes: frameworks patch theirs."""
    folder = tmp_path_factory.mktemp("interchange")
    return Matrices(request.session, worlds, folder, "test_interchange", fresh=True)


@pytest.mark.parametrize(("family", "source", "destination"), pairs())
def test_interchange(matrices: Matrices, family: str, source: str, destination: str) -> None:
    matrices.of(family).check(source, destination)
