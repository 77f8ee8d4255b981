"""Let the ranks of a process group run one call of a tool together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.collectives.current import current
from bytecheckpoint.collectives.single import SingleProcess
from bytecheckpoint.planning.balance import assign
from bytecheckpoint.settings import settings
from bytecheckpoint.world import world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ToolRanks", "tool_ranks"]

_Result = TypeVar("_Result")


class ToolRanks:
    """The ranks of one call.

    Args:
        agreement: steps of the ranks.

    Attributes:
        rank: rank of this process.
        count: number of ranks.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.rank = agreement.rank
        self.count = agreement.collective.world_size
        self._agreement = agreement

    def agree(self, step: str, work: Callable[[], Any], decide: Callable[[list[Any]], _Result]) -> _Result:
        """Run `work` on every rank and `decide` on rank 0 with all results; raise the failure of any rank on all ranks."""
        return self._agreement.agree(step, work, decide)

    def all_succeed(self, step: str, work: Callable[[], _Result]) -> _Result:
        """Run `work` on every rank and return its result there; raise the failure of any rank on all ranks."""
        found: list[_Result] = []
        self._agreement.agree(step, lambda: found.append(work()), lambda _: None)
        return found[0]

    def share(self, sizes: Sequence[int]) -> list[int]:
        """Return the positions of this rank's share of things of some sizes, of which every rank could take each."""
        things, ranks = np.indices((len(sizes), self.count)).reshape(2, -1)
        taker = assign(things, ranks, np.array(sizes, np.int64), self.count)
        return np.flatnonzero(taker == self.rank).tolist()


@contextmanager
def tool_ranks(
    tool: str, process_group: ProcessGroup | None, address: str = "", *, alone: bool = True
) -> Iterator[ToolRanks]:
    """Yield the ranks of a call: those of a process group, all of which call this, or this process alone.

    Args:
        tool: name of the call.
        process_group: the group; None for this process alone, or for all ranks.
        address: address that all ranks give.
        alone: True if None stands for this process alone.
    """
    timeout = settings().timeout
    if process_group is None and alone:
        yield ToolRanks(Agreement(SingleProcess(), tool, timeout))
        return
    collective = current(process_group, timeout=timeout)
    calls = world_of(collective).calls
    number = calls.begin(tool, address, timeout)
    collective.begin_call(f"{tool}/{number}", address)
    try:
        yield ToolRanks(Agreement(collective, f"{tool}/{number}", timeout))
    except BaseException as error:
        calls.note_failure(tool, number, address, error)
        raise
