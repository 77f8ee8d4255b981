"""Hugging Face Trainer passes the conformance suite."""

from __future__ import annotations

from tests.integrations.conformance import CHANGES, Conformance, pytest_generate_tests  # noqa: F401


class TestTransformers(Conformance):
    tool = "transformers"
    demo = "trainer"
    demo_close = 1e-5  # Trainer adds losses in single precision
    changes = CHANGES
