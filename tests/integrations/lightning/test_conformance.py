"""Lightning passes the conformance suite."""

from __future__ import annotations

from tests.integrations.conformance import CHANGES, Conformance, pytest_generate_tests  # noqa: F401


class TestLightning(Conformance):
    tool = "lightning"
    demo = "lightning_trainer"
    changes = CHANGES
