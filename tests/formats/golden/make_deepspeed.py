"""Makes golden folders of DeepSpeed: `python make_deepspeed.py FOLDER STAGE RANK PORT` as two processes, for each stage.

Then, in the same environment (DeepSpeed 0.19.8), `ds_to_universal.py` converts each folder, and `expected` below joins its
files into STAGE.expected.pt: parameter -> state -> tensor. Two of the results are kept as they are: universal1 (with
`--inject_missing_state`) and universal3.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch


def expected(universal: Path) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for file in sorted(universal.glob("zero/*/*.pt")):
        value = torch.load(file, weights_only=False)
        found.setdefault(file.parent.name, {})[file.stem] = torch.as_tensor(
            value["param"] if isinstance(value, dict) else value
        )
    return found


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.body = torch.nn.Linear(5, 9)
        self.frozen = torch.nn.Linear(9, 3)
        self.frozen.weight.requires_grad = False
        self.head = torch.nn.Linear(9, 7, bias=False)
        self.register_buffer("count", torch.arange(4.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.body(self.embed(ids)).relu()
        return self.head(x).sum() + self.frozen(x).sum()


def main(folder: str, stage: int, rank: int, port: str) -> None:
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, DS_ACCELERATOR="cpu")
    import deepspeed

    logging.disable(logging.INFO)
    torch.manual_seed(1)
    net = Net()
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "sub_group_size": 40 if stage == 3 else 1_000_000_000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config)
    for _ in range(2):
        engine.backward(engine(torch.tensor([[1, 2, 3 + rank]])))
        engine.step()
    engine.save_checkpoint(folder, tag=f"zero{stage}", client_state={"note": "hi"})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
