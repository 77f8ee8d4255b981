from __future__ import annotations

from tests.support.settings import writer_threads

__all__ = ["writer_threads"]
