"""Resolve a path or URL to its storage, by built-in schemes and by the schemes that other packages add.

A package adds a scheme by an entry point of the group `bytecheckpoint.storages`. Its name is the scheme, and its object is
called with the URL and returns a `Storage`:

    [project.entry-points."bytecheckpoint.storages"]
    tape = "my_package.tape:TapeStorage"
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from bytecheckpoint._distribution import install_command
from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, StorageError, UsageError
from bytecheckpoint.representation.catalog import DELTA, FOREIGN, StorageFile
from bytecheckpoint.representation.names import delta_name, generation_of, is_uri
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.base import FileReader, Storage
from bytecheckpoint.storage.posix.storage import LocalStorage, PosixStorage
from bytecheckpoint.storage.wrappers import WrappedStorage, unwrapped, wrapped_like

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from bytecheckpoint.storage.deltas.reading import DeltaReader

__all__ = [
    "COLD_FOLDERS",
    "GROUP",
    "adopted_version",
    "known_schemes",
    "open_differences",
    "open_named",
    "open_stored",
    "other_folder",
    "resolve",
]

GROUP = "bytecheckpoint.storages"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_FSSPEC = "fsspec+"


class _Builtin(NamedTuple):
    """The backend of a scheme, the top-level package that it needs, and the extra that installs it."""

    module: str
    factory: str
    needs: str = ""
    extra: str = ""


_BUILTIN = {
    "mem": _Builtin("bytecheckpoint.storage.posix.memory", "MemoryStorage"),
    "s3": _Builtin("bytecheckpoint.storage.objects.storage", "ObjectStorage", "obstore", "s3"),
    "gs": _Builtin("bytecheckpoint.storage.objects.storage", "ObjectStorage", "obstore", "gcs"),
    "az": _Builtin("bytecheckpoint.storage.objects.storage", "ObjectStorage", "obstore", "azure"),
    "hdfs": _Builtin("bytecheckpoint.storage.hdfs.storage", "HdfsStorage", "hdfs_native", "hdfs"),
}
_BUILTIN_FSSPEC = _Builtin("bytecheckpoint.storage.fsspec", "FsspecStorage", "fsspec", "fsspec")
#: File of a run's folder with the folders to which a cooldown moves its steps, one on each line.
COLD_FOLDERS = "cooldown.folders"
_cold_folders: dict[str, set[str]] = {}  # by run, those that were read
_TIER = "tier+"
#: Folder of an earlier checkpoint, beside that of the files that build on it; never "." or "..".
_FOLDER = re.compile(r"(?!\.{1,2}$)[^/\\:\x00-\x1f\x7f]{1,255}")
_BUILTIN_TIER = _Builtin("bytecheckpoint.tiers.storage", "TierStorage")


def resolve(path: str | os.PathLike[str] | Storage) -> Storage:
    """Return the storage of a path or URL; a `Storage` is returned as it is. Relative paths are resolved now.

    Raises:
        UsageError: the path is empty or holds credentials, or the scheme's backend is unknown or not installed.
    """
    if isinstance(path, Storage):
        return path
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        # A dict of states in the place of a path would be printed with all that it holds.
        shown = (
            repr(path) if path is None or isinstance(path, str | bytes) else f"an object of type {type(path).__name__}"
        )
        raise UsageError(f"{shown} is not a checkpoint path: give a folder or a URL")
    match = _SCHEME.match(text)
    if match is None:
        _refuse_broken_url(text)
        return LocalStorage(text)
    scheme = match[1].lower()
    if scheme == "file":
        return LocalStorage(_file_path(text))
    url = scheme + text[len(scheme) :]
    builtin = _BUILTIN.get(scheme)
    for prefix, wrapping in ((_FSSPEC, _BUILTIN_FSSPEC), (_TIER, _BUILTIN_TIER)):
        if scheme.startswith(prefix):
            builtin = wrapping
    if builtin is not None:
        return _import_backend(builtin, scheme)(url)
    plugin = _plugins().get(scheme)
    if plugin is None:
        raise UsageError(f"no storage backend for {scheme}:// ; known schemes: {', '.join(known_schemes())}")
    return _open_plugin(plugin, url)


def open_named(storage: Storage, name: str) -> FileReader:
    """Open a file by its name in the catalog of the checkpoint in `storage`: a name in the folder, or a URI elsewhere.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptCheckpointError: the URI does not name a storage file: no reader opens another file for a catalog.
        IncompatibleCheckpointError: the file lies outside of the checkpoint's folder, in one that is not trusted.
    """
    if not is_uri(name):
        _refuse_link(storage, name)
        return storage.open(name)
    folder, *inside = name.rsplit("/", 2)
    if len(inside) < 2 or generation_of("/".join(inside)) is None:
        raise CorruptCheckpointError(
            f"{storage.url}: the catalog names {name[:200]!r}, which is no storage file", file=name[:200]
        )
    return other_folder(storage, folder).open("/".join(inside))


def open_stored(storage: Storage, file: StorageFile) -> FileReader:
    """Open a file of the checkpoint in `storage`: one of this package, or an adopted one of another program.

    Raises as `open_named`; CorruptCheckpointError too for an adopted file without checksums that was replaced, and for a
    file of differences that was cut, or whose base is gone.
    """
    if file.format == DELTA:
        return open_differences(storage, file)
    if file.format != FOREIGN or not is_uri(file.name):
        return open_named(storage, file.name)
    folder, _, name = file.name.rpartition("/")
    place = other_folder(storage, folder, name)
    if not file.block_bytes and file.header_sum and adopted_version(place, name) != file.header_sum:
        raise CorruptCheckpointError(
            f"{storage.url}: {file.name} was replaced or written to since it was adopted: adopt it again",
            file=file.name,
        )
    return place.open(name)


def open_differences(storage: Storage, file: StorageFile) -> DeltaReader:
    """Open the differences of a file from one of an earlier checkpoint, in a folder beside this one.

    They are what the file is kept as, or lie beside a whole file. Raises as `open_stored`.
    """
    name = delta_name(file.name)
    stored = open_named(storage, name)
    try:
        if file.format == DELTA and not stored.match_size(file.stored):
            raise CorruptCheckpointError(
                f"{storage.url}: {name} has {stored.size} bytes, the catalog says {file.stored}; the file was cut, "
                "extended or replaced; use another checkpoint",
                file=name,
            )
        reader = _decoded(storage, name, stored)
        if reader.size != file.size:
            raise CorruptCheckpointError(
                f"{storage.url}: {name} holds the differences of another file; use another checkpoint", file=name
            )
    except BaseException:
        stored.close()
        raise
    return reader


def _decoded(storage: Storage, name: str, stored: FileReader, depth: int = 0) -> DeltaReader:
    from bytecheckpoint.storage.deltas.coding import LONGEST_CHAIN  # pyarrow, which the helper process does without
    from bytecheckpoint.storage.deltas.reading import DeltaReader

    label = f"{storage.url}/{name}"

    def open_base(base: str) -> FileReader:
        folder, _, inside = base.partition("/")
        if not _FOLDER.fullmatch(folder) or generation_of(inside) is None or depth >= LONGEST_CHAIN:
            raise CorruptCheckpointError(f"{label} builds on {base[:200]!r}, which is no storage file", file=name)
        place = wrapped_like(storage, resolve(f"{storage.url.rpartition('/')[0]}/{folder}"))
        try:
            found = open_named(place, inside)
        except FileNotFoundError:
            raise CorruptCheckpointError(
                f"{label} builds on {base}, which is missing: its checkpoint was removed or moved; use another one",
                file=name,
            ) from None
        return found if not inside.endswith(f".{DELTA}") else _decoded(place, inside, found, depth + 1)

    return DeltaReader(label, name, stored, open_base)


def adopted_version(storage: Storage, name: str) -> int:
    """Return the xxh3_64 of a file's size and time, or version in an object store, by which a file replaced shows.

    Raises:
        FileNotFoundError: there is no such file.
    """
    found = storage.stat(name)
    local = isinstance(unwrapped(storage), PosixStorage)  # its versions have numbers of files, which a mount changes
    return xxhash.xxh3_64_intdigest(f"{found.size} {found.modified if local else found.version}".encode())


def other_folder(storage: Storage, folder: str, name: str = "") -> Storage:
    """Return the storage of another folder that holds files of the checkpoint in `storage`.

    Args:
        storage: storage of the checkpoint.
        folder: URL of the other folder.
        name: the only file that is wanted there, which may be trusted alone.

    Raises:
        IncompatibleCheckpointError: that folder is not trusted (decision 0062).
    """
    trusted = [part.strip() for part in settings().storage.trusted_folders.split(",") if part.strip()]
    wanted = f"{folder}/{name}" if name else folder
    if not any(_is_below(wanted, place) for place in trusted) and not _was_cooled_to(storage, wanted):
        raise IncompatibleCheckpointError(
            f"{storage.url}: the catalog leads to {folder[:200]}, outside of the checkpoint: if you trust the checkpoint, "
            "name that folder in the setting trusted_folders"
        )
    return wrapped_like(storage, resolve(folder))


def _was_cooled_to(storage: Storage, folder: str) -> bool:
    """Return whether a cooldown of the run noted, beside the step, that it moves steps to that folder."""
    run = storage.url.rpartition("/")[0]
    known = _cold_folders.setdefault(run, set())
    if not any(_is_below(folder, place) for place in known):
        with contextlib.suppress(FileNotFoundError, StorageError, UsageError):
            known.update(wrapped_like(storage, resolve(run)).read(COLD_FOLDERS).decode(errors="replace").splitlines())
    return any(_is_below(folder, place) for place in known)


def _is_below(folder: str, place: str) -> bool:
    """Return whether one URL is another one's, or below it."""
    folder, place = (url.removeprefix("file://").rstrip("/") for url in (folder, place))
    parts = folder.split("/")
    return bool(place) and "." not in parts and ".." not in parts and f"{folder}/".startswith(f"{place}/")


