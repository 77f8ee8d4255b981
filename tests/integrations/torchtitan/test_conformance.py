"""torchtitan passes the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tests.integrations.conformance import Conformance, pytest_generate_tests  # noqa: F401


class TestTorchtitan(Conformance):
    tool = "torchtitan"
    ranks: ClassVar[Mapping[str, int]] = {"one": 1, "ddp": 2, "tp": 2, "hsdp": 2}  # its data parallelism is FSDP
    changes = (("tp", "one"), ("one", "tp"), ("ddp", "hsdp"))
    test_saves_behind_the_training = None  # type: ignore[assignment]  # async_mode says how a save copies (test_modes)
    test_a_new_run_in_an_old_folder = None  # type: ignore[assignment]  # torchtitan always resumes
    test_the_demo = None  # type: ignore[assignment]  # test_demo.py runs it by torchtitan's own program
