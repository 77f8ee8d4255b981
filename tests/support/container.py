"""A process under the default limits of containers: nobody's, on a read-only root, with little of everything."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import ROOT

__all__ = ["container_command", "forbid_reading_of_other_processes", "lacks"]

_TOOLS = ("unshare", "setpriv", "prlimit", "mount")
_NOBODY = 65534


def lacks() -> str:
    """Return what a container here lacks; "" if it can be made."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"there is no {missing[0]}"
    if os.geteuid() != 0 or platform.machine() != "x86_64":
        return "needs root, and x86-64"
    for file in (ROOT / "pyproject.toml", Path(sys.prefix, "pyvenv.cfg")):
        look = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "test", "-r", str(file)]
        if subprocess.run(look, check=False).returncode:
            return f"other users may not read {file}"
    return ""


def container_command(command: Sequence[str], scratch: Path) -> list[str]:
    """Return a command that runs another one in a container, with 64 MiB of /dev/shm.

    Args:
        command: command line.
        scratch: folder outside of the container's root, where alone the command may write; it is empty and in memory.
    """
    # Nobody may enter the folders of root in which Python may lie.
    hidden = [parent for parent in Path(sys.base_prefix).parents if not parent.stat().st_mode & 1]
    steps = ["set -e", "mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm"]
    for folder in hidden:
        inside, aside = Path(sys.base_prefix), scratch.parent / "python"
        aside.mkdir(exist_ok=True)
        steps += [
            f"mount --bind {inside} {aside}", f"mount -t tmpfs -o mode=755 tmpfs {folder}", f"mkdir -p {inside}",
            f"mount --bind {aside} {inside}",
        ]  # fmt: skip
    limits = [
        "setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all",
        "--no-new-privs", "prlimit", "--memlock=65536:65536", "--nofile=1024:1024", "env", "-u", "HOME",
    ]  # fmt: skip
    scratch.mkdir(exist_ok=True)
    steps += [
        f"mount -t tmpfs -o mode=1777 tmpfs {scratch}",
        "mount -o remount,bind,ro /",
        f"cd {scratch}",
        f"exec {shlex.join([*limits, *command])}",
    ]
    return ["unshare", "--mount", "bash", "-c", "\n".join(steps)]


def forbid_reading_of_other_processes() -> None:
    """Let process_vm_readv fail in this process and its children, as the seccomp profile of containers may do."""

    class Instruction(ctypes.Structure):
        _fields_ = (
            ("code", ctypes.c_ushort),
            ("yes", ctypes.c_ubyte),
            ("no", ctypes.c_ubyte),
            ("value", ctypes.c_uint),
        )

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction)))

    instructions = (Instruction * 4)(
        Instruction(0x20, 0, 0, 0),  # load the number of the system call
        Instruction(0x15, 0, 1, 310),  # process_vm_readv of x86-64
        Instruction(0x06, 0, 0, 0x00050001),  # fails with EPERM
        Instruction(0x06, 0, 0, 0x7FFF0000),  # all others pass
    )
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, with_filter = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, with_filter, ctypes.byref(Program(4, instructions)), 0, 0) == 0
