"""A server as a child process: start, wait until it answers, stop, kill, start again at the same address."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

__all__ = ["Server", "folder_of", "free_port", "opener", "program_of"]

#: Runs a command, and ends it when the test run ends in any way: the pipe at descriptor 0 closes then.
_LEASH = 'exec 3<&0; "$0" "$@" </dev/null & pid=$!; { read -r _ <&3; kill -9 $pid; } & wait $pid'
#: Sends requests to servers of this machine, past the proxy of the environment.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def folder_of(name: str) -> Path:
    """Return the folder of an installed server; without it, skip the test, or fail it if servers are required."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bytecheckpoint-servers"
    folder = Path(os.environ.get("SERVERS_DIR") or default) / name
    if not (folder / ".version").exists():
        reason = f"{name} is not installed in {folder.parent}: run scripts/install-servers.sh {name}"
        if os.environ.get("BYTECHECKPOINT_REQUIRE_SERVERS"):
            pytest.fail(reason)
        pytest.skip(f"NOT TESTED HERE: {reason}")
    return folder


def program_of(name: str) -> str:
    """Return the path of an installed program; without it, skip the test, or fail it if servers are required."""
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is not installed: run scripts/install-servers.sh metrics"
        if os.environ.get("BYTECHECKPOINT_REQUIRE_SERVERS"):
            pytest.fail(reason)
        pytest.skip(f"NOT TESTED HERE: {reason}")
    return found


def free_port() -> int:
    """Return a free TCP port of the loopback interface.

    It is outside the range of outgoing connections, so that a server that is started again finds it free.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


class Server:
    """One server.

    Args:
        command: command line.
        url: "http://127.0.0.1:port/path", which has an HTTP status once the server is ready.
        log: file for the output.
        env: variables, besides those of this process.
    """

    def __init__(self, command: Sequence[str], url: str, log: Path, *, env: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._url = url
        self._log = log
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running server; its children are in a group of its own."""
        assert self._process is not None
        return self._process

    @property
    def running(self) -> bool:
        """True if it was started and neither stopped nor killed."""
        return self._process is not None

    def start(self, timeout: float = 120.0) -> Server:
        """Start the server, and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _LEASH, *self._command], stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._env,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + timeout
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"{self._command} did not start: {self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        return self

    def _answers(self) -> bool:
        try:
            opener.open(self._url, timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except (OSError, ValueError):
            return False
        return True

    def stop(self) -> None:
        """Ask the server to end, and wait until it has ended."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server with SIGKILL."""
        self._end(signal.SIGKILL)

    def kill_for(self, seconds: float) -> None:
        """End the server with SIGKILL, and start it again `seconds` later, on another thread."""
        self.kill()
        threading.Timer(seconds, self.start).start()

    def pause(self) -> None:
        """Let the server answer nothing until `resume`.

        The signal only asks: a thread that runs goes on until the kernel next looks at it, and may still answer.
        """
        os.killpg(self.process.pid, signal.SIGSTOP)
        group = [p for p in Path("/proc").glob("[0-9]*") if self._is_ours(int(p.name))]
        deadline = time.monotonic() + 20
        while not all(_stands(thread) for process in group for thread in process.glob("task/*")):
            assert time.monotonic() < deadline, f"{self._command} does not stop"
            time.sleep(0.005)

    def resume(self) -> None:
        """Let a paused server go on."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def _is_ours(self, pid: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return os.getpgid(pid) == self.process.pid
        return False

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        for signum in (signal.SIGCONT, how, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            if signum == how:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
        process.wait()
        process.stdin.close()


def _stands(thread: Path) -> bool:
    """Return True for a thread, by its folder in /proc, that is stopped or has ended."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
