"""framework="auto" for models that several frameworks handle together."""

from __future__ import annotations

import pytest

from tests.frameworks.interchange import auto_jobs as jobs
from tests.support.worlds import Worlds

pytestmark = [pytest.mark.timeout(600), pytest.mark.short]


def test_the_framework_that_shards_the_model_is_chosen(worlds: Worlds) -> None:
    worlds.close()
    for found in worlds.run(2, jobs.chosen_adapters, timeout=300):
        assert found == {
            "plain": "megatron",
            "ddp": "megatron",
            "fsdp1": "fsdp1",
            "fsdp1-grad": "fsdp1",
            "fsdp2": "native",
            "zero": "deepspeed",
            "megatron": "megatron",
        }


def test_doubly_sharded_models_are_refused(worlds: Worlds) -> None:
    worlds.close()
    for found in worlds.run(2, jobs.doubly_sharded_models, timeout=300):
        assert found.pop("fsdp1 torch").startswith("model belongs to FSDP1")
        assert len(found) == 5
        for said in found.values():
            assert "Megatron" in said
