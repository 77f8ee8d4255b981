"""Let torchtitan, which is made for accelerators, train on the CPU over gloo."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["load_training"]


class _Cpu:
    """Answers for the module of a device (`torch.cuda`), for one device, which is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: object) -> None: ...

    def get_device_name(self, device: object = None) -> str:
        return "CPU"

    def get_device_properties(self, device: object = None) -> Any:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: object = None) -> None: ...

    def empty_cache(self) -> None: ...


def load_training() -> ModuleType:
    """Return the module `training`, which needs torchtitan. Its first import takes many seconds."""
    if "torchtitan" not in sys.modules:
        _install()
    return importlib.import_module("tests.integrations.torchtitan.training")


def _install() -> None:
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", _Cpu()
    utils.get_local_device = lambda: torch.device("cpu")
    utils.get_peak_flops = lambda _: 1e12  # it starts lspci

    from torchtitan import trainer
    from torchtitan.distributed import fsdp
    from torchtitan.distributed import utils as dist_utils

    # It names a device in a barrier, which gloo does not take.
    dist_utils.set_pg_timeouts = lambda timeout, parallel_dims: dist.barrier()
    trainer.time = SimpleNamespace(perf_counter=trainer.time.perf_counter, sleep=lambda _: None)

    def sum_only(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no average

    fsdp.disable_fsdp_gradient_division = sum_only
