"""framework="auto" for models that several frameworks handle together."""

from __future__ import annotations

from typing import Any

import pytest

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.registry import resolve
from tests.support.interchange import gpt
from tests.support.megatron.models import Layout, build_chunks, initialize_parallel
from tests.support.worlds import Worlds, on_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.short]


@pytest.fixture(autouse=True)
def _new_processes(worlds: Worlds) -> None:
    worlds.close()


@on_ranks(2, timeout=300)
def test_the_framework_that_shards_the_model_is_chosen() -> None:
    """Of each way to run a GPTModel without model parallelism."""
    found = {wrapping: resolve("auto", gpt.TorchRun(wrapping, Layout()).states()).name for wrapping in gpt.WRAPPERS}
    found["zero"] = resolve("auto", gpt.EngineRun("z2x2", Layout()).states()).name
    found["megatron"] = resolve("auto", gpt.MegatronRun(Layout(dp=2)).states()).name
    assert found == {
        "plain": "megatron",
        "ddp": "megatron",
        "fsdp1": "fsdp1",
        "fsdp1-grad": "fsdp1",
        "fsdp2": "native",
        "zero": "deepspeed",
        "megatron": "megatron",
    }, found


@on_ranks(2, timeout=300)
def test_doubly_sharded_models_are_refused() -> None:
    """Both Megatron and torch shard the model."""
    for wrapping, frameworks in (("fsdp1", ("auto", "fsdp", "fsdp1", "torch")), ("fsdp2", ("auto", "fsdp2"))):
        initialize_parallel(Layout(tp=2))
        (model,) = build_chunks(Layout(tp=2))
        states: dict[str, Any] = {"model": gpt.WRAPPERS[wrapping](model)}
        for framework in frameworks:
            match = "^model belongs to FSDP1" if framework == "torch" else "Megatron"
            with pytest.raises(UsageError, match=match):
                resolve(framework, states).capture(states)
