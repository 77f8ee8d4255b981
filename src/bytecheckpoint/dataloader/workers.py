"""Make the rows of some streams in worker processes, a few batches ahead.

A worker keeps the state after each batch that it is ahead, so that the loader can be saved as of the last batch that the
training took. A state that was requested in advance is handed over as soon as the batch before it is made
(ByteCheckpoint, section 4.5: state prefetching).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
import weakref
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing  # lets connections carry tensors in shared memory
from msgspec import structs

from bytecheckpoint.dataloader.handover import StateReceiver, StateSender, StreamSnapshot, filled, share_states
from bytecheckpoint.dataloader.makers import LocalMaker
from bytecheckpoint.dataloader.rows import PackedRows, shared_tensor
from bytecheckpoint.dataloader.trained import TrainedBatches
from bytecheckpoint.errors import CheckpointTimeoutError, PeerLostError, UsageError
from bytecheckpoint.failures import Failure

__all__ = ["Worker"]

_ORPHAN_SECONDS = 1.0  # between two looks whether the parent lives


class Worker:
    """The loader's end of one worker process.

    Args:
        name: name in errors, e.g. "data loader worker 1 of 4, which feeds streams 4 to 7".
        start_method: start method of the process.
        ahead: number of batches to make before they are wanted.
        timeout: seconds to wait for a batch or for states.
        arguments: arguments of the `LocalMaker`.

    Attributes:
        late: True if the worker gave no answer in time, and none since.
    """

    def __init__(self, name: str, start_method: str, ahead: int, timeout: float, arguments: tuple[Any, ...]) -> None:
        self.name, self.late = name, False
        self._timeout = timeout
        recipe, numbers, begin, states = arguments
        count = recipe.rows * len(numbers)
        # A batch stays in its slot until it is taken; the worker makes no further ones than there are slots.
        words = PackedRows.words(count, recipe.context_length)
        memory = shared_tensor((ahead, words), torch.int64)
        self._slots = [PackedRows.over(part, count, recipe.context_length) for part in memory]
        self._made: dict[int, bool] = {}  # number of a batch -> whether its slot holds it; False: a stream has ended
        self._states: dict[int, dict[int, Any]] = {}
        self._failures: dict[int, Failure] = {}  # by number of a batch; -1 for a failure of the worker itself
        self._asked: set[int] = set()
        self._receiver = StateReceiver()
        context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload([__name__])  # torch is imported once, not by every worker
        self._link, theirs = context.Pipe()
        self._process = context.Process(
            target=_work,
            args=(theirs, memory, (recipe, numbers, begin, share_states(states))),
            name="bytecheckpoint-loader",
            daemon=True,
        )
        try:
            self._process.start()
        except OSError:
            raise
        except Exception as error:  # of a class that cannot be sent
            raise UsageError(
                f"the sources or the tokenizer cannot be sent to a {start_method} worker ({error}): define them at the top "
                'of a module, use workers=0, or start_method="fork", which may hang in a process with threads'
            ) from error
        theirs.close()
        self.close = weakref.finalize(self, _end, self._process, self._link, os.getpid())

    def make(self, rows: PackedRows, batch: int) -> bool:
        """Copy the rows of a batch that is not taken yet; return False when a stream has ended."""
        self._receive(lambda: batch in self._made or batch in self._failures, "a batch")
        if batch in self._failures:
            raise self._failure(batch)
        if self._made[batch]:
            rows.copy_from(self._slots[batch % len(self._slots)].part(0, len(rows.numbers)))
        return self._made[batch]

    def taken(self, counts: TrainedBatches) -> None:
        """Report to the worker how many batches were taken, and which positions are kept."""
        self._made = {number: made for number, made in self._made.items() if number >= counts.taken}
        # Not those that are kept besides: their memory is needed for the next state, and the worker can make them again.
        self._states = {number: states for number, states in self._states.items() if number >= counts.position}
        self._asked = {number for number in self._asked if number >= counts.position}
        self._send(("taken", (counts.taken, counts.oldest)))
        for released in self._receiver.released():
            self._send(("released", released))

    def ask(self, batches: int) -> None:
        """Request the states after that many batches, once."""
        if batches not in self._asked:
            self._asked.add(batches)
            self._send(("states", batches))

    def states(self, batches: int) -> dict[int, Any]:
        """Return the states after that many batches."""
        self.ask(batches)
        self._receive(lambda: batches in self._states, "its states")
        return self._states[batches]

    def snapshots(self, batches: int) -> dict[int, StreamSnapshot]:
        """Return the same: nothing writes to the memory of a state while one of its tensors is left."""
        return filled(self.states(batches))

    def _send(self, message: tuple[str, Any]) -> None:
        try:
            self._link.send(message)
        except OSError:
            raise self._death() from None

    def _receive(self, ready: Any, what: str) -> None:
        """Receive messages until `ready()`."""
        deadline = time.monotonic() + self._timeout
        while not ready():
            if -1 in self._failures:
                raise self._failure(-1)
            if not wait([self._link, self._process.sentinel], max(deadline - time.monotonic(), 0.0)):
                self.late = True
                raise CheckpointTimeoutError(
                    f"{self.name} gave no answer for {self._timeout:g} s ({what} was wanted): look at its source and "
                    "tokenizer, or raise timeout="
                )
            try:
                # A process that has died may have answered before.
                if not self._link.poll():
                    raise self._death()
                kind, number, value = self._link.recv()
                self.late = False
            except (EOFError, ConnectionError, FileNotFoundError):
                raise self._death() from None
            if kind == "rows":
                self._made[number] = value
            elif kind == "states":
                self._states[number] = self._receiver.receive(value)
            else:
                self._failures[number] = value

    def _failure(self, number: int) -> Exception:
        return structs.replace(self._failures[number], stage=f"{self.name} failed").as_error()

    def _death(self) -> PeerLostError:
        self._process.join(5)
        return PeerLostError(
            f"{self.name} died with exit code {self._process.exitcode} (pid {self._process.pid}): look for the reason in "
            "its output, or for the kernel's out-of-memory killer; start again from the last checkpoint"
        )


def _end(process: Any, link: Connection, owner: int) -> None:
    if os.getpid() != owner:  # a forked process has a copy, and must not end the worker
        return
    link.close()
    process.terminate()
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join(5)


def _work(link: Connection, memory: torch.Tensor, arguments: tuple[Any, ...]) -> None:
    """Be a worker, until the loader closes the link or its process dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the loader handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    parent = os.getppid()  # the loader's process, or a fork server that ends with it
    try:
        recipe, numbers, begin, states = arguments
        slots = [PackedRows.over(part, recipe.rows * len(numbers), recipe.context_length) for part in memory]
        _serve(link, parent, slots, LocalMaker(recipe, numbers, begin, StateReceiver().receive(states)))
    except _LoaderGoneError:
        return
    except BaseException as error:  # noqa: BLE001  the loader raises it
        with contextlib.suppress(_LoaderGoneError):
            _send(link, "failure", -1, _failure(error))
            while True:  # tensors that were sent live in this process until they are received
                _receive(link, parent)


