"""The checkpoint engine "bytecheckpoint" of verl: a trainer's weights reach its rollout workers as published versions.

In the configuration of verl's rollout:

    checkpoint_engine:
      backend: bytecheckpoint
      custom_backend_module: bytecheckpoint.integrations.verl_rollout
      engine_kwargs: {bytecheckpoint: {root: s3://bucket/versions}}

It lies beside the package `verl`, not in it: an import of that package replaces verl's manager of checkpoints.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
import xxhash
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from bytecheckpoint.errors import CheckpointNotFoundError, StorageUnavailableError, UsageError
from bytecheckpoint.manager.run_folder import step_folder
from bytecheckpoint.opening import open as open_checkpoint
from bytecheckpoint.publishing import Follower, Publisher
from bytecheckpoint.tools.ranks import ToolRanks, tool_ranks

__all__ = ["VersionsEngine"]

#: Name of the backend, and of the state that is the model.
_BACKEND, _MODEL = "bytecheckpoint", "model"
#: Seconds between two looks for a version.
_POLL: Final = 0.1


@CheckpointEngineRegistry.register(_BACKEND)
class VersionsEngine(CheckpointEngine):  # type: ignore[misc]
    """Publishes on the ranks of the trainer, and follows on the workers of the rollout.

    verl gives whole tensors to every rank of the trainer, and takes whole tensors from every worker. A rank keeps and
    writes its share of them in host memory, as differences from the version before. A worker keeps all of them in host
    memory, reads the differences, and proves each version by its fingerprints. Each start of a trainer has a folder of its
    own below `root`; remove those of ended runs when you like.

    Args:
        bucket_size: size of verl's buckets, in bytes; not used.
        is_master: True on rank 0 of the trainer.
        root: folder or URL that all ranks and workers can reach.
        rollout_dtype: name of the dtype in which tensors of floating point are published, as of verl's other engines; None
            for their own.
        full_every: number of versions from one whole one to the next, as of `Publisher`.
        keep: number of whole versions to keep, as of `Publisher`.
        timeout: seconds for which a worker waits for a version.

    Raises:
        UsageError: the dtype is none of floating point.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        *,
        root: str,
        is_master: bool = False,
        rollout_dtype: str | None = "bfloat16",
        full_every: int = 20,
        keep: int = 2,
        timeout: float = 1800.0,
    ) -> None:
        self._dtype = None if rollout_dtype is None else getattr(torch, str(rollout_dtype).removeprefix("torch."), None)
        if rollout_dtype is not None and not (isinstance(self._dtype, torch.dtype) and self._dtype.is_floating_point):
            raise UsageError(f"rollout_dtype={rollout_dtype!r}: give a dtype of floating point, such as 'bfloat16'")
        self._full_every, self._keep, self._timeout = full_every, keep, timeout
        self._folder = (
            f"{root.rstrip('/')}/{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}" if is_master else ""
        )
        self._version = 0
        self._held: dict[str, torch.Tensor] = {}
        self._publisher: Publisher | None = None
        self._follower: Follower | None = None

    def prepare(self) -> dict[str, Any]:
        """Return the folder and the number of the next version, on rank 0 of the trainer."""
        return {"folder": self._folder, "version": self._version + 1} if self._folder else {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return what every rank and worker learns in `init_process_group`: folder and number of the version."""
        said = metadata[0]
        return tuple(  # type: ignore[return-value]
            {name: [value] * count for name, value in said.items()}
            for count in (actor_wg_world_size, rollout_world_size)
        )

    def init_process_group(self, *, folder: str, version: int) -> None:
        """Take over the folder, and the number of the version that is sent next."""
        if folder != self._folder:
            self._folder, self._follower = folder, None
        self._version = version

    def finalize(self) -> None:
        """Keep all for the next version."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish the weights, and wait until the version is committed. Every rank of the trainer calls it.

        Args:
            weights: whole tensors by name, the same on all ranks; each is taken before the next one.
            global_steps: step of the trainer, for the metadata of the version.

        Returns:
            Facts for verl's metrics.

        Raises:
            UsageError: ranks have different tensors, or two tensors have one name.
            CheckpointError: as of `Publisher.publish`.
        """
        if self._publisher is None:
            self._publisher = Publisher(self._folder, full_every=self._full_every, keep=self._keep)
        with tool_ranks("send_weights", None, self._folder, alone=False) as ranks:
            ranks.agree("take", lambda: self._take(weights, ranks), _check_same)
        handle = self._publisher.publish(
            {_MODEL: dict(self._held)}, self._version, metadata={"global_steps": global_steps}
        )
        self._publisher.wait()
        with tool_ranks("send_weights", None, self._folder, alone=False) as ranks:
            written = ranks.agree("written", lambda: handle.result().bytes_written, sum)
        return {"checkpoint_engine/payload_mbytes": written / (1 << 20)}

    def _take(self, weights: Iterable[tuple[str, torch.Tensor]], ranks: ToolRanks) -> str:
        """Copy this rank's share into host memory; return a sum of all names, shapes and dtypes."""
        loads, before, facts = [0] * ranks.count, self._held, xxhash.xxh3_128()
        names: list[str] = []
        self._held = {}
        for name, tensor in weights:
            dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            names.append(name)
            facts.update(repr((name, tuple(tensor.shape), dtype)).encode())
            taker = loads.index(min(loads))
            loads[taker] += tensor.numel() * dtype.itemsize
            if taker == ranks.rank:
                memory = before.get(name)
                if memory is None or (memory.shape, memory.dtype) != (tensor.shape, dtype):
                    memory = torch.empty(tensor.shape, dtype=dtype)
                self._held[name] = memory.copy_(tensor.detach())
        if len({*names}) < len(names):  # now: verl's ranks make the tensors together, up to the last one
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"two tensors are called {twice!r}")
        return facts.hexdigest()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Wait for the version, bring the memory of this worker to it, and yield all tensors in its order.

        Args:
            global_steps: step of the trainer; not used, since the number of the version is known.

        Raises:
            StorageUnavailableError: the version was not committed in time.
            CheckpointError: as of `Follower.update`; nothing has been yielded then.
        """
        path = step_folder(self._folder, self._version)
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                with open_checkpoint(path) as version:
                    wanted = {
                        key.removeprefix(f"{_MODEL}/"): (tuple(entry.shape), entry.dtype)
                        for key, entry in version.tensors.items()
                    }
                break
            except CheckpointNotFoundError:
                if time.monotonic() > deadline:
                    raise StorageUnavailableError(f"{path} was not committed in {self._timeout:.0f} s") from None
                await asyncio.sleep(_POLL)
        if self._follower is None or wanted != {name: (tuple(t.shape), t.dtype) for name, t in self._held.items()}:
            self._held = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in wanted.items()}
            self._follower = Follower(self._folder, process_group=_alone())
        self._follower.update({_MODEL: self._held}, step=self._version)
        for name, tensor in self._held.items():
            yield name, tensor


def _check_same(sums: list[str]) -> None:
    """Refuse tensors that differ between ranks."""
    for rank, found in enumerate(sums):
        if found != sums[0]:
            raise UsageError(f"rank {rank} has other tensors than rank 0: verl gives whole tensors to every rank")


def _alone() -> Any:
    """Return the process group of this worker alone: the workers that a manager updates together come and go."""
    if not dist.is_initialized():
        return None
    return dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
