"""The versions in a folder, and which of them build on which."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bytecheckpoint.manager.rules import StepInfo
from bytecheckpoint.representation.catalog import published_facts

__all__ = ["LastChains", "PublishedVersion", "path_to"]


@dataclass(frozen=True)
class PublishedVersion:
    """A version that was published.

    Attributes:
        step: training step.
        path: address of its checkpoint.
        id: id that no other version has; "" for a checkpoint that no publisher wrote.
        base: id of the version on which it builds, "" for one that is whole.
        before: id of the version from which it has the differences, beside its files if it is whole; "" for none.
        created: time of the save, by which a checkpoint without an id differs from another one of its step.
    """

    step: int
    path: str
    id: str
    base: str
    before: str
    created: float

    @staticmethod
    def of(info: StepInfo) -> PublishedVersion:
        """Return the version in a step's folder."""
        facts = published_facts(info.metadata)
        base = facts.get("base", "")
        return PublishedVersion(
            info.step, info.path, facts.get("id", ""), base, facts.get("before", base), info.created
        )


def path_to(versions: Sequence[PublishedVersion], held: str) -> list[PublishedVersion]:
    """Return the versions to apply one after the other to reach the last one; none if that has to be loaded whole.

    At most one of them is whole: a load takes no longer than the differences since the whole version before.

    Args:
        versions: all versions, by step.
        held: id of the version that is held.
    """
    by_id = {version.id: version for version in versions if version.id}
    found: list[PublishedVersion] = []
    at: PublishedVersion | None = versions[-1]
    while at is not None and at.before and at not in found and sum(not each.base for each in (at, *found)) < 2:
        found.insert(0, at)
        if at.before == held:
            return found
        at = by_id.get(at.before)
    return []


@dataclass(frozen=True)
class LastChains:
    """Keep the newest whole versions, with all that builds on them and what lies between.

    Attributes:
        count: number of whole versions.
    """

    count: int

    def keep(self, steps: Sequence[StepInfo]) -> Collection[int]:
        """See `KeepRule`."""
        whole = [position for position, info in enumerate(steps) if not PublishedVersion.of(info).base]
        first = whole[-self.count] if len(whole) >= self.count else 0
        return [info.step for info in steps[first:]]
