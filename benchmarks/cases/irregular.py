"""Irregular optimizer state (flat parameters of FSDP1): ours against DCP, which gathers and copies it.

ByteCheckpoint, section 4.4 and Table 7. Network bytes are counted at the loopback device, so every library's traffic
counts, and the messages of plan and commit too.
"""

from __future__ import annotations

import ctypes
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Arm, peak_memory
from bytecheckpoint.collectives import current
from bytecheckpoint.world import world_of

__all__ = ["Contender", "irregular", "measure_contenders", "pool_bytes"]

_WIDTH = 1000  # no power of two: flat shards end in the middle of rows


def _trained(nbytes: int) -> tuple[FSDP, torch.optim.Optimizer, int]:
    """Return a model under FSDP1, its AdamW after one step, and the bytes of both over all ranks."""
    layer = 4 * (_WIDTH * _WIDTH + _WIDTH)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # with it, FSDP's sharded state dicts hold DTensors
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(max(nbytes // (3 * layer), 2))))
    for number, inner in enumerate(model):
        model[number] = FSDP(inner, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu"))
    wrapped = FSDP(model, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    wrapped(torch.rand(2, _WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return wrapped, optimizer, 3 * layer * len(model)


def _loopback_bytes() -> int:
    """Return the bytes that the machine has sent to itself."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    return 0


def _save_with_dcp(model: FSDP, optimizer: torch.optim.Optimizer, sharded: bool, folder: Path) -> Callable[[], object]:
    """Start a save of state dicts by DCP, for which FSDP gathers flat state from all ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if sharded:
            FSDP.set_state_dict_type(
                model,
                StateDictType.SHARDED_STATE_DICT,
                ShardedStateDictConfig(offload_to_cpu=True),
                ShardedOptimStateDictConfig(offload_to_cpu=True),
            )
        else:
            FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
        state: dict[str, Any] = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
        future: Any = dcp.async_save(state, checkpoint_id=str(folder))
    end: Callable[[], object] = future.result
    return end


class Contender:
    """An arm that starts a save, and waits for its end outside of the measured time.

    Args:
        bench: the run.
        name: name of the arm.
        begin: starts a save into a folder; returns a function that waits for its end.
        cached_bytes: returns the memory that stays mapped from save to save, which the rise during a save leaves out.
    """

    def __init__(
        self,
        bench: Bench,
        name: str,
        begin: Callable[[Path], Callable[[], object]],
        cached_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._bench = bench
        self._begin = begin
        self._cached_bytes = cached_bytes
        self._folder = bench.folder / name
        self._wait: Callable[[], object] | None = None
        self._since = (0.0, 0)
        self._memory: dict[str, float] = {}
        self._watch: Any = None
        self.ends: list[dict[str, float]] = []
        self.arm = Arm(name, self._run, self._before, self._end)

    def _before(self) -> None:
        self._bench.clear(self.arm.name)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or memory of an earlier round would hide what this one takes

    def _run(self) -> None:
        self._watch = peak_memory(self._memory)
        self._watch.__enter__()
        self._since = time.perf_counter(), _loopback_bytes()
        self._wait = self._begin(self._folder)

    def _end(self) -> None:
        world = self._bench.world
        if self._wait is not None:
            self._wait()
        seconds = time.perf_counter() - self._since[0]
        self._watch.__exit__(None, None, None)
        world.barrier()
        network = _loopback_bytes() - self._since[1]
        peak = self._memory["peak_bytes"] + self._cached_bytes() if world.rank == 0 else 0.0
        self.ends.append(
            {
                "end_to_end": world.max(seconds),
                "network_bytes": world.max(float(network)),
                "rank_0_bytes": world.max(peak),
            }
        )
        self._wait = None


def pool_bytes() -> int:
    """Size of this rank's staging pool, which stays from save to save."""
    return world_of(current()).resources.pools.shared.capacity


def measure_contenders(bench: Bench, case: str, nbytes: int, contenders: Sequence[Contender]) -> None:
    """Measure the blocking time of each contender's save.

    Further figures: seconds to the end of the save, network bytes of all ranks together, and the largest rise of rank 0's
    resident memory.
    """
    results = bench.measure(case, nbytes, [c.arm for c in contenders])
    for result, contender in zip(results, contenders, strict=True):
        for key in ("end_to_end", "network_bytes", "rank_0_bytes"):
            result.extra[key] = [end[key] for end in contender.ends[1:]]  # the first round does not count
    bench.clear_all()


def irregular(bench: Bench) -> None:
    """Measure saves; `wall` is the blocking time; see `measure_contenders` for the other figures."""
    model, optimizer, nbytes = _trained(bench.options.nbytes)

    def ours(folder: Path) -> Callable[[], object]:
        states = {"model": model, "optimizer": optimizer}
        return bytecheckpoint.save(folder, states, async_checkpoint=True).result

    contenders = [Contender(bench, "bytecheckpoint", ours, pool_bytes)]
    if any(peer.name == "DCP" for peer in bench.peers):
        contenders += [
            Contender(bench, "DCP, sharded state dicts", partial(_save_with_dcp, model, optimizer, True)),
            Contender(bench, "DCP, full state dicts", partial(_save_with_dcp, model, optimizer, False)),
        ]
    measure_contenders(bench, "irregular state (FSDP1): blocking", nbytes, contenders)
