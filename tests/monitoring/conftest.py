"""Settings of the tests of metrics."""

from tests.support.settings import writer_threads

__all__ = ["writer_threads"]
