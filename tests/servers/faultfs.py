"""A file system that fails on command: passes everything on to a folder, but for what its rules say.

    python tests/servers/faultfs.py BACK MOUNT RULES     # ends when MOUNT is unmounted

RULES is a JSON file, read at each call: a list of objects with `op` ("write", "fsync", ... or "*") and, all optional,
`errno`, `delay` (seconds), `hang` (until the rules change), `path` (a part of the file's name), `after_bytes` (that many
were written since the rules changed), `times` (that many calls), `flip` (a byte of what is read is wrong), `short` (a
write takes that many bytes at most). `FaultFs` is the test's side of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: What a journal has: these, with the arguments that `power_loss` knows.
_CHANGES = {"create", "write", "truncate", "fsync", "fsyncdir", "mkdir", "rmdir", "unlink", "rename", "link"}


class FaultFs:
    """A mounted one.

    Args:
        folder: for everything; new.
        library: where mfusepy is.
    """

    def __init__(self, folder: Path, library: Path) -> None:
        self.back, self.mount, self._rules = folder / "back", folder / "mount", folder / "rules.json"
        for path in (self.back, self.mount):
            path.mkdir(parents=True)
        self.clear()
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(self.back), str(self.mount), str(self._rules)],
                env={**os.environ, "PYTHONPATH": str(library)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while not os.path.ismount(self.mount):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"faultfs did not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def rule(self, op: str, code: int = 0, **options: Any) -> None:
        """One rule, in the place of all others."""
        self._write([{"op": op, "errno": code, **options}])

    def clear(self) -> None:
        """Everything works again."""
        self._write([])

    def record(self) -> Path:
        """Everything works, and every change goes into a journal, in the order of the changes: JSON lines in this file."""
        journal = self._rules.with_name("journal")
        journal.unlink(missing_ok=True)
        self._write([{"op": "", "journal": str(journal)}])
        return journal

    def _write(self, rules: list[dict[str, Any]]) -> None:
        temporary = self._rules.with_suffix(".new")
        temporary.write_text(json.dumps(rules))
        os.replace(temporary, self._rules)

    def stop(self) -> None:
        """Unmount it."""
        self.clear()
        subprocess.run(["umount", "-l", str(self.mount)], check=False, capture_output=True, timeout=30)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Rules:
    """The rules in force, and what was counted since they came into force."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen = 0, 0
        self._rules: list[dict[str, Any]] = []
        self._written = 0
        self._journal = ""
        self._in_order = threading.Lock()

    def written(self, nbytes: int) -> None:
        with self._lock:
            self._written += nbytes

    def do(self, op: str, function: Callable[[], Any], change: Callable[[Any], list[Any]]) -> Any:
        """Change something: `function()`; `change` of its result is what the journal says behind `op`."""
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

    def meet(self, op: str, path: str | None) -> dict[str, Any]:
        """Wait or raise as the rules say; what else they say. An open file that was removed has no path."""
        more: dict[str, Any] = {}
        delay, code = 0.0, 0
        with self._lock:
            stamp = self._stamp()
            if stamp != self._seen:
                with open(self._path, encoding="utf-8") as file:
                    self._rules = json.load(file)
                self._seen, self._written = stamp, 0
                self._journal = next((rule["journal"] for rule in self._rules if "journal" in rule), "")
            for rule in self._rules:
                if rule["op"] not in (op, "*") or rule.get("path", "") not in (path or "") or rule.get("times", 1) <= 0:
                    continue
                if self._written < rule.get("after_bytes", 0):
                    continue
                if "times" in rule:
                    rule["times"] -= 1
                delay = max(delay, rule.get("delay", 0.0))
                code = code or rule.get("errno", 0)
                more |= {key: rule[key] for key in ("flip", "short", "hang") if key in rule}
        time.sleep(delay)
        while more.get("hang") and self._stamp() == stamp:
            time.sleep(0.02)
        if code:
            raise OSError(code, os.strerror(code))
        return more


def main() -> None:
    """Serve until unmounted."""
    import mfusepy as fuse

    back, mount, rules = *map(os.path.abspath, sys.argv[1:3]), _Rules(sys.argv[3])

    def passed(function: Callable[..., Any]) -> Callable[..., Any]:
        """The operation with the rules before it; the first argument behind self is the path."""
        op = function.__name__

        def call(self: Any, path: str, *args: Any, **options: Any) -> Any:
            try:
                rules.meet(op, path)
                return rules.do(op, lambda: function(self, path, *args, **options), lambda _: [path, *args[:1]])
            except OSError as error:
                raise fuse.FuseOSError(error.errno or errno.EIO) from None

        return call

    @contextlib.contextmanager
    def failing(op: str, path: str) -> Iterator[dict[str, Any]]:
        try:
            yield rules.meet(op, path)
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
                return int(rules.do("create", lambda: os.open(back + path, flags, mode), lambda fd: [path, number(fd)]))

        @passed
        def open(self, path: str, flags: int) -> int:
            return os.open(back + path, flags & ~os.O_DIRECT & ~os.O_CREAT)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            with failing("read", path) as more:
                data = os.pread(fh, size, offset)
            return bytes([data[0] ^ 1]) + data[1:] if "flip" in more and data else data

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            with failing("write", path) as more:
                part = data[: more.get("short", len(data))]
                rules.written(len(part))
                return int(
                    rules.do("write", lambda: os.pwrite(fh, part, offset), lambda _: [number(fh), offset, part.hex()])
                )

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            with failing("truncate", path):
                ino = os.stat(back + path).st_ino
                rules.do("truncate", lambda: os.truncate(back + path, length), lambda _: [ino, length])

        def fsync(self, path: str, datasync: int, fh: int) -> None:
            with failing("fsync", path):
                rules.do("fsync", lambda: os.fsync(fh), lambda _: [number(fh)])

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
        # `direct_io`: no page cache of this mount hides what the rules do. `hard_remove`: open files are removed and
        # replaced as others are, not given another name first.
        fuse.FUSE(
            FaultyFolder(), mount, foreground=True, nothreads=False, attr_timeout=0, entry_timeout=0, direct_io=True,
            hard_remove=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
