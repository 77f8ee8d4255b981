"""kill -9 of a rank at each stage of a view: whole with the step, or not there until a resumed run completes it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint
from bytecheckpoint import CheckpointError, CheckpointManager, HuggingFaceView, SaveOptions, tools
from bytecheckpoint.collectives import current
from bytecheckpoint.collectives.store_collective import StoreCollective
from bytecheckpoint.engine.view_files import VIEW_INDEX
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.world import world_of
from tests.support.faulty_storage import Faults
from tests.support.pretrained import Net, Own, check, trained, view_of_own
from tests.support.worlds import Worlds

#: Operation before which the rank is killed, part of the file's name, and calls that pass first.
BEFORE_COMMIT = ("publish", CATALOG_NAME, 0)
STAGES = {
    "config": ("publish", "config.json", 0),
    "create": ("create", "model-", 0),
    "write": ("write", "model-", 0),
    "header": ("write", "model-", 1),
    "finish": ("finish", "model-", 0),
    "index": ("publish", VIEW_INDEX, 0),
}
VIEW = HuggingFaceView(dtype="float32")  # files of their own: those of whole tensors come with the step


def sharded(value: float, base: Path | None = None) -> dict[str, Any]:
    """Return states cut over all ranks: of transformers' names, or with `base` of others, which its view explains."""
    model: Any = Net(value) if base is None else Own(value, turned=base.name == "turned")
    if current().world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (current().world_size,)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def view_by(base: Path | None) -> HuggingFaceView:
    """Return the view of `sharded` states."""
    return VIEW if base is None else view_of_own(base, turned=base.name == "turned")


def save_and_be_killed(root: Path, victim: int, operation: str, name: str, skip: int, base: Path | None = None) -> None:
    """Save step 1, then kill a rank at a stage of step 2."""
    bytecheckpoint.configure(timeout=8.0, writer="thread")
    view = view_by(base)
    options = SaveOptions(view=view, async_checkpoint=False)
    with CheckpointManager(root, sharded(1.0, base), save_options=options) as manager:
        manager.save(1)
    faults = Faults()
    faults.add(operation, name=name, rank=victim, skip=skip, before=lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(CheckpointError):
        faults.install(patch)
        bytecheckpoint.save(root / "step_00000002", sharded(2.0, base), view=view).viewed.result()


def save_and_be_killed_at_an_exchange(root: Path, victim: int) -> float:
    """Save step 1, then kill a rank when ranks join the tensors of step 2; return the seconds until another rank knows."""
    bytecheckpoint.configure(timeout=60.0, writer="thread")
    with CheckpointManager(root, sharded(1.0), save_options=SaveOptions(view=HuggingFaceView())) as manager:
        manager.save(1)
    exchange = StoreCollective.exchange

    def die(self: Any, *args: Any, **options: Any) -> None:
        if self.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreCollective, "exchange", die)
        handle = bytecheckpoint.save(
            root / "step_00000002", sharded(2.0), view=HuggingFaceView(), async_checkpoint=True
        )
        begin = time.monotonic()
        with pytest.raises(CheckpointError, match="rank"):
            handle.result()
    return time.monotonic() - begin


def resume(root: Path, view: HuggingFaceView = VIEW, base: Path | None = None) -> int:
    """Resume the run, at any number of ranks, and wait for the view; return the step."""
    states, options = sharded(0.0, base), SaveOptions(view=view, async_checkpoint=False)
    with CheckpointManager(root, states, save_options=options) as manager:
        restored = manager.restore_latest()
        assert restored is not None
        world_of(current()).saves.drain_behind()
    return restored.step


def opens(step: Path, value: float) -> bool:
    """Return whether a step has a view; fail if it has another one than its own."""
    try:
        check(step, value)
    except FileNotFoundError:
        return False
    return True


