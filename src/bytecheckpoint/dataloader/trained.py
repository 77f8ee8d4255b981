"""Tell the batches that were trained from those that were taken, where something takes batches in advance."""

from __future__ import annotations

from bytecheckpoint.errors import UsageError

__all__ = ["TrainedBatches"]


class TrainedBatches:
    """Numbers of batches of a run: those that were taken from a loader, and those of them that were trained.

    Args:
        kept: number of batches before the last one whose positions the loader keeps.

    Attributes:
        taken: number of batches that were taken.
        kept: the argument.
    """

    def __init__(self, kept: int) -> None:
        if type(kept) is not int or kept < 0:
            raise UsageError(f"kept must be an int of at least 0, not {kept!r}")
        self.taken, self.kept = 0, kept
        self._first = 0  # of this loader, which knows no position before it
        self._trained: int | None = None

    def begin(self, batches: int) -> None:
        """Begin at a position, behind that many batches."""
        self.taken = self._first = batches
        self._trained = None

    def forget(self) -> None:
        """Keep no position before that of a save any more."""
        self._first = max(self._first, self.position)

    @property
    def position(self) -> int:
        """Number of batches before the position that a save holds."""
        return self.taken if self._trained is None else self._trained

    @property
    def oldest(self) -> int:
        """Number of batches before the oldest position that is kept."""
        return max(self._first, self.taken - self.kept)

    def train(self, batches: int) -> None:
        """Set the number of batches that were trained.

        Raises:
            UsageError: so many were not taken, or their position is not kept any more.
        """
        if not self.kept:
            raise UsageError("trained() needs positions that are kept: pass kept= to the loader")
        least = max(self.oldest, self._trained or 0)
        if type(batches) is not int or not least <= batches <= self.taken:
            raise UsageError(
                f"trained({batches!r}): {self.taken} batches were taken, and positions behind {least} and more are kept: "
                "call it after every step with the number of batches of the run that were trained"
            )
        self._trained = batches

    def check_next(self) -> None:
        """Check that the position behind the trained batches is still kept when one more is taken.

        Raises:
            UsageError: it is not.
        """
        if self._trained is not None and self.taken - self._trained >= self.kept:
            raise UsageError(
                f"{self.taken} batches were taken, and trained() was called for {self._trained} of them: call it after "
                f"every step, or keep more than {self.kept} positions by kept="
            )
