"""Engines of any stage: each step is a folder of Hugging Face too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint import HuggingFaceView
from tests.support.deepspeed_engines import full_state, in_engine_world, trained_run
from tests.support.pretrained import Config, read

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["z1x3", "z3x2"])
@in_engine_world
def test_a_step_is_a_folder_of_hugging_face(name: str, path: str) -> None:
    run = trained_run(name)
    run.engine.module.config, run.engine.module.dtype = Config(), torch.float32
    handle = bytecheckpoint.save(path, run.states(), view=HuggingFaceView())
    assert handle.result().view == "index"
    handle.viewed.result()
    dist.barrier()
    wanted = full_state(run.engine)
    found = read(path, f"['{type(run.engine.module).__name__}']")
    assert all(torch.equal(value, wanted[f"model/{key}"].cpu()) for key, value in found.items()) and len(found) > 20
    dist.barrier()
