"""Settings of the tests of the data loaders."""

from tests.support.settings import writer_threads

__all__ = ["writer_threads"]
