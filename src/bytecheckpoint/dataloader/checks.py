"""Check the rank of a loader, and the checkpoint that it resumes from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch.distributed

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.representation.values.equality import equal

__all__ = ["check_allow", "check_in_order", "check_rank", "check_shared", "remedy", "share", "short"]


def check_rank(rank: int | None, ranks: int | None) -> tuple[int, int]:
    """Return the data-parallel rank and the number of ranks, by default 0 and 1 if the job is one process.

    Raises:
        UsageError: the two do not fit each other, or are missing in a job of several processes.
    """
    if rank is None and ranks is None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and (processes := torch.distributed.get_world_size()) > 1:
            raise UsageError(
                f"these {processes} processes do not know their part of the data: pass rank= and ranks=, the "
                'data-parallel ones (mesh["dp"].get_local_rank() and mesh["dp"].size(), or those of torch.distributed)'
            )
        return 0, 1
    if type(rank) is not int or type(ranks) is not int or not 0 <= rank < ranks:
        raise UsageError(f"rank {rank!r} of {ranks!r}: pass rank= and ranks= together, ints, 0 <= rank < ranks")
    return rank, ranks


def share(count: int, rank: int, ranks: int) -> range:
    """Return the consecutive share of a rank in `count` things. The first ranks have one more if that is uneven.

    >>> [list(share(7, rank, 3)) for rank in range(3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    least, more = divmod(count, ranks)
    first = rank * least + min(rank, more)
    return range(first, first + least + (rank < more))


def check_allow(allow: Collection[str], known: Collection[str]) -> set[str]:
    """Check the argument `allow` of a loader, one name or several; return the names.

    Raises:
        UsageError: the loader does not know one of the names.
    """
    names = {allow} if isinstance(allow, str) else {*allow}
    if unknown := sorted(names - {*known}):
        raise UsageError(f"allow= does not know {', '.join(unknown)}; it takes {', '.join(known)}")
    return names


def check_in_order(loader: Any) -> None:
    """Check that a DataLoader with workers yields batches in their order.

    Raises:
        UsageError: the loader does not.
    """
    if not getattr(loader, "in_order", True):
        raise UsageError("in_order=False lets workers yield batches out of their order, so that no position is exact")


def check_shared(
    saved: Any,
    own: Mapping[str, Any],
    *,
    allow: Collection[str] = (),
    allowed: Mapping[str, str] | None = None,
    compare: Mapping[str, Callable[[Any, Any], list[str]]] | None = None,
) -> None:
    """Check that a loader feeds the data of a checkpoint.

    Args:
        saved: shared state in the checkpoint.
        own: shared state of this loader, with the kind of the loader under "loader".
        allow: names of entries that may differ.
        allowed: names that `allow` may have -> effect of such a difference.
        compare: names of entries -> function (saved, own) that returns the differences in words.

    Raises:
        IncompatibleCheckpointError: the states differ; the message has the differences and the remedy.
    """
    kind = saved.get("loader") if isinstance(saved, Mapping) else None
    if kind != own["loader"]:
        other = f"a {kind}" if isinstance(kind, str) else "another kind of loader"
        raise IncompatibleCheckpointError(
            f"the data loader of the checkpoint is {other}, from which a {own['loader']} cannot resume: load it into "
            "one of the kind that saved it"
        )
    found = []
    for name, value in own.items():
        if compare and name in compare:
            found += compare[name](saved.get(name), value)
        elif name not in allow and not equal(saved.get(name), value):
            found.append(f"{name} was {short(saved.get(name))} and is {short(value)} here{remedy(name, allowed)}")
    if found:
        raise IncompatibleCheckpointError("the data loader cannot resume from this checkpoint: " + "; ".join(found))


def remedy(name: str, allowed: Mapping[str, str] | None) -> str:
    """Return the remedy for a difference, to be put behind it."""
    if allowed and name in allowed:
        return f' (allow=("{name}",) accepts that: {allowed[name]})'
    return ": set it as the run began"


def short(value: object) -> str:
    """Return a value as text of one line."""
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
