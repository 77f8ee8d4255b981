"""Hugging Face Accelerate passes the conformance suite."""

from __future__ import annotations

from tests.integrations.conformance import CHANGES, Conformance, pytest_generate_tests  # noqa: F401


class TestAccelerate(Conformance):
    tool = "accelerate"
    demo = "accelerator"
    changes = CHANGES
    test_a_signal = None  # type: ignore[assignment]  # the program decides where it saves
