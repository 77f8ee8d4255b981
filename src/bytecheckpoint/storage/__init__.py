"""Bytes under names: one small protocol, one file per backend, chosen by URL scheme."""

from __future__ import annotations

import os
import re

from ..errors import UsageError
from .base import FileReader, FileWriter, Storage
from .local import LocalStorage

__all__ = ["FileReader", "FileWriter", "Storage", "resolve"]

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_KNOWN = ("file",)


def resolve(path: str | os.PathLike[str]) -> Storage:
    """The storage that `path` names. A relative path means the directory at the time of this call.

    Raises:
        UsageError: an empty path, or a URL whose scheme has no backend.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(f"{text!r} is not a checkpoint path: give a folder or a URL")
    match = _SCHEME.match(text)
    if match is None:
        return LocalStorage(text)
    if match[1].lower() == "file":
        return LocalStorage(text[len("file://") :])
    raise UsageError(f"no storage backend for {match[1]}:// in {text!r}; known schemes: {', '.join(_KNOWN)}")
