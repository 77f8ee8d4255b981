"""Workers of verl for tests of its checkpoint engines: a trainer of FSDP2, and rollouts that keep what they get."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from bytecheckpoint.tools import fingerprint

WIDTH = 32


def model_of(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False))


def fingerprint_of(tensors: dict[str, torch.Tensor], ranks: Any = None) -> str:
    return str(fingerprint({"model": tensors}, process_group=ranks))


class Trainer(Worker):  # type: ignore[misc]
    """As verl's `ActorRolloutRefWorker`: the weights of FSDP, whole, tensor after tensor, on every rank."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        self.model = model_of(0)
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(self.model, mesh=mesh)
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend, is_master=dist.get_rank() == 0, bucket_size=1 << 20, **config.engine_kwargs[config.backend]
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def train(self, rows: int) -> str:
        """Change some rows of each parameter; return the fingerprint of the whole model in bfloat16."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.to_local()[:rows] += 1.0
        return fingerprint_of({name: tensor.to(torch.bfloat16) for name, tensor in self._weights()})

    def _weights(self) -> Any:
        for name, parameter in self.model.state_dict().items():
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None, mode: str = "") -> Any:
        return await self.checkpoint_engine.send_weights(self._weights(), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class KeepingAdapter:
    """The engine of a rollout: it keeps the weights that it gets."""

    replica_rank, is_leader_rank = 0, True

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    async def update_weights(
        self, weights: AsyncIterator[tuple[str, torch.Tensor]], wire_format: str = "", global_steps: int | None = None
    ) -> None:
        assert wire_format == "named_tensors"
        self.weights = {name: tensor.clone() async for name, tensor in weights}


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]
    """verl's worker with such an engine."""

    def __init__(self, rollout_config: RolloutConfig, model_config: Any) -> None:
        super().__init__(rollout_config, model_config, KeepingAdapter())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def fingerprint(self) -> str:
        """Return that of this worker's weights alone: other replicas may have another version."""
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return fingerprint_of(self.server_adapter.weights, alone)


class Replica(SimpleNamespace):
    """The workers of one replica; nothing else is running in it."""

    async def nothing(self, **_: Any) -> None:
        """Do nothing."""

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing
