"""The error tree: one class for each way in which a program handles a failure.

Everything that this package raises on purpose derives from `CheckpointError`. Where Python already has a class for
the idea (a missing key, a time-out, a wrong argument), the error derives from that one too, so that ordinary
handlers work. Each message is one line: what happened, where (rank, stage, file, tensor), what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CheckpointTimeoutError",
    "CorruptCheckpointError",
    "IncompatibleCheckpointError",
    "MissingKeyError",
    "OutOfRangeError",
    "PeerLostError",
    "StateChangedError",
    "StorageConflictError",
    "StorageError",
    "StorageFullError",
    "StorageUnavailableError",
    "UsageError",
    "listed",
]


class CheckpointError(Exception):
    """Base of every error of this package.

    The keyword-only parameters of a class's constructor are the fields of its errors. `failures.Failure` carries them to
    other ranks and processes.

    Attributes:
        failure: `failures.Failure` that this error was made from or sent as, None for an error that was not sent.
        repeats: "here" for an error by which a save raises the failure of an earlier one, "elsewhere" on the other ranks of
            that save, else "".
    """

    failure: object | None = None
    repeats = ""

    def __str__(self) -> str:
        # KeyError's own __str__ would show the message in quotes.
        text = str(self.args[0]) if self.args else type(self).__name__
        # Names of states and tensors may hold anything; a message is one line that any terminal and log accepts.
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class CheckpointNotFoundError(CheckpointError):
    """There is no committed checkpoint at the path. Handler: try another step, or start afresh."""


class CorruptCheckpointError(CheckpointError):
    """Bytes differ from what was written, or files are missing. Handler: fall back to an older step.

    Attributes:
        file: name of the damaged file inside the checkpoint, or "" when it is not known.
        block: index of the damaged block of that file, or -1.
        tensors: keys of the tensors that the damage touches.
    """

    def __init__(self, message: str, *, file: str = "", block: int = -1, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.file = file
        self.block = block
        self.tensors = tensors


class CheckpointReplacedError(CorruptCheckpointError):
    """Another save replaced the checkpoint while it was read or open. A load starts again itself. Handler: open it anew."""


class IncompatibleCheckpointError(CheckpointError):
    """The checkpoint is sound, but does not fit: shapes, dtypes, keys, a newer format. Handler: change the call.

    Attributes:
        calls_differ: ranks may have been in different calls.
    """

    def __init__(self, message: str, *, calls_differ: bool = False) -> None:
        super().__init__(message)
        self.calls_differ = calls_differ


class MissingKeyError(IncompatibleCheckpointError, KeyError):
    """A key that the checkpoint does not hold was asked for."""


class StorageError(CheckpointError):
    """The storage refused an operation, for a reason that is neither space nor availability (permission, ...)."""


class StorageFullError(StorageError):
    """No space or quota left. Handler: free space, then save again."""


class StorageUnavailableError(StorageError):
    """The storage does not answer, or answers with transient errors. Handler: retry later.

    Attributes:
        undecided: the answer was lost: the operation may have taken effect, or may yet take effect.
    """

    def __init__(self, message: str, *, undecided: bool = False) -> None:
        super().__init__(message)
        self.undecided = undecided


class StorageConflictError(StorageError):
    """Another job writes the same checkpoint. Handler: end the one that should not run, or give each its own path."""


class PeerLostError(CheckpointError):
    """Another rank died, failed or left, or a data loader's worker did. Handler: restart from the last checkpoint."""


class StateChangedError(CheckpointError):
    """The program changed its state while a save copied it in the background. Handler: call `fence` before the change.

    Attributes:
        tensors: keys of some of the tensors that changed.
    """

    def __init__(self, message: str, *, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tensors = tensors


class CheckpointTimeoutError(CheckpointError, TimeoutError):
    """A wait ended without an answer. Handler: look for a hung rank, or raise the limit.

    Attributes:
        calls_differ: a rank was waited for, which may not have made the call.
    """

    def __init__(self, message: str, *, calls_differ: bool = False) -> None:
        super().__init__(message)
        self.calls_differ = calls_differ


class UsageError(CheckpointError, ValueError):
    """The call itself is wrong, or holds something that cannot be saved. Handler: fix the program.

    Attributes:
        calls_differ: ranks were in different calls.
    """

    def __init__(self, message: str, *, calls_differ: bool = False) -> None:
        super().__init__(message)
        self.calls_differ = calls_differ


class OutOfRangeError(UsageError, IndexError):
    """An index is outside the shape of a tensor, or there are more indices than dimensions."""


#: Characters of a name in a message: a hostile one may have millions.
_MOST_NAME = 20_000


def listed(names: Sequence[object], most: int = 5) -> str:
    """Join the first few of `names` for a message, and count the others: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(_cut(str(name)) for name in names[:most]) + more


def shown(value: object) -> str:
    """Return `repr(value)`; of integers with more digits than Python writes, the digits in base 16."""
    try:
        return repr(value)
    except ValueError:
        if isinstance(value, int):
            return hex(value)
        if isinstance(value, dict):
            return f"{{{', '.join(f'{shown(key)}: {shown(item)}' for key, item in value.items())}}}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(shown, value))}]"
        return f"<{type(value).__name__} with a huge integer>"


def _cut(name: str) -> str:
    return name if len(name) <= _MOST_NAME else f"{name[:_MOST_NAME]}... ({len(name)} characters)"
