"""Labels and attention bounds of packed rows, against loops over their places."""

from __future__ import annotations

import pytest
import torch

from bytecheckpoint.dataloader import SequenceSource, TokenBufferLoader, TokenRecipe, cumulative_lengths, labels_of


@pytest.mark.parametrize("length", [1, 7, 16])
def test_labels_and_bounds(length: int) -> None:
    documents = [list(range(100 * i, 100 * i + 1 + 3 * i % 11)) for i in range(1, 40)]
    loader = TokenBufferLoader(TokenRecipe(SequenceSource(documents, "d"), length, 4))
    for _ in range(5):
        batch = next(loader)
        tokens, numbers = batch["tokens"], batch["documents"]
        shifted, unshifted = labels_of(batch), labels_of(batch, shifted=False, ignored=-1)
        lengths = []
        for row in range(4):
            for place in range(length):
                inside = place + 1 < length and numbers[row, place + 1] == numbers[row, place]
                assert shifted[row, place] == (tokens[row, place + 1] if inside else -100)
                first = place == 0 or numbers[row, place - 1] != numbers[row, place]
                assert unshifted[row, place] == (-1 if first else tokens[row, place])
                lengths = [*lengths, 1] if first else [*lengths[:-1], lengths[-1] + 1]
        bounds, longest = cumulative_lengths(batch)
        assert bounds.dtype == torch.int32 and longest == max(lengths)
        assert bounds.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
