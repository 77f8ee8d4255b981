"""The conformance suite: tests of the storage protocol, from which a backend derives its own test class.

    class TestMine(StorageTests):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(f"mine://{tmp_path}")

Needs pytest. Override `again` and `neighbour` where `resolve(storage.url)` does not lead to the same files, `large_bytes`
so that a file of that length takes several parts, and `many` so that so many files take several pages of a listing.
Override `raw_access` so that the suite can compare what is stored with what the storage says.
"""

from __future__ import annotations

import pytest

# Before the imports, so that a failing test shows the values it compared.
pytest.register_assert_rewrite(
    *(f"{__name__}.{part}" for part in ("support", "files", "ranges", "names", "commits", "programs", "raw"))
)

from bytecheckpoint.storage.testing.access import FolderAccess, RawAccess  # noqa: E402
from bytecheckpoint.storage.testing.commits import CommitTests  # noqa: E402
from bytecheckpoint.storage.testing.files import FileTests  # noqa: E402
from bytecheckpoint.storage.testing.names import NameTests  # noqa: E402
from bytecheckpoint.storage.testing.programs import ProgramTests  # noqa: E402
from bytecheckpoint.storage.testing.ranges import RangeTests  # noqa: E402
from bytecheckpoint.storage.testing.raw import RawTests  # noqa: E402
from bytecheckpoint.storage.testing.support import content, read_all, write_file  # noqa: E402

__all__ = ["FolderAccess", "RawAccess", "StorageTests", "content", "read_all", "write_file"]


class StorageTests(FileTests, RangeTests, NameTests, CommitTests, ProgramTests, RawTests):
    """The whole suite. A derived class defines the fixture `storage`: an empty folder, if possible one that is missing."""
