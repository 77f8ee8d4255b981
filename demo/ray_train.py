"""Train on two workers of Ray, of which one is killed once: Ray starts both again, and they go on where they were.

    python demo/ray_train.py /tmp/ray-run

The losses of all steps are in losses.jsonl there. Start it again with another number of workers and more steps:

    python demo/ray_train.py /tmp/ray-run 1 60
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model

import bytecheckpoint
from bytecheckpoint.integrations.ray import CheckpointManager
from bytecheckpoint.manager import Cadence

SAMPLES_PER_STEP = 8


def train(config: dict[str, Any]) -> None:
    context, folder = ray.train.get_context(), Path(config["folder"])
    rank, ranks = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    states = {"model": model, "optimizer": optimizer, "rng": bytecheckpoint.rng_state()}
    with CheckpointManager(states, every=Cadence(10, at_end=True)) as manager:
        manager.restore_latest()
        for step in range(manager.step + 1, config["steps"] + 1):
            samples = torch.randn(SAMPLES_PER_STEP, 4, generator=torch.Generator().manual_seed(step))[rank::ranks]
            loss = (model(samples).squeeze(1) - samples.sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.maybe_save(step, {"loss": loss})
            if rank == 0:
                with (folder / "losses.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
            if rank == 1 and step == 25 and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, workers: int, steps: int) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    result = TorchTrainer(
        train,
        train_loop_config={"folder": folder, "steps": steps},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=folder,
            failure_config=ray.train.FailureConfig(max_failures=1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    print(result.checkpoint)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2, int(sys.argv[3]) if len(sys.argv) > 3 else 40)
