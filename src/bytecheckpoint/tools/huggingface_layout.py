"""Decide which tensors an export writes, with which dtype, and where in which file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.opening import Entry
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.representation.dtypes import safetensors_code
from bytecheckpoint.representation.storage_file import MAX_HEADER_BYTES

__all__ = [
    "ADAPTER_FILE", "SINGLE_FILE", "OutputFile", "OutputTensor", "distribute", "export_dtype", "header_bytes",
    "tensors_to_export",
]  # fmt: skip

#: Name of the only file of an export.
SINGLE_FILE = "model.safetensors"
#: The same for an adapter of PEFT.
ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(slots=True)
class OutputTensor:
    """One tensor to write.

    Attributes:
        name: name in the exported file.
        key: key in the checkpoint.
        shape: global shape.
        dtype: dtype to write.
        nbytes: bytes to write.
        stored_bytes: bytes that the checkpoint stores.
        cast: True if the elements are converted.
        start: byte offset in the data section of its file.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    stored_bytes: int
    cast: bool
    start: int = 0


@dataclass(slots=True)
class OutputFile:
    """One file to write.

    Attributes:
        name: name of the file.
        tensors: its tensors, in the order of the file.
        nbytes: bytes of the tensors.
    """

    name: str = SINGLE_FILE
    tensors: list[OutputTensor] = field(default_factory=list)
    nbytes: int = 0


def export_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that an argument names, None for None.

    Raises:
        UsageError: it is not a floating dtype that safetensors tools read.
    """
    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    name = str(found).removeprefix("torch.")
    if not isinstance(found, torch.dtype) or not found.is_floating_point or safetensors_code(name) is None:
        known = "float64, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2"
        raise UsageError(f"{dtype!r} is not a dtype to export to: use one of {known}")
    return found


def tensors_to_export(
    source: CheckpointView,
    state: str,
    wanted: torch.dtype | None,
    renamed: Callable[[str], str | None] = str,
    *,
    all_names: bool = False,
) -> tuple[list[OutputTensor], list[str], list[str]]:
    """Return the tensors to write, tied tensors once, the keys of plain values, and those of tensors to leave out.

    Args:
        source: open checkpoint.
        state: name of the state.
        wanted: dtype of floating tensors, or None.
        renamed: function that returns the exported name of a tensor, or None to leave it out.
        all_names: write a tied tensor under each of its names, as PEFT wants it.

    Raises:
        IncompatibleCheckpointError: a dtype or name that safetensors cannot hold.
    """
    tensors: list[OutputTensor] = []
    skipped: list[str] = []
    left_out: list[str] = []
    seen: set[object] = set()
    for key in source.keys_of(state):
        stored = source.stored_under(key)
        if stored is None:
            skipped.append(key)
            continue
        name = renamed(key.removeprefix(f"{state}/"))
        if name is None:
            left_out.append(key)
            continue
        once = (stored, name) if all_names else stored
        if once in seen:
            continue  # another name of a tied tensor
        seen.add(once)
        entry = source[key]
        assert isinstance(entry, Entry)
        own = str(entry.dtype).removeprefix("torch.")
        # Packed and scale formats are not numbers to convert one by one.
        cast = wanted is not None and entry.dtype.is_floating_point and safetensors_code(own) is not None
        dtype = wanted if cast and wanted is not None else entry.dtype
        _check_fits_format(key, name, own, dtype)
        nbytes = entry.shape.numel() * dtype.itemsize
        tensors.append(OutputTensor(name, key, tuple(entry.shape), dtype, nbytes, entry.nbytes, dtype != entry.dtype))
    return tensors, skipped, left_out


def _check_fits_format(key: str, name: str, stored_dtype: str, dtype: torch.dtype) -> None:
    if safetensors_code(str(dtype).removeprefix("torch.")) is None:
        raise IncompatibleCheckpointError(
            f"{key} is {stored_dtype}, which safetensors tools do not read: it cannot be exported"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise IncompatibleCheckpointError(f"{key!r} is not valid Unicode: safetensors cannot hold the name") from None
    if name == "__metadata__":
        raise IncompatibleCheckpointError(f"{key!r} has a name that safetensors reserves")


def distribute(tensors: Sequence[OutputTensor], max_bytes: int, ranks: int = 1) -> list[OutputFile]:
    """Distribute tensors to files in order, and name the files. Wide elements come first in a file, so all are aligned.

    Args:
        tensors: the tensors.
        max_bytes: most bytes of a file of several tensors.
        ranks: number of ranks that write the files; each gets as many of them, of about equal size, if there are several.
    """
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    count = -(-total // max_bytes)  # of full files
    even = total / (-(-count // ranks) * ranks) if ranks > 1 and total else total
    files = [OutputFile()]
    for tensor in tensors:
        if files[-1].tensors and (
            files[-1].nbytes + tensor.nbytes > max_bytes or done + tensor.nbytes / 2 > len(files) * even
        ):
            files.append(OutputFile())
        files[-1].tensors.append(tensor)
        files[-1].nbytes += tensor.nbytes
        done += tensor.nbytes
    for number, file in enumerate(files, 1):
        if len(files) > 1:
            file.name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file.tensors.sort(key=lambda tensor: -tensor.dtype.itemsize)
        position = 0
        for tensor in file.tensors:
            tensor.start = position
            position += tensor.nbytes
    return files


def header_bytes(file: OutputFile) -> bytes:
    """Return the safetensors header of a file."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor in file.tensors:
        code = safetensors_code(str(tensor.dtype).removeprefix("torch."))
        offsets = [tensor.start, tensor.start + tensor.nbytes]
        table[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UsageError(
            f"the names of {len(file.tensors)} tensors make too long a header: use a smaller max_shard_bytes"
        )
    return struct.pack("<Q", len(text)) + text
