"""A small training program with what checkpoints often lose: frozen layers, buffers, groups, their hyperparameters."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import bytecheckpoint


def trained(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with a frozen layer, and its AdamW with three parameter groups, after three steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 3)).to(dtype)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": model[1].parameters(), "lr": 0.01},
            {"params": model[2].parameters(), "lr": 0.02, "betas": (0.5, 0.6)},
        ]
    )
    optimizer.add_param_group({"params": model[3].parameters(), "weight_decay": 0.3})
    for _ in range(3):
        model(torch.randn(8, 6, dtype=dtype)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fresh(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same program before its first step."""
    model, optimizer = trained(seed=1, dtype=dtype)
    empty = torch.optim.AdamW([{k: v for k, v in group.items() if k == "params"} for group in optimizer.param_groups])
    return model, empty


def restored(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Save the program's state to `path`; return a fresh program that has loaded it."""
    bytecheckpoint.save(path, {"model": model, "optimizer": optimizer})
    other, empty = fresh(dtype)
    bytecheckpoint.load(path, {"model": other, "optimizer": empty})
    return other, empty
