"""verl's delta engine (`delta_sharded`, 0.9.1) without its transport, which needs CUDA (NCCL and cupy).

Its own code finds the changed elements against a copy in host memory, and writes them into the engine's weights; what lies
between is handed over in memory. `_flush` packs it as verl's `_assemble_flush` does, which is beside that transport.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.state import Tensors

__all__ = ["VerlDelta"]

_MISSING = """\
  NOT MEASURED: verl's delta engine. verl is not installed here; `make test-verl` makes an environment with it, and
  `.venv-verl/bin/python -m benchmarks --only publishing` measures there."""


class VerlDelta:
    """A trainer's and an engine's side of verl's delta engine.

    Args:
        state: the trainer's weights.
        engine: the engine's weights, which get those of `state`.
    """

    def __init__(self, state: Tensors, engine: Tensors) -> None:
        from verl.workers.engine.spec import ShardSpec
        from verl.workers.engine.utils import prime_delta_snapshots

        self._state, self._spec = state, ShardSpec.from_param
        self._engine, self._snapshots = _Engine(engine), dict[str, torch.Tensor]()
        self._flushed: list[tuple[str, torch.Tensor]] = []
        prime_delta_snapshots(self._shards(), self._snapshots, False)
        for name, tensor in state.items():
            engine[name].copy_(tensor)

    @staticmethod
    def available() -> bool:
        """Return whether verl is installed; say so if it is not."""
        found = importlib.util.find_spec("verl") is not None
        if not found:
            print(_MISSING, file=sys.stderr)
        return found

    def _shards(self) -> Iterator[tuple[str, torch.Tensor, Any]]:
        for name, tensor in self._state.items():
            yield name, tensor, self._spec(tensor)

    def publish(self) -> float:
        """Find the changed elements, and pack them; return their bytes."""
        from verl.workers.engine.utils import _hf_entry_identity, hf_delta_export

        self._flushed = _flush(list(hf_delta_export(self._shards(), self._snapshots, _hf_entry_identity)))
        return float(sum(tensor.numel() * tensor.element_size() for _, tensor in self._flushed))

    def follow(self) -> None:
        """Write the changed elements into the engine's weights."""
        from verl.workers.rollout.sglang_rollout.delta_loader import apply_delta

        apply_delta(self._engine, self._flushed)  # type: ignore[arg-type]  # of it verl calls load_weights alone


class _Engine:
    """Weights that are loaded by name, as those of SGLang's models."""

    def __init__(self, weights: Tensors) -> None:
        self._weights = weights

    def load_weights(self, loaded: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in loaded:
            self._weights[name].copy_(tensor)


def _flush(entries: list[Any]) -> list[tuple[str, torch.Tensor]]:
    from verl.checkpoint_engine.delta_sync.encode import checksum

    values = torch.cat([entry[4] for entry in entries])
    positions = torch.cat([entry[3] for entry in entries]).contiguous().view(torch.uint8)
    parameters, at = [], 0
    for slots, dtype, _, index, _, _ in entries:
        end = at + index.numel()
        facts: dict[str, object] = {"name": slots[0][0], "dtype": dtype, "shape": list(slots[0][1])}
        places = {"pos_start": 4 * at, "pos_end": 4 * end, "pos_width": 4, "val_start": at, "val_end": end}
        parameters.append({**facts, **places})
        at = end
    spec = {"encoding": "indices", "params": parameters, "checksum": checksum(positions, values)}
    text = torch.from_numpy(np.frombuffer(json.dumps(spec).encode(), np.uint8).copy())
    return [("__delta_spec__", text), ("__positions__", positions), ("__values__", values)]
