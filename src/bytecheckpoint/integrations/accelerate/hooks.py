"""Run the hooks by which a program saves models in its own way, and carry their files in checkpoints (decision 0079)."""

from __future__ import annotations

import collections
import functools
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.providers.base import Piece, PieceReader
from bytecheckpoint.manager import CheckpointManager
from bytecheckpoint.representation.names import escape, unescape
from bytecheckpoint.settings import settings
from bytecheckpoint.step_fence import fence

__all__ = ["HookFiles", "run_load_hooks", "run_save_hooks"]

_SAVE_HOOK, _LOAD_HOOK = "a hook of register_save_state_pre_hook", "a hook of register_load_state_pre_hook"


class HookFiles:
    """The files of hooks in a local folder, as a state: a load gets those of all ranks of the save."""

    of_all_ranks = True

    def __init__(self) -> None:
        self.files: dict[str, io.BufferedReader] = {}  # that this rank saves, by their escaped names

    @functools.cached_property
    def folder(self) -> Path:
        """The folder, which is made when it is needed."""
        return Path(tempfile.mkdtemp("", "bytecheckpoint-hooks-", settings().storage.spool_dir or None)).resolve()

    def remove(self) -> None:
        """Remove the folder."""
        if "folder" in vars(self):
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self, *_: object) -> None:
        """Close the files, which ends them."""
        for file in self.files.values():
            file.close()

    def open(self) -> None:
        """Open all files in the folder, which is removed then, so that a killed job leaves nothing."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_symlink() or not path.is_dir():
                if not path.is_file():
                    raise UsageError(f"{_SAVE_HOOK} has made {path}, which is no file: write files and folders only")
                self.files[escape(path.relative_to(self.folder).as_posix())] = path.open("rb")

    def __bytecheckpoint_pieces__(self) -> Iterator[Piece]:
        """Return a piece for each file, which nobody else can reach."""

        def read(file: io.BufferedReader, offset: int, buffer: memoryview) -> int:
            file.seek(offset)
            return file.readinto(buffer)

        for name, file in self.files.items():
            size = os.fstat(file.fileno()).st_size
            yield Piece(unescape(name), size, functools.partial(read, file), stable=True)

    def load_pieces(self, pieces: Mapping[str, PieceReader]) -> None:
        """Write the files into the folder."""
        for name, piece in pieces.items():
            path = (self.folder / name).resolve()
            if not path.is_relative_to(self.folder):
                raise IncompatibleCheckpointError(f"the file {name!r} of a hook would lie outside of its folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.writelines(piece)


def _models(accelerator: Any) -> list[Any]:
    """Return the models that accelerate shows to hooks of a load, and whose weights it shows to hooks of a save."""
    return [] if accelerator.distributed_type.name == "FSDP" else list(accelerator._models)


def run_save_hooks(accelerator: Any, manager: CheckpointManager, files: HookFiles) -> list[int] | None:
    """Run the hooks of a save on all ranks; return the numbers of the models popped on rank 0, or None without hooks."""
    hooks = list(accelerator._save_model_state_pre_hook.values())

    def run() -> tuple[list[int], list[str]] | None:
        if not hooks:
            return None
        fence()  # a hook may change parameters for a while, to write their average
        weights = [accelerator.get_state_dict(model, unwrap=False) for model in _models(accelerator)]
        before = [(own, dict(own)) for own in weights]
        try:
            for hook in hooks:
                hook(accelerator._models, weights, str(files.folder))
            files.open()
        finally:
            files.remove()
        left = {id(own) for own in weights}
        for number, (own, held) in enumerate(before):
            edited = [name for name in {**held, **own} if own.get(name) is not held.get(name)]
            if edited and id(own) in left:
                raise UsageError(f"{_SAVE_HOOK} has edited weights[{number}][{edited[0]!r}]: pop what it writes itself")
        if left - {id(own) for own, _ in before}:
            raise UsageError(f"{_SAVE_HOOK} has put weights of its own into the list: write them to files")
        return [number for number, (own, _) in enumerate(before) if id(own) not in left], list(files.files)

    reports = manager.ask_ranks(run)
    names = [report[1] if report else [] for report in reports]
    holders = collections.Counter(name for of_rank in names for name in of_rank)
    folders = {str(folder) for name in holders for folder in PurePosixPath(name).parents}
    if twice := {name for name, count in holders.items() if count > 1 or name in folders}:
        own = {name: file for name, file in files.files.items() if name in twice}
        digests = manager.ask_ranks(lambda: {n: hashlib.file_digest(f, "sha256").digest() for n, f in own.items()})
        for name in sorted(twice):
            if name in folders or len({found[name] for found in digests if name in found}) > 1:
                raise UsageError(
                    f"hooks of several ranks have written different files named {name!r}: let one write it"
                )
            if any(name in of_rank for of_rank in names[: accelerator.process_index]) and name in own:
                files.files.pop(name).close()
    return list(reports[0][0] if reports[0] else []) if any(reports) else None


def run_load_hooks(accelerator: Any, manager: CheckpointManager, files: HookFiles, *, saved: bool) -> list[int]:
    """Run the hooks of a load, from a step that was `saved` with hooks or without; return the numbers of popped models."""

    def run() -> list[int]:
        models, before, failure = _models(accelerator), _models(accelerator), ""
        try:
            for hook in list(accelerator._load_model_state_pre_hook.values()):
                hook(models, str(files.folder))
        except Exception as error:
            if saved:
                raise
            failure = f"fails ({type(error).__name__}: {error})"
        left = {id(model) for model in models}
        popped = [number for number, model in enumerate(before) if id(model) not in left]
        if not saved and (failure or popped):
            raise IncompatibleCheckpointError(
                f"{_LOAD_HOOK} {failure or f'has popped models {popped}'}, and the checkpoint was saved without "
                f"{_SAVE_HOOK}: it holds all weights itself, and no files; remove the hook for this load"
            )
        return popped

    found = manager.ask_ranks(run)
    if any(popped != found[0] for popped in found):
        raise UsageError(f"{_LOAD_HOOK} has popped different models on the ranks: {found}")
    return list(found[0])
