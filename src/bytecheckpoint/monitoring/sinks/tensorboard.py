"""Metrics as scalars of TensorBoard."""

from __future__ import annotations

from torch.utils.tensorboard import SummaryWriter

from bytecheckpoint.errors import UsageError
from bytecheckpoint.monitoring.sinks.scalars import ScalarSink

__all__ = ["TensorBoardSink"]


class TensorBoardSink(ScalarSink):
    """Writes an event file of its own into a folder; TensorBoard joins it with those of the training there.

    Args:
        address: tensorboard:///absolute/folder, or tensorboard://folder relative to the working directory.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        folder = address.partition("://")[2]
        if not folder:
            raise UsageError("setting metrics: write tensorboard:///folder")
        self._writer = SummaryWriter(folder, filename_suffix=".bytecheckpoint")

    def write(self, scalars: dict[str, float], step: int | None, began: float) -> None:
        """Append to the event file."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step, began)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
