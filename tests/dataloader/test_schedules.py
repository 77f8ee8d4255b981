"""Ratios that change within a run, documents that are left out, and what a loader says of its progress."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytecheckpoint.dataloader import JsonLinesSource, SequenceSource, TokenBufferLoader, TokenRecipe
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError

LENGTH, BATCH = 32, 4
SHARES = {0: 0.9, 20: 0.5, 40: 0}, {0: 0.1, 20: 0.5, 40: 1}


def documents(first: int) -> SequenceSource:
    """Return documents of one token, `first` or `first + 1`, of different lengths."""
    return SequenceSource([[first] * (1 + i % 5) for i in range(50)], "a" if first == 1 else "b")


def loader_of(shares: Any = SHARES, workers: int = 0, **options: Any) -> TokenBufferLoader:
    recipe = TokenRecipe({documents(1): shares[0], documents(2): shares[1]}, LENGTH, BATCH)
    return TokenBufferLoader(recipe, workers=workers, **options)


def shares(loader: TokenBufferLoader, batches: int) -> float:
    """Return the share of source b in the next batches."""
    return float(np.mean([next(loader)["tokens"].numpy() == 2 for _ in range(batches)]))


@pytest.mark.parametrize("workers", [0, 2])
def test_ratios_hold_from_their_batch_on(workers: int) -> None:
    with loader_of(workers=workers) as loader:
        assert shares(loader, 20) == pytest.approx(0.1, abs=0.05)
        assert shares(loader, 20) == pytest.approx(0.5, abs=0.07)
        next(loader)  # with what was buffered
        assert shares(loader, 10) == 1


@pytest.mark.parametrize("at", [7, 19, 20, 21, 39, 45])
def test_a_resume_in_the_schedule_is_exact(at: int) -> None:
    whole = loader_of()
    batches = [next(whole)["tokens"] for _ in range(60)]
    first = loader_of()
    for _ in range(at):
        next(first)
    again = loader_of()
    again.choose_streams(first.shared_state(), [*first.stream_states()])
    again.load_streams(first.shared_state(), first.stream_states())
    assert all((next(again)["tokens"] == batch).all() for batch in batches[at:])


def test_a_schedule_belongs_to_the_run() -> None:
    saved = loader_of()
    for other in ((0.9, 0.1), ({0: 0.9, 20: 0.6}, {0: 0.1, 20: 0.4})):
        with pytest.raises(IncompatibleCheckpointError, match="schedule was"):
            loader_of(other).choose_streams(saved.shared_state(), range(BATCH))
        loader_of(other, allow="schedule").choose_streams(saved.shared_state(), range(BATCH))


def test_a_schedule_in_another_scale_is_that_of_the_run() -> None:
    saved, scaled = (loader_of(({0: 1, 10: 0.9 * scale}, {0: 1, 10: 0.1 * scale})) for scale in (1, 0.3))
    for _ in range(15):
        next(saved)
    assert scaled.shared_state()["schedule"] != saved.shared_state()["schedule"]  # by rounding
    scaled.choose_streams(saved.shared_state(), range(BATCH))
    scaled.load_streams(saved.shared_state(), saved.stream_states())
    assert scaled.shared_state()["schedule"] == saved.shared_state()["schedule"]
    for _ in range(30):
        assert next(scaled)["tokens"].equal(next(saved)["tokens"])


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (({1: 0.5}, 0.5), "begins with batch 0"),
        (({0: 0.5, -1: 0.5}, 0.5), "the batch of a share must be an int of at least 0"),
        (({0: 0.5, 0.5: 0.5}, 0.5), "the batch of a share must be an int"),
        (({0: 1, 5: -1}, 1), "ratios must be numbers from 0 on, .* from batch 5 on"),
        (({0: 1, 5: 0}, 0), "ratios must be numbers from 0 on"),
        ((0, 1), "ratios must be positive numbers"),
        (({0: float("inf")}, 1), "ratios must be positive numbers"),
    ],
)
def test_wrong_shares(shares: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loader_of(shares)
    with pytest.raises(UsageError, match="ratios must be positive numbers"):
        TokenRecipe({documents(1): {0: 1, 5: 0}, documents(2): 1}, 4, 1, epochs=1)


def test_a_source_that_comes_later() -> None:
    with loader_of((1, {0: 0, 10: 1})) as loader:
        assert shares(loader, 10) == 0
        assert shares(loader, 30) == pytest.approx(0.5, abs=0.07)


def bad_lines(folder: Path, count: int, bad: set[int]) -> Path:
    lines = ['{"text": 3' if i in bad else f'{{"text": "{i} {i}"}}' for i in range(count)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"


def numbers(text: str) -> list[int]:
    found = [int(word) for word in text.split()]
    if found[0] == 7:
        raise KeyError("no such word")
    return found


def fed(loader: TokenBufferLoader) -> Iterator[int]:
    return (token for batch in loader for token in batch["tokens"].reshape(-1).tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_documents_are_left_out(tmp_path: Path, workers: int) -> None:
    """By the source or the tokenizer, each once; the number is in the state, and resumes; the rest is all fed."""

    source = JsonLinesSource(bad_lines(tmp_path, 60, {3, 11, 40}), "data")
    recipe = TokenRecipe(source, 4, 2, epochs=2, skip_bad=True, tokenizer=numbers)
    kept = {*range(60)} - {3, 7, 11, 40}
    loader = TokenBufferLoader(recipe, workers=workers)
    for _ in range(9):
        next(loader)
    again = TokenBufferLoader(recipe, workers=workers)
    again.load_streams(loader.shared_state(), loader.stream_states())
    for one in (loader, again):
        found = [*fed(one)]
        progress = one.progress()["data"]
        fed_until_now = 72 + len(found)  # of the last batch, and in buffers
        assert 2 * (60 - len(kept)) - 2 <= progress.skipped <= 2 * (60 - len(kept)) and progress.epoch in (1, 2)
        assert 4 * len(kept) - 8 < fed_until_now <= progress.tokens <= 4 * len(kept) and {*found} <= kept
        one.close()


def test_bad_documents_are_errors_by_default(tmp_path: Path) -> None:
    path = bad_lines(tmp_path, 20, {5})
    with pytest.raises(UsageError, match=r"data\.jsonl, line 6, is no document"):
        [*fed(TokenBufferLoader(TokenRecipe(JsonLinesSource(path), 4, 2, epochs=1, tokenizer=lambda text: [1])))]
    # A storage that fails is no bad document, and neither are documents that are all bad.
    path = bad_lines(tmp_path, 20, {*range(20)})
    with pytest.raises(UsageError, match="have no tokens in stream"):
        next(TokenBufferLoader(TokenRecipe(JsonLinesSource(path), 4, 2, skip_bad=True, tokenizer=numbers)))
    source = JsonLinesSource(bad_lines(tmp_path, 20, set()))
    path.write_text("")
    with pytest.raises(Exception, match="has 0 bytes, but had"):
        next(TokenBufferLoader(TokenRecipe(source, 4, 2, skip_bad=True, tokenizer=numbers)))


def test_progress_of_ranks_adds_up() -> None:
    loaders = [loader_of(rank=rank, ranks=2) for rank in range(2)]
    for _ in range(30):
        tokens = np.concatenate([next(one)["tokens"].numpy().reshape(-1) for one in loaders])
        assert len(tokens) == LENGTH * BATCH
    parts = [one.progress() for one in loaders]
    total = sum(part[name].tokens for part in parts for name in ("a", "b"))
    assert 30 * LENGTH * BATCH <= total < 30 * LENGTH * BATCH + 5 * BATCH
