"""Count the batches that the program takes from data loaders of accelerate.

Loaders are monkey-patched: a loader gets a subclass of its own class, and the gradient state, which is notified of every
iteration, refuses copies of such loaders.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from bytecheckpoint.errors import UsageError
from bytecheckpoint.integrations.accelerate.position import LoaderPosition
from bytecheckpoint.integrations.attaching import Mixin, subclass

__all__ = ["refuse_copies", "track"]

_tracked: weakref.WeakSet[Any] = weakref.WeakSet()


def track(loader: Any, accelerator: Any) -> LoaderPosition:
    """Track a prepared loader; return its position.

    Raises:
        UsageError: the loader is of another kind.
    """
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

    kind = type(loader)
    if not issubclass(kind, _TrackedLoader):
        if kind not in (DataLoaderShard, DataLoaderDispatcher):
            raise UsageError(f"the position of a {kind.__name__} is not known: let accelerator.prepare make the loader")
        loader.bytecheckpoint_position = LoaderPosition(loader, accelerator)
        # The loader pretends to be of torch's class, by a property that hides the attribute.
        object.__dict__["__class__"].__set__(loader, subclass(_TrackedLoader, kind))
        _tracked.add(loader)
    found: LoaderPosition = loader.bytecheckpoint_position
    return found


def refuse_copies(gradient_state: Any) -> None:
    """Refuse iterations over copies of tracked loaders, whose positions are not known. Monkey-patches the gradient state.

    Args:
        gradient_state: accelerate's gradient state, which every iteration notifies.
    """
    gradient_state._add_dataloader = _add_dataloader


def _add_dataloader(loader: Any) -> None:  # with a name of its own, because loaders are pickled with the gradient state
    from accelerate.state import GradientState

    if not isinstance(loader, _TrackedLoader) and any(loader.dataset is other.dataset for other in list(_tracked)):
        raise UsageError(
            "this data loader is a copy of one that the accelerator has prepared, so its position is not known: use "
            "accelerator.skip_first_batches in place of accelerate.skip_first_batches"
        )
    GradientState._add_dataloader(GradientState(), loader)


class _TrackedLoader(Mixin):  # type: ignore[misc]
    """Methods that `track` overrides in a loader."""

    bytecheckpoint_position: LoaderPosition

    def __iter__(self) -> Iterator[Any]:
        return self.bytecheckpoint_position.iterate(super().__iter__)

    def __reduce__(self) -> tuple[Any, ...]:
        reduced: Any = super().__reduce__()
        maker, (_, *rest), state = reduced
        state = {name: value for name, value in state.items() if name != "bytecheckpoint_position"}
        return maker, (type(self).__bases__[1], *rest), state

    def set_epoch(self, epoch: int) -> None:
        self.bytecheckpoint_position.check_epoch(epoch)
        super().set_epoch(epoch)
