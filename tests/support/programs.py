"""Programs that begin in milliseconds: a template process imports torch once, and forks them.

`forked` returns the command of a relay. It passes its arguments, folder, environment and standard streams to the template,
and ends as the program ends, so that `subprocess` works as ever; a killed relay has its program killed. A program ends as
any other one does: its interpreter shuts down. Other signals do not reach it, and its memory is partly the template's:
tests of those take `processes.python`.

This file is the program of relay and template too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

__all__ = ["forked"]

_STREAMS = 3
_HEAD = 8  # bytes: the length of what follows


def forked(*arguments: object) -> list[str]:
    """Return the command that runs Python with these arguments: "-c" and code, "-m" and a module, or a file."""
    # -S: the relay starts faster without the packages of the environment.
    address, _ = _template()
    return [sys.executable, "-S", "-E", __file__, address, *map(str, arguments)]


@functools.cache
def _template() -> tuple[str, subprocess.Popen[bytes]]:
    """Return the address of this run's template, which starts with the first program and ends with the run."""
    import subprocess

    from tests.support.processes import ROOT, environment, python

    run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()  # one template for all parallel workers
    address = f"bytecheckpoint-tests-{run}"
    command = python("-W", "ignore:This process:DeprecationWarning", "-m", "tests.support.programs", address, run)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    answer = process.stdout.readline()
    assert answer in (b"ready\n", b"taken\n")
    if answer == b"taken\n":
        process.wait()
    return address, process


def relay(address: str, arguments: list[str]) -> None:
    """Have the template run a program, and end as it ends."""
    texts = [os.getcwd(), str(len(arguments)), *arguments, *(f"{name}={text}" for name, text in os.environ.items())]
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(f"\0{address}")
        data = "\0".join(texts).encode(errors="surrogateescape")
        socket.send_fds(link, [len(data).to_bytes(_HEAD)], range(_STREAMS))
        link.sendall(data)
        code = int(link.makefile().read())
    if code < 0:
        with contextlib.suppress(OSError):  # of SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def listen(address: str) -> socket.socket | None:
    """Listen for relays; return None if the template of another worker does."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{address}")
    except OSError:
        listener.close()
        return None
    listener.listen(100)
    return listener


def serve(listener: socket.socket, run: int) -> list[str] | None:
    """Fork a program for each relay; return its arguments in the program, None in the template after the tests.

    Args:
        listener: where relays connect.
        run: process whose end is that of the tests.
    """
    ended = os.pidfd_open(run)
    with listener, open(ended, "rb"):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for guardians
        while True:
            ready, _, _ = select.select([listener.fileno(), ended], [], [])
            if ended in ready:
                return None
            link, _ = listener.accept()
            if os.fork() == 0:
                break
            link.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return guard(link)


def guard(link: socket.socket) -> list[str]:
    """Fork the program, and return in it alone: this process waits for it, and kills it when the relay goes."""
    head, streams, _, _ = socket.recv_fds(link, _HEAD, _STREAMS)
    data = link.recv(int.from_bytes(head), socket.MSG_WAITALL)
    program = os.fork()
    if program:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(_STREAMS):
            os.dup2(null, stream)
            os.close(streams[stream])
        ended = os.pidfd_open(program)
        if link.fileno() in select.select([link.fileno(), ended], [], [])[0]:
            os.kill(program, signal.SIGKILL)
        _, status = os.waitpid(program, 0)
        with contextlib.suppress(OSError):  # the relay may be gone
            link.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    link.close()
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    folder, count, *texts = data.decode(errors="surrogateescape").split("\0")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(text.split("=", 1) for text in texts[int(count) :])
    return texts[: int(count)]


def run(arguments: list[str]) -> None:
    """Run the program of these arguments, as Python's command does."""
    import runpy

    kind, *rest = arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        names, code = vars(sys.modules["__main__"]), compile(rest[0], "<string>", "exec", dont_inherit=True)
        names.clear()  # of what this file defines
        names["__name__"] = "__main__"
        exec(code, names)
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(kind)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    if sys.flags.no_site:
        relay(sys.argv[1], sys.argv[2:])
    listening = listen(sys.argv[1])
    print("taken" if listening is None else "ready", flush=True)  # relays may connect, and wait for the imports
    if listening is not None:
        import tests.support.preloaded  # noqa: F401

        chosen = serve(listening, int(sys.argv[2]))
        if chosen is not None:
            run(chosen)
