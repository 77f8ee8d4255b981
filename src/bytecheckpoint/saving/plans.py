"""Plan a save of all ranks: rows and values to write, and checks of the ranks' reports (pure functions over records)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import different_paths, names_of_ranks
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.selection import check_selections
from bytecheckpoint.planning.assembly import Assembly
from bytecheckpoint.planning.local_table import LocalTable
from bytecheckpoint.planning.planned_rows import SavePlan
from bytecheckpoint.planning.save_plan import plan_save
from bytecheckpoint.representation.catalog import VALUES_SLOT
from bytecheckpoint.representation.names import unescape
from bytecheckpoint.saving.copies import DifferingCopies, differing_copies
from bytecheckpoint.saving.messages import MIXED_PLANS, AssemblyRequest, Key, PlanRequest, ValueRecord, WriteReport
from bytecheckpoint.saving.steps import check_optimizer_steps, check_steps

__all__ = [
    "GlobalPlan",
    "assign_values",
    "check_arguments",
    "check_calls",
    "check_parts",
    "check_reports",
    "owners_of_values",
    "plan_around",
    "unwritten_values",
]

#: All ranks' values by rank.
RankValues = Mapping[int, Sequence[ValueRecord]]


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """A plan that the coordinator has made for all ranks.

    Attributes:
        name: identity of the plan.
        columns: rows and files of all ranks.
        tables: shards of each rank.
        expected: plan name that each rank reports when it follows this plan.
        assembly: tensors that the ranks join before they write, if all can; None if none are joined.
    """

    name: str
    columns: SavePlan
    tables: list[LocalTable]
    expected: list[str]
    assembly: Assembly | None = None

    def written(self, reports: Mapping[int, WriteReport]) -> SavePlan:
        """Return the rows and files that the ranks have written, given the reports of all."""
        joined = self._joined(reports)
        return self.columns if joined is None else joined.columns

    def named_files(self, reports: Mapping[int, WriteReport]) -> dict[str, int]:
        """Return the number of the file of each tensor of another program that the ranks have written whole."""
        joined = self._joined(reports)
        return {} if joined is None else joined.named_files()

    def _joined(self, reports: Mapping[int, WriteReport]) -> Assembly | None:
        """Return the assembly if the ranks have written by it."""
        whole = {report.whole for report in reports.values()}
        if whole == {True} and self.assembly is not None:
            return self.assembly
        assert whole == {False}, "the ranks agree whether they join tensors"
        return None

    def fits(self, reports: Mapping[int, WriteReport | AssemblyRequest]) -> bool:
        """Return whether all reporting ranks have followed this plan."""
        return all(self.expected[rank] == report.plan for rank, report in reports.items())


def plan_around(tables: Sequence[LocalTable], fixed: Mapping[int, NDArray[np.int64]]) -> tuple[SavePlan, str]:
    """Plan a save in which some ranks have written already.

    Args:
        tables: the shards of each rank.
        fixed: the rows that each of these ranks has written.

    Returns:
        A plan in which the other ranks write the other rows, and "". If there is none, a plan in which all ranks write
        anew, and the reason: for example, a rank has left a shard to another rank that no longer holds it.

    Raises:
        IncompatibleCheckpointError: the states of all ranks do not make whole tensors.
    """
    try:
        plan = plan_save(tables, fixed)
    except IncompatibleCheckpointError as error:
        if not fixed:
            raise
        reason = str(error)
    else:
        # Offsets in files follow from the rows of a plan, so the rows that were written must be those of the plan.
        if all(np.array_equal(plan.locals_of(rank), rows) for rank, rows in fixed.items()):
            return plan, ""
        reason = "ranks wrote what others have written"
    try:
        return plan_save(tables), reason
    except IncompatibleCheckpointError as error:
        if len(fixed) < len(tables):
            raise
        raise IncompatibleCheckpointError(f"{MIXED_PLANS}: {error}") from error


def check_calls(messages: Mapping[int, PlanRequest | WriteReport]) -> None:
    """Refuse a save that is a preparation on some ranks."""
    preparing = [rank for rank, message in messages.items() if isinstance(message, PlanRequest) and message.dry]
    saving = sorted(messages.keys() - preparing)
    if preparing and saving:
        raise UsageError(
            f"prepare was called on {names_of_ranks(preparing)}, save on {names_of_ranks(saving)}: "
            "make the same calls on all",
            calls_differ=True,
        )


def check_arguments(messages: Mapping[int, PlanRequest | WriteReport]) -> None:
    """Refuse messages of all ranks if these save to different paths, or different parts of their states."""
    if paths := different_paths({rank: message.url for rank, message in sorted(messages.items())}, "to"):
        raise UsageError(f"ranks save to different paths: {paths}; give all the same path", calls_differ=True)
    check_selections([message.selection for _, message in sorted(messages.items())])


def check_reports(reports: Mapping[int, WriteReport], plan: GlobalPlan) -> DifferingCopies | None:
    """Refuse reports that do not belong to one plan, one path and one training step; return replicas that differ."""
    check_arguments(reports)
    for rank, report in reports.items():
        if report.plan != plan.expected[rank]:
            raise IncompatibleCheckpointError(f"rank {rank} followed another save plan; the next save plans anew")
    checks = {rank: report.checks for rank, report in reports.items()}
    optimizer_steps = {rank: np.frombuffer(found.optimizer_steps, np.float64) for rank, found in checks.items()}
    # Where the optimizers show one step, other counters that differ are meant to.
    if not check_optimizer_steps(optimizer_steps, plan.tables):
        check_steps({r: {unescape(name): step for name, step in found.steps.items()} for r, found in checks.items()})
    check_parts({rank: report.values for rank, report in reports.items()}, [found.streams for found in checks.values()])
    # After the steps, which may be the reason.
    return differing_copies(checks, plan.tables) if plan.columns.has_copies() else None


# --- values ------------------------------------------------------------------------------------------------


def assign_values(values: RankValues, *, whole_world: bool) -> dict[int, set[Key]]:
    """Assign values to writers: one rank if all ranks hold the same value, otherwise each rank its own.

    Args:
        values: values of the ranks that ask for a plan.
        whole_world: True if these are all ranks.
    """
    chosen: dict[int, set[Key]] = {rank: set() for rank in values}
    for key, by_rank in _by_key(values).items():
        first: dict[bytes, int] = {}
        for rank, record in by_rank.items():
            first.setdefault(record.digest, rank)
        one_stands_for_all = whole_world and _same_everywhere(by_rank, len(values))
        for rank, record in by_rank.items():
            if first[record.digest] == rank or not (record.merged or one_stands_for_all):
                chosen[rank].add(key)
    return chosen


def check_parts(values: RankValues, counts: Iterable[Mapping[str, int]] = ()) -> None:
    """Check that ranks that hold one part of a state hold the same, and that together they hold all parts.

    Args:
        values: values of all ranks.
        counts: numbers of parts by state, of ranks that hold none.

    Raises:
        IncompatibleCheckpointError: they do not; the message names the part and two ranks, or how many parts there are.
    """
    totals = {state: total for of_rank in counts for state, total in of_rank.items()}
    if not totals and not any(record.parts for records in values.values() for record in records):
        return  # as in most saves
    found: dict[str, set[str]] = {}
    for (state, name, slot), by_rank in _by_key(values).items():
        (first, record), *others = by_rank.items()
        if not record.parts and not any(other.parts for _, other in others):
            continue
        for rank, other in ((first, record), *others):
            if other.parts != totals.setdefault(state, other.parts) or other.digest != record.digest:
                part = f"{unescape(state)}/{unescape(name)}".rstrip("/")
                raise IncompatibleCheckpointError(
                    f"ranks {first} and {rank} hold different states under {part}: ranks that hold the same stream must "
                    "have fed it alike, and all ranks need the same loader"
                )
        if slot == VALUES_SLOT and name:
            found.setdefault(state, set()).add(name)
    for state, total in totals.items():
        if len(found.get(state, ())) != total:
            raise IncompatibleCheckpointError(
                f"the ranks hold {len(found.get(state, ()))} of the {total} streams of {unescape(state)}: every rank that "
                "feeds streams must pass its loader to the save"
            )


def unwritten_values(values: RankValues) -> dict[int, set[Key]]:
    """Find the values of which no equal copy is written, by the rank that must still write them."""
    unwritten: dict[int, set[Key]] = {}
    for key, by_rank in _by_key(values).items():
        written = {r.digest for r in by_rank.values() if r.file >= 0}
        same = _same_everywhere(by_rank, len(values))
        for rank, record in by_rank.items():
            if record.file >= 0 or (record.digest in written and (record.merged or same)):
                continue
            unwritten.setdefault(rank, set()).add(key)
            written.add(record.digest)
    return unwritten


def owners_of_values(values: RankValues, shared: int) -> list[tuple[int, ValueRecord, int]]:
    """List every written value as (writer, record, owner).

    Args:
        values: values of all ranks.
        shared: owner of a copy that stands for all ranks. Any further copy belongs to its writer.
    """
    shared_keys = {
        key
        for key, by_rank in _by_key(values).items()
        if len({r.digest for r in by_rank.values()}) == 1
        and (next(iter(by_rank.values())).merged or len(by_rank) == len(values))
    }
    rows = []
    for rank in sorted(values):
        for record in values[rank]:
            if record.file < 0:
                continue
            owner = rank
            if record.key in shared_keys:
                shared_keys.discard(record.key)
                owner = shared
            rows.append((rank, record, owner))
    return rows


def _by_key(values: RankValues) -> dict[Key, dict[int, ValueRecord]]:
    table: dict[Key, dict[int, ValueRecord]] = {}
    for rank in sorted(values):
        for record in values[rank]:
            table.setdefault(record.key, {})[rank] = record
    return table


def _same_everywhere(by_rank: Mapping[int, ValueRecord], ranks: int) -> bool:
    return len(by_rank) == ranks and len({r.digest for r in by_rank.values()}) == 1
