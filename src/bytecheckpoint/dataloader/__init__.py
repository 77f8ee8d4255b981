"""Data loading whose state belongs to a fixed number of streams, so that any number of ranks goes on exactly."""

from __future__ import annotations

from bytecheckpoint.dataloader.loader import TokenBufferLoader
from bytecheckpoint.dataloader.sources.base import Cursor, MapSource, Source
from bytecheckpoint.dataloader.sources.sequence import SequenceSource

__all__ = ["Cursor", "MapSource", "SequenceSource", "Source", "TokenBufferLoader"]
