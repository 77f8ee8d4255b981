"""Real training frameworks on real storages: what each saved, every other one loads (`make test-frameworks-servers`)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from bytecheckpoint.storage import resolve
from tests.frameworks.megatron.test_load_large import EXPERTS, check
from tests.layouts.models import Family
from tests.storage.world_jobs import check_members, run
from tests.support.interchange.families import FAMILIES
from tests.support.worlds import Worlds

_THERE = all(map(importlib.util.find_spec, ("deepspeed", "megatron")))
pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not _THERE and not os.environ.get("BYTECHECKPOINT_REQUIRE_FRAMEWORKS"),
        reason="NOT TESTED HERE: needs DeepSpeed and megatron-core: `make test-frameworks-servers`",
    ),
]
#: Megatron-Core in one process, FSDP1, ZeRO-3, Megatron-Core with tensor and pipeline parallelism.
MEMBERS = ("plain", "fsdp1-x3", "z3x2", "tp2-pp2-whole")


@pytest.mark.parametrize("root", ["hdfs", "s3"], indirect=True)
def test_every_framework_loads_every_framework(
    worlds: Worlds, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as in tests/frameworks/interchange, on storages across a network."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    check_members(worlds, root, tmp_path, FAMILIES["dense-adamw"], MEMBERS)


@pytest.mark.parametrize("root", ["hdfs", "s3"], indirect=True)
def test_megatron_loads_folders_of_hugging_face(
    worlds: Worlds, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name in ("llama", "qwen3_moe-large"):
        Family(name).write(tmp_path / name)
        for file in (tmp_path / name).iterdir():
            resolve(f"{root}/{name}").publish(file.name, file.read_bytes())
    module, paths = "frameworks.megatron.test_load_large", (f"{root}/llama", f"{root}/qwen3_moe-large")
    check(run(worlds, EXPERTS.world, module, "load", "qwen3_moe-large", EXPERTS, *paths))
