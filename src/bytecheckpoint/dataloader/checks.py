"""Checks that all loaders share: their rank, and what they go on from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch.distributed

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.representation.values.equality import equal

__all__ = ["check_allow", "check_rank", "check_shared", "remedy", "share", "short"]


def check_rank(rank: int | None, ranks: int | None) -> tuple[int, int]:
    """Return the data-parallel rank and the number of these: 0 of 1 by default, if the job is one process.

    Raises:
        UsageError: they do not fit each other, or several processes were not told theirs.
    """
    if rank is None and ranks is None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and (processes := torch.distributed.get_world_size()) > 1:
            raise UsageError(
                f"these {processes} processes were not told which of the data they feed: pass rank= and ranks=, the "
                'data-parallel ones (mesh["dp"].get_local_rank() and mesh["dp"].size(), or those of torch.distributed)'
            )
        return 0, 1
    if type(rank) is not int or type(ranks) is not int or not 0 <= rank < ranks:
        raise UsageError(f"rank {rank!r} of {ranks!r}: pass rank= and ranks= together, ints, 0 <= rank < ranks")
    return rank, ranks


def share(count: int, rank: int, ranks: int) -> range:
    """Return the run of `count` things that a rank has. The first ranks have one more if the others cannot.

    >>> [list(share(7, rank, 3)) for rank in range(3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    least, more = divmod(count, ranks)
    first = rank * least + min(rank, more)
    return range(first, first + least + (rank < more))


def check_allow(allow: Collection[str], known: Collection[str]) -> None:
    """Check the argument `allow` of a loader.

    Raises:
        UsageError: it has a name that the loader does not know.
    """
    if unknown := sorted({*allow} - {*known}):
        raise UsageError(f"allow= does not know {', '.join(unknown)}; it takes {', '.join(known)}")


def check_shared(
    saved: Any,
    own: Mapping[str, Any],
    *,
    allow: Collection[str] = (),
    allowed: Mapping[str, str] | None = None,
    compare: Mapping[str, Callable[[Any, Any], list[str]]] | None = None,
) -> None:
    """Check that a loader goes on with what the checkpoint was fed.

    Args:
        saved: the shared state of the checkpoint.
        own: the shared state here. Its "loader" says which kind of loader it is of.
        allow: names of what may differ.
        allowed: what `allow` may name -> what happens then.
        compare: names of what is compared by (saved, own) -> the differences, each in words.

    Raises:
        IncompatibleCheckpointError: they differ; the message says in what, and what to do.
    """
    kind = saved.get("loader") if isinstance(saved, Mapping) else None
    if kind != own["loader"]:
        other = f"a {kind}" if isinstance(kind, str) else "another kind of loader"
        raise IncompatibleCheckpointError(
            f"the data loader of the checkpoint is {other}, from which a {own['loader']} cannot go on: load it into one of "
            "the kind that saved it"
        )
    found = []
    for name, value in own.items():
        if compare and name in compare:
            found += compare[name](saved.get(name), value)
        elif name not in allow and not equal(saved.get(name), value):
            found.append(f"{name} was {short(saved.get(name))} and is {short(value)} here{remedy(name, allowed)}")
    if found:
        raise IncompatibleCheckpointError("the data loader cannot go on from this checkpoint: " + "; ".join(found))


def remedy(name: str, allowed: Mapping[str, str] | None) -> str:
    """Return what to do about a difference, to be put behind it."""
    if allowed and name in allowed:
        return f' (allow=("{name}",) accepts that: {allowed[name]})'
    return ": set it as the run began"


def short(value: object) -> str:
    """Return a value as text of one line."""
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
