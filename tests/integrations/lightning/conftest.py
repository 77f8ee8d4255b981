"""Lightning is imported once, in the template of the worlds."""

from __future__ import annotations

import importlib.util

from tests.support.worlds import PRELOADED

if importlib.util.find_spec("lightning"):
    PRELOADED.append("tests.integrations.lightning.preloaded")
