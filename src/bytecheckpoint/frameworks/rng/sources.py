"""Read and set the states of a process's random number generators, as bytes, and derive states from seeds."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bytecheckpoint.errors import UsageError

__all__ = ["RandomSource", "framework_layout", "framework_sources", "own_source", "process_sources"]

#: Modules whose name `_CUDA_RNG_STATE_TRACKER` holds further states of the accelerator's generator, by name.
_TRACKERS = {
    "megatron": "megatron.core.tensor_parallel.random",
    "deepspeed": "deepspeed.runtime.activation_checkpointing.checkpointing",
}


@dataclass(frozen=True)
class RandomSource:
    """One generator.

    Attributes:
        get: returns a copy of its state, uint8 [n].
        set: sets the state of the generator.
        seeded: returns the state of a generator of this kind that is seeded with 64 bits.
        seed: seed that a framework gave the generator by the layout; None: the program has seeded the generator.
    """

    get: Callable[[], torch.Tensor]
    set: Callable[[torch.Tensor], object]
    seeded: Callable[[int], torch.Tensor]
    seed: int | None = None


def process_sources() -> dict[str, RandomSource]:
    """Return the generators that every process has, and those of all accelerator devices, the current one first."""
    found = {
        "python": _of_python(random),
        "numpy": _of_numpy(),
        "torch": _of_torch(torch.default_generator),
    }
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        current, kind = torch.accelerator.current_device_index(), accelerator.type
        others = (i for i in range(torch.accelerator.device_count()) if i != current)
        for number, index in enumerate((current, *others)):
            if (source := _of_device(torch.device(kind, index))) is not None:
                found[f"{kind}.{number}"] = source
    return found


def framework_sources() -> dict[str, RandomSource]:
    """Return the states that trackers of frameworks hold, by "framework.name"."""
    found = {}
    for framework, module in _TRACKERS.items():
        tracker: Any = getattr(sys.modules.get(module), "_CUDA_RNG_STATE_TRACKER", None)
        for name in sorted(tracker.get_states()) if tracker is not None else ():
            found[f"{framework}.{name}"] = _of_tracker(tracker, name)
    return found


def framework_layout() -> dict[str, int]:
    """Return the sizes by which Megatron seeds the ranks; empty without it."""
    groups: Any = sys.modules.get("megatron.core.parallel_state")
    if groups is None or not groups.model_parallel_is_initialized():
        return {}
    dimensions = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    return {name: int(getattr(groups, f"get_{name}_parallel_world_size")() or 1) for name in dimensions}


def own_source(name: str, generator: object) -> RandomSource:
    """Return a generator of the program.

    Raises:
        UsageError: it is none of Python, NumPy or torch.
    """
    if isinstance(generator, torch.Generator):
        return _of_torch(generator)
    if isinstance(generator, random.Random):
        return _of_python(generator)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return RandomSource(
            lambda: _of_bits(bits), lambda state: _set_bits(bits, state), lambda seed: _of_bits(type(bits)(seed))
        )
    raise UsageError(
        f"generators[{name!r}] is a {type(generator).__name__}, not a torch.Generator, random.Random or "
        "numpy.random.Generator"
    )


def _of_python(generator: Any) -> RandomSource:
    def set_state(state: torch.Tensor) -> None:
        version, words, gauss = _from_bytes(state)
        generator.setstate((version, tuple(words), gauss))

    return RandomSource(
        lambda: _to_bytes(generator.getstate()), set_state, lambda seed: _to_bytes(random.Random(seed).getstate())
    )


#: What numpy's seed sequences are made of. The last one counts the children that `Generator.spawn` has made.
_SEEDS = ("entropy", "spawn_key", "pool_size", "n_children_spawned")


def _of_bits(bits: np.random.BitGenerator) -> torch.Tensor:
    state, seeds = dict(bits.state), bits.seed_seq
    if isinstance(seeds, np.random.SeedSequence):
        state["seed_seq"] = {name: getattr(seeds, name) for name in _SEEDS}
    return _to_bytes(state)


def _set_bits(bits: Any, data: torch.Tensor) -> None:
    state = _from_bytes(data)
    seeds = state.pop("seed_seq", None)  # earlier versions kept none
    if seeds is None or np.__version__.startswith("1."):  # numpy 1 cannot exchange the sequence
        bits.state = state
    else:
        bits.__setstate__((state, np.random.SeedSequence(**seeds)))


def _of_numpy() -> RandomSource:
    # The module's functions share one RandomState, whose kind of bits the program may have changed.
    get, put = np.random.get_state, np.random.set_state

    def seeded(seed: int) -> torch.Tensor:
        bits = type(np.random.get_bit_generator())(seed)
        return _to_bytes(np.random.RandomState(bits).get_state(legacy=False))

    return RandomSource(lambda: _to_bytes(get(legacy=False)), lambda state: put(_from_bytes(state)), seeded)


def _of_torch(generator: torch.Generator, seed: int | None = None) -> RandomSource:
    return RandomSource(generator.get_state, generator.set_state, lambda n: _torch_state(generator.device, n), seed)


def _of_device(device: torch.device) -> RandomSource | None:
    module = torch.get_device_module(device)
    if not hasattr(module, "get_rng_state"):
        return None
    which = () if device.type == "mps" else (device,)  # there is one only
    return RandomSource(
        lambda: module.get_rng_state(*which),
        lambda state: module.set_rng_state(state, *which),
        lambda seed: _torch_state(device, seed),
    )


def _of_tracker(tracker: Any, name: str) -> RandomSource:
    state = tracker.get_states()[name]
    if isinstance(state, torch.Generator):  # as CUDA graphs need it
        return _of_torch(state, state.initial_seed())
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    live = torch.Generator(device)
    live.set_state(state)
    return RandomSource(
        state.clone,
        lambda new: tracker.set_states({**tracker.get_states(), name: new}),
        lambda seed: _torch_state(device, seed),
        live.initial_seed(),
    )


def _torch_state(device: torch.device, seed: int) -> torch.Tensor:
    return torch.Generator(device).manual_seed(seed).get_state()


def _to_bytes(state: Any) -> torch.Tensor:
    """Encode nested values with arrays, as JSON: the integers have up to 128 bits."""
    text = json.dumps(state, default=lambda array: {"dtype": array.dtype.name, "array": array.tolist()})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _from_bytes(state: torch.Tensor) -> Any:
    def with_arrays(value: dict[str, Any]) -> Any:
        return np.array(value["array"], value["dtype"]) if value.keys() == {"dtype", "array"} else value

    return json.loads(state.numpy().tobytes(), object_hook=with_arrays)
