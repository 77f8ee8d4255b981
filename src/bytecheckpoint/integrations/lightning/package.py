"""Lightning, under the name by which the program has imported it."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["pl"]

_OLD = "pytorch_lightning"


def _find() -> Any:
    if _OLD in sys.modules and "lightning.pytorch" not in sys.modules:
        return importlib.import_module(_OLD)
    try:
        return importlib.import_module("lightning.pytorch")
    except ModuleNotFoundError:
        return importlib.import_module(_OLD)


pl = _find()
