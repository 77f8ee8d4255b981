"""Storages of checkpoint folders: one small protocol, and a backend per URL scheme."""

from __future__ import annotations

from bytecheckpoint.storage.base import Capabilities, FileReader, FileStat, FileWriter, NewFile, Storage
from bytecheckpoint.storage.registry import known_schemes, open_named, resolve

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
