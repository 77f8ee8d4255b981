"""Data loading whose state belongs to a fixed number of streams, so that any number of ranks resumes exactly."""

from __future__ import annotations

from bytecheckpoint.dataloader.hugging_face import HuggingFaceLoader
from bytecheckpoint.dataloader.loader import TokenBufferLoader, WorkerOptions
from bytecheckpoint.dataloader.map_style import ResumableLoader, ResumableSampler
from bytecheckpoint.dataloader.mosaic import MosaicLoader
from bytecheckpoint.dataloader.packing import cumulative_lengths, labels_of
from bytecheckpoint.dataloader.per_rank import PerRankLoader
from bytecheckpoint.dataloader.recipe import TokenRecipe
from bytecheckpoint.dataloader.sources.base import Cursor, MapSource, Source
from bytecheckpoint.dataloader.sources.iterable import IterableSource, from_hugging_face
from bytecheckpoint.dataloader.sources.megatron import MegatronSource
from bytecheckpoint.dataloader.sources.parquet import ParquetSource
from bytecheckpoint.dataloader.sources.sequence import SequenceSource
from bytecheckpoint.dataloader.sources.text import JsonLinesSource, TextSource
from bytecheckpoint.dataloader.sources.tokens import TokenFileSource
from bytecheckpoint.dataloader.stream import SourceProgress
from bytecheckpoint.dataloader.torchdata import TorchdataLoader

__all__ = [
    "Cursor",
    "HuggingFaceLoader",
    "IterableSource",
    "JsonLinesSource",
    "MapSource",
    "MegatronSource",
    "MosaicLoader",
    "ParquetSource",
    "PerRankLoader",
    "ResumableLoader",
    "ResumableSampler",
    "SequenceSource",
    "Source",
    "SourceProgress",
    "TextSource",
    "TokenBufferLoader",
    "TokenFileSource",
    "TokenRecipe",
    "TorchdataLoader",
    "WorkerOptions",
    "cumulative_lengths",
    "from_hugging_face",
    "labels_of",
]
