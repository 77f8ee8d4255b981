"""Lazy weights of inference engines: views without reads, copies that one load fills, and reads for anything else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.integrations.engines.lazy_weights import LazyWeight, WantedWeight, WeightPart

SHAPE = (6, 4, 8)


def lazy(full: torch.Tensor, reads: list[WeightPart], wanted: dict[str, WantedWeight] | None = None) -> LazyWeight:
    """Return a tensor as a lazy weight that notes what is read."""

    def read(part: WeightPart) -> torch.Tensor:
        reads.append(part)
        return full[tuple(slice(b, b + n) for b, n in zip(part.begins, part.lengths, strict=True))].clone()

    shape = tuple(full.shape)
    return LazyWeight(
        WeightPart("w", shape, (0,) * full.ndim, shape, tuple(range(full.ndim))), full.dtype, read, wanted
    )


def a_view(chosen: random.Random, tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a random view as loaders of engines make them."""
    dim = chosen.randrange(tensor.ndim)
    length = tensor.shape[dim]
    begin = chosen.randrange(length)
    count, other, order = chosen.randrange(1, length - begin + 1), chosen.randrange(tensor.ndim), [*range(tensor.ndim)]
    chosen.shuffle(order)
    parts = chosen.choice([n for n in (1, 2, 3) if n <= length])
    return chosen.choice([
        lambda t: t.narrow(dim, begin, count),
        lambda t: t[(slice(None),) * dim + (slice(begin, begin + count),)],
        lambda t: t.select(dim, begin) if t.ndim > 1 else t,
        lambda t: t.transpose(dim, other),
        lambda t: t.permute(order),
        lambda t: t.chunk(parts, dim)[-1],
        lambda t: t.split([begin, length - begin], dim)[1] if length > 1 else t,
        lambda t: t.unbind(dim)[begin] if t.ndim > 1 else t,
        lambda t: t.detach().view(t.shape),
        lambda t: t.mT if t.ndim > 1 else t,
        lambda t: t.unsqueeze(dim - t.ndim),
    ])  # fmt: skip


@pytest.mark.parametrize("seed", range(150))
def test_any_views_read_one_part_when_it_is_needed(seed: int) -> None:
    chosen, full = random.Random(seed), torch.arange(192, dtype=torch.float32).reshape(SHAPE)
    reads: list[WeightPart] = []
    expected, found = full, lazy(full, reads)
    for _ in range(chosen.randrange(1, 6)):
        view = a_view(chosen, expected)
        expected, found = view(expected), view(found)
        assert found.shape == expected.shape and type(found) is LazyWeight
    assert not reads
    assert torch.equal(found + 1, expected + 1) and len(reads) == 1
    assert torch.Size(reads[0].lengths).numel() == expected.numel()


@pytest.mark.parametrize("seed", range(30))
def test_copies_are_filled_by_one_load(seed: int, tmp_path: Path) -> None:
    chosen, full = random.Random(seed), torch.arange(192, dtype=torch.float32).reshape(SHAPE)
    bytecheckpoint.save(tmp_path / "step", {"model": {"w": full.clone()}})
    reads: list[WeightPart] = []
    wanted: dict[str, WantedWeight] = {}
    memory: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(chosen.randrange(1, 5)):
        expected, found = full, lazy(full, reads, wanted)
        for _ in range(chosen.randrange(5)):
            view = a_view(chosen, expected)
            expected, found = view(expected), view(found)
        target = torch.zeros(expected.shape, dtype=chosen.choice([torch.float32, torch.bfloat16]))
        target.copy_(found)
        memory.append((target, expected))
    assert not reads or len({target.dtype for target, _ in memory}) == 2, "one tensor of a state has one dtype"
    states: dict[str, Any] = {"model": wanted}
    bytecheckpoint.load(tmp_path / "step", states, cast=True, strict={"model": False}, prepare_save=False)
    for part in wanted.values():
        for copy, first in part.copies:
            copy.copy_(first)
    for target, expected in memory:
        assert torch.equal(target, expected.to(target.dtype))


def test_what_is_no_plain_copy_is_read_at_once() -> None:
    full, reads = torch.arange(192, dtype=torch.float32).reshape(SHAPE), list[WeightPart]()
    wanted: dict[str, WantedWeight] = {}
    weight = lazy(full, reads, wanted)
    wider = torch.zeros(2, *SHAPE)
    wider.copy_(weight)  # broadcast
    assert torch.equal(wider[1], full) and len(reads) == 1 and not wanted
    assert weight[0, 0, 3].item() == 3 and weight[:, :, ::2].shape == (6, 4, 4)
    assert torch.equal(torch.cat([weight, weight]), torch.cat([full, full]))
    assert torch.equal(weight.to(torch.float64), full.double()) and torch.equal(
        weight.reshape(24, 8), full.reshape(24, 8)
    )
    added = weight.unsqueeze(1)
    assert added[:, :0].shape == (6, 0, 4, 8) and [one.shape[1] for one in added.split([0, 1], 1)] == [0, 1]
    assert weight.numel() == 192 and weight.dtype == torch.float32 and "LazyWeight" in repr(weight)
