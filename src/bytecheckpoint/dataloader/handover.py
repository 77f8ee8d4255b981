"""Hand the states of streams from a worker to its loader, in shared memory that is used again.

Touching new pages takes ten times as long as copying into used ones, and a save would touch the loader's own mapping of
them once more. So both ends keep the memory of a state. It is written again when no tensor of that state is left.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from bytecheckpoint.dataloader.rows import shared_tensor
from bytecheckpoint.dataloader.stream import BUFFERS

__all__ = ["ALIGN", "StateReceiver", "StateSender", "States", "StreamSnapshot", "filled", "on_tensors", "share_states"]

#: Alignment of tensors in bytes.
ALIGN: Final = 64
#: The states of a worker's streams, by number.
States = Mapping[int, Any]
#: State of a stream, and a function that fills its tensors.
StreamSnapshot = tuple[Any, Callable[[], object]]


def filled(states: States) -> dict[int, StreamSnapshot]:
    """Return states whose tensors are filled and stay as they are, as snapshots."""
    return {number: (state, lambda: None) for number, state in states.items()}


def _carve(memory: torch.Tensor) -> Callable[[int, torch.dtype], torch.Tensor]:
    """Return a function (count, dtype) -> tensor that takes tensors from `memory`, uint8 [n], one after the other."""
    position = 0

    def allocate(count: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal position
        start, position = position, position - (-count * dtype.itemsize // ALIGN) * ALIGN
        return memory[start : start + count * dtype.itemsize].view(dtype)

    return allocate


class StateSender:
    """Lays states out in shared memory, in the worker."""

    def __init__(self) -> None:
        self._number = 0
        self._memory: dict[int, torch.Tensor] = {}
        self._free: set[int] = set()
        self._unknown: set[int] = set()  # to the loader

    def reserve(self, nbytes: int) -> None:
        """Touch memory for the first state in advance."""
        if not self._memory:
            self._allocate(nbytes)
            self._memory[self._number][:nbytes] = 0

    def _allocate(self, nbytes: int) -> None:
        # Buffers differ a little in length from save to save. Pages that are not used take no memory.
        self._number += 1
        self._memory[self._number] = shared_tensor((nbytes + nbytes // 8 + ALIGN,), torch.uint8)
        self._free.add(self._number)
        self._unknown.add(self._number)

    def send(self, nbytes: int, states: Callable[[Callable[[int, torch.dtype], torch.Tensor]], States]) -> Any:
        """Make states in shared memory, and return a message for `StateReceiver.receive`.

        Args:
            nbytes: bytes of their tensors, each rounded up to a multiple of 64.
            states: function that makes the states, in tensors from the allocating function that it gets.
        """
        fitting = [number for number in self._free if len(self._memory[number]) >= nbytes]
        if not fitting:
            self._allocate(nbytes)
        number = fitting[0] if fitting else self._number
        self._free.discard(number)
        memory = self._memory[number]
        shown = memory if number in self._unknown else None
        self._unknown.discard(number)
        return number, shown, on_tensors(states(_carve(memory)), _place)

    def release(self, number: int, keep: bool) -> None:
        """Use the memory of a state again if `keep`, or free it."""
        if keep:
            self._free.add(number)
        else:
            del self._memory[number]


def share_states(states: States) -> Any:
    """Return a message for `StateReceiver.receive`, with copies in one piece of memory, which takes one descriptor."""
    sizes = [tensor.nbytes for state in states.values() for name in BUFFERS for tensor in state[name].values()]

    def copies(allocate: Callable[[int, torch.dtype], torch.Tensor]) -> States:
        return on_tensors(states, lambda tensor: allocate(tensor.numel(), tensor.dtype).copy_(tensor))

    return StateSender().send(sum(-(-size // ALIGN) * ALIGN for size in sizes), copies)


class StateReceiver:
    """Receives states from a worker, in the loader."""

    def __init__(self) -> None:
        self._memory: dict[int, torch.Tensor] = {}
        self._released: deque[int] = deque()

    def receive(self, message: Any) -> dict[int, Any]:
        """Return the states in a message of `StateSender.send`."""
        number, memory, states = message
        if memory is not None:
            self._memory[number] = memory
        # A tensor of its own, so that the last one of the state, wherever it is, ends the use of the memory.
        array = self._memory[number].numpy()
        weakref.finalize(array, self._released.append, number).atexit = False
        whole = torch.from_numpy(array)

        def named(place: tuple[int, int, torch.dtype]) -> torch.Tensor:
            start, count, dtype = place
            return whole[start : start + count * dtype.itemsize].view(dtype)

        return on_tensors(states, named)

    def released(self) -> list[tuple[int, bool]]:
        """Return the arguments of `StateSender.release` for each state whose tensors are gone."""
        found = []
        while self._released:
            number = self._released.popleft()
            keep = number in sorted(self._memory)[-2:]  # a caller may hold one state while the next is made
            if not keep:
                del self._memory[number]
            found.append((number, keep))
        return found


def _place(tensor: torch.Tensor) -> tuple[int, int, torch.dtype]:
    return int(tensor.storage_offset()) * tensor.element_size(), tensor.numel(), tensor.dtype


def on_tensors(states: States, change: Callable[[Any], Any]) -> dict[int, Any]:
    """Return states in which the tensors of buffers are changed."""
    return {
        number: state | {name: {part: change(value) for part, value in state[name].items()} for name in BUFFERS}
        for number, state in states.items()
    }
