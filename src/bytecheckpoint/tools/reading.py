"""Read many tensors of a checkpoint in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.tools.subject import Subject, opened

__all__ = ["stream"]


def stream(
    checkpoint: Subject, keys: Iterable[str], *, max_bytes: int = 32 << 20
) -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
    """Read several tensors in pieces; small tensors are read together.

    Args:
        checkpoint: path, storage or open checkpoint.
        keys: keys of tensors, in the order in which to yield them.
        max_bytes: bytes of tensors in memory at a time.

    Yields:
        (key, slices, data) where `data` is `open(checkpoint)[key][slices]`. The pieces of a tensor come in row-major order,
        each one run of its elements. A tensor without elements is one empty piece.

    Raises:
        MissingKeyError: the checkpoint has no tensor under a key.
    """
    with opened(checkpoint) as source:
        yield from CheckpointView.of(source).stream(keys, max_bytes)
