"""Import Lightning under the name that the program uses, or that is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

__all__ = ["pl"]

_OLD = "pytorch_lightning"
_uses_old = _OLD in sys.modules and "lightning.pytorch" not in sys.modules
_has_only_old = importlib.util.find_spec("lightning") is None and importlib.util.find_spec(_OLD) is not None

pl: Any = importlib.import_module(_OLD if _uses_old or _has_only_old else "lightning.pytorch")
