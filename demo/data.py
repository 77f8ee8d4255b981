"""The training text, and what tells one global batch from another."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bytecheckpoint.dataloader import SequenceSource, Source, TextSource

#: The token behind each document.
NEWLINE = ord("\n")


def standard_library() -> dict[Source, float]:
    """Return two sources of the installed Python's standard library, and the share of each in the bytes that are fed."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "encodings", "pydoc_data"}
    modules = sorted(p for pattern in ("*.py", "*/*.py") for p in root.glob(pattern) if p.parent.name not in skipped)
    texts = [p.read_text(encoding="utf-8", errors="replace") for p in modules]
    docstrings = [found for text in texts for found in re.findall(r'"""(.+?)"""', text, re.DOTALL)]
    return {
        TextSource(modules, "lines of code", errors="replace"): 0.7,
        SequenceSource(docstrings, "docstrings"): 0.3,
    }


# At the top of a module: the loader's workers are processes, which import it.
def to_bytes(text: str) -> NDArray[np.uint8]:
    """Tokenize: a token is a byte of UTF-8."""
    return np.frombuffer(text.encode(), np.uint8)


def inputs_and_targets(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, [rows, length] each, of rows of length + 1 tokens: a target is the next token.

    A row may hold several documents. The model attends to all of the row, and the first byte of a document is a target as
    any other.
    """
    return tokens[:, :-1], tokens[:, 1:]


def as_table(batch: dict[str, Tensor]) -> Tensor:
    """Return a line per row of a batch: its number, the number of its documents, its tokens; int64 [rows, 2 + tokens]."""
    return torch.cat([batch["rows"][:, None], batch["documents"][:, -1:] + 1, batch["tokens"]], dim=1)


def global_table(batch: dict[str, Tensor], mesh: DeviceMesh) -> Tensor:
    """Return the table of the global batch, whose rows the data-parallel ranks hold one after the other.

    Args:
        batch: this rank's part, with as many rows as any other.
        mesh: data-parallel, then tensor-parallel dimension.
    """
    own = as_table(batch)
    tables = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, own)
    grid = torch.stack(tables).unflatten(0, mesh.shape)
    assert torch.equal(grid, grid[:, :1].expand_as(grid)), "the ranks of a tensor-parallel group feed different rows"
    return grid[:, 0].flatten(0, 1)


def describe(table: Tensor) -> dict[str, object]:
    """Return a hash of a global batch, and the mean length of its samples: of the (parts of) documents in its rows."""
    tokens, samples = table[:, 2:].numel(), table[:, 1].sum().item()
    digest = hashlib.blake2b(table.contiguous().numpy().tobytes(), digest_size=5).hexdigest()
    return {"batch": digest, "sample_length": tokens / samples}
