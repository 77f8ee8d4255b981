"""Megatron-Core on the CPU, for tests only: code that asks for a CUDA device gets the CPU.

A function mode handles every call of torch (devices, `Tensor.cuda`, the type strings that Megatron compares). The few
functions of torch.cuda that Megatron calls directly are replaced. Megatron's own arithmetic does not change.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_state = threading.local()


def _is_cuda(device: object) -> bool:
    return getattr(device, "type", str(device).partition(":")[0]) == "cuda"


class OnCpu(TorchFunctionMode):
    """Makes every device the CPU, and its tensors pass for CUDA tensors where Megatron looks at their type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.record_stream:
            return None
        if func is dist.all_gather and len({part.numel() for part in args[0]}) > 1:
            return _gather_uneven(*args, **kwargs)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


def _gather_uneven(parts: list[torch.Tensor], own: torch.Tensor, group: Any = None, async_op: bool = False) -> None:
    """Gather parts of different sizes, as NCCL does and gloo does not."""
    for rank, part in enumerate(parts):
        if rank == dist.get_rank(group):
            part.copy_(own)
        dist.broadcast(part, dist.get_global_rank(group, rank), group=group)


class _SplitDevices(TorchFunctionMode):
    """Makes all tensors pass for those of a device, except for the copies that are made for the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._on_cpu: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_on_cpu = any(args[0] is tensor for tensor in self._on_cpu)
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not is_on_cpu
        made = args[0] if func is torch.Tensor.pin_memory else func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and (is_on_cpu or func is torch.Tensor.cpu):
            self._on_cpu.append(made)
        return made


def _split_devices(function: Any) -> Any:
    """Return the function that divides parameters between a device and the CPU, for a machine without a device."""

    def split(*args: Any) -> Any:
        with _SplitDevices():
            return function(*args)

    return split


class _NoOp:
    """A stream or event: every method exists and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def use_cpu() -> None:
    """Prepare this process, once, before anything has imported Megatron."""
    if getattr(_state, "mode", None) is not None:
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import megatron.core.models.gpt  # before the replacements: decorators of torch look at what they find
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer as Hybrid

    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    cuda.is_available = lambda: False  # DeepSpeed has it ask for the number of devices
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.default_stream = _NoOp
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    random = sys.modules["megatron.core.tensor_parallel.random"]
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    dispatcher = sys.modules.get("megatron.core.transformer.moe.token_dispatcher")
    if dispatcher is not None:
        dispatcher.maybe_move_tensor_to_cpu = _to_cpu  # tensors are on the CPU already
    utilities: Any = sys.modules["megatron.core.transformer.moe.moe_utils"]
    utilities.te_general_gemm = getattr(
        utilities, "te_general_gemm", None
    )  # 0.16 forgets it without Transformer Engine
    sys.modules["megatron.core.transformer.torch_norm"].WrappedTorchNorm.__new__ = _norm
    Hybrid._get_sub_optimizer_param_groups = _split_devices(Hybrid._get_sub_optimizer_param_groups)
    del megatron
    _state.mode = OnCpu()
    _state.mode.__enter__()


class _RMSNormAroundZero(torch.nn.RMSNorm):
    """A norm whose weight is stored around zero, which Megatron has for GPUs only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


class _LayerNormAroundZero(torch.nn.LayerNorm):
    """The same with a mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


_NORMS = {
    ("RMSNorm", False): torch.nn.RMSNorm,
    ("RMSNorm", True): _RMSNormAroundZero,
    ("LayerNorm", False): torch.nn.LayerNorm,
    ("LayerNorm", True): _LayerNormAroundZero,
}


def _norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
    """Return a norm that marks its weight for sequence parallelism; without Apex, Megatron has none that does."""
    made = _NORMS[config.normalization, config.layernorm_zero_centered_gamma](hidden_size, eps)
    for parameter in made.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return made


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
