"""Bytes under names: one small protocol, one file per backend, chosen by URL scheme."""

from __future__ import annotations

from .base import Capabilities, FileReader, FileStat, FileWriter, NewFile, Storage
from .registry import known_schemes, open_named, resolve

__all__ = [
    "Capabilities",
    "FileReader",
    "FileStat",
    "FileWriter",
    "NewFile",
    "Storage",
    "known_schemes",
    "open_named",
    "resolve",
]
