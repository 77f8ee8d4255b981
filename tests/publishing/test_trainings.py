"""Real trainings of torch publish, and the same ranks follow at another layout, over steps at the rates of fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.publishing import Follower, Publisher
from bytecheckpoint.tools import fingerprint
from tests.support.fsdp1_layouts import WORLD_SIZE, build
from tests.support.tiny_model import source_values
from tests.support.variants import quick
from tests.support.worlds import on_ranks

PAIRS = [
    ("fsdp4", "tp2-fsdp2"), ("tp2-fsdp2", "ep2-fsdp2"), ("full4-orig", "tp2-fsdp2"), ("hsdp2x2", "fsdp4"),
    ("pp2-fsdp2", "hsdp2x2"), ("pp2-fsdp2", "tp2-fsdp2"), ("fsdp2", "grad2-flat"), ("tp2", "fsdp2"),
    ("tp2", "full2-deep"), ("fsdp2", "ddp2"), ("ddp2", "tp2"), ("one", "one"),
]  # fmt: skip


def adam(parameters: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*parameters.values()], lr=2e-5, foreach=False)


@pytest.mark.parametrize(("layout", "followed"), quick(PAIRS, every=4))
@on_ranks(lambda layout, **_: WORLD_SIZE[layout])
def test_followers_equal_the_training_at_every_version(layout: str, followed: str, path: str) -> None:
    trainer = build(layout, source_values, dtype=torch.bfloat16, optimizer=adam)
    engine = build(followed, source_values, dtype=torch.bfloat16, optimizer=adam).model
    follower = Follower(path)
    with Publisher(path, full_every=4) as publisher:
        for step in range(1, 7):
            trainer.step()
            publisher.publish(trainer.model, step).result(60)
            report = follower.update(engine)
            assert report is not None and (report.step, report.versions) == (step, int(step > 1))
            found = fingerprint({"model": engine})
            assert found.tensors == fingerprint(Path(path) / f"step_{step:08d}").tensors
    assert trainer.step() > 0
    assert bytecheckpoint.load(Path(path) / "step_00000006", {"model": engine}).bytes_read
