"""Objects of Megatron-Core that are not built as in the tested versions: refused, never read by guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint.errors import UsageError
from tests.frameworks.megatron.variants import VariantModel
from tests.support.megatron.models import Layout
from tests.support.worlds import on_ranks

pytestmark = pytest.mark.timeout(300)


def _shift_ranges(optimizer: Any) -> None:
    ranges = next(iter(optimizer.gbuf_ranges[0].values()))[0]["param_map"]
    next(iter(ranges.values()))["param"].end += 1


def _grow_bucket(chunk: Any) -> None:
    parameter, (start, end, number) = next(iter(chunk.buffers[0].param_index_map.items()))
    chunk.buffers[0].param_index_map[parameter] = start, end + 1, number


OPTIMIZERS: dict[str, Callable[[Any], None]] = {
    "DistributedOptimizer has no gbuf_ranges": lambda o: delattr(o, "gbuf_ranges"),
    "has no model_param_group_index_map": lambda o: delattr(o, "model_param_group_index_map"),
    "steps a tensor of shape .* for the elements": _shift_ranges,
    "gbuf_ranges of DistributedOptimizer do not have all": lambda o: o.gbuf_ranges.clear(),
}
CHUNKS: dict[str, Callable[[Any], None]] = {
    "DistributedDataParallel has no remove_forward_pre_hook_handles": lambda c: delattr(
        c, "remove_forward_pre_hook_handles"
    ),
    "has no expert_parallel_buffers": lambda c: delattr(c, "expert_parallel_buffers"),
    "a buffer has .* elements of one of": _grow_bucket,
}


@on_ranks(1)
def test_unknown_structures_are_refused(path: str) -> None:
    for changes, part in ((OPTIMIZERS, "optimizer"), (CHUNKS, "model")):
        for message, change in changes.items():
            trained = VariantModel("thirds", Layout(bf16=True))
            change(trained.optimizer.chained_optimizers[0] if part == "optimizer" else trained.chunks[0])
            with pytest.raises(UsageError, match=rf"^{part}: .*{message}.*tested: 0\.16\.1"):
                bytecheckpoint.save(path, trained.states())
