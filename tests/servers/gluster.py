"""GlusterFS, a network file system: one server ("brick"), and two FUSE mounts in place of two machines.

The mounts cache in three ways:

- "strict": attributes and names are asked for each time: close-to-open consistency, as NFS promises it
- "default": as GlusterFS comes: names are fresh, and content that was rewritten in place is seen late
- "stale": with its metadata cache on top: even a rename is seen up to a second late
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.servers.process import free_port
from tests.support.processes import wait_until

__all__ = ["KINDS", "Gluster"]

KINDS = ("strict", "default", "stale")
_STRICT = ("--fopen-keep-cache=off", "--attribute-timeout=0", "--entry-timeout=0")

_BRICK = """
volume posix
  type storage/posix
  option directory {folder}/brick
end-volume
volume locks
  type features/locks
  subvolumes posix
end-volume
volume brick
  type performance/io-threads
  option thread-count 8
  subvolumes locks
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.bind-address 127.0.0.1
  option transport.socket.listen-port {port}
  option transport.address-family inet
  option auth.addr.brick.allow 127.0.0.1
  subvolumes brick
end-volume
"""
_CLIENT = """
volume c0
  type protocol/client
  option transport-type tcp
  option remote-host 127.0.0.1
  option remote-port {port}
  option remote-subvolume brick
  option transport.address-family inet
  option ping-timeout 5
end-volume
volume wb
  type performance/write-behind
  subvolumes c0
end-volume
"""
_CACHE = """
volume cache
  type performance/md-cache
  option md-cache-timeout 1
  subvolumes wb
end-volume
"""


class Gluster:
    """One volume with two mounts, `mounts[0]` and `mounts[1]`.

    Args:
        folder: new folder for all its files.
        kind: one of KINDS.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        _require()
        self.folder = folder
        self.mounts = [folder / "m1", folder / "m2"]
        for name in ("brick", "m1", "m2", "log"):
            (folder / name).mkdir(parents=True)
        port = free_port()
        (folder / "brick.vol").write_text(_BRICK.format(folder=folder, port=port))
        (folder / "client.vol").write_text(_CLIENT.format(port=port) + (_CACHE if kind == "stale" else ""))
        self._port = port
        self._processes: list[subprocess.Popen[bytes]] = []
        self._brick: subprocess.Popen[bytes] | None = None
        try:
            self.start_server()
            for mount in self.mounts:
                options = _STRICT if kind == "strict" else ()
                command = ["glusterfs", "-N", "-f", "client.vol", *options, "-l", f"log/{mount.name}.log", str(mount)]
                self._processes.append(self._start(command))
            if not wait_until(lambda: all(os.path.ismount(m) and _answers(m) for m in self.mounts), 30):
                raise RuntimeError("GlusterFS did not start")
        except BaseException:
            self.stop()
            raise

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def start_server(self) -> None:
        """Start the server; also after `kill_server`."""
        self._brick = self._start(["glusterfsd", "-N", "-f", "brick.vol", "-l", "log/brick.log"])

    def kill_server(self) -> None:
        """End the server with SIGKILL."""
        assert self._brick is not None
        self._brick.kill()
        self._brick.wait()

    @contextlib.contextmanager
    def paused(self):  # type: ignore[no-untyped-def]  # a context manager
        """Let the server answer nothing inside the block."""
        assert self._brick is not None
        self._brick.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._brick.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Unmount, and end all processes."""
        for mount in self.mounts:
            if os.path.ismount(mount):
                subprocess.run(["umount", "-l", str(mount)], check=False, timeout=30)
        for process in (*self._processes, self._brick):
            if process is not None:
                process.kill()
                process.wait()


def _require() -> None:
    reason = ""
    if os.geteuid() != 0:
        reason = "mounting takes root"
    elif not os.path.exists("/dev/fuse"):
        reason = "this machine has no FUSE (/dev/fuse)"
    elif shutil.which("glusterfs") is None or shutil.which("glusterfsd") is None:
        reason = "GlusterFS is not installed (apt-get install glusterfs-server glusterfs-client)"
        if os.environ.get("BYTECHECKPOINT_REQUIRE_SERVERS") and shutil.which("apt-get"):
            pytest.fail(reason)
    if reason:
        pytest.skip(f"NOT TESTED HERE: {reason}")


def _answers(mount: Path) -> bool:
    try:
        os.listdir(mount)
    except OSError:
        return False
    return True
