"""Trainer is imported once, in the template of the worlds."""

from __future__ import annotations

import importlib.util

from tests.support.worlds import PRELOADED

if importlib.util.find_spec("transformers"):
    PRELOADED.append("tests.integrations.transformers.preloaded")
