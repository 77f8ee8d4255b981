"""Storages of checkpoint folders: one small protocol, and a backend per URL scheme."""

from __future__ import annotations

from bytecheckpoint.storage.base import Capabilities, FileReader, FileStat, FileWriter, NewFile, Storage
from bytecheckpoint.storage.registry import (
    COLD_FOLDERS,
    adopted_version,
    known_schemes,
    open_differences,
    open_named,
    open_stored,
    other_folder,
    resolve,
)

__all__ = [
    "COLD_FOLDERS",
    "Capabilities",
    "FileReader",
    "FileStat",
    "FileWriter",
    "NewFile",
    "Storage",
    "adopted_version",
    "known_schemes",
    "open_differences",
    "open_named",
    "open_stored",
    "other_folder",
    "resolve",
]
