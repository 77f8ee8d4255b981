"""The interface of a step's view: files by which another program reads the folder of the step as it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.frameworks.selection import NameSelection
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.storage import Storage

__all__ = ["VIEW_STEP", "StepView", "ViewOfSave"]

#: Name of the first agreement of `ViewOfSave.write`.
VIEW_STEP = "view"


class StepView(ABC):
    """A view that saves make: the user's choice."""

    @abstractmethod
    def of(self, states: Mapping[str, object], selection: NameSelection) -> ViewOfSave:
        """Return the view for one save of live objects, in the caller's thread.

        Args:
            states: live objects of this rank.
            selection: selected part of them.

        Raises:
            UsageError: no view can be made of them.
        """


class ViewOfSave(ABC):
    """The view of one save."""

    @abstractmethod
    def describe(self, catalog: Catalog) -> tuple[dict[str, bytes], Catalog]:
        """Return the small files of the view and the catalog to commit, on rank 0.

        `VIEW_INDEX` is not among the files if `write` is to write it.

        Args:
            catalog: catalog of the save, of which only the info may change.

        Raises:
            UsageError, IncompatibleCheckpointError: the view cannot be made.
        """

    @abstractmethod
    def write(self, agreement: Agreement, storage: Storage, generation: str) -> None:
        """Write the large files of the view behind the commit, and the index last. All ranks call it together.

        Args:
            agreement: the ranks.
            storage: storage of the committed checkpoint.
            generation: generation of the save.

        Raises:
            CheckpointError: a rank failed, or the checkpoint was replaced or removed; there is no index then.
        """
