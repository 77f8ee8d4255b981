"""A training function for Ray's workers, and what stands for Ray in tests without a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from tests.support.processes import wait_until
from tests.support.runs import steps_in

__all__ = ["Reports", "new_states", "pretended_ray", "train"]


def new_states() -> dict[str, Any]:
    """Return a small model and its optimizer; the model is under DDP where there are several ranks."""
    torch.manual_seed(1)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    if dist.is_initialized() and dist.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)}


def take_step(states: dict[str, Any], step: int, rank: int, ranks: int) -> float:
    """Train on this rank's part of eight samples; return the loss of all."""
    samples = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[rank::ranks]
    loss = (states["model"](samples).squeeze(1) - samples.sum(1)).square().mean()
    states["optimizer"].zero_grad()
    loss.backward()
    states["optimizer"].step()
    total = loss.detach().clone()
    if ranks > 1:
        dist.all_reduce(total)
    return float(total / ranks)


def train(config: dict[str, Any]) -> None:
    """Train in a worker of Ray, and write losses down beside those of a run that nothing stops.

    Args:
        config: "steps"; "notes": folder for the losses; "kill": step at which rank 1 dies if it has not yet, or 0.
    """
    import ray.train

    from bytecheckpoint.integrations.ray import CheckpointManager

    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    folder = Path(context.get_storage().experiment_fs_path)
    whole, wanted = new_states(), {}
    torch.manual_seed(rank)
    for step in range(1, config["steps"] + 1):
        wanted[step] = take_step(whole, step, rank, ranks), torch.rand(1).item()

    states = new_states()
    torch.manual_seed(rank)
    states["rng"] = bytecheckpoint.rng_state()
    with CheckpointManager(states, every=4) as manager:
        manager.restore_latest()
        begin = manager.step + 1
        known = [Path(c.checkpoint.path).name for c in ray.train.get_all_reported_checkpoints()]
        for step in range(begin, config["steps"] + 1):
            loss, drawn = take_step(states, step, rank, ranks), torch.rand(1).item()
            note = {"begin": begin, "step": step, "got": [loss, drawn], "wanted": wanted[step], "known": known}
            with (Path(config["notes"]) / f"{ranks}-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(note) + "\n")
            manager.maybe_save(step, {"loss": loss})
            if step == config["kill"] and begin == 1 and rank == 1:
                assert wait_until(lambda: 4 in steps_in(folder), 60)
                os.kill(os.getpid(), signal.SIGKILL)


class Reports:
    """What was reported, in place of Ray: checks that each checkpoint is committed, and that all ranks report it together.

    Attributes:
        found: (step, name of the folder or "", metrics) of each report.
    """

    def __init__(self, known: Sequence[str] = ()) -> None:
        self.found: list[tuple[int, str, dict[str, Any]]] = []
        self.known = list(known)

    def report(self, metrics: dict[str, Any], checkpoint: Any = None, checkpoint_upload_mode: Any = None) -> None:
        """See `ray.train.report`."""
        assert checkpoint_upload_mode.value == "NO_UPLOAD"
        path = "" if checkpoint is None else checkpoint.path
        assert not path or (Path(path) / "metadata.parquet").is_file(), "a checkpoint that is not committed"
        if dist.is_initialized():
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, path)
            assert found == [path] * len(found)
        self.found.append((metrics["step"], os.path.basename(path), metrics))
        if path:
            self.known.append(path)

    def all_reported(self, consistency_mode: Any) -> list[Any]:
        """See `ray.train.get_all_reported_checkpoints`."""
        return [SimpleNamespace(checkpoint=SimpleNamespace(path=path)) for path in self.known]

    @property
    def steps(self) -> list[int]:
        """The steps whose checkpoints were reported."""
        return [step for step, name, _ in self.found if name]


@contextlib.contextmanager
def pretended_ray(folder: Path, known: Sequence[str] = (), **storage: Any) -> Iterator[Reports]:
    """Be a worker of Ray whose run is in this folder."""
    import pyarrow.fs
    import ray.train

    place = {
        "storage_filesystem": pyarrow.fs.LocalFileSystem(), "experiment_fs_path": str(folder), "custom_fs_provided": False,
        **storage,
    }  # fmt: skip
    reports = Reports(known)
    context = SimpleNamespace(get_storage=lambda: SimpleNamespace(**place))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray.train, "get_context", lambda: context)
        patch.setattr(ray.train, "report", reports.report)
        patch.setattr(ray.train, "get_all_reported_checkpoints", reports.all_reported)
        yield reports
