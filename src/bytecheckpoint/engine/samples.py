"""Sample the bytes of tensors, to prove later that a copy holds what they held.

All bytes of all tensors form one line: those of the first tensor in row-major order, then those of the second, and so on.
Each piece of a tensor, of 8 MiB or less, gives its first 8 bytes, its last 8, and 6 times 8 between. A write that comes
while a piece is copied shows at its end, which is copied last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.engine.pieces import PIECE_BYTES
from bytecheckpoint.engine.runs import Runs
from bytecheckpoint.engine.tensor_bytes import dense, flat_bytes, movable
from bytecheckpoint.representation.boxes import Int64s, Mask

__all__ = ["CopiedRanges", "SamplePlaces", "TensorSamples"]

#: Samples of a piece; two of them are its ends.
_PER_PIECE = 8
_WORD = 8
#: Bytes that are hashed together where everything is.
_BLOCK = 64 << 10


class CopiedRanges(NamedTuple):
    """Ranges of the line of all bytes that were copied into one memory, as columns of int64 in the order of the line.

    Attributes:
        begin: first byte of each range in the line, [n].
        end: end of each range in the line, [n].
        at: place of its first byte in the memory, [n].
    """

    begin: Int64s
    end: Int64s
    at: Int64s

    def find(self, begin: Int64s, end: Int64s) -> tuple[Mask, Int64s]:
        """Return which parts [begin, end) of the line lie in a copied range, and the places of these in the memory."""
        of_range = np.maximum(np.searchsorted(self.begin, begin, "right") - 1, 0)
        inside = (begin >= self.begin[of_range]) & (end <= self.end[of_range])
        return inside, (self.at[of_range] + begin - self.begin[of_range])[inside]


class _Column(NamedTuple):
    """Samples of one width, uint64 or uint8: their places in the line, and their values, which may be on a device."""

    at: Int64s
    values: NDArray[Any] | torch.Tensor

    def host_values(self) -> NDArray[Any]:
        return self.values.cpu().numpy() if isinstance(self.values, torch.Tensor) else self.values


class _Blocks(NamedTuple):
    """Hashes of all bytes, block by block: places of the blocks in the line, and a number for each."""

    begin: Int64s
    end: Int64s
    hashes: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SamplePlaces:
    """Places of the samples of tensors. They hold for any tensors of the same form in the same memory.

    Attributes:
        starts: first byte of each tensor in the line of all bytes, and the end of the last one, int64 [tensors + 1].
        words: places in the line, and addresses, of samples of eight bytes in host memory.
        odd: places and addresses of samples of one byte.
        elements: whole elements of tensors that have strides, consist of runs or are on a device without `spaces`.
        spaces: whole elements of other tensors on devices.
    """

    starts: Int64s
    words: tuple[Int64s, Int64s]
    odd: tuple[Int64s, Int64s]
    elements: list[_Elements]
    spaces: list[_DeviceElements]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor | Runs]) -> SamplePlaces:
        """Choose the places."""
        sizes = np.fromiter((tensor.nbytes for tensor in tensors), np.int64, len(tensors))
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        plain = np.fromiter(map(_in_one_place, tensors), np.bool_, len(tensors))
        address = np.array([t.data_ptr() if isinstance(t, torch.Tensor) else 0 for t in tensors], np.int64)
        long = np.flatnonzero(plain & (sizes >= _WORD))
        which, offset = _places(long, sizes[long], _WORD)
        words = starts[which] + offset, address[which] + offset
        short = np.flatnonzero(plain & (sizes < _WORD))
        which = np.repeat(short, sizes[short])
        offset = np.arange(len(which)) - np.repeat(np.cumsum(sizes[short]) - sizes[short], sizes[short])
        odd = starts[which] + offset, address[which] + offset
        elements: list[_Elements] = []
        on_devices: dict[tuple[torch.device, torch.dtype], list[tuple[_Elements, torch.Tensor]]] = {}
        for number in np.flatnonzero(~plain & (sizes > 0)).tolist():
            tensor = tensors[number]
            found = _Elements.of(number, tensor, int(starts[number]))
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.is_contiguous():
                on_devices.setdefault((tensor.device, tensor.dtype), []).append((found, tensor))
            else:
                elements.append(found)
        spaces = [_DeviceElements.of(device, found) for (device, _), found in on_devices.items()]
        return cls(starts, words, odd, elements, spaces)

    def read(self, tensors: Sequence[torch.Tensor | Runs], *, full: bool = False) -> TensorSamples:
        """Read the samples now. On a device, the current stream reads them in order with the work queued there.

        Args:
            tensors: the tensors, as in `of`.
            full: True to hash all bytes too.
        """
        columns = [
            _Column(self.words[0], _read(self.words[1], np.uint64)),
            _Column(self.odd[0], _read(self.odd[1], np.uint8)),
        ]
        batches: dict[tuple[torch.device, torch.dtype], tuple[list[Int64s], list[torch.Tensor]]] = {}
        for elements in self.elements:
            values = elements.take(tensors[elements.number])
            at, held = batches.setdefault((values.device, values.dtype), ([], []))
            at.append(elements.at)
            held.append(values)
        columns += [_Column(space.at, space.take()) for space in self.spaces]
        for at, held in batches.values():
            joined = flat_bytes(torch.cat(held))
            columns.append(_Column(np.concatenate(at), joined.numpy() if joined.is_cpu else joined))
        return TensorSamples(self.starts, columns, _hash(tensors if full else [], self.starts))


class _Elements(NamedTuple):
    """Sampled elements of one tensor.

    Attributes:
        number: number of the tensor.
        at: places of their bytes in the line.
        numbers: numbers of the elements in row-major order, at one distance.
    """

    number: int
    at: Int64s
    numbers: Int64s

    @classmethod
    def of(cls, number: int, tensor: torch.Tensor | Runs, start: int) -> _Elements:
        size = (tensor if isinstance(tensor, torch.Tensor) else tensor.memory).element_size()
        count = tensor.nbytes // size
        samples = min(_PER_PIECE * -(-tensor.nbytes // PIECE_BYTES), count)
        numbers = count - 1 - np.arange(samples)[::-1] * (count // samples)
        return cls(number, (start + numbers[:, None] * size + np.arange(size)).ravel(), numbers)

    def take(self, tensor: torch.Tensor | Runs) -> torch.Tensor:
        numbers = self.numbers
        if not isinstance(tensor, torch.Tensor):
            return tensor.memory.take(torch.from_numpy(tensor.places_of(numbers)).to(tensor.memory.device))
        memory = movable(tensor)
        if not tensor.is_contiguous():
            return memory.take(torch.from_numpy(numbers).to(memory.device))
        step = int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1
        return memory.as_strided((len(numbers),), (step,), memory.storage_offset() + int(numbers[0]))


class _DeviceElements(NamedTuple):
    """Sampled elements of contiguous tensors of one width on one CUDA device, which one kernel reads.

    A view for each tensor takes eight microseconds of the call.

    Attributes:
        at: places of their bytes in the line.
        memory: the device's memory from the first tensor to the last, as elements of one width.
        numbers: numbers of the sampled elements there, on the device.
    """

    at: Int64s
    memory: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(cls, device: torch.device, found: Sequence[tuple[_Elements, torch.Tensor]]) -> _DeviceElements:
        size = found[0][1].element_size()
        width = min(size, _WORD)  # complex128 has two words
        address = np.concatenate([tensor.data_ptr() + elements.numbers * size for elements, tensor in found])
        words = (address[:, None] + np.arange(0, size, width)).ravel()
        low = int(words.min())
        space = _AddressSpace(low, (int(words.max()) - low) // width + 1, np.dtype(f"i{width}"), width)
        numbers = torch.from_numpy((words - low) // width).pin_memory()  # a copy from other memory waits for the device
        at = np.concatenate([elements.at for elements, _ in found])
        return cls(at, torch.as_tensor(space), numbers.to(device, non_blocking=True))

    def take(self) -> torch.Tensor:
        return flat_bytes(self.memory.take(self.numbers))


@dataclass(frozen=True, slots=True)
class TensorSamples:
    """Samples of tensors at one moment.

    Attributes:
        starts: first byte of each tensor in the line of all bytes, and the end of the last one, int64 [tensors + 1].
    """

    starts: Int64s
    _columns: list[_Column]
    _blocks: _Blocks

    def differing(self, copied: CopiedRanges, memory: NDArray[np.uint8]) -> Int64s:
        """Return the numbers of the tensors of which a sample in a copied range differs from the copy.

        Args:
            copied: ranges that were copied.
            memory: memory that they were copied to.
        """
        found = [np.zeros(0, np.int64)]
        if not len(copied.begin):
            return found[0]
        for at, values in ((column.at, column.host_values()) for column in self._columns):
            if not len(at):
                continue
            inside, places = copied.find(at, at + values.itemsize)
            found.append(at[inside][_read(memory.ctypes.data + places, values.dtype) != values[inside]])
        begin, end, hashes = self._blocks
        inside, places = copied.find(begin, end)
        for number, place in zip(np.flatnonzero(inside).tolist(), places.tolist(), strict=True):
            block = memory[place : place + end[number] - begin[number]]
            if xxhash.xxh3_64_intdigest(block) != hashes[number]:
                found.append(begin[number : number + 1])
        return self._tensors_at(np.concatenate(found))

    def differing_from(self, other: TensorSamples) -> Int64s:
        """Return the numbers of the tensors whose samples differ from those of the same tensors at another moment."""
        pairs = zip(self._columns, other._columns, strict=True)
        found = [a.at[a.host_values() != b.host_values()] for a, b in pairs]
        return self._tensors_at(
            np.concatenate([*found, self._blocks.begin[self._blocks.hashes != other._blocks.hashes]])
        )

    def _tensors_at(self, places: Int64s) -> Int64s:
        return np.unique(np.searchsorted(self.starts, places, "right") - 1)


def _in_one_place(tensor: torch.Tensor | Runs) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.is_contiguous()


def _places(numbers: Int64s, sizes: Int64s, width: int) -> tuple[Int64s, Int64s]:
    """Return the tensor and the offset in it of each sample of `width` bytes.

    Args:
        numbers: numbers of the tensors, [n].
        sizes: their lengths in bytes, at least `width`, [n].
        width: bytes of a sample.
    """
    pieces = -(-sizes // PIECE_BYTES)
    which = np.repeat(np.arange(len(numbers)), pieces)
    begin = (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * PIECE_BYTES
    last = np.minimum(begin + PIECE_BYTES, sizes[which]) - width
    begin = np.minimum(begin, last)
    # Places that look random, so no pattern of a write avoids them: multiples of the golden ratio, modulo one.
    part = np.arange(1, len(which) * _PER_PIECE + 1).reshape(-1, _PER_PIECE) * 0.6180339887498949 % 1.0
    part[:, 0], part[:, -1] = 0.0, 1.0
    offsets = begin[:, None] + (part * (last - begin)[:, None]).astype(np.int64)
    return np.repeat(numbers[which], _PER_PIECE), offsets.ravel()


def _hash(tensors: Sequence[torch.Tensor | Runs], starts: Int64s) -> _Blocks:
    """Hash all bytes of tensors."""
    begin, end, hashes = [], [], []
    for tensor, start in zip(tensors, starts[:-1].tolist(), strict=False):
        if isinstance(tensor, Runs):
            data = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
            tensor.copy_bytes(0, tensor.nbytes, data)
        else:
            data = flat_bytes(dense(tensor)).cpu()
        for at, block in zip(range(0, tensor.nbytes, _BLOCK), data.split(_BLOCK), strict=False):
            begin.append(start + at)
            end.append(start + at + len(block))
            hashes.append(xxhash.xxh3_64_intdigest(block.numpy()))
    return _Blocks(np.array(begin, np.int64), np.array(end, np.int64), np.array(hashes, np.uint64))


class _AddressSpace:
    """Memory from an address on, as an array in which an element begins at every byte, or after every `stride` bytes."""

    def __init__(self, address: int, count: int, dtype: Any, stride: int = 1) -> None:
        about = {"version": 3, "shape": (count,), "strides": (stride,), "typestr": np.dtype(dtype).str}
        self.__array_interface__ = {**about, "data": (address, True)}
        self.__cuda_array_interface__ = {**about, "data": (address, False)}  # torch knows no memory that is only read


def _read(addresses: Int64s, dtype: Any) -> NDArray[Any]:
    """Read a number at each address."""
    if not len(addresses):
        return np.zeros(0, dtype)
    low = int(addresses.min())
    # One index for all: a view for each takes eight times as long.
    return np.asarray(_AddressSpace(low, int(addresses.max()) - low + 1, dtype))[addresses - low]
