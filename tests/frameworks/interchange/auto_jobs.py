"""What ranks run in test_auto.py."""

from __future__ import annotations

from typing import Any

import pytest

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.registry import resolve
from tests.frameworks.interchange import gpt
from tests.frameworks.megatron.worlds import Layout, build_chunks, prepare


def chosen() -> dict[str, str]:
    """The adapter that "auto" chooses for each way to run a GPTModel without Megatron's parallelism."""
    found = {how: resolve("auto", gpt.TorchRun(how, Layout()).states()).name for how in gpt.WRAPPERS}
    found["zero"] = resolve("auto", gpt.EngineRun("z2x2", Layout()).states()).name
    found["megatron"] = resolve("auto", gpt.MegatronRun(Layout(dp=2)).states()).name
    return found


def split() -> dict[str, str]:
    """What is said of a model that Megatron splits and torch shards as well, by wrapper and framework."""
    found = {}
    for how, frameworks in (("fsdp1", ("auto", "fsdp", "fsdp1", "torch")), ("fsdp2", ("auto", "fsdp2"))):
        layout = Layout(tp=2)
        prepare(layout)
        (model,) = build_chunks(layout)
        states: dict[str, Any] = {"model": gpt.WRAPPERS[how](model)}
        for framework in frameworks:
            with pytest.raises(UsageError) as caught:
                resolve(framework, states).capture(states)
            found[f"{how} {framework}"] = str(caught.value)
    return found
