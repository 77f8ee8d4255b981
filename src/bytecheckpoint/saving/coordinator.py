"""Rank 0's part of a save: plan for all ranks, wait until everybody's files are durable, commit, tell everybody.

It runs on a thread of its own and talks to its own rank by the same messages as to the others, so there is one
protocol (docs/architecture.md, "A save"). Whatever happens here ends in a message to every rank that waits.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..collectives import Collective
from ..errors import (
    CheckpointError,
    IncompatibleCheckpointError,
    StorageConflictError,
    StorageError,
    StorageUnavailableError,
    UsageError,
)
from ..planning.replicas import group_equal
from ..planning.save_plan import LocalTable, SavePlan, all_rows, plan_save
from ..representation.names import CATALOG_NAME, generation_of
from ..storage import Storage
from .commit import build_catalog, encode_catalog
from .messages import (
    MIXED_PLANS,
    Answer,
    Description,
    Failure,
    Outcome,
    Report,
    Request,
    ValueRecord,
    decode,
    encode,
    tag,
)

__all__ = ["Coordinator", "SaveTask"]

_log = logging.getLogger("bytecheckpoint")
_KEPT_PLANS = 16
#: A rank that writes slower than this is taken for hanging, bytes per second.
_SLOWEST = 4 << 20


Key = tuple[str, str, str]


@dataclass(slots=True)
class SaveTask:
    """What rank 0 knows about a save besides the messages.

    Attributes:
        sequence: number of the save.
        timeout: seconds that a step may take, beyond the time for moving bytes.
        storage: where the checkpoint goes; set before rank 0 sends its first message.
        replaces: version of the catalog that was there when rank 0 began to write, "" for none.
        generation: of the new files.
        info: what the catalog says about the save as a whole.
        layout: how the objects are distributed; rank 0 finds it when it asks for a plan, and keeps it with the plan.
    """

    sequence: int
    timeout: float
    storage: Storage | None = None
    replaces: str = ""
    generation: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] | None = None


@dataclass(slots=True)
class _KnownPlan:
    name: str
    plan: SavePlan
    tables: list[LocalTable]
    expected: list[str]  # the plan name that each rank reports when it follows this plan


class _Failed(Exception):
    """A step failed for the reason in `failure`; `waiting` ranks are to be told under the tag they wait for."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error["message"])
        self.failure = failure