def _refuse_link(storage: Storage, name: str) -> None:
    """Refuse a symbolic link in the folder of a checkpoint that leads out of it."""
    while isinstance(storage, WrappedStorage):
        if storage.follows_links:
            return
        storage = storage.inner
    if not isinstance(storage, LocalStorage):
        return
    path = os.path.join(storage.url, name)
    if not (os.path.islink(path) or os.path.islink(os.path.dirname(path))):
        return
    real, own = os.path.realpath(path), os.path.realpath(storage.url)
    trusted = [own, *(part.strip() for part in settings().storage.trusted_folders.split(","))]
    if os.path.exists(real) and not any(_is_below(real, place) for place in trusted):
        raise IncompatibleCheckpointError(
            f"{storage.url}: {name} is a symbolic link to {real[:200]}, outside of the checkpoint: if you trust the "
            "checkpoint, name that folder in the setting trusted_folders"
        )


def known_schemes() -> list[str]:
    """Return all schemes that `resolve` takes, those of other packages last."""
    return ["file", *_BUILTIN, f"{_FSSPEC}...", f"{_TIER}...", *sorted(_plugins())]


def _refuse_broken_url(text: str) -> None:
    """Raise UsageError for a malformed URL. Taken as a path, it would name a folder on each machine.

    The same for a home folder that no shell has expanded: a later `rm -r ~` would remove the other one.
    """
    if text.partition("/")[0] == "~":
        raise UsageError(
            f"{text[:40]} is not expanded to your home folder: give os.path.expanduser(path) (or write ./~ for a local "
            f"folder of that name)"
        )
    head, colon, _ = text.partition(":")
    word = head.lower()
    if word.startswith(_TIER):
        raise UsageError(f"a tier stands before a URL: write {_TIER}file:///folder or {_TIER}s3://...")
    if colon and (word in ("file", *_BUILTIN) or word.startswith(_FSSPEC) or word in _plugins()):
        raise UsageError(
            f"{head}: is no URL: write {head}://..., with two slashes and as a string, since pathlib takes one of them "
            f"away (or ./{head}:... for a local folder of that name)"
        )
    if re.match(r"[^/]*://", text):
        raise UsageError(
            f"{head[:40]!r} is no scheme of a URL; known schemes: {', '.join(known_schemes())} (or write ./{head[:40]}:... "
            f"for a local folder of that name)"
        )


