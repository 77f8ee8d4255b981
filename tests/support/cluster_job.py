"""A rank of a job that a launcher starts: it saves step after step, and continues where the job before has ended.

    python cluster_job.py FOLDER STEPS [--pace SECONDS] [--preemption]

The launcher may be torchrun, Slurm's srun or MPI's mpirun: it sets the variables with the rank.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")


def _first(names: Iterable[str], variables: Mapping[str, str]) -> str:
    return next(variables[name] for name in names if name in variables)


def main(arguments: argparse.Namespace) -> None:
    variables = os.environ
    variables["RANK"], variables["WORLD_SIZE"] = _first(_RANK, variables), _first(_SIZE, variables)
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    import bytecheckpoint
    from bytecheckpoint.collectives import current
    from bytecheckpoint.manager import Preemption

    told = logging.StreamHandler(sys.stdout)
    told.setFormatter(logging.Formatter(f"rank {variables['RANK']}: %(name)s: %(message)s"))
    logging.getLogger("bytecheckpoint").addHandler(told)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,))

    def filled(step: int) -> torch.Tensor:
        return torch.arange(60_000, dtype=torch.float32).reshape(300, 200) + step

    count = torch.zeros((), dtype=torch.int64)
    states = {"model": {"w": distribute_tensor(filled(0), mesh, [Shard(0)]), "count": count}}

    def note(text: str) -> None:
        with (arguments.folder.parent / f"{arguments.folder.name}.log").open("a") as log:
            log.write(text + "\n")  # one call, so that lines of ranks do not mix

    preemption = Preemption() if arguments.preemption else None
    with bytecheckpoint.CheckpointManager(arguments.folder, states, every=1, keep=3, preemption=preemption) as manager:
        manager.restore_latest()
        begun = manager.step
        assert torch.equal(states["model"]["w"].full_tensor(), filled(begun)) and count.item() == begun
        note(f"rank {rank} of {size} on {current().host.partition('/')[0]} begins at {begun}")
        for step in range(begun + 1, begun + arguments.steps + 1):
            states["model"]["w"].copy_(distribute_tensor(filled(step), mesh, [Shard(0)]))
            count.fill_(step)
            manager.maybe_save(step)
            if manager.preempted:
                break
            time.sleep(arguments.pace)
    note(f"rank {rank} of {size} ends at {count.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--preemption", action="store_true", help="save and end on SIGTERM")
    main(parser.parse_args())
