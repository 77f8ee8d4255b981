"""Make the coordinator's plans from all ranks' tables, and check the ranks' reports against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import different_paths, names_of_ranks
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.selection import check_selections
from bytecheckpoint.planning.local_table import LocalTable
from bytecheckpoint.planning.save_plan import SavePlan, plan_save
from bytecheckpoint.representation.names import unescape
from bytecheckpoint.saving.copies import check_copies
from bytecheckpoint.saving.messages import MIXED_PLANS, PlanRequest, WriteReport
from bytecheckpoint.saving.steps import check_optimizer_steps, check_steps
from bytecheckpoint.saving.values import check_parts

__all__ = ["GlobalPlan", "check_arguments", "check_calls", "check_reports", "plan_around"]


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """A plan that the coordinator has made for all ranks.

    Attributes:
        name: identity of the plan.
        columns: rows and files of all ranks.
        tables: shards of each rank.
        expected: plan name that each rank reports when it follows this plan.
    """

    name: str
    columns: SavePlan
    tables: list[LocalTable]
    expected: list[str]

    def fits(self, reports: Mapping[int, WriteReport]) -> bool:
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
            "make the same calls on all"
        )


def check_arguments(messages: Mapping[int, PlanRequest | WriteReport]) -> None:
    """Refuse messages of all ranks if these save to different paths, or different parts of their states."""
    if paths := different_paths({rank: message.url for rank, message in sorted(messages.items())}, "to"):
        raise UsageError(f"ranks save to different paths: {paths}; give all the same path")
    check_selections([message.selection for _, message in sorted(messages.items())])


def check_reports(reports: Mapping[int, WriteReport], plan: GlobalPlan) -> None:
    """Refuse reports that do not belong to one plan, one path and one training step, or differ in what they replicate."""
    check_arguments(reports)
    for rank, report in reports.items():
        if report.plan != plan.expected[rank]:
            raise IncompatibleCheckpointError(f"rank {rank} followed another save plan; the next save plans anew")
    checks = {rank: report.checks for rank, report in reports.items()}
    optimizer_steps = {rank: np.frombuffer(found.optimizer_steps, np.float64) for rank, found in checks.items()}
    # Where the optimizers show one step, other counters that differ are meant to.
    if not check_optimizer_steps(optimizer_steps, plan.tables):
        check_steps({r: {unescape(name): step for name, step in found.steps.items()} for r, found in checks.items()})
    check_parts({rank: report.values for rank, report in reports.items()})
    rows = sum(len(table.ndims) for table in plan.tables) // np.dtype(np.int32).itemsize
    # After the steps, which may be the reason.
    check_copies(checks, plan.tables, replicated=rows > len(plan.columns.boxes))
