"""Failures on their way between threads, processes and ranks, and the token that ends one save or load with a failure."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn, get_type_hints

import msgspec

from bytecheckpoint import errors
from bytecheckpoint.errors import CheckpointError

__all__ = ["Cancellation", "Failure"]


def _fields_of(cls: type[CheckpointError]) -> dict[str, Any]:
    """Return the types of the fields of an error class: the keyword-only parameters of its constructor."""
    constructor: Any = cls.__init__
    names = getattr(constructor, "__kwdefaults__", None) or ()
    return {name: hint for name, hint in get_type_hints(constructor).items() if name in names} if names else {}


_CLASSES: dict[str, type[CheckpointError]] = {
    name: cls for name in errors.__all__ if isinstance(cls := getattr(errors, name), type)
}
_FIELDS = {name: _fields_of(cls) for name, cls in _CLASSES.items()}


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """One failure, described once where it happens and passed on unchanged.

    Attributes:
        error: name of the error's class in `errors`.
        message: text of the error, without rank and stage.
        fields: fields of the error as JSON, which keeps the lone surrogates of file names; msgpack refuses them.
        rank: rank that failed, -1 for a process that is none.
        stage: work that failed, "" if the message says enough.
        repeats: flag that a save raises this failure of an earlier save.
    """

    error: str
    message: str
    fields: str = "{}"
    rank: int = -1
    stage: str = ""
    repeats: bool = False

    @classmethod
    def of(cls, error: BaseException, *, rank: int = -1, stage: str = "") -> Failure:
        """Return the failure that `error` carries, or describe a new one, which `error` carries from then on.

        Args:
            error: error of any class. One that is no `CheckpointError` becomes one, with its class name in the message.
            rank: rank on which `error` was raised.
            stage: work that raised it.

        Examples:
            >>> failure = Failure.of(errors.StorageFullError("no space left"), rank=3, stage="write")
            >>> raise failure.as_error()
            Traceback (most recent call last):
            bytecheckpoint.errors.StorageFullError: rank 3, write: no space left
        """
        if not isinstance(error, CheckpointError):
            return cls("CheckpointError", _encodable(f"{type(error).__name__}: {error}"), "{}", rank, stage)
        if isinstance(error.failure, Failure):
            if error.failure.rank < 0:  # of a helper process, which does not know its rank
                stage = error.failure.stage or stage
                error.failure = msgspec.structs.replace(error.failure, rank=rank, stage=stage)
            return error.failure
        known = next(c for c in type(error).__mro__ if _CLASSES.get(c.__name__) is c)
        fields = {name: getattr(error, name) for name in _FIELDS[known.__name__]}
        message = _encodable(str(error).removeprefix(f"rank {rank}: "))
        made = cls(known.__name__, message, json.dumps(fields), rank, stage, bool(error.repeats))
        error.failure = made
        return made

    @property
    def error_class(self) -> type[CheckpointError]:
        """Class of the error; `CheckpointError` if this version does not know it."""
        return _CLASSES.get(self.error, CheckpointError)

    def as_error(self) -> CheckpointError:
        """Make an error of the same class and fields, whose message begins with rank and stage and which carries this."""
        cls = self.error_class
        where = ", ".join(filter(None, (f"rank {self.rank}" if self.rank >= 0 else "", self.stage)))
        earlier = "an earlier asynchronous save failed" if self.repeats else ""
        message = ": ".join([*filter(None, (earlier, where)), self.message])
        error = cls(message, **_known_fields(self.fields, _FIELDS[cls.__name__]))
        error.failure = self
        error.repeats = "elsewhere" if self.repeats else ""
        return error

    def as_repeated(self) -> CheckpointError:
        """Make the error by which a later save of the rank raises this failure of an earlier one."""
        error = msgspec.structs.replace(self, repeats=True).as_error()
        error.repeats = "here"
        return error

    def encode(self) -> bytes:
        """Encode this failure for another process."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> Failure:
        """Invert `encode`."""
        return _decoder.decode(data)


def _known_fields(text: str, hints: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an error, none if another process has sent something else."""
    try:
        given = json.loads(text)
        return {name: msgspec.convert(given[name], hints[name]) for name in hints.keys() & given.keys()}
    except (ValueError, AttributeError, RecursionError):
        return {}


# Made before any thread decodes: msgspec (0.22) crashes if two threads use a type for the first time at once.
_decoder = msgspec.msgpack.Decoder(Failure)


class Cancellation:
    """Token that ends one save or load of this rank: set once with a failure, from any thread.

    Attributes:
        future: future that fails with the error of the failure, for `concurrent.futures.wait`.

    Examples:
        >>> cancel = Cancellation()
        >>> cancel.set(Failure("StorageError", "no permission", rank=1, stage="write"))
        True
        >>> cancel.raise_if_set()
        Traceback (most recent call last):
        bytecheckpoint.errors.StorageError: rank 1, write: no permission
    """

    def __init__(self) -> None:
        self.future: Future[NoReturn] = Future()
        self._failure: Failure | None = None
        self._lock = threading.Lock()

    @property
    def failure(self) -> Failure | None:
        """The failure that ended the save or load, None while it continues."""
        return self._failure

    def set(self, failure: Failure) -> bool:
        """End the save or load with `failure`, unless another failure came first; return whether it was the first."""
        with self._lock:
            if self._failure is not None:
                return False
            self._failure = failure
        self.future.set_exception(failure.as_error())
        return True

    def raise_if_set(self) -> None:
        """Raise the failure if there is one.

        Raises:
            CheckpointError: the failure, each time as an error of its own.
        """
        if (failure := self.failure) is not None:
            raise failure.as_error()

    def on_set(self, function: Callable[[Failure], object]) -> None:
        """Call a function with the failure: now if there is one, otherwise on the thread that sets it.

        Args:
            function: function that returns at once, since other waits end after it.
        """
        self.future.add_done_callback(lambda _: function(self._failure) if self._failure is not None else None)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _with_encodable_text(record: logging.LogRecord) -> bool:
    """Let a log record have a text that every handler can encode: file names may hold lone surrogates."""
    text = record.getMessage()
    if not text.isascii():
        record.msg, record.args = _encodable(text), None
    return True


logging.getLogger("bytecheckpoint").addFilter(_with_encodable_text)
