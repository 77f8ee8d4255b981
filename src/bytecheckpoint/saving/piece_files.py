"""Arrange the pieces of providers in files, and use files of earlier saves again.

In an incremental save, pieces with tokens get files apart. A later save uses such a file again while all of its pieces have
the tokens that they had (decision 0074).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

import torch

from bytecheckpoint.engine.earlier_files import EarlierFiles
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.frameworks.providers.base import Piece
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name
from bytecheckpoint.representation.names import unescape
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.saving.capture import Value
from bytecheckpoint.saving.messages import FileRecord, ValueRecord
from bytecheckpoint.saving.request import SaveRequest
from bytecheckpoint.storage.base import file_size

__all__ = ["PieceFiles", "TakenPiece", "failure_of_provider"]

#: Files of one state that a save uses again; the pieces of smaller further ones are written together.
_MOST_FILES = 16


class TakenPiece:
    """A piece that a provider has handed over, until the save needs it no more.

    Args:
        key: key of the tensor that it becomes.
        piece: the piece.
        provider: name of the provider's class.
    """

    def __init__(self, key: TensorKey, piece: Piece, provider: str) -> None:
        self.key = key
        self.piece = piece
        self._provider = provider
        self._ended = False

    def __str__(self) -> str:
        return f"piece {self.piece.name!r} of {self.key.state}, a {self._provider}"

    def end(self) -> None:
        """Tell the provider, once, that the save needs the piece no more."""
        if not self._ended:
            self._ended = True
            try:
                self.piece.done()
            except Exception as error:  # any program, any exception
                raise failure_of_provider(f"{self}: its done", error) from error

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer, on the thread for pieces."""
        try:
            found = self.piece.read(offset, buffer)
        except Exception as error:  # any program, any exception
            raise failure_of_provider(f"{self}: its read at byte {offset}", error) from error
        if found is not None and found != len(buffer):
            raise CheckpointError(
                f"{self}: its read at byte {offset} gave {found} of {len(buffer)} bytes: the piece is shorter than it says"
            )

    @property
    def facts(self) -> tuple[object, ...]:
        """Token, dtype and shape of the piece."""
        return self.piece.token, self.piece.dtype, self.piece.shape

    def value(self, data: torch.Tensor | None = None, digest: bytes = b"") -> Value:
        """Describe the tensor that the piece becomes, with or without its content."""
        if data is None:  # one element, shown in the piece's shape
            data = torch.empty([1] * len(self.piece.shape), dtype=self.piece.dtype).expand(self.piece.shape)
        return Value(self.key, data, dtype_name(self.piece.dtype), merged=False, digest=digest)


class _TokenFile(NamedTuple):
    """A committed file of pieces that all have tokens.

    Attributes:
        url: address of the checkpoint.
        record: description of the file.
        pieces: token, dtype and shape of each piece, by name.
        values: records of the pieces in the catalog.
    """

    url: str
    record: FileRecord
    pieces: Mapping[str, tuple[object, ...]]
    values: list[ValueRecord]

    def is_unchanged(self, taken: Mapping[str, TakenPiece]) -> bool:
        """Return whether all its pieces are taken again as they were."""
        return all(name in taken and taken[name].facts == facts for name, facts in self.pieces.items())


class _FileOfPieces(NamedTuple):
    """A file to write: its state, its part number, and the pieces in it, small ones first."""

    state: str
    part: int
    pieces: list[TakenPiece]


class PieceFiles:
    """The files of the pieces of one save on one rank.

    Args:
        request: arguments of the save.
        earlier: files that may be used again.

    Attributes:
        kept: files of earlier saves that are used again.
        linked: names that such files got in the checkpoint's folder for this save.
        groups: files to write.
    """

    def __init__(self, request: SaveRequest, earlier: EarlierFiles) -> None:
        self._request = request
        self._earlier = earlier
        self.kept: list[_TokenFile] = []
        self.linked: set[str] = set()
        self.groups: list[_FileOfPieces] = []

    def arrange(self, taken: Sequence[TakenPiece]) -> None:
        """Choose the files. The pieces in those that are used again end here."""
        incremental = bool(self._request.incremental)
        by_state: dict[str, dict[str, TakenPiece]] = defaultdict(dict)
        for piece in taken:
            by_state[piece.key.state][piece.piece.name] = piece
        for state, found in by_state.items():
            usable = self._earlier.pieces.get(state, []) if self._request.incremental is True else []
            usable = [file for file in usable if file.is_unchanged(found)]
            while not all(map(self._link, kept := _chosen(usable, found, incremental))):
                usable = [file for file in usable if self._link(file)]
            used = {file.record.part for file in kept}
            free = (part for part in count() if part not in used)
            self.kept += kept
            groups = _arranged(kept, found, incremental)
            self.groups += [_FileOfPieces(state, part, group) for group, part in zip(groups, free, strict=False)]
            for name in (name for file in kept for name in file.pieces):
                found[name].end()

    def _link(self, file: _TokenFile) -> bool:
        """Give an earlier file its name in the checkpoint's folder; return whether it has it."""
        storage, name = self._request.storage, file.record.name
        if file.url != storage.url and name not in self.linked:
            if not storage.adopt(name, file.url):
                return False
            self.linked.add(name)
        return file_size(storage, name) == file.record.size

    def remember(self, written: Sequence[FileRecord], values: Sequence[ValueRecord]) -> None:
        """Remember the committed files of pieces with tokens, for later saves.

        Args:
            written: descriptions of the files of `groups`.
            values: records of their pieces.
        """
        if not self._request.incremental:
            return
        url, files = self._request.storage.url, defaultdict(list)
        for file in self.kept:
            files[unescape(file.record.state)].append(file._replace(url=url))
        for number, (group, record) in enumerate(zip(self.groups, written, strict=True)):
            if group.pieces and all(piece.piece.token is not None for piece in group.pieces):
                facts = {piece.piece.name: piece.facts for piece in group.pieces}
                own = [value for value in values if value.file == number]
                files[group.state].append(_TokenFile(url, record, facts, own))
        self._earlier.pieces = dict(files)


def _arranged(kept: Sequence[_TokenFile], found: Mapping[str, TakenPiece], incremental: bool) -> list[list[TakenPiece]]:
    """Arrange the pieces that no kept file holds in files, small ones first; those with tokens apart.

    A file without pieces names the kept files, if there is no other.
    """
    inside = {name for file in kept for name in file.pieces}
    rest = sorted((t for name, t in found.items() if name not in inside), key=lambda taken: taken.piece.nbytes)
    if not incremental:
        return [rest]
    groups = [[t for t in rest if (t.piece.token is None) == without] for without in (True, False)]
    return [group for group in groups if group] or [[]]


def _chosen(usable: Sequence[_TokenFile], found: Mapping[str, TakenPiece], incremental: bool) -> list[_TokenFile]:
    """Choose files to use again: not too many, and so that the part numbers of all files have no gap."""
    kept = sorted(sorted(usable, key=lambda file: -file.record.size)[:_MOST_FILES], key=lambda file: file.record.part)
    while kept and kept[-1].record.part >= len(kept) + len(_arranged(kept, found, incremental)):
        kept.pop()
    return kept


def failure_of_provider(what: str, error: Exception) -> CheckpointError:
    """Return an error about a call of a provider."""
    return CheckpointError(f"{what} failed ({type(error).__name__}: {error})")
