"""Saves in processes that other libraries start, and under limits of the process."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

import bytecheckpoint
from bytecheckpoint import StorageFullError
from tests.support.coded import files_of, load_step, states
from tests.support.modes import MODES


class SavingDataset(Dataset[int]):
    """Saves a checkpoint for each item, as a cache of preprocessed samples may."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> int:
        handle = bytecheckpoint.save(self.root / str(item), states(step=item), async_checkpoint=bool(item % 2))
        return item if handle.result(60) else -1


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader_save_beside_the_training(tmp_path: Path, method: str) -> None:
    bytecheckpoint.save(tmp_path / "before", states(step=7), async_checkpoint=True).result(60)
    flight = bytecheckpoint.save(tmp_path / "flight", states(step=8), async_checkpoint=True)
    loader = DataLoader(SavingDataset(tmp_path), num_workers=2, multiprocessing_context=method, batch_size=None)
    assert list(loader) == [0, 1, 2, 3]
    flight.result(60)
    assert [load_step(tmp_path / str(i)) for i in range(4)] == [0, 1, 2, 3]
    assert load_step(tmp_path / "flight") == 8


def save_and_end(rank: int, root: Path, mode: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/store-{mode}", rank=rank, world_size=2)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    bytecheckpoint.save(root / mode, states(step=3), **MODES[mode])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_torch_spawns_end_at_once(tmp_path: Path, mode: str) -> None:
    """Saves in flight are finished."""
    torch.multiprocessing.spawn(save_and_end, (tmp_path, mode), nprocs=2)
    assert load_step(tmp_path / mode) == 3


@pytest.mark.parametrize("mode", MODES)
def test_a_limit_of_file_sizes_is_named(tmp_path: Path, mode: str) -> None:
    bytecheckpoint.save(tmp_path / "s", states(step=1), **MODES[mode]).result(60)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StorageFullError, match=r"File too large; .* limits the size of a file \(ulimit -f\)"):
            bytecheckpoint.save(tmp_path / "t", states(step=2), **MODES[mode]).result(60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not files_of(tmp_path / "t")
    bytecheckpoint.save(tmp_path / "t", states(step=2), **MODES[mode]).result(60)
    assert load_step(tmp_path / "t") == 2
