"""Reads the tensors of a foreign checkpoint from (file, offset, strides), and compares with what torch loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bytecheckpoint.formats.foreign import ForeignCheckpoint
from bytecheckpoint.representation.boxes import row_major
from bytecheckpoint.representation.values import codec


def read_tensors(folder: Path, foreign: ForeignCheckpoint) -> dict[str, torch.Tensor]:
    """Return every tensor by "state/fqn", aliases too. Elements that no row fills are NaN or -1."""
    catalog = foreign.catalog
    strides = row_major(catalog.boxes.lengths) if catalog.strides is None else catalog.strides
    found = {}
    for i in range(catalog.count):
        dtype = getattr(torch, catalog.dtype[i])
        found[str(catalog.key(i))] = torch.empty(catalog.shape(i), dtype=torch.uint8).to(dtype).fill_(True)
    for row in range(len(catalog.boxes)):
        i = int(catalog.boxes.tensor[row])
        ndim = int(catalog.ndims[i])
        begin, length = int(catalog.byte_offset[row]), int(catalog.byte_length[row])
        with open(folder / catalog.files[catalog.file[row]].name, "rb") as file:
            file.seek(begin)
            data = file.read(length)
        assert len(data) == length
        offsets = catalog.boxes.offsets[row, :ndim].tolist()
        lengths = catalog.boxes.lengths[row, :ndim].tolist()
        target = found[str(catalog.key(i))]
        for k in range(ndim):
            target = target.narrow(k, offsets[k], lengths[k])
        if length:
            raw = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().view(target.dtype)
            target.copy_(raw.as_strided(lengths, strides[row, :ndim].tolist()))
    for state, names in catalog.aliases.items():
        for name, stored in names.items():
            found[f"{state}/{name}"] = found[f"{state}/{stored}"]
    return found


def values_of(folder: Path, foreign: ForeignCheckpoint) -> dict[str, Any]:
    """Return every state as the tree that the program saved."""
    tensors = read_tensors(folder, foreign)
    return {
        state: codec.decode(
            blob,
            on_tensor=lambda name, state=state: tensors[f"{state}/{name}"],
            on_unregistered=lambda name, v: (name, v),
        )
        for state, blob in foreign.values.items()
    }


def assert_same(ours: Any, theirs: Any, path: str = "") -> None:
    """Compare trees: equal types, equal bits of tensors."""
    if isinstance(theirs, torch.Tensor):
        theirs = theirs.detach()
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), path
        assert torch.equal(bits(ours), bits(theirs)), path
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs) and type(ours) is type(theirs), path
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{path}/{key}")
    elif isinstance(theirs, list | tuple) and type(theirs) is not torch.Size:
        assert type(ours) is type(theirs) and len(ours) == len(theirs), path
        for k, item in enumerate(theirs):
            assert_same(ours[k], item, f"{path}/{k}")
    else:
        assert codec.equal(ours, theirs), (path, ours, theirs)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
