"""Staging: the image in the pool, and chunk by chunk, holds the bytes of the tensors at their places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bytecheckpoint.engine.device_copies import DeviceCopies
from bytecheckpoint.engine.runs import Runs
from bytecheckpoint.engine.staging import Image, ImageFile, KnownTargets, chunks_of
from bytecheckpoint.engine.tensor_bytes import copy_all, dense, flat_bytes

#: Of all kinds: large and contiguous, not contiguous, small, of a dtype that few kernels copy, empty.
TENSORS = [
    torch.arange(300_000, dtype=torch.int32),
    torch.arange(600_000, dtype=torch.int16).reshape(600, 1000).t(),
    torch.randn(17),
    torch.randn(33).to(torch.float8_e4m3fn),
    torch.zeros(0),
    torch.arange(100, dtype=torch.uint8),
]
#: Runs of all lengths, and what they hold.
_LENGTHS = np.concatenate([np.full(5000, 3), np.arange(1, 300), [70_000]])
_PLACES = np.random.default_rng(0).permutation(len(_LENGTHS)) * 7 % 90_000
RUNS = Runs(torch.arange(200_000, dtype=torch.int32), _PLACES, _LENGTHS)


def expected(shards: list[int]) -> bytes:
    runs = torch.cat([RUNS.memory[p : p + n] for p, n in zip(_PLACES, _LENGTHS, strict=True)])
    return b"".join(flat_bytes(dense([*TENSORS, runs][i])).numpy().tobytes() for i in shards)


def image(*, known_files: int) -> Image:
    files, start = [], 0
    tensors = [*TENSORS, RUNS]
    for shards in ([0, 6, 2, 4, 3], [1, 5]):
        sizes = np.array([tensors[i].nbytes for i in shards], np.int64)
        files.append(ImageFile(start, int(sizes.sum()), shards, np.cumsum(sizes) - sizes, sizes))
        start += -(-int(sizes.sum()) // 4096) * 4096
    return Image(tensors, files, DeviceCopies((), to_host=True), KnownTargets(known_files))


@pytest.mark.parametrize("known_files", [0, 1, 2])
def test_a_staged_image_holds_every_file(known_files: int) -> None:
    staged = image(known_files=known_files)
    for generation in (1, 1, 2):  # the second time with the views of the first
        pool = torch.full((staged.nbytes + 5,), 0xEE, dtype=torch.uint8)
        staged.stage(pool, generation)
        for file in staged.files:
            assert pool[file.start : file.start + file.nbytes].numpy().tobytes() == expected(file.shards)


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 18, 1 << 22])
@pytest.mark.parametrize("by_reference", [True, False])
def test_chunks_of_any_length_hold_every_file(chunk_bytes: int, by_reference: bool) -> None:
    whole = image(known_files=0)
    large = whole.large() if by_reference else {}
    assert sorted(large) == ([0] if by_reference else [])
    slot = torch.zeros(chunk_bytes, dtype=torch.uint8)
    found = [b"", b""]
    for chunk in chunks_of(whole.files, chunk_bytes):
        data = b"".join(whole.fill(chunk, slot, large))
        assert (chunk.start, chunk.nbytes) == (len(found[chunk.file]), len(data))
        found[chunk.file] += data
    assert found == [expected(file.shards) for file in whole.files]


def test_the_host_s_copies_are_made_beside_those_of_a_device() -> None:
    """There is no accelerator here: torch's "meta" device stands for one."""
    targets = [torch.zeros(3), torch.empty(3, device="meta"), torch.zeros(300_000)]
    copy_all(targets, [torch.ones(3), torch.ones(3), torch.ones(300_000)])
    assert targets[0].all() and targets[2].all()
