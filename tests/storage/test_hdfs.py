"""HDFS against a real NameNode and two DataNodes: the conformance suite, what it costs, how it commits, what is refused."""

from __future__ import annotations

import uuid

import pytest

from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.testing import StorageTests
from tests.servers.hdfs import Hdfs

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


class TestHdfs(StorageTests):
    large_bytes = (40 << 20) + 4097

    @pytest.fixture
    def storage(self, hdfs: Hdfs) -> Storage:
        return resolve(f"hdfs://demo_0/runs/{uuid.uuid4().hex}/step")
