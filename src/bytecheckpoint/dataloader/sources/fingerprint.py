"""Fingerprints of data: xxh3 of sizes and samples, never of paths or times, because data may be moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

__all__ = ["even_places", "value_fingerprint"]


def even_places(count: int, most: int) -> list[int]:
    """Return up to `most` places of `count` that lie evenly, the first and the last one among them."""
    samples = min(count, most)
    return [i * (count - 1) // max(samples - 1, 1) for i in range(samples)]


def value_fingerprint(value: Any) -> str:
    """Return the hash of a value: of texts, numbers, arrays, tensors and containers of them by content, else by type."""
    running = xxhash.xxh3_64()
    _add(running, value)
    return running.hexdigest()


def _add(running: xxhash.xxh3_64, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        content = flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()  # one element may have any stride
        value = [str(value.dtype), *value.shape, content]
    if isinstance(value, Mapping):
        value = [part for key in sorted(value, key=str) for part in (key, value[key])]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        head, data = f"array {value.dtype.str} {value.shape}", np.ascontiguousarray(value).tobytes()
    elif isinstance(value, (list, tuple, np.ndarray)):
        head, data = f"list {len(value)}", b""
    elif isinstance(value, bytes):
        head, data = f"bytes {len(value)}", value
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        head = f"str {len(data)}"
    elif value is None or isinstance(value, (bool, int, float, np.generic)):
        head, data = f"number {value}", b""
    else:
        head, data = type(value).__qualname__, b""
    running.update(f"{head}\n".encode())
    running.update(data)
    if head.startswith("list "):
        for part in value:
            _add(running, part)
