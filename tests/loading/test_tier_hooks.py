"""How saving and loading know of tiers: two hooks of the storage, which wrappers pass on."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.wrappers import WrappedStorage


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_tier(tmp_path: Path, wrapped: bool) -> None:
    tier = resolve(f"tier+file://{tmp_path}/step")
    storage = WrappedStorage(tier) if wrapped else tier
    assert storage.tier_to_flush() is tier
    assert storage.nearest_tier().tier_to_flush().url == tier.url
    chosen = resolve(tmp_path / "chosen")
    asked: list[Storage] = []

    def agree(here: Storage) -> Storage:
        asked.append(here)
        return chosen

    agreed = storage.agree_on_copy(agree)
    assert asked == [tier] and agreed.url == chosen.url
    assert isinstance(agreed, WrappedStorage) is wrapped


@pytest.mark.parametrize("wrapped", [False, True])
def test_any_other_storage_has_one_copy_and_final_commits(tmp_path: Path, wrapped: bool) -> None:
    inner = resolve(tmp_path)
    storage = WrappedStorage(inner) if wrapped else inner

    def agree(_: Storage) -> Storage:
        raise AssertionError("there is nothing to agree on")

    assert storage.tier_to_flush() is None
    assert storage.agree_on_copy(agree) is storage