def _file_path(url: str) -> str:
    path = url.partition("://")[2]
    if path.startswith("localhost/"):
        path = path[len("localhost") :]
    if not path.startswith("/"):
        raise UsageError(
            "a file:// URL is not a checkpoint path of another machine, nor a relative one: write file:///folder"
        )
    return f"/{path.lstrip('/')}"


def _plugins() -> dict[str, EntryPoint]:
    """Return the entry points of other packages by scheme. None can replace a built-in scheme."""
    from importlib.metadata import entry_points  # slow to import and rarely needed

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        scheme = entry.name.lower()
        if (
            scheme not in ("file", *_BUILTIN)
            and not scheme.startswith((_FSSPEC, _TIER))
            and _SCHEME.match(f"{scheme}://")
        ):
            found[scheme] = entry
    return found


def _import_backend(builtin: _Builtin, scheme: str) -> Callable[[str], Storage]:
    try:
        factory: Callable[[str], Storage] = getattr(importlib.import_module(builtin.module), builtin.factory)
    except ImportError as error:  # missing, too old, or broken
        if not builtin.needs or (error.name or "").partition(".")[0] != builtin.needs:
            raise
        raise UsageError(
            f"{scheme}:// needs the package {builtin.needs}: {install_command(builtin.extra)} ({error})"
        ) from None
    return factory


def _open_plugin(plugin: EntryPoint, url: str) -> Storage:
    where = f"the storage backend {plugin.value!r} of {plugin.dist.name if plugin.dist else 'an unknown package'}"
    try:
        factory = plugin.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{where} cannot be imported: {error}") from error
    storage = factory(url)
    if not isinstance(storage, Storage):
        raise UsageError(f"{where} made a {type(storage).__name__}, which is no bytecheckpoint Storage")
    return storage
