"""A data loader's buffers among the saves of several ranks: do they cost more than the same bytes as tensors would?

ByteCheckpoint, section 4.5, and Figure 9. The loader's state is as large as the sharded tensors beside it, and is handed
over before the save (the case loader-state measures that). Phases are those of the slowest rank in each of them;
"write_least" is the quickest rank's. `wall` is the whole save; of asynchronous ones the blocking time, with "end_to_end"
beside it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.cases.loader_state import BufferedLoader
from benchmarks.measure import Arm, measure
from benchmarks.state import sharded, size_of
from bytecheckpoint.dataloader import WorkerOptions

__all__ = ["loader_upload"]

_PHASES = {"capture": "gathering", "plan": "plan", "stage": "staging", "write": "write", "commit": "commit"}


def loader_upload(bench: Bench) -> None:
    """Measure saves of tensors alone, with a loader, and with as many bytes more in tensors."""
    if bench.options.short and bench.place == "disk":
        return
    world = bench.world
    tensors = sharded(bench.options.nbytes)
    nbytes = size_of(tensors)
    more = {f"more.{name}": tensor for name, tensor in sharded(bench.options.nbytes).items()}
    with BufferedLoader(nbytes, WorkerOptions(1, state_every=1), rank=world.rank, ranks=world.size) as loader:
        states = {
            "tensors alone": {"model": tensors},
            "bytecheckpoint": {"model": tensors, "dataloader": loader},
            "as many bytes more in tensors": {"model": tensors | more},
        }
        for asynchronous, kind in ((False, "synchronous"), (True, "asynchronous: blocking")):
            arms = [
                Arm(
                    name,
                    partial(_save, bench, name, state, asynchronous),
                    partial(_take_batch, loader),
                    partial(bench.clear, name),
                )
                for name, state in states.items()
            ]
            case = f"save beside a loader, {kind}"
            results = measure(world, case, bench.place, nbytes, arms, bench.options.rounds)
            for result in results:
                result.wall = result.extra.pop("blocking", result.wall)
                result.nbytes *= 1 if result.arm == "tensors alone" else 2
            bench.add(*results)
    bench.clear_all()


def _take_batch(loader: BufferedLoader) -> None:
    next(loader)
    loader.stream_states()


def _save(bench: Bench, name: str, state: dict[str, Any], asynchronous: bool) -> dict[str, float]:
    report = bytecheckpoint.save(bench.folder / name, state, async_checkpoint=asynchronous).result()
    write = report.phases.get("write", 0.0) + report.phases.get("finish", 0.0)
    phases = {**report.phases, "write": write}
    figures = {_PHASES[phase]: phases.get(phase, 0.0) for phase in _PHASES}
    figures["write_least"] = -bench.world.max(-write)
    if asynchronous:
        figures |= {"blocking": report.blocking_seconds, "end_to_end": report.total_seconds}
    else:
        figures["blocking"] = report.total_seconds
    return figures
