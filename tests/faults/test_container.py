"""A distributed job under the default limits of a container. This file is also the program of each rank."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.servers.process import free_port
from tests.support.container import container_command, forbid_reading_of_other_processes, lacks
from tests.support.memory import as_on_disk
from tests.support.processes import environment, python


@pytest.mark.slow  # each rank imports torch
@pytest.mark.skipif(bool(lacks()), reason=f"NOT TESTED HERE: {lacks()}")
def test_saves_and_loads_in_a_container() -> None:
    """64 MiB of /dev/shm, no process_vm_readv, no capabilities, 64 KiB of locked memory, a read-only root, nobody's."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", __file__]
    with tempfile.TemporaryDirectory() as folder:  # pytest's are for their owner only
        Path(folder).chmod(0o755)
        command = container_command(python(*launch, "checkpoints"), Path(folder, "scratch"))
        variables = environment() | {"PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all is well") == 2
    # Each limit that costs something is named: by each rank once, or by the helper process that meets it.
    said = [line for line in done.stderr.splitlines() if line.startswith("bytecheckpoint:")]
    assert len(said) == 2 and all("cannot read the memory of other ranks of this machine" in line for line in said)
    assert "goes straight to the durable storage: the hot tier mem://tier is full" in done.stderr


def main(root: str) -> None:
    forbid_reading_of_other_processes()
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    import bytecheckpoint

    told = logging.StreamHandler()
    told.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logging.getLogger("bytecheckpoint").addHandler(told)
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24 << 20, dtype=torch.float32).reshape(4096, -1)  # 96 MiB
    state = {"model": {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "everywhere": whole[:2048].clone()}}
    for number in range(2):
        bytecheckpoint.save(f"{root}/{number}", state, async_checkpoint=True).result()
    bytecheckpoint.save(f"{root}/sync", state)
    bytecheckpoint.save(f"tier+file://{Path(root).absolute()}/tier", state, async_checkpoint=True).result()
    for name in ("0", "1", "sync", "tier"):
        loaded = {
            "model": {
                "sharded": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)]),
                "everywhere": torch.zeros_like(whole[:2048]),
            }
        }
        # From memory each rank reads by itself; from a disk they read each byte once, and exchange it.
        bytecheckpoint.load(f"{root}/{name}" if name == "tier" else as_on_disk(f"{root}/{name}"), loaded)
        assert torch.equal(loaded["model"]["sharded"].full_tensor(), whole)
        assert torch.equal(loaded["model"]["everywhere"], whole[:2048])
    time.sleep(0.5 * dist.get_rank())  # so that their lines do not mix
    print("all is well", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
