"""Saving and loading find the tier of a storage through its wrappers, and keep the wrappers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from bytecheckpoint.collectives.single import SingleProcess
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.wrappers import WrappedStorage
from bytecheckpoint.tiers.restore import choose_copy
from bytecheckpoint.tiers.storage import HotTier, hot_part, tier_of


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_tier(tmp_path: Path, wrapped: bool) -> None:
    tier = resolve(f"tier+file://{tmp_path}/step")
    storage = WrappedStorage(tier) if wrapped else tier
    assert tier_of(storage) is tier
    hot = hot_part(storage)
    assert isinstance(tier_of(hot), HotTier) and hot.url == tier.url
    assert isinstance(hot, WrappedStorage) is wrapped
    assert hot_part(hot) is hot


@pytest.mark.parametrize("wrapped", [False, True])
def test_any_other_storage_has_one_copy_and_final_commits(tmp_path: Path, wrapped: bool) -> None:
    inner = resolve(tmp_path)
    storage = WrappedStorage(inner) if wrapped else inner
    assert tier_of(storage) is None
    assert hot_part(storage) is storage
    with contextlib.ExitStack() as stack:
        assert choose_copy(storage, SingleProcess(), "load/0", settings(), stack) is storage
