"""The process of `FaultFs`: it passes every call on to a folder, unless a rule hits it.

    python tests/servers/faultfs_program.py BACK MOUNT RULES     # ends when MOUNT is unmounted

RULES is a JSON file, read again when it has changed: a list of "rules", and the name of a "journal" or "".
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fault_rule import FaultRule  # a module of bytecheckpoint.storage.testing, without the package, which imports torch

#: The operations of the journal, with the arguments that `tests.faults.power_loss.Disk` reads.
_CHANGES = {"create", "write", "truncate", "fsync", "fsyncdir", "mkdir", "rmdir", "unlink", "rename", "link"}


@dataclass
class FileFault(FaultRule):
    """A rule for calls of the file system.

    Attributes:
        times: number of calls that are hit; by default all.
        errno: number of the error; 0 for none.
        hang: True if the call waits until the rules change.
        after_bytes: number of bytes, written since the rules changed, after which calls are hit.
        flip: True if one bit of the bytes read is wrong.
        short: number of bytes that a write takes at most; 0: all.
    """

    times: int = -1
    errno: int = 0
    hang: bool = False
    after_bytes: int = 0
    flip: bool = False
    short: int = 0


class _Rules:
    """The rules of the file, and what was written since they changed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen = 0, 0
        self._rules: list[FileFault] = []
        self._written = 0
        self._journal = ""
        self._in_order = threading.Lock()

    def written(self, nbytes: int) -> None:
        with self._lock:
            self._written += nbytes

    def journaled(self, op: str, function: Callable[[], Any], change: Callable[[Any], list[Any]]) -> Any:
        """Return `function()`; write `op` and `change` of the result into the journal."""
        if not self._journal or op not in _CHANGES:
            return function()
        with self._in_order:
            result = function()
            with open(self._journal, "a", encoding="utf-8") as file:
                file.write(json.dumps([op, *change(result)]) + "\n")
        return result

    def _stamp(self) -> tuple[int, int]:
        found = os.stat(self._path)
        return found.st_ino, found.st_mtime_ns

    def apply(self, op: str, path: str | None) -> list[FileFault]:
        """Wait or raise as the rules say; return the rules that hit. An open file that was removed has no path."""
        with self._lock:
            stamp = self._stamp()
            if stamp != self._seen:
                with open(self._path, encoding="utf-8") as file:
                    record = json.load(file)
                self._rules, self._journal = [FileFault(**rule) for rule in record["rules"]], record["journal"]
                self._seen, self._written = stamp, 0
            hit = [r for r in self._rules if self._written >= r.after_bytes and r.hit(op, path or "")]
        for rule in hit:
            rule.wait()
        while any(rule.hang for rule in hit) and self._stamp() == stamp:
            time.sleep(0.02)
        for rule in hit:
            if rule.errno:
                raise OSError(rule.errno, os.strerror(rule.errno))
        return hit


def main() -> None:
    """Serve until the file system is unmounted."""
    import mfusepy as fuse

    back, mount, rules = *map(os.path.abspath, sys.argv[1:3]), _Rules(sys.argv[3])

    def passed(function: Callable[..., Any]) -> Callable[..., Any]:
        """Apply the rules before an operation whose first argument is the path."""
        op = function.__name__

        def call(self: Any, path: str, *args: Any, **options: Any) -> Any:
            try:
                rules.apply(op, path)
                return rules.journaled(op, lambda: function(self, path, *args, **options), lambda _: [path, *args[:1]])
            except OSError as error:
                raise fuse.FuseOSError(error.errno or errno.EIO) from None

        return call

    @contextlib.contextmanager
    def failing(op: str, path: str) -> Iterator[list[FileFault]]:
        try:
            yield rules.apply(op, path)
        except OSError as error:
            raise fuse.FuseOSError(error.errno or errno.EIO) from None

    def number(fd: int) -> int:
        return os.fstat(fd).st_ino

    class FaultyFolder(fuse.Operations):  # type: ignore[misc,name-defined]
        use_ns = True

        @passed
        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            found = os.lstat(back + path) if fh is None else os.fstat(fh)
            names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino", "st_blocks")
            facts = {name: getattr(found, name) for name in names}
            facts.update(st_atime=found.st_atime_ns, st_mtime=found.st_mtime_ns, st_ctime=found.st_ctime_ns)
            return facts

        @passed
        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(back + path)]

        @passed
        def mkdir(self, path: str, mode: int) -> None:
            os.mkdir(back + path, mode)

        @passed
        def rmdir(self, path: str) -> None:
            os.rmdir(back + path)

        @passed
        def unlink(self, path: str) -> None:
            os.unlink(back + path)

        @passed
        def rename(self, old: str, new: str) -> None:
            os.rename(back + old, back + new)

        @passed
        def link(self, target: str, source: str) -> None:
            os.link(back + source, back + target)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            flags = os.O_CREAT | os.O_RDWR | os.O_TRUNC
            with failing("create", path):
                return int(
                    rules.journaled("create", lambda: os.open(back + path, flags, mode), lambda fd: [path, number(fd)])
                )

        @passed
        def open(self, path: str, flags: int) -> int:
            return os.open(back + path, flags & ~os.O_DIRECT & ~os.O_CREAT)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            with failing("read", path) as hit:
                data = os.pread(fh, size, offset)
            return bytes([data[0] ^ 1]) + data[1:] if data and any(rule.flip for rule in hit) else data

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            with failing("write", path) as hit:
                part = data[: min([len(data), *(rule.short for rule in hit if rule.short)])]
                rules.written(len(part))
                return int(
                    rules.journaled(
                        "write", lambda: os.pwrite(fh, part, offset), lambda _: [number(fh), offset, part.hex()]
                    )
                )

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            with failing("truncate", path):
                ino = os.stat(back + path).st_ino
                rules.journaled("truncate", lambda: os.truncate(back + path, length), lambda _: [ino, length])

        def fsync(self, path: str, datasync: int, fh: int) -> None:
            with failing("fsync", path):
                rules.journaled("fsync", lambda: os.fsync(fh), lambda _: [number(fh)])

        @passed
        def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
            pass

        @passed
        def flush(self, path: str, fh: int) -> None:
            pass

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

        def chmod(self, path: str, mode: int) -> None:
            os.chmod(back + path, mode)

        def utimens(self, path: str, times: Any = None) -> None:
            os.utime(back + path, ns=times)

        def statfs(self, path: str) -> dict[str, Any]:
            found = os.statvfs(back + path)
            names = ("bavail", "bfree", "blocks", "bsize", "favail", "ffree", "files", "frsize", "namemax")
            return {f"f_{name}": getattr(found, f"f_{name}") for name in names}

    with contextlib.suppress(KeyboardInterrupt):
        # `direct_io`: no page cache hides what the rules do. `hard_remove`: FUSE removes open files, and does not rename
        # them first.
        fuse.FUSE(
            FaultyFolder(), mount, foreground=True, nothreads=False, attr_timeout=0, entry_timeout=0, direct_io=True,
            hard_remove=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
