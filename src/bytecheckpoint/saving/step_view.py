"""The interface of a step's view: files by which another program reads the folder of the step as it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from bytecheckpoint.arguments import value_of
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.engine.catalogs import read_catalog, read_outline
from bytecheckpoint.engine.view_files import VIEW_INDEX, VIEW_KEY, named_in, publish_view, view_info
from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.selection import NameSelection
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.names import view_generation_of
from bytecheckpoint.storage import Storage

__all__ = ["VIEW_STEP", "StepView", "ViewOfSave", "complete_view"]

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
    """The view of one save.

    Attributes:
        whole: name of the state whose tensors should lie whole in files, so that the view needs no files of its own; "" if
            it needs them in any case.
        names: text that differs between views with different names of tensors; "" if these are the state's own.
    """

    whole: str = ""
    names: str = ""

    def shown(self, catalog: Catalog) -> Catalog:
        """Return the tensors that files should hold whole, as boxes of those of `whole`, if they have names of their own.

        Args:
            catalog: tensors of that state, as if each lay whole in a file.

        Raises:
            UsageError, IncompatibleCheckpointError: the tensors cannot be shown so.
        """
        return catalog

    @abstractmethod
    def describe(self, catalog: Catalog, named: Callable[[], Mapping[str, str]]) -> tuple[dict[str, bytes], Catalog]:
        """Return the small files of the view and the catalog to commit, on rank 0.

        `VIEW_INDEX` is not among the files if `write` is to write it.

        Args:
            catalog: catalog of the save, of which only the info may change.
            named: function that returns the file of each tensor of `shown`; nothing if these lie in no files.

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


def complete_view(agreement: Agreement, view: ViewOfSave | Exception, storage: Storage) -> bool:
    """Write the view of a committed checkpoint that a kill has left without one. All ranks call it together.

    Args:
        agreement: the ranks.
        view: view of the states as they are now, or the error of this rank's states.
        storage: storage of the checkpoint, which lasts.

    Returns:
        Whether a view was missing.

    Raises:
        CheckpointError: a rank failed, or the view would differ from that of the save; there is no index then.
    """

    def check() -> None:
        value_of(view)

    def begin(_: list[None]) -> tuple[bool, str]:
        info, present = read_outline(storage).info, dict(storage.list())
        if VIEW_KEY not in info or VIEW_INDEX in present or "moved_to" in info:
            return False, ""
        generation = info[VIEW_KEY]["generation"]
        catalog = read_catalog(storage)[0]
        found = value_of(view)
        files = found.describe(catalog, lambda: named_in(storage, catalog, found.whole))[0]
        if view_info(files, generation)[VIEW_KEY] != info[VIEW_KEY]:
            raise IncompatibleCheckpointError("its configuration differs from that of the model now")
        storage.delete([name for name in present if view_generation_of(name) is not None])  # parts of files
        publish_view(storage, files)
        return True, "" if VIEW_INDEX in files else generation

    missing, generation = agreement.agree("complete", check, begin)
    if generation:
        value_of(view).write(agreement, storage, generation)
    return bool(missing)
