"""verl's real manager of checkpoint engines with this package's engine, between workers of a real Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bytecheckpoint.errors import CorruptCheckpointError, StorageUnavailableError, UsageError
from tests.support.damage import flip_bit, storage_file
from tests.support.ray_cluster import ray_cluster

pytestmark = pytest.mark.timeout(300)
MODULE = "bytecheckpoint.integrations.verl_rollout"


@pytest.fixture
def cluster() -> Iterator[None]:
    with ray_cluster(4):
        yield


def group(kind: type, count: int, **arguments: Any) -> Any:
    """Start workers of verl."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    pool = RayResourcePool(process_on_nodes=[count], use_gpu=False, max_colocate_count=1)
    wanted = RayClassWithInitArgs(cls=ray.remote(kind), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=wanted, device_name="cpu")


def test_rollouts_hold_what_the_trainer_holds(cluster: None, tmp_path: Path) -> None:
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    from tests.integrations.verl.rollout_workers import Replica, Rollout, Trainer

    kwargs = {"bytecheckpoint": {"root": str(tmp_path)}}
    config = CheckpointEngineConfig(backend="bytecheckpoint", custom_backend_module=MODULE, engine_kwargs=kwargs)
    trainer = group(Trainer, 2, config=config)
    rollout = group(Rollout, 2, rollout_config=RolloutConfig(name="vllm", checkpoint_engine=config), model_config=None)
    first, second = (Replica(workers=[worker]) for worker in rollout.workers)
    manager = CheckpointEngineManager(config, trainer, [first, second])
    written = []
    for step, replicas in enumerate([[first, second], [first], [first, second]], 1):
        (expected, again), manager.replicas = trainer.train(1), replicas
        assert expected == again
        written.append(manager.update_weights(global_steps=10 * step)["checkpoint_engine/payload_mbytes"])
        found = rollout.fingerprint()
        assert found[0] == expected
        assert (found[1] == expected) == (second in replicas), "it was left out once, and caught up"
    assert written[1] < written[0] / 2
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in sorted(folder.glob("step_*"))] == [f"step_{step:08d}" for step in (1, 2, 3)]


def engine(root: Path, version: int, **arguments: Any) -> Any:
    from bytecheckpoint.integrations.verl_rollout import VersionsEngine

    made = VersionsEngine(root=str(root), is_master=True, **arguments)
    made.init_process_group(folder=str(root), version=version)
    return made


def weights(value: float, *names: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full((64, 64), value)) for name in names]


async def received(worker: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for name, tensor in worker.receive_weights()}


def test_versions_that_change_their_tensors(tmp_path: Path) -> None:
    """A wait that finds one, other names and another dtype, and a damaged one, after which a whole one comes."""
    sender, worker = engine(tmp_path, 1, rollout_dtype=None), engine(tmp_path, 1)

    async def together() -> dict[str, torch.Tensor]:
        waits = asyncio.create_task(received(worker))
        await asyncio.sleep(0.3)
        await sender.send_weights(weights(1.0, "model.a.weight", "b"), global_steps=7)
        return await waits

    assert {name: float(t[0, 0]) for name, t in asyncio.run(together()).items()} == {"model.a.weight": 1.0, "b": 1.0}
    for version, (value, names) in enumerate([(2.0, ["b", "c"]), (3.0, ["b", "c"]), (4.0, ["b", "c"])], 2):
        for each in (sender, worker):
            each.init_process_group(folder=str(tmp_path), version=version)
        asyncio.run(sender.send_weights(weights(value, *names)))
        if value == 3.0:
            flip_bit(storage_file(tmp_path / "step_00000003"), -20)
            with pytest.raises(CorruptCheckpointError, match=r"rank-00000\S*\.delta: its index"):
                asyncio.run(received(worker))
            sender._publisher.close()  # the next one is whole
            continue
        found = asyncio.run(received(worker))
        assert {name: (float(t.min()), float(t.max())) for name, t in found.items()} == dict.fromkeys(
            names, (value, value)
        )


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rollout_dtype='int8': give a dtype of floating point"):
        engine(tmp_path, 1, rollout_dtype="int8")
    with pytest.raises(UsageError, match="two tensors are called 'a'"):
        asyncio.run(engine(tmp_path, 1).send_weights(weights(1.0, "a", "b", "a")))
    with pytest.raises(StorageUnavailableError, match=r"step_00000009 was not committed in 0 s"):
        asyncio.run(received(engine(tmp_path, 9, timeout=0.2)))