def _failure(error: BaseException) -> Failure:
    failure = Failure.of(error)
    trace = "".join(traceback.format_exception(error)[-6:])
    return structs.replace(failure, message=f"{failure.message}\n{trace}")


def _serve(link: Connection, parent: int, slots: list[PackedRows], maker: LocalMaker) -> None:
    taken = maker.made
    wanted: set[int] = set()
    ended = False
    sender = StateSender()
    while True:
        idle = ended or maker.made >= taken + len(slots)
        if idle and wanted:
            sender.reserve(maker.state_bytes(maker.made))
        while idle or _polls(link):
            kind, value = _receive(link, parent)
            if kind == "taken":
                taken, oldest = value
                maker.forget(oldest)
            elif kind == "released":
                sender.release(*value)
            else:
                wanted.add(value)
            idle = False
        for number in sorted(wanted):
            if maker.knows(number):
                wanted.discard(number)
                _send(link, "states", number, maker.send_states(number, sender))
        if not ended and maker.made < taken + len(slots):
            number = maker.made
            try:
                ended = not maker.make(slots[number % len(slots)].part(0, maker.count(number)), number)
            except Exception as error:  # noqa: BLE001  the loader raises it for this batch; what is before can be saved
                ended = True
                _send(link, "failure", number, _failure(error))
            else:
                _send(link, "rows", number, not ended)


def _polls(link: Connection) -> bool:
    try:
        return link.poll()
    except OSError as error:
        raise _LoaderGoneError from error


def _send(link: Connection, kind: str, number: int, value: object) -> None:
    try:
        link.send((kind, number, value))
    except OSError as error:
        raise _LoaderGoneError from error


def _receive(link: Connection, parent: int) -> Any:
    try:
        # Other workers may hold the other end open, so an orphan sees no end of the link.
        while not link.poll(_ORPHAN_SECONDS):
            if os.getppid() != parent:
                raise _LoaderGoneError
        return link.recv()
    except (EOFError, OSError) as error:
        raise _LoaderGoneError from error


class _LoaderGoneError(Exception):
    """The loader has closed the link, or its process has ended; so does the worker."""
