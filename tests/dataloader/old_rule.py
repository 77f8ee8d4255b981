"""A run that began before documents were dealt by place: its loader, and what it fed.

`old-rule` was written by this file at commit 459bb6ba: `python -m tests.dataloader.old_rule`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import bytecheckpoint
from bytecheckpoint.dataloader import SequenceSource, TokenBufferLoader, TokenRecipe

FOLDER = Path(__file__).parent / "old-rule"
FED = FOLDER / "fed.json"
SHARES = {"many": 3.0, "few": 1.0, "two": 2.0}
COUNTS = {"many": 40, "few": 5, "two": 2}


def old_loader(order: Sequence[str] = ("many", "few", "two"), **options: object) -> TokenBufferLoader:
    """Return the loader of the run; `order` is that of its sources."""
    sources = {
        name: SequenceSource([[100 * list(SHARES).index(name) + i] * (i % 4 + 1) for i in range(COUNTS[name])], name)
        for name in order
    }
    shares = {source: SHARES[name] for name, source in sources.items()}
    recipe = TokenRecipe(shares, 8, 6, shuffle_buffer=3, seed=5)
    return TokenBufferLoader(recipe, **options)  # type: ignore[arg-type]


def main() -> None:
    """Write the checkpoint of the run, and the batches behind it."""
    one = old_loader()
    for _ in range(4):
        next(one)
    bytecheckpoint.save(FOLDER / "step", {"dataloader": one})
    FED.write_text(json.dumps([next(one)["tokens"].tolist() for _ in range(30)]))


if __name__ == "__main__":
    main()
