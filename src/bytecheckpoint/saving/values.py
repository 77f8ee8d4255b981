"""Decide which rank writes which value, and for which ranks a written copy stands (pure functions over records)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.representation.catalog import VALUES_SLOT
from bytecheckpoint.representation.names import unescape
from bytecheckpoint.saving.messages import Key, ValueRecord

__all__ = ["assign_values", "check_parts", "owners_of_values", "unwritten_values"]

#: All ranks' values by rank.
RankValues = Mapping[int, Sequence[ValueRecord]]


def assign_values(values: RankValues, *, whole_world: bool) -> dict[int, set[Key]]:
    """Choose each rank's values to write: one rank writes where one copy can stand for all, else each rank its own.

    Args:
        values: of the ranks that ask for a plan.
        whole_world: these are all ranks.
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


def check_parts(values: RankValues) -> None:
    """Check that ranks that hold one part of a state hold the same, and that together they hold all parts.

    Raises:
        IncompatibleCheckpointError: they do not; the message names the part and two ranks, or how many parts there are.
    """
    if not any(record.parts for records in values.values() for record in records):
        return  # as in most saves
    found: dict[str, set[str]] = {}
    totals: dict[str, int] = {}
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
    """Find values that no written copy stands for, by the rank that must still write them."""
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
        values: of all ranks.
        shared: the owner of a copy that stands for all ranks. Any further copy belongs to its writer.
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
