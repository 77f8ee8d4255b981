"""The conformance suite: what every storage must do, as tests that a backend's own test class derives from.

    class TestMine(StorageTests):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(f"mine://{tmp_path}")

Needs pytest. Override `again` and `neighbour` where `resolve(storage.url)` does not lead to the same files, `large_bytes`
so that a file of that length takes several parts, and `many` so that as many files take several pages of a listing.
"""

from __future__ import annotations

import pytest

# Before they are imported: then a test that fails shows the values that it compared.
pytest.register_assert_rewrite(
    *(f"{__name__}.{part}" for part in ("support", "files", "ranges", "names", "commits", "programs"))
)

from .commits import CommitTests  # noqa: E402
from .files import FileTests  # noqa: E402
from .names import NameTests  # noqa: E402
from .programs import ProgramTests  # noqa: E402
from .ranges import RangeTests  # noqa: E402
from .support import content, read_all, write_file  # noqa: E402

__all__ = ["StorageTests", "content", "read_all", "write_file"]


class StorageTests(FileTests, RangeTests, NameTests, CommitTests, ProgramTests):
    """Derive from it, define the fixture `storage`: an empty folder, which must not exist yet where that is possible."""
