"""What ranks run in test_auto.py. Each function returns plain data."""

from __future__ import annotations

from typing import Any

import pytest

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.registry import resolve
from tests.frameworks.interchange import gpt
from tests.frameworks.megatron.models import Layout, build_chunks, initialize_parallel


def chosen_adapters() -> dict[str, str]:
    """Return the adapter that "auto" chooses for each way to run a GPTModel without model parallelism."""
    found = {wrapping: resolve("auto", gpt.TorchRun(wrapping, Layout()).states()).name for wrapping in gpt.WRAPPERS}
    found["zero"] = resolve("auto", gpt.EngineRun("z2x2", Layout()).states()).name
    found["megatron"] = resolve("auto", gpt.MegatronRun(Layout(dp=2)).states()).name
    return found


def doubly_sharded_models() -> dict[str, str]:
    """Return the errors for a model that both Megatron and torch shard, by wrapper and framework."""
    found = {}
    for wrapping, frameworks in (("fsdp1", ("auto", "fsdp", "fsdp1", "torch")), ("fsdp2", ("auto", "fsdp2"))):
        layout = Layout(tp=2)
        initialize_parallel(layout)
        (model,) = build_chunks(layout)
        states: dict[str, Any] = {"model": gpt.WRAPPERS[wrapping](model)}
        for framework in frameworks:
            with pytest.raises(UsageError) as caught:
                resolve(framework, states).capture(states)
            found[f"{wrapping} {framework}"] = str(caught.value)
    return found