def killed(worlds: Worlds, root: Path, victim: int, stage: tuple[str, str, int], ranks: int = 2) -> Path:
    world = worlds.fresh(ranks)
    ended = world.start(save_and_be_killed, root, victim, *stage).outcomes(timeout=60, grace=40)
    assert "died with exit code -9" in ended[victim][1]
    assert all(ok for rank, (ok, _) in enumerate(ended) if rank != victim), ended
    assert opens(root / "step_00000001", 1.0)
    return root / "step_00000002"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_completes_the_view(worlds: Worlds, tmp_path: Path, stage: str) -> None:
    victim = 0 if STAGES[stage][0] == "publish" else 1
    step = killed(worlds, tmp_path, victim, STAGES[stage])
    assert not opens(step, 2.0)
    fresh = trained(0.0)
    bytecheckpoint.load(step, fresh)
    assert torch.equal(fresh["model"].embed.weight, Net(2.0).embed.weight)
    if stage in ("finish", "index"):  # nobody resumes this one
        assert list(step.glob("model-*"))
        tools.collect_garbage(tmp_path, older_than=-60)
        assert not list(step.glob("model-*"))
    assert worlds.get(2).run(resume, tmp_path) == [2, 2]
    assert opens(step, 2.0)
    report = tools.verify(step)
    assert report.ok
    assert not report.notes
    tools.collect_garbage(tmp_path, older_than=-60)
    assert opens(step, 2.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "stage"), [("names", "index"), ("turned", "finish"), ("turned", "index")])
def test_a_resumed_run_completes_the_view_of_a_layout(worlds: Worlds, tmp_path: Path, kind: str, stage: str) -> None:
    """Files of the step hold the tensors, or those that are not transposed."""
    base, root = tmp_path / kind, tmp_path / "run"
    view = view_by(base)
    ended = worlds.fresh(2).start(save_and_be_killed, root, 0, *STAGES[stage], base).outcomes(timeout=60, grace=40)
    assert "died with exit code -9" in ended[0][1]
    step = root / "step_00000002"
    assert not (step / VIEW_INDEX).exists()
    assert worlds.get(2).run(resume, root, view, base) == [2, 2]
    check(step, 2.0, architecture=None)
    assert len(list(step.glob("model-*"))) == (kind == "turned")
    report = tools.verify(step)
    assert report.ok and not report.notes


@pytest.mark.timeout(300)
def test_a_kill_before_the_commit_leaves_no_step(worlds: Worlds, tmp_path: Path) -> None:
    step = killed(worlds, tmp_path, 0, BEFORE_COMMIT)
    assert not opens(step, 2.0)
    assert worlds.get(2).run(resume, tmp_path) == [1, 1]
    (garbage,) = tools.collect_garbage(tmp_path, older_than=-60)
    assert "only the catalog is missing" in garbage.kept
    tools.remove(step)
    assert not step.exists() or not os.listdir(step)


@pytest.mark.timeout(300)
def test_another_number_of_ranks_completes_the_view(worlds: Worlds, tmp_path: Path) -> None:
    step = killed(worlds, tmp_path, 1, STAGES["finish"])
    assert resume(tmp_path) == 2
    assert opens(step, 2.0)
    assert [path.name[:20] for path in step.glob("model-*")] == ["model-00001-of-00001"]
    (step / VIEW_INDEX).unlink()
    (step / "config.json").unlink()
    resume(tmp_path)
    assert opens(step, 2.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_while_ranks_join_tensors_leaves_no_step(worlds: Worlds, tmp_path: Path, victim: int) -> None:
    world = worlds.fresh(2)
    ended = world.start(save_and_be_killed_at_an_exchange, tmp_path, victim).outcomes(timeout=90, grace=70)
    assert "died with exit code -9" in ended[victim][1]
    ok, seconds = ended[1 - victim]
    assert ok and seconds < 30, seconds
    assert opens(tmp_path / "step_00000001", 1.0)
    assert not (tmp_path / "step_00000002" / CATALOG_NAME).exists()
    assert worlds.get(2).run(resume, tmp_path, HuggingFaceView()) == [1, 1]


def test_a_view_of_another_configuration_is_not_completed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = SaveOptions(view=HuggingFaceView())
    with CheckpointManager(tmp_path, sharded(2.0), save_options=options) as manager:
        manager.save(2)
    step = tmp_path / "step_00000002"
    (step / VIEW_INDEX).unlink()
    states = sharded(0.0)
    states["model"].config.changed = True
    with CheckpointManager(tmp_path, states, save_options=options) as manager:
        manager.restore_latest()
        world_of(current()).saves.drain_behind()
    assert "stays without its view" in caplog.text
    assert not opens(step, 2.0)
    resume(tmp_path, HuggingFaceView())  # an index over the storage files, of which no byte is written twice
    assert opens(step, 2.0)
    assert not list(step.glob("model-*"))
