"""Simulate the metrics of a run, for tests, documents and benchmarks. Their paths begin with "simulated://"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.monitoring.record import LEVELS, ROW, RankRecord
from bytecheckpoint.monitoring.table import OperationRecord, operation_record

__all__ = ["Fault", "SimulatedRun"]

_SAVE = ("wait", "capture", "plan", "stage", "write", "finish", "commit")
_LOAD = ("catalog", "agree", "destination", "plan", "agree", "read", "apply")
#: Median seconds of phases whose length does not depend on the bytes.
_SECONDS = {
    "wait": 0.0, "capture": 0.02, "plan": 0.01, "finish": 0.15, "commit": 0.3, "catalog": 0.2, "agree": 0.05,
    "destination": 0.3, "apply": 0.4,
}  # fmt: skip
#: Seconds of the first plan, in which all ranks' tables are joined.
_FIRST_PLAN = 2.0
#: Bytes per second of a rank's copy from its device.
_COPY_BANDWIDTH = 12e9
_CHUNKS = 8
_LEVEL = {name: place for place, name in enumerate(LEVELS)}


@dataclass(frozen=True, slots=True)
class Fault:
    """A simulated fault.

    Attributes:
        kind: "slow" (a phase takes longer), "retry" (requests are repeated in it), "fail" (it fails) or "missing" (the
            rank reports nothing).
        ranks: ranks with the fault.
        phase: phase with the fault.
        factor: factor of the phase's length, for "slow".
        first: number of the first save with the fault, from 0.
        last: number of the last save with the fault; None for all later ones.
    """

    kind: str
    ranks: Sequence[int]
    phase: str = "write"
    factor: float = 5.0
    first: int = 0
    last: int | None = None


@dataclass(frozen=True)
class SimulatedRun:
    """A run whose times are drawn from distributions.

    Attributes:
        mesh: size by dimension, the outermost first; their product is the number of ranks.
        ranks_per_host: ranks of one machine.
        saves: number of saves.
        loads: number of loads, before the first save.
        every: training steps between saves.
        interval: seconds between saves.
        nbytes: bytes that each rank moves.
        bandwidth: bytes per second of each rank.
        noise: standard deviation of the logarithm of all times.
        chunks: spans of single chunks per rank.
        faults: faults of ranks.
        seed: seed of the random numbers.
        began: beginning of the run, in seconds since 1970.
    """

    mesh: Mapping[str, int]
    ranks_per_host: int = 8
    saves: int = 20
    loads: int = 1
    every: int = 100
    interval: float = 900.0
    nbytes: int = 1 << 30
    bandwidth: float = 250e6
    noise: float = 0.08
    chunks: int = 2
    faults: Sequence[Fault] = ()
    seed: int = 0
    began: float = 1_790_000_000.0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(np.prod([*self.mesh.values()]))

    def records(self) -> Iterator[OperationRecord]:
        """Iterate over the operations of the run, in order of time."""
        random = np.random.default_rng(self.seed)
        for number in range(self.loads):
            began = self.began + number * self.interval / (self.loads + 1)
            yield self._operation("load", number, began, random)
        for number in range(self.saves):
            yield self._operation("save", number, self.began + (number + 1) * self.interval, random)

    def _operation(self, kind: str, number: int, began: float, random: np.random.Generator) -> OperationRecord:
        size = self.world_size
        faults = [
            f for f in self.faults if kind == "save" and f.first <= number <= (number if f.last is None else f.last)
        ]
        phases = _SAVE if kind == "save" else _LOAD
        shares = np.full(size, float(self.nbytes)) * np.exp(random.normal(0, 0.01, size))
        begins, seconds = self._times(phases, shares, number, faults, random)
        failed = {rank: fault.phase for fault in faults if fault.kind == "fail" for rank in fault.ranks}
        missing = {rank for fault in faults if fault.kind == "missing" for rank in fault.ranks}
        step = (number + 1) * self.every if kind == "save" else self.every
        records = [
            RankRecord(
                kind=kind,
                number=number + 1,
                path=f"simulated://run/step_{step}",
                step=step,
                began=began,
                rank=rank,
                host=f"host-{rank // self.ranks_per_host:04d}",
                mesh=mesh,
                attempt=1,
                error=self._error(failed),
                stage=failed.get(rank, "commit") if failed else "",
                seconds=ends,
                blocking_seconds=blocking,
                nbytes=int(nbytes),
                strings=strings,
                rows=rows,
            )
            for rank, (mesh, ends, blocking, nbytes, (strings, rows)) in enumerate(
                zip(
                    self._places(),
                    (begins[-1] + seconds[-1]).tolist(),
                    (begins[phases.index("stage") + 1] if kind == "save" else begins[-1] + seconds[-1]).tolist(),
                    shares.tolist(),
                    self._rows(kind, phases, begins, seconds, shares, number, faults),
                    strict=True,
                )
            )
            if rank not in missing
        ]
        return operation_record(records, f"simulated-{self.seed}", size)

    def _times(
        self,
        phases: Sequence[str],
        shares: NDArray[np.float64],
        number: int,
        faults: Sequence[Fault],
        random: np.random.Generator,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return beginnings and lengths of all phases of all ranks."""
        begins, lengths = np.zeros((2, len(phases), len(shares)))
        now = np.abs(random.normal(0, 0.005, len(shares)))
        moved = {"stage": shares / _COPY_BANDWIDTH, "write": shares / self.bandwidth, "read": shares / self.bandwidth}
        for place, phase in enumerate(phases):
            usual = moved.get(phase, _SECONDS.get(phase, 0.1))
            seconds = usual * np.exp(random.normal(0, self.noise, len(shares)))
            for fault in faults:
                if fault.phase == phase and fault.kind in ("slow", "retry"):
                    seconds[list(fault.ranks)] *= fault.factor
            begins[place] = now
            first_plan = phase == "plan" and "commit" in phases and not number
            if first_plan or phase in ("agree", "commit"):  # all ranks continue at the same moment
                end = now.max() + (_FIRST_PLAN if first_plan else _SECONDS[phase])
                lengths[place] = end - now
            else:
                lengths[place] = seconds
            now = now + lengths[place]
        return begins, lengths

    def _rows(
        self,
        kind: str,
        phases: Sequence[str],
        begins: NDArray[np.float64],
        lengths: NDArray[np.float64],
        shares: NDArray[np.float64],
        number: int,
        faults: Sequence[Fault],
    ) -> Iterator[tuple[list[str], bytes]]:
        """Iterate over the ranks' strings and rows."""
        strings = ["", "file", *dict.fromkeys([*phases, "write", "read", "copy", "create", "retry", "cached plan"])]
        code = {text: place for place, text in enumerate(strings)}
        moving = "write" if kind == "save" else "read"
        at = phases.index(moving)
        size = len(shares)
        columns: list[dict[str, Any]] = [
            {"level": _LEVEL["phase"], "name": code[phase], "phase": code[phase], "begin": begins[i],
             "seconds": lengths[i], "count": 1}
            for i, phase in enumerate(phases)
        ]  # fmt: skip
        totals: dict[str, tuple[Any, Any, Any]] = {moving: (_CHUNKS, lengths[at], shares)}
        if kind == "save":
            totals["copy"] = (1, lengths[phases.index("stage")], shares)
            totals["create"] = (1, lengths[at] * 0.01, 0)
            totals["cached plan"] = (int(number > 0), 0.0, 0)
        retries = np.zeros(size, np.int64)
        for fault in faults:
            if fault.kind == "retry":
                retries[list(fault.ranks)] += 5
        if retries.any():
            totals["retry"] = (retries, retries * 0.5, 0)
        columns += [
            {"level": _LEVEL["total"], "name": code[name], "seconds": seconds, "count": count, "nbytes": nbytes}
            for name, (count, seconds, nbytes) in totals.items()
        ]
        columns += [
            {"level": _LEVEL["span"], "name": code[moving], "phase": code[moving], "subject": code["file"],
             "begin": begins[at] + lengths[at] * chunk / self.chunks, "seconds": lengths[at] / _CHUNKS, "count": 1,
             "nbytes": shares / _CHUNKS}
            for chunk in range(self.chunks)
        ]  # fmt: skip
        rows = np.zeros((size, len(columns)), ROW)
        for place, column in enumerate(columns):
            for name, values in column.items():
                rows[name][:, place] = values
        for rank in range(size):
            own = [strings[0], f"model/rank-{rank:05d}.safetensors", *strings[2:]]
            yield own, rows[rank].tobytes()

    def _places(self) -> Iterator[dict[str, int]]:
        """Iterate over the ranks' coordinates."""
        for place in np.ndindex(*self.mesh.values()):
            yield dict(zip(self.mesh, place, strict=True))

    @staticmethod
    def _error(failed: Mapping[int, str]) -> str:
        if not failed:
            return ""
        first = min(failed)
        return f"StorageFullError: rank {first}, {failed[first]}: no space left on the storage"
