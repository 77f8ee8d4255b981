"""Settings of the tests of open checkpoints."""

from tests.support.settings import writer_threads

__all__ = ["writer_threads"]
