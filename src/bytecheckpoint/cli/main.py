"""Run the `bytecheckpoint` command: errors and exit statuses.

Exit status: 0 fine; 1 findings (a damaged block, a difference); 2 not readable as a checkpoint, or wrong usage; 130
interrupted; 141 the output was closed; 128 + N ended by signal N. An error is one line on stderr.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bytecheckpoint._distribution import install_command
from bytecheckpoint.cli.format import printable
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError
from bytecheckpoint.representation.names import CATALOG_NAME

__all__ = ["main", "run"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FINE, FINDINGS, UNUSABLE, INTERRUPTED, PIPE = 0, 1, 2, 130, 141


def main() -> None:
    """Run the `bytecheckpoint` command as a program."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not `nohup`
            signal.signal(number, _end)
    code = run(sys.argv[1:])
    stdout_works = code != PIPE
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code, stdout_works = PIPE, False
    except OSError as error:
        stdout_works = False
        if code != UNUSABLE:
            code = _fail(_message(error), UNUSABLE)
    if not stdout_works:
        # The interpreter flushes again at its exit, and would report an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status. Never raises for an error that a user can cause."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # terminals that are not UTF-8
    try:
        from bytecheckpoint.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        return _fail(f"the command line needs an extra: {install_command('cli')}", UNUSABLE)
    try:
        # The parser only chooses the job. The job runs here, where every error is caught.
        job: Callable[[], int] | int | None = app(
            args=list(arguments) or ["--help"], prog_name="bytecheckpoint", standalone_mode=False
        )
        return job() if callable(job) else int(job or FINE)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        return PIPE
    except CheckpointError as error:
        damaged = isinstance(error, CorruptCheckpointError) and error.file not in ("", CATALOG_NAME)
        return _fail(str(error), FINDINGS if damaged else UNUSABLE)
    except Exception as error:  # noqa: BLE001  the user gets one line for any failure
        return _fail(_message(error), UNUSABLE)


def _end(number: int, frame: object) -> None:
    """End as after Ctrl-C: the verb removes its temporary files."""
    raise SystemExit(128 + number)


def _message(error: Any) -> str:
    if hasattr(error, "format_message"):  # an error of the parser
        return f"{error.format_message().rstrip('.')}; see bytecheckpoint --help"
    if type(error).__name__ == "Abort":
        return "interrupted"
    if os.environ.get("BYTECHECKPOINT_TRACEBACK"):
        raise error
    if isinstance(error, OSError) and error.errno in _FULL:  # storages raise a CheckpointError instead
        return f"cannot write the output: {error.strerror or error}"
    return (
        f"internal error, {type(error).__name__}: {error}; please report it with the traceback that "
        f"BYTECHECKPOINT_TRACEBACK=1 shows"
    )


def _fail(message: str, code: int) -> int:
    try:
        print(f"bytecheckpoint: {printable(message)}", file=sys.stderr)
    except OSError:
        pass
    return code


if __name__ == "__main__":
    main()
