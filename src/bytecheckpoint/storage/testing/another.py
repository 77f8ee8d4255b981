"""Another process on the same storage: `python -m bytecheckpoint.storage.testing.another URL NUMBER`.

It prints whether it sees the file that the test has written, waits for a line of input, and then prints the names that it
could publish before the others.
"""

from __future__ import annotations

import sys

import numpy as np

from bytecheckpoint.errors import StorageConflictError
from bytecheckpoint.storage.registry import resolve
from bytecheckpoint.storage.testing.support import FILE_BYTES, TRIALS, content, read_all

__all__ = ["main"]


def main(url: str, number: str) -> None:
    """Run the program."""
    storage = resolve(url)
    seen = storage.list() == [("model/file", FILE_BYTES)]
    _print(seen and np.array_equal(read_all(storage, "model/file"), content(FILE_BYTES)))
    sys.stdin.readline()
    for trial in range(TRIALS):
        try:
            storage.publish(f"catalog-{trial}", number.encode() * FILE_BYTES, expected="")
            _print(trial)
        except StorageConflictError:
            pass


def _print(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
