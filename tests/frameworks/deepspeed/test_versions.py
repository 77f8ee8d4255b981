"""The version of DeepSpeed with which the tests run."""

from __future__ import annotations

import os

import pytest

from tests.support.worlds import on_ranks

pytestmark = pytest.mark.timeout(300)


@on_ranks(2)
def test_the_version_is_the_one_that_is_meant() -> None:
    """`make test-deepspeed-versions` puts others before the pinned one, which is in the environment."""
    import deepspeed

    assert deepspeed.__version__ == os.environ.get("BYTECHECKPOINT_DEEPSPEED", "0.19.8")