class Coordinator:
    """Serves the saves of one world, in order."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._plans: OrderedDict[str, _KnownPlan] = OrderedDict()

    def run(self, task: SaveTask) -> None:
        """See one save through. Never raises: what goes wrong is told to the ranks."""
        world = range(self._collective.world_size)
        # The tag under which each rank waits for its next word.
        waits: dict[int, str] = dict.fromkeys(world, "f")
        try:
            self._run(task, waits)
        except BaseException as error:  # noqa: BLE001  told to every rank
            failure = error.failure if isinstance(error, _Failed) else Failure.of(0, "coordination", error)
            self._plans.clear()
            for rank, step in waits.items():
                self._tell(task, rank, step, failure)

    def _tell(self, task: SaveTask, rank: int, step: str, message: Any) -> None:
        try:
            self._collective.send(rank, tag(task.sequence, step), encode(message))
        except CheckpointError as error:
            _log.warning("save %d: cannot tell rank %d: %s", task.sequence, rank, error)

    def _collect(self, task: SaveTask, ranks: Collection[int], step: str, extra: float) -> dict[int, Any]:
        got = self._collective.collect(sorted(ranks), tag(task.sequence, step), timeout=task.timeout + extra)
        return {rank: decode(message) for rank, message in zip(sorted(ranks), got, strict=True)}

    @staticmethod
    def _raise_first(messages: Mapping[int, Any], waits: dict[int, str]) -> None:
        failures = [m for m in messages.values() if isinstance(m, Failure)]
        for failure in failures:
            waits.pop(failure.rank, None)  # it knows
        if failures:
            raise _Failed(failures[0])

    def _run(self, task: SaveTask, waits: dict[int, str]) -> None:
        world = range(self._collective.world_size)
        try:
            first = self._collect(task, world, "a", self._writing_time(None))
        except CheckpointError as error:
            # Ranks may wait for an answer or for the end; both must hear.
            for rank in world:
                self._tell(task, rank, "b", Failure.of(0, "coordination", error))
            raise
        requests = {r: m for r, m in first.items() if isinstance(m, Request)}
        waits.update(dict.fromkeys(requests, "b"))
        self._raise_first(first, waits)
        reports: dict[int, Report] = {r: m for r, m in first.items() if isinstance(m, Report)}
        known, answers = self._plan(task, requests, reports, waits)
        for rank, answer in answers.items():
            self._tell(task, rank, waits[rank], answer)
            waits[rank] = "f" if rank in requests else "k"
        if requests and all(r.dry for r in requests.values()):
            return
        later = self._collect(task, answers, "c", self._writing_time(known.plan))
        self._raise_first(later, waits)
        reports.update(later)
        self._check(reports, known)
        self._complete_values(task, reports, waits)
        assert task.storage is not None
        catalog = build_catalog(known.plan, reports, task.generation, {**task.info, "layout": task.layout})
        # Looked for before the commit: what appears later belongs to a save that begins later.
        stale = self._stale(task.storage, {f.name: f.size for f in catalog.files}, task.replaces)
        self._publish(task, encode_catalog(catalog))
        self._clean(task.storage, stale)
        for rank in world:
            self._tell(task, rank, waits[rank], Outcome())

    @staticmethod
    def _publish(task: SaveTask, catalog: bytes) -> None:
        """Commit. What fails may have taken effect all the same (an answer that got lost, an fsync after the rename)."""
        storage = task.storage
        assert storage is not None
        try:
            storage.publish(CATALOG_NAME, catalog, expected=task.replaces)
        except BaseException as error:
            keep = isinstance(error, StorageUnavailableError) and error.undecided
            try:
                keep = keep or storage.read(CATALOG_NAME) == catalog
            except FileNotFoundError:
                pass
            except (StorageError, OSError):
                keep = True
            raise _Failed(Failure.of(0, "commit", error, keep=keep)) from error

    def _writing_time(self, plan: SavePlan | None) -> float:
        plans = [plan] if plan is not None else [k.plan for k in self._plans.values()]
        most = 0
        for p in plans:
            loads = np.bincount(p.rank, p.nbytes, minlength=1)
            most = max(most, int(loads.max(initial=0)))
        return most / _SLOWEST

    def _plan(
        self, task: SaveTask, requests: dict[int, Request], reports: dict[int, Report], waits: dict[int, str]
    ) -> tuple[_KnownPlan, dict[int, Answer]]:
        """The plan that this save follows, and the answers to the ranks that asked for one, or have to write anew."""
        old = self._known(reports) if reports else None
        if old is not None:
            # Ranks keep the plans that they used last, so this side does too.
            self._plans.move_to_end(old.name)
            if not requests:
                return old, {}
        urls = {m.url for m in requests.values()} | {m.url for m in reports.values()}
        if len(urls) > 1:
            raise UsageError(f"ranks save to different paths: {', '.join(sorted(urls)[:3])}; give all the same path")
        tables = {rank: request.table for rank, request in requests.items()}
        if old is not None:
            tables |= {rank: old.tables[rank] for rank in reports}
            fixed = {rank: old.plan.locals_of(rank) for rank in reports}
        else:
            told = self._described(task, reports, waits)
            tables |= {rank: description.table for rank, description in told.items()}
            fixed = {rank: np.frombuffer(description.rows, np.int64) for rank, description in told.items()}
        ordered = [tables[rank] for rank in range(self._collective.world_size)]
        plan, why_anew = _plan_around(ordered, fixed)
        name = f"{self._collective.world_id}-{task.sequence}"
        asked = {rank: request.values for rank, request in requests.items()}
        if why_anew:
            asked |= {rank: report.values for rank, report in reports.items()}
        expected = [name if rank in asked else reports[rank].plan for rank in range(len(ordered))]
        known = _KnownPlan(name, plan, ordered, expected)
        self._plans[name] = known
        while len(self._plans) > _KEPT_PLANS:
            self._plans.popitem(last=False)
        values = _writers(asked, whole_world=len(asked) == len(ordered))
        differences = _differences(requests, ordered)
        answers = {
            rank: Answer(name, plan.locals_of(rank).tobytes(), sorted(values[rank]), differences, why_anew)
            for rank in asked
        }
        return known, answers

    def _known(self, reports: Mapping[int, Report]) -> _KnownPlan | None:
        """The plan to which all that was reported belongs, if it is remembered."""
        return next(
            (
                k
                for k in reversed(self._plans.values())
                if all(k.expected[rank] == m.plan for rank, m in reports.items())
            ),
            None,
        )

    def _described(self, task: SaveTask, ranks: Collection[int], waits: dict[int, str]) -> dict[int, Description]:
        """Ask ranks that have written by plans that are not remembered what they hold, and what they wrote."""
        for rank in ranks:
            self._tell(task, rank, waits[rank], Outcome(describe=True))
            waits[rank] = "h"
        told = self._collect(task, ranks, "d", 0.0) if ranks else {}
        self._raise_first(told, waits)
        return told

    @staticmethod
    def _check(reports: Mapping[int, Report], known: _KnownPlan) -> None:
        urls = {r.url for r in reports.values()}
        if len(urls) > 1:
            raise UsageError(f"ranks save to different paths: {', '.join(sorted(urls)[:3])}; give all the same path")
        for rank, report in reports.items():
            if report.plan != known.expected[rank]:
                raise IncompatibleCheckpointError(f"rank {rank} followed another save plan; the next save plans anew")

    def _complete_values(self, task: SaveTask, reports: dict[int, Report], waits: dict[int, str]) -> None:
        """Have values written that no longer equal the copy that was to stand for them."""
        lacking = _unwritten({r: m.values for r, m in reports.items()})
        if not lacking:
            return
        for rank, keys in lacking.items():
            self._tell(task, rank, waits[rank], Outcome(write_values=sorted(keys)))
            waits[rank] = "g"
        more = self._collect(task, lacking, "e", 0.0)
        self._raise_first(more, waits)
        for rank, report in more.items():
            reports[rank] = report

    @staticmethod
    def _stale(storage: Storage, named: Mapping[str, int], replaces: str) -> list[str]:
        """Storage files that the new catalog does not name: the replaced checkpoint's, and those of killed saves.

        Args:
            storage: as rank 0 sees it.
            named: the new files and their sizes.
            replaces: version of the catalog that the new one is to replace.

        Raises:
            StorageConflictError: another save has committed meanwhile, and taken these files for those of a killed one.
            StorageError: a file that a rank has written is not here, or has another size: ranks do not share the path.
        """
        try:
            present = dict(storage.list())
        except Exception as error:  # noqa: BLE001  a storage that cannot be listed can be saved to
            _log.warning("%s: old files could not be removed: %s", storage.url, error)
            return []
        for name, size in named.items():
            if present.get(name) != size and not storage.capabilities.machine_only:
                if storage.version(CATALOG_NAME) != replaces:
                    raise StorageConflictError(
                        f"cannot publish {storage.url}/{CATALOG_NAME}: another save replaced it meanwhile; let one job at "
                        f"a time save to a path"
                    )
                _refuse_unseen(storage, name, size)
        return [name for name in present if generation_of(name) is not None and name not in named]

    @staticmethod
    def _clean(storage: Storage, stale: Sequence[str]) -> None:
        try:
            storage.delete(stale)
        except Exception as error:  # noqa: BLE001  the save is committed: nothing may report its failure any more
            _log.warning("%s: old files could not be removed: %s", storage.url, error)


def _plan_around(tables: Sequence[LocalTable], fixed: Mapping[int, NDArray[np.int64]]) -> tuple[SavePlan, str]:
    """A plan in which the ranks in `fixed` have written the rows given, and the others write the rest.

    Returns:
        The plan, and "". Or else a plan without regard to what was written, and why that does not fit (a rank relied
        on another one for a shard that this one does not hold any more): then the ranks in `fixed` write anew.

    Raises:
        IncompatibleCheckpointError: the states of all ranks do not make whole tensors.
    """
    try:
        plan = plan_save(tables, fixed)
    except IncompatibleCheckpointError as error:
        if not fixed:
            raise
        why = str(error)
    else:
        # Offsets in files are reckoned from the rows of a plan, so what was written must be what the plan says.
        if all(np.array_equal(plan.locals_of(rank), rows) for rank, rows in fixed.items()):
            return plan, ""
        why = "ranks wrote what others have written"
    try:
        return plan_save(tables), why
    except IncompatibleCheckpointError as error:
        if len(fixed) < len(tables):
            raise
        raise IncompatibleCheckpointError(f"{MIXED_PLANS}: {error}") from error


def _refuse_unseen(storage: Storage, name: str, size: int) -> None:
    """Look at a file that the listing lacks: listings of network file systems may come from a cache."""
    try:
        present = storage.stat(name).size
    except FileNotFoundError:
        present = -1
    if present != size:
        found = f"{present} bytes of it" if present >= 0 else "nothing of it"
        raise StorageError(
            f"{storage.url}: {name} was written with {size} bytes, but rank 0 sees {found}; the path must be on storage "
            f"that all ranks share"
        )


def _by_key(values: Mapping[int, Sequence[ValueRecord]]) -> dict[Key, dict[int, ValueRecord]]:
    table: dict[Key, dict[int, ValueRecord]] = {}
    for rank in sorted(values):
        for record in values[rank]:
            table.setdefault(record.key, {})[rank] = record
    return table


def _writers(values: Mapping[int, Sequence[ValueRecord]], *, whole_world: bool) -> dict[int, set[Key]]:
    """Who writes which value: one rank where one copy can stand for all, else each its own."""
    chosen: dict[int, set[Key]] = {rank: set() for rank in values}
    for key, by_rank in _by_key(values).items():
        first: dict[bytes, int] = {}
        for rank, record in by_rank.items():
            first.setdefault(record.digest, rank)
        one_stands_for_all = len(first) == 1 and len(by_rank) == len(values) and whole_world
        for rank, record in by_rank.items():
            if first[record.digest] == rank or not (record.merged or one_stands_for_all):
                chosen[rank].add(key)
    return chosen


def _unwritten(values: Mapping[int, Sequence[ValueRecord]]) -> dict[int, set[Key]]:
    """Values that some rank must still write."""
    lacking: dict[int, set[Key]] = {}
    for key, by_rank in _by_key(values).items():
        written = {r.digest for r in by_rank.values() if r.file >= 0}
        same = len({r.digest for r in by_rank.values()}) == 1 and len(by_rank) == len(values)
        for rank, record in by_rank.items():
            if record.file >= 0 or (record.digest in written and (record.merged or same)):
                continue
            lacking.setdefault(rank, set()).add(key)
            written.add(record.digest)
    return lacking


def _differences(requests: Mapping[int, Request], tables: Sequence[LocalTable]) -> list[str]:
    """Keys of tensors whose copies differ between ranks, where content hashes were sent."""
    if not requests or not all(r.digests for r in requests.values()) or len(requests) < len(tables):
        return []
    tensors, boxes = all_rows(tables)
    digests: NDArray[np.uint64] = np.concatenate(
        [np.frombuffer(requests[r].digests, np.uint64) for r in sorted(requests)]
    )
    group = group_equal(boxes)
    order = np.argsort(group, kind="stable")
    same_group = group[order][1:] == group[order][:-1]
    differs = same_group & (digests[order][1:] != digests[order][:-1])
    rows = order[1:][differs]
    return sorted({str(tensors[int(t)].key) for t in boxes.tensor[rows]})
