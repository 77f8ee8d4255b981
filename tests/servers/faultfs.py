"""A FUSE file system that fails by rules; faultfs_program.py is its process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bytecheckpoint.storage.testing import fault_rule
from tests.servers.process import folder_of
from tests.support.processes import wait_until

__all__ = ["FaultFs", "fault_fs"]

_PROGRAM = Path(__file__).with_name("faultfs_program.py")


class FaultFs:
    """A mounted file system over a folder of this machine.

    Args:
        folder: new folder for its files.
        library: folder of mfusepy.

    Attributes:
        back: the folder below.
        mount: the mount point.
    """

    def __init__(self, folder: Path, library: Path) -> None:
        self.back, self.mount, self._rules = folder / "back", folder / "mount", folder / "rules.json"
        for path in (self.back, self.mount):
            path.mkdir(parents=True)
        self._log, self._library = folder / "log", library
        self._process: subprocess.Popen[bytes] | None = None
        self._restart: threading.Timer | None = None
        self.clear()
        self.start()

    def start(self) -> None:
        """Mount the file system; also after `kill`."""
        self._unmount()
        with self._log.open("ab") as log:
            process = self._process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(self.back), str(self.mount), str(self._rules)],
                env={**os.environ, "PYTHONPATH": f"{self._library}:{Path(fault_rule.__file__).parent}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: os.path.ismount(self.mount) or process.poll() is not None, 60)
        if not os.path.ismount(self.mount):
            self.stop()
            raise RuntimeError(f"faultfs did not start: {self._log.read_text()[-2000:]}")

    def kill(self, *, unmount: bool = False) -> None:
        """End the process with SIGKILL; the mount stays, and every call fails, unless it is removed, too."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        if unmount:
            self._unmount()

    def kill_for(self, seconds: float, *, unmount: bool = False) -> threading.Timer:
        """End the process, and start it again `seconds` later, on the returned thread."""
        self.kill(unmount=unmount)
        self._restart = threading.Timer(seconds, self.start)
        self._restart.start()
        return self._restart

    def _unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.mount)], check=False, capture_output=True, timeout=30)

    def rule(self, call: str, code: int = 0, **options: Any) -> None:
        """Replace all rules by one; see `faultfs_program.FileFault` for the options."""
        self._write([{"call": call, "errno": code, **options}])

    def clear(self) -> None:
        """Remove all rules."""
        self._write([])

    def record(self) -> Path:
        """Remove all rules, and record every change, in order, as a JSON line of the returned file."""
        journal = self._rules.with_name("journal")
        journal.unlink(missing_ok=True)
        self._write([], str(journal))
        return journal

    def _write(self, rules: list[dict[str, Any]], journal: str = "") -> None:
        temporary = self._rules.with_suffix(".new")
        temporary.write_text(json.dumps({"rules": rules, "journal": journal}))
        os.replace(temporary, self._rules)

    def stop(self) -> None:
        """Unmount the file system, and end its process."""
        if self._restart is not None:
            self._restart.cancel()
            if self._restart is not threading.current_thread():
                self._restart.join()
        self.clear()
        self._unmount()
        if self._process is not None:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@contextlib.contextmanager
def fault_fs(folder: Path) -> Iterator[FaultFs]:
    """Mount a file system below a folder; skip the test where this user may not."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("NOT TESTED HERE: needs root and FUSE (/dev/fuse)")
    fs = FaultFs(folder / "faultfs", folder_of("mfusepy"))
    try:
        yield fs
    finally:
        fs.stop()
