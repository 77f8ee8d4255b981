"""Carry states of loaders that belong to a rank: exact at the same degree, and at another one by split and merge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from bytecheckpoint.dataloader.checks import check_rank, check_shared
from bytecheckpoint.dataloader.hugging_face import check_exact
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError

__all__ = ["PerRankLoader", "SupportsStateDict"]


class SupportsStateDict(Protocol):
    """Loader with a state."""

    def state_dict(self) -> Any:
        """Return the state behind the last item that was taken."""

    def load_state_dict(self, state: Any, /) -> object:
        """Continue from a state."""


class PerRankLoader:
    """Carries the states of loaders that know only their own rank; implements `SupportsStreams`.

    Stream i is the state of data-parallel rank i. With the same number of ranks, each gets its own state back. With another
    number, every rank reads all states, `merge` makes one of them, and `split` takes this rank's part of it. Without
    these two functions, such a checkpoint is refused, since samples would be lost or fed twice.

    Args:
        loader: iterable with `state_dict` and `load_state_dict`. It may have the two functions as methods.
        rank: number of this rank among those that feed different data (the data-parallel rank).
        ranks: number of these ranks.
        merge: function states of all ranks, in their order -> one state.
        split: function (that state, rank, ranks) -> state of this rank.
        fingerprint: version or hash that identifies the data; None: it is not compared.

    Attributes:
        loader: the wrapped loader.

    Raises:
        UsageError: an argument is out of its range, or one of the two functions is missing.
    """

    def __init__(
        self,
        loader: SupportsStateDict,
        *,
        rank: int | None = None,
        ranks: int | None = None,
        merge: Callable[[list[Any]], Any] | None = None,
        split: Callable[[Any, int, int], Any] | None = None,
        fingerprint: str | int | None = None,
    ) -> None:
        for name in ("state_dict", "load_state_dict"):
            if not callable(getattr(loader, name, None)):
                raise UsageError(f"a {type(loader).__name__} has no {name}, so its position cannot be saved")
        if type(self) is PerRankLoader and any("torchdata.stateful" in c.__module__ for c in type(loader).__mro__):
            raise UsageError("use TorchdataLoader, which knows when the state of a StatefulDataLoader loses something")
        for dataset in (loader, getattr(loader, "dataset", None)):
            check_exact(dataset, "use HuggingFaceLoader(replay=True)")
        self.loader = loader
        self._fingerprint = fingerprint
        self._rank, self._ranks = check_rank(rank, ranks)
        if merge is None and split is None and callable(getattr(loader, "merge", None)):
            merge, split = getattr(loader, "merge", None), getattr(loader, "split", None)
        self._merge, self._split = merge, split
        if (self._merge is None) != (self._split is None):
            raise UsageError("merge and split belong together: pass both, or none")

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the loader."""
        return iter(self.loader)  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        """Return the length of the loader."""
        return len(self.loader)  # type: ignore[arg-type]

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def stream_count(self) -> int:
        """Number of data-parallel ranks."""
        return self._ranks

    def shared_state(self) -> Any:
        """Return the kind of the loader, and the number of ranks."""
        return self._identity() | {"ranks": self._ranks}

    def _identity(self) -> dict[str, Any]:
        return {
            "loader": type(self).__name__,
            "wraps": type(self.loader).__name__,
            "dataset_fingerprint": self._fingerprint,
        }

    def stream_states(self) -> Mapping[int, Any]:
        """Return the state of this rank's loader."""
        return {self._rank: self.loader.state_dict()}

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Return this rank's stream, or all of them if the number of ranks has changed.

        Raises:
            IncompatibleCheckpointError: another kind of loader saved the checkpoint, or another number of ranks, and there
                is no `merge` and `split`.
        """
        check_shared(shared, self._identity())
        if shared["ranks"] == self._ranks:
            return [self._rank]
        if self._merge is None:
            raise IncompatibleCheckpointError(
                f"{shared['ranks']} ranks saved the states of their {type(self.loader).__name__}, and {self._ranks} cannot "
                "share them: samples would be lost or fed twice. Keep the number of data-parallel ranks, or "
                "pass merge= and split="
            )
        return saved

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Continue from this rank's state, or from its part of all states."""
        if shared["ranks"] == self._ranks:
            self.loader.load_state_dict(states[self._rank])
            return
        assert self._merge is not None and self._split is not None
        merged = self._merge([states[number] for number in sorted(states)])
        self.loader.load_state_dict(self._split(merged, self._rank, self._ranks))
