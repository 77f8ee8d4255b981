"""Takes batches from any loader, and says how long that took."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Feeding"]


class Feeding:
    """Takes batches, epoch by epoch.

    Args:
        loader: gives tensors of token ids, or dicts of them.
        key: key of the token ids in a dict.
    """

    def __init__(self, loader: Iterable[Any], key: str = "tokens") -> None:
        self._loader, self._key = loader, key
        self._iterator: Iterator[Any] = iter(())

    def _next(self) -> Any:
        for batch in self._iterator:
            return batch
        self._iterator = iter(self._loader)
        return next(self._iterator)

    def take(self, batches: int, step_seconds: float = 0.0) -> dict[str, float]:
        """Take some batches, with a training step after each that leaves the cores free, as on an accelerator.

        Returns:
            "wait": seconds per batch in which the training waits for it; "main_core": core-seconds of this process per
            batch; "tokens": how many token ids these were.
        """
        waited, tokens = 0.0, 0
        core = time.process_time()
        for _ in range(batches):
            begin = time.perf_counter()
            batch = self._next()
            waited += time.perf_counter() - begin
            tokens += (batch[self._key] if isinstance(batch, dict) else batch).numel()
            if step_seconds:
                time.sleep(step_seconds)
        main = (time.process_time() - core) / batches
        return {"wait": waited / batches, "main_core": main, "tokens": float(tokens)}
