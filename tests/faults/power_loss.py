"""The states in which POSIX may leave a disk after a loss of power, made from a journal of `tests.servers.faultfs`.

The disk surely holds what was synced: the bytes of a file up to its last fsync, and the names in a folder up to the
folder's last fsync. It may or may not hold any later change, in any order. A rename is atomic.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Disk", "Tree", "digest", "mark", "read", "write"]

#: A disk by path: the content of each file, and None for each folder.
Tree = dict[str, bytes | None]
_MARK = "/mark-"


def mark(mount: Path, word: str) -> None:
    """Write a mark into the journal of a mounted file system."""
    os.mkdir(f"{mount}{_MARK}{word}")


@dataclass(slots=True)
class _File:
    now: bytearray = field(default_factory=bytearray)
    synced: bytes = b""

    def after_loss(self, what: str) -> bytes:
        """Return the content if unsynced bytes are "lost", "kept", or "empty": zeros stand in their place."""
        if what == "kept":
            return bytes(self.now)
        if what == "lost":
            return self.synced
        if bytes(self.now) == self.synced:
            return self.synced
        same = bytearray(len(self.now))
        for at, (new, old) in enumerate(zip(self.now, self.synced, strict=False)):
            same[at] = old if new == old else 0
        return bytes(same)


@dataclass(frozen=True, slots=True)
class _Names:
    """A change of names in one folder: name -> file, None for a new folder, or "" for a name that is removed."""

    folder: str
    names: dict[str, _File | str | None]


class Disk:
    """A disk that follows the lines of a journal.

    Attributes:
        marks: words that the writing program left in the journal by `mark`.
    """

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._now: dict[str, dict[str, _File | None]] = {"/": {}}
        self._synced: dict[str, dict[str, _File | None]] = {"/": {}}
        self._pending: list[_Names] = []
        self.marks: list[str] = []

    def apply(self, line: str) -> None:
        """Make the change of one line of the journal."""
        op, *arguments = json.loads(line)
        getattr(self, f"_{op}")(*arguments)

    def _create(self, path: str, number: int) -> None:
        file = self._files[number] = _File()
        self._name({path: file})

    def _write(self, number: int, offset: int, data: str) -> None:
        file, new = self._files[number], bytes.fromhex(data)
        file.now.extend(bytes(max(offset + len(new) - len(file.now), 0)))
        file.now[offset : offset + len(new)] = new

    def _truncate(self, number: int, length: int) -> None:
        now = self._files[number].now
        now[length:] = bytes(max(length - len(now), 0))

    def _fsync(self, number: int) -> None:
        file = self._files[number]
        file.synced = bytes(file.now)

    def _fsyncdir(self, path: str, *_: Any) -> None:
        for change in self._pending:
            if change.folder == path:
                _apply(self._synced, change)
        self._pending = [change for change in self._pending if change.folder != path]

    def _mkdir(self, path: str, *_: Any) -> None:
        if path.startswith(_MARK):
            self.marks.append(path.removeprefix(_MARK))
        else:
            self._name({path: None})

    def _rmdir(self, path: str) -> None:
        self._name({path: ""})

    def _unlink(self, path: str) -> None:
        self._name({path: ""})

    def _link(self, target: str, source: str) -> None:
        self._name({target: self._at(source)})

    def _rename(self, old: str, new: str) -> None:
        self._name({old: "", new: self._at(old)})

    def _at(self, path: str) -> _File | None:
        folder, name = os.path.split(path)
        return self._now[folder][name]

    def _name(self, changes: dict[str, _File | str | None]) -> None:
        (folder,) = {os.path.dirname(path) for path in changes}
        change = _Names(folder, {os.path.basename(path): what for path, what in changes.items()})
        _apply(self._now, change)
        self._pending.append(change)

    def now(self) -> Tree:
        """Return the disk as programs see it before the loss of power."""
        return _tree(self._now, "kept")

    def after_loss(self) -> Iterator[Tree]:
        """Yield the states in which the disk may be if the power fails now.

        They have no unsynced change of names, all of them, each one alone, all but each one, or those up to each one;
        and each of these with the unsynced bytes of files lost, kept, or replaced by zeros.
        """
        pending = self._pending
        count = len(pending)
        chosen = {(), tuple(range(count))}
        for one in range(count):
            chosen |= {(one,), tuple(range(one)), tuple(n for n in range(count) if n != one)}
        for numbers in sorted(chosen):
            names = {folder: dict(entries) for folder, entries in self._synced.items()}
            for number in numbers:
                _apply(names, pending[number])
            for what in ("lost", "kept", "empty"):
                yield _tree(names, what)


def _apply(folders: dict[str, dict[str, _File | None]], change: _Names) -> None:
    entries = folders.setdefault(change.folder, {})
    for name, what in change.names.items():
        path = os.path.join(change.folder, name)
        if isinstance(what, str):
            if entries.pop(name, None) is None:
                folders.pop(path, None)
            continue
        entries[name] = what
        if what is None:
            folders.setdefault(path, {})


def _tree(folders: dict[str, dict[str, _File | None]], what: str, at: str = "/") -> Tree:
    """Return what can be reached: the content of a folder is lost if the name of the folder is."""
    found: Tree = {}
    for name, file in folders.get(at, {}).items():
        path = os.path.join(at, name)
        if file is None:
            found[path] = None
            found |= _tree(folders, what, path)
        else:
            found[path] = file.after_loss(what)
    return found


def digest(tree: Tree) -> str:
    """Return a hash that is equal for equal trees."""
    total = hashlib.blake2b(digest_size=16)
    for path, data in sorted(tree.items()):
        total.update(f"{path}\0{-1 if data is None else len(data)}\0".encode() + (data or b""))
    return total.hexdigest()


def write(tree: Tree, folder: Path) -> None:
    """Create the files and folders of a tree below `folder`, which must be empty."""
    for path, data in tree.items():
        place = folder / path[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            place.mkdir(exist_ok=True)
        else:
            place.write_bytes(data)


def read(folder: Path) -> Tree:
    """Return the files and folders below `folder`, without marks."""
    found = {f"/{p.relative_to(folder)}": p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}
    return {path: data for path, data in found.items() if not path.startswith(_MARK)}
