from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.errors import UsageError
from bytecheckpoint.representation.names import (
    CATALOG_NAME,
    check_file_name,
    escape,
    generation_of,
    is_uri,
    new_generation,
    state_folder,
    storage_file_name,
    unescape,
    values_file_name,
)

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=80)  # lone surrogates included
GENERATION = new_generation("world", 7)


def test_usual_states_have_readable_folders() -> None:
    for state in ("model", "optimizer", "dataloader", "lr_scheduler", "my-kind_2"):
        assert state_folder(state) == state
    assert state_folder("extra_states") == "extra"


OTHER_STATES = (
    "", "extra", "Model", "../model", "a/b", "con", "lpt1", "kind-0123456789abcdef", "metadata.parquet", "a" * 65, "ä",
    "_a", "model\n",
)  # fmt: skip


@pytest.mark.parametrize("state", OTHER_STATES)
def test_other_states_have_hashed_folders(state: str) -> None:
    assert re.fullmatch(r"kind-[0-9a-f]{16}", state_folder(state))


@given(st.lists(ANY_TEXT | st.text("aAbB-_", max_size=4), unique=True, max_size=20))
def test_folders_are_safe_and_different_also_where_case_is_ignored(states: list[str]) -> None:
    folders = [state_folder(state) for state in states]
    assert len({folder.lower() for folder in folders}) == len(states)
    for folder in folders:
        assert re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", folder)


def test_file_names() -> None:
    assert storage_file_name("model", 3, GENERATION) == f"model/rank-00003.{GENERATION}.safetensors"
    second_part = f"extra/rank-123456-p001.{GENERATION}.safetensors"
    assert storage_file_name("extra_states", 123456, GENERATION, 1) == second_part
    assert values_file_name("optimizer", 3, GENERATION) == f"optimizer/values-00003.{GENERATION}.safetensors"


@given(ANY_TEXT, st.integers(0, 10**7), st.integers(0, 5000), st.integers(0, 10**9))
def test_generated_names_hold_their_generation(state: str, rank: int, part: int, sequence: int) -> None:
    generation = new_generation(state, sequence)
    assert generation_of(storage_file_name(state, rank, generation, part)) == generation
    assert generation_of(values_file_name(state, rank, generation, part)) == generation
    assert check_file_name(storage_file_name(state, rank, generation, part))


@pytest.mark.parametrize(
    "name",
    [
        CATALOG_NAME,
        "",
        "model/model.safetensors",
        "model-00001-of-00002.safetensors",
        f"rank-00003.{GENERATION}.safetensors",
        f"a/model/rank-00003.{GENERATION}.safetensors",
        f"../rank-00003.{GENERATION}.safetensors",
        f"model/rank-3.{GENERATION}.safetensors",
        f"model/rank-000003.{GENERATION}.safetensors",
        f"model/rank-00003-p000.{GENERATION}.safetensors.bak",
        f"model/rank-00003.{GENERATION}.safetensors\n",
        f"model/rank-00003.{GENERATION.upper()}x.safetensors",
        f"model/valuesx-00003.{GENERATION}.safetensors",
        "model/rank-00003.abc.safetensors",
    ],
)
def test_other_names_have_no_generation(name: str) -> None:
    assert generation_of(name) is None


def test_generations_depend_only_on_world_and_sequence() -> None:
    made = {new_generation(world, sequence) for world in ("a", "b", "1", "") for sequence in range(50)}
    assert len(made) == 200
    assert all(re.fullmatch(r"[0-9a-f]{24}", generation) for generation in made)
    assert new_generation("a", 1) == new_generation("a", 1)


LEAVING = (
    "", "/etc/passwd", "..", "a/../b", "./a", "a//b", "a/", "C:/x", "c:x", "a\\b", "..\\a", "a\0b", "a\nb", "://x", "s3://a\0b",
)  # fmt: skip


@pytest.mark.parametrize("name", LEAVING)
def test_names_that_leave_the_checkpoint_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="does not stay inside"):
        check_file_name(name)


def test_relative_names_and_uris_are_accepted() -> None:
    for name in (
        "a",
        "model/x.safetensors",
        "..a/b..",
        "run-10:00:00.pt",
        "s3://bucket/step_1/model/x.safetensors",
        "hdfs://n/a",
    ):
        assert check_file_name(name) == name
    assert is_uri("s3://bucket/x") and not is_uri("model/x") and not is_uri("C:/x")


@given(ANY_TEXT | st.text("\ufdd0\ud800a0", max_size=12))
def test_escaped_text_is_valid_and_can_be_unescaped(text: str) -> None:
    escape(text).encode()
    assert unescape(escape(text)) == text
