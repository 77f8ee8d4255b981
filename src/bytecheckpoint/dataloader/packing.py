"""Labels and attention bounds of a batch of packed rows, in which documents follow each other."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["cumulative_lengths", "labels_of"]


def labels_of(batch: Mapping[str, torch.Tensor], *, shifted: bool = True, ignored: int = -100) -> torch.Tensor:
    """Return the labels of a batch, so that no document is to be predicted from the one before it.

    Args:
        batch: item of a `TokenBufferLoader`.
        shifted: True for the label of each place to be the next token, for a loss over all logits; False to leave the
            labels where the tokens are, for models that shift them themselves, as those of Transformers.
        ignored: label of places that have none.

    Returns:
        int64 [rows, context_length], on the device of the tokens.
    """
    labels = batch["tokens"].masked_fill(batch["positions"] == 0, ignored)
    if not shifted:
        return labels
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignored)


def cumulative_lengths(batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the bounds of the pieces of documents, for attention that takes rows of different lengths (cu_seqlens).

    Args:
        batch: item of a `TokenBufferLoader`. Its rows are taken one after the other.

    Returns:
        The starts of all pieces and the number of all tokens, int32 [pieces + 1], on the device of the tokens, and the
        length of the longest piece.
    """
    positions = batch["positions"].reshape(-1)
    starts = (positions == 0).nonzero().reshape(-1)
    bounds = torch.nn.functional.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)
    return bounds, int(positions.max()) + 1 if positions.numel() else 0
