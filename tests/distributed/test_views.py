"""Views of cut tensors: ranks join them before the write, or write files for Hugging Face behind the commit, index last."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint
from bytecheckpoint import (
    CheckpointError,
    CheckpointManager,
    HuggingFaceView,
    SaveOptions,
    StorageConflictError,
    StorageError,
    UsageError,
    tools,
)
from bytecheckpoint.collectives import current
from bytecheckpoint.engine.view_files import VIEW_INDEX
from bytecheckpoint.manager import Retention
from bytecheckpoint.saving import rank_assembly
from bytecheckpoint.storage.posix.storage import PosixStorage
from bytecheckpoint.tools.huggingface import WeightFiles
from bytecheckpoint.world import world_of
from tests.support.pretrained import Net, check, trained
from tests.support.worlds import on_ranks

VIEW = HuggingFaceView()
AS_FILES = HuggingFaceView(dtype="float32")


def sharded(value: float = 1.0) -> dict[str, Any]:
    """Return a model in FSDP2 with its optimizer."""
    model = Net(value)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def files_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("model-"))


@pytest.mark.parametrize(
    "options", [{}, {"async_checkpoint": True}, {"async_checkpoint": True, "staging": "background"}]
)
@on_ranks(2)
def test_ranks_join_cut_tensors(tmp_path: Path, options: dict[str, Any]) -> None:
    """No byte is written twice, the view is there with the commit, and each rank writes about its share."""
    written = []
    for value in (1.0, 2.0):
        report = bytecheckpoint.save(tmp_path / "step", sharded(value), view=VIEW, **options).result()
        assert report.view == "index"
        check(tmp_path / "step", value)
        written.append(report.bytes_written)
        dist.barrier()
    assert not files_in(tmp_path / "step")
    fresh = sharded(0.0)
    bytecheckpoint.load(tmp_path / "step", fresh)
    assert torch.equal(fresh["model"].embed.weight.full_tensor(), Net(2.0).embed.weight)
    plain = bytecheckpoint.save(tmp_path / "plain", sharded(2.0), **options).result()
    assert max(written) <= plain.bytes_written + 8192  # a box more or less
    if dist.get_rank() == 0:
        report = tools.verify(tmp_path / "step")
        assert report.ok and not report.notes
    dist.barrier()


@on_ranks(2)
def test_a_view_is_prepared(tmp_path: Path) -> None:
    states = sharded()
    bytecheckpoint.prepare(states, view=VIEW).result()
    capacity = world_of(current()).resources.pools.shared.capacity
    report = bytecheckpoint.save(tmp_path / "step", states, view=VIEW, async_checkpoint=True).result()
    assert report.view == "index" and report.plan_cached
    assert world_of(current()).resources.pools.shared.capacity == capacity > 0
    with CheckpointManager(tmp_path / "run", sharded(), save_options=SaveOptions(view=VIEW)) as manager:
        manager.maybe_save(1)
        report = manager.save(2).result()
    assert report.view == "index"


@on_ranks(2)
def test_a_rank_without_memory_while_tensors_are_joined_fails_the_save_of_all(tmp_path: Path) -> None:
    def fail(*_: Any) -> int:
        raise MemoryError("no memory")

    bytecheckpoint.save(tmp_path / "first", sharded(), view=VIEW)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(rank_assembly, "join_tensors", fail)
        handle, begin = (
            bytecheckpoint.save(tmp_path / "second", sharded(), view=VIEW, async_checkpoint=True),
            time.monotonic(),
        )
        with pytest.raises(CheckpointError, match="rank 1, write: MemoryError: no memory"):
            handle.result()
        assert time.monotonic() - begin < 20  # not the time-out
    dist.barrier()
    assert not (tmp_path / "second/metadata.parquet").exists()
    assert bytecheckpoint.save(tmp_path / "third", sharded(), view=VIEW).result().view == "index"


@on_ranks(2)
def test_all_ranks_write_a_view(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        handle = bytecheckpoint.save(tmp_path / "step", sharded(value), view=AS_FILES, async_checkpoint=True)
        assert handle.result().view == "files"
        handle.viewed.result()
        check(tmp_path / "step", value)
        dist.barrier()
    assert len(files_in(tmp_path / "step")) == 2  # one of each rank; those of the first save are gone
    if dist.get_rank() == 0:
        report = tools.verify(tmp_path / "step")
        assert report.ok and not report.notes
        tools.copy(tmp_path / "step", str(tmp_path / "copy"))
        check(tmp_path / "copy", 2.0)
        with (tmp_path / "copy" / files_in(tmp_path / "copy")[0]).open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xff")
        (finding,) = tools.verify(tmp_path / "copy").findings
        assert finding.kind == "sum" and finding.file.startswith("model-")
        tools.collect_garbage(tmp_path / "step", older_than=-9.0)
        check(tmp_path / "step", 2.0)
        tools.remove(tmp_path / "step")
        assert not files_in(tmp_path / "step") and not (tmp_path / "step" / "config.json").exists()
    dist.barrier()


@on_ranks(2)
def test_a_manager_keeps_steps_until_their_views_are_there(tmp_path: Path) -> None:
    found: list[int] = []
    write, committed = WeightFiles.write, threading.Event()

    def wait(self: WeightFiles, storage: Any) -> Any:
        assert committed.wait(60)
        return write(self, storage)

    def on_commit(info: Any) -> None:
        check(info.path, 1.0)
        found.append(info.step)

    options = SaveOptions(view=AS_FILES, on_commit=on_commit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightFiles, "write", wait)
        with CheckpointManager(tmp_path, sharded(), keep=Retention(1, grace=0.0), save_options=options) as manager:
            for step in (1, 2, 3):
                manager.save(step)
                manager.wait()  # does not wait for a view
            assert not found and [info.step for info in manager.steps()] == [1, 2, 3]
            committed.set()
    if dist.get_rank() == 0:
        assert found == [1, 2, 3]
        assert [name for name in sorted(os.listdir(tmp_path)) if name.startswith("step")] == ["step_00000003"]
    dist.barrier()


@on_ranks(2)
def test_a_failed_view_has_no_index(tmp_path: Path) -> None:
    def fail(self: WeightFiles, storage: Any) -> Any:
        files = write(self, storage)
        if self.ranks.rank == 1:
            raise StorageError("no room")
        return files

    write = WeightFiles.write
    bytecheckpoint.save(tmp_path, sharded(), view=AS_FILES).viewed.result()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightFiles, "write", fail)
        handle = bytecheckpoint.save(tmp_path, sharded(2.0), view=AS_FILES)
        with pytest.raises(StorageError, match="no room"):
            handle.viewed.result()
    dist.barrier()
    assert not files_in(tmp_path) and not (tmp_path / VIEW_INDEX).exists()
    fresh = sharded(0.0)
    bytecheckpoint.load(tmp_path, fresh)
    assert torch.equal(fresh["model"].embed.weight.full_tensor(), Net(2.0).embed.weight)


@on_ranks(2)
def test_parts_of_a_pipeline_need_an_index_only(tmp_path: Path) -> None:
    states = trained()
    stages = ["embed", "layer"] if dist.get_rank() == 0 else ["head", "layer"]
    states["model"].head.weight = torch.nn.Parameter(states["model"].head.weight.detach() + 1)
    for name in {"embed", "layer", "head"} - {*stages}:
        delattr(states["model"], name)
    handle = bytecheckpoint.save(tmp_path, {"model": states["model"]}, view=VIEW)
    assert handle.result().view == "index"
    weights = json.loads((tmp_path / VIEW_INDEX).read_text())["weight_map"]
    assert weights.keys() == {"embed.weight", "layer.weight", "head.weight"} and len({*weights.values()}) == 2


@on_ranks(2)
def test_a_rank_without_a_view_ends_that_of_all(tmp_path: Path) -> None:
    handle = bytecheckpoint.save(tmp_path, sharded(), view=AS_FILES if dist.get_rank() == 0 else None)
    with pytest.raises(UsageError, match="this rank gave no view="):
        handle.viewed.result(60)
    assert not (tmp_path / VIEW_INDEX).exists()


@on_ranks(2)
def test_a_save_meanwhile_gets_no_older_weights(tmp_path: Path) -> None:
    """Another save commits when the index of the first one's view is about to be published."""
    real, stopped, replaced = PosixStorage.publish, threading.Event(), threading.Event()

    def publish(storage: Any, name: str, data: bytes, **options: Any) -> None:
        if name == VIEW_INDEX and not stopped.is_set():
            stopped.set()
            assert replaced.wait(60)
        real(storage, name, data, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosixStorage, "publish", publish)
        first = bytecheckpoint.save(tmp_path, sharded(), view=AS_FILES)
        assert dist.get_rank() or stopped.wait(60)
        bytecheckpoint.save(tmp_path, sharded(2.0))
        dist.barrier()
        replaced.set()
        with pytest.raises(StorageConflictError, match="another save has replaced"):
            first.viewed.result(60)
    dist.barrier()
    assert not (tmp_path / VIEW_INDEX).exists() and not files_in(tmp_path)
