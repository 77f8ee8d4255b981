"""Makes golden files of the torch that runs it: `python make.py FOLDER`, once, in an environment with that version.

tests/formats/golden/torch-2.4.1 is of torch 2.4.1. Nothing here needs the package, so an old torch can run it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp


def states() -> dict[str, Any]:
    numbers = torch.arange(120, dtype=torch.float32)
    return {
        "model": {
            "row": numbers[:24].view(4, 6),
            "transposed": numbers[:24].view(4, 6).t(),
            "channels_last": numbers.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "bfloat16": numbers[:3].bfloat16(),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(2.0),
            "sliced": numbers[:24].view(4, 6)[:, 1:3].clone(),
        },
        "optimizer": {
            "state": {"row": {"exp_avg": torch.ones(4, 6), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["row"]}],
        },
        "step": 5,
        "list": [1, torch.ones(2)],
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(states(), checkpoint_id=str(folder / "dcp"))
    torch.save(states(), folder / "new.pt")
    torch.save(states(), folder / "old.pt", _use_new_zipfile_serialization=False)
