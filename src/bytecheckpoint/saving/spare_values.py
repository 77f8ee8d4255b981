"""Values that a rank stages without writing them."""

from __future__ import annotations

from collections.abc import Sequence

from bytecheckpoint.engine.device_copies import DeviceCopies
from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.engine.staging import Image
from bytecheckpoint.saving.file_layout import place_values
from bytecheckpoint.saving.state import Value

__all__ = ["SpareValues"]


class SpareValues:
    """One rank's values that copies of other ranks stand for. The coordinator may still ask for one that has changed.

    Args:
        values: the values.
        position: byte of the pool from which on they lie; a multiple of 4096.
        copies: copies the values that are on devices.

    Attributes:
        image: their place in the pool.
    """

    def __init__(self, values: Sequence[Value], position: int, copies: DeviceCopies) -> None:
        # Larger elements first, so that each lies at a multiple of its size.
        self._values = sorted(values, key=lambda value: -value.data.element_size())
        section = place_values(self._values, position)
        self.image = Image([value.data for value in self._values], [section] if self._values else [], copies)

    def stage(self, pool: StagingPool) -> None:
        """Copy the values into `pool`, or into new memory if they do not fit there."""
        if not self._values:
            return
        if pool.capacity < self.image.nbytes:
            with self.image.copies.queued():
                for value in self._values:
                    value.data = value.data.to("cpu", copy=True)
            return
        self.image.stage(pool.tensor(), pool.generation)
        (section,) = self.image.files
        for value, start in zip(self._values, section.starts.tolist(), strict=True):
            value.data = self.image.staged(value.data, 0, start, pool.tensor())
        self.image.tensors = []
