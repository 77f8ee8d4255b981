"""torchtitan is imported once, in the template of the worlds. Nothing is asked of the Hugging Face Hub."""

from __future__ import annotations

import importlib.util
import os

from tests.support.worlds import PRELOADED

os.environ["HF_HUB_OFFLINE"] = "1"
if importlib.util.find_spec("torchtitan"):
    PRELOADED.append("tests.integrations.torchtitan.preloaded")
