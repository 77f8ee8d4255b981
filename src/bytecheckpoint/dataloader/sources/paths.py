"""Find files by path or pattern, and keep in a local folder copies of some, and indices of their documents."""

from __future__ import annotations

import fcntl
import glob
import os
import posixpath
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint._distribution import install_command
from bytecheckpoint.errors import StorageError, UsageError

__all__ = ["Paths", "SourceCache", "local_files"]

#: A path, a pattern of `glob` ("**" crosses folders), or several paths. A pattern's files are sorted by path.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

#: Endings of compressed files.
_COMPRESSED: Final = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip")
#: Facts of storages that differ between two versions of a file, of which some are written as "LastModified" or "ETag".
_FACTS: Final = ("size", "mtime", "etag", "last_modified", "lastmodified", "last-modified", "created", "updated")
#: Bytes of a file's name that are used in the cache, so that no name is too long.
_NAME_BYTES: Final = 100


def local_files(path: str, cache: SourceCache | None) -> list[str]:
    """Return the absolute paths of a path or pattern, or those of copies.

    Raises:
        UsageError: there is no such file, or it needs a cache, and there is none.
    """
    if _is_foreign(path):
        if cache is not None:
            return cache.copies(path)
        why = "is no local file" if "://" in path else "is compressed, so its documents have no positions"
        raise UsageError(f"{path} {why}: pass cache=, a local folder for copies, or copy it yourself")
    if glob.has_magic(path) and not os.path.exists(path):
        found = sorted(os.path.abspath(one) for one in glob.iglob(path, recursive=True) if os.path.isfile(one))
        if not found:
            raise UsageError(f"no file matches {path}")
        return [local for one in found for local in (local_files(one, cache) if _is_foreign(one) else [one])]
    if os.path.isdir(path or "."):
        raise UsageError(f"{path!r} is a folder: name its files, as in {os.path.join(path, '*')}")
    return [os.path.abspath(path)]


def _is_foreign(path: str) -> bool:
    """Return whether documents of a file have no positions on a local disk."""
    return "://" in path or path.lower().endswith(_COMPRESSED)


class SourceCache:
    """A local folder with what was made of files. Processes of one machine share it; anything in it may be deleted.

    Args:
        folder: path of the folder.

    Raises:
        UsageError: the folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.path.abspath(folder)
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the cache {self._folder} cannot be made: {error.strerror}") from error

    def copies(self, path: str) -> list[str]:
        """Copy files, decompressed, unless that was done before; return the paths of the copies, in the order of the files.

        Raises:
            UsageError: no file matches, a package is missing, or an archive has several files.
            StorageError: a file cannot be read or copied.
        """
        try:
            import fsspec
        except ImportError as error:
            raise UsageError(f"{path} needs fsspec: {install_command('fsspec')}") from error
        try:
            files, plain = fsspec.core.url_to_fs(path)
            pattern = glob.has_magic(plain) and not files.exists(plain)
            found = files.glob(plain, detail=True) if pattern else {plain: files.info(plain)}
            names = sorted(name for name, facts in found.items() if facts["type"] == "file")
            if not names:
                raise UsageError(f"no file matches {path}")
            return [self._copy(files, name, found[name]) for name in names]
        except UsageError:
            raise
        except (ImportError, ValueError) as error:  # fsspec does not know the storage, or the compression
            raise UsageError(f"{path} cannot be opened: {error}") from error
        except Exception as error:  # storages and decompressors raise errors of their own
            raise StorageError(f"{path} cannot be copied into {self._folder}: {error}") from error

    def _copy(self, files: Any, name: str, facts: Mapping[str, Any]) -> str:
        base, ending = os.path.splitext(posixpath.basename(name))
        base = base if ending.lower() in _COMPRESSED else base + ending

        def fill(target: IO[bytes]) -> None:
            if ending.lower() == ".zip":
                with files.open(name, "rb") as raw, zipfile.ZipFile(raw) as archive:
                    if (count := len(archive.namelist())) != 1:
                        raise UsageError(f"{name} has {count} files, of which one would be read: unpack it")
            with files.open(name, "rb", compression="infer") as source:
                shutil.copyfileobj(source, target, 8 << 20)

        version = (str(facts[fact]) for fact in sorted(facts) if fact.lower() in _FACTS)
        return self._make(fill, base, files.unstrip_protocol(name), *version)

    def index(self, path: str, size: int, kind: str, find: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the bounds of the documents of a local file of some size, which `find` finds unless that was done before.

        Raises:
            StorageError: the folder cannot be used.
        """
        try:
            facts = os.stat(path)
            key = path, str(facts.st_size), str(facts.st_mtime_ns), str(facts.st_ctime_ns), kind
            while facts.st_size == size:  # else the file grows now, and the bounds are not those of this size
                made = self._make(lambda target: np.save(target, find()), f"{os.path.basename(path)}.npy", *key)
                if (found := _bounds_in(made, size)) is not None:
                    return found
                Path(made).unlink(missing_ok=True)  # another process may have found the damage too
        except OSError as error:
            raise StorageError(f"the cache {self._folder} cannot be used: {error.strerror or error}") from error
        return find()

    def _make(self, fill: Callable[[IO[bytes]], object], base: str, *key: str) -> str:
        """Make a file of the cache for a key unless it is there, one process for all; return its path."""
        digest = xxhash.xxh3_64_hexdigest("\0".join(key).encode("utf-8", "surrogateescape"))
        name = f"{digest}-{os.fsdecode(os.fsencode(base)[-_NAME_BYTES:])}"
        path = os.path.join(self._folder, name)
        if os.path.exists(path):
            return path
        with open(os.path.join(self._folder, f".{name}.lock"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(path):
                temporary = f"{path}.tmp"  # that of a process that was killed is written anew
                try:
                    with open(temporary, "wb") as target:
                        fill(target)
                        target.flush()
                        os.fsync(target.fileno())  # a machine that stops now must not leave a name without the bytes
                    os.replace(temporary, path)
                finally:
                    if os.path.exists(temporary):
                        os.unlink(temporary)
        return path


def _bounds_in(path: str, size: int) -> NDArray[np.int64] | None:
    """Return the bounds of documents in a file of the cache; None if it is damaged."""
    try:
        found = np.load(path, allow_pickle=False)
    except (EOFError, ValueError, FileNotFoundError):
        return None
    good = found.dtype == np.int64 and found.ndim == 1 and len(found) and found[0] >= 0 and found[-1] <= size
    return found if good and (np.diff(found) > 0).all() else None
