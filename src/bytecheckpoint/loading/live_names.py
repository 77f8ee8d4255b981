"""Names of live objects and the checkpoint's names for them: `rename=`, `include=` and `exclude=` of a load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.objects.capture import KINDS_BY_NAME
from bytecheckpoint.frameworks.selection import Selection
from bytecheckpoint.representation.catalog import VALUES_SLOT
from bytecheckpoint.representation.shards import TensorKey

__all__ = ["LiveNames"]


class LiveNames:
    """Leads from live names to names of the checkpoint, and notes which live names the load leaves alone.

    Args:
        selection: what the load selects, by live names.
        rename: live name -> name in the checkpoint, both "kind/FQN"; None: they are the same.
        kinds: the kinds that the caller loads.

    Attributes:
        selection: as given.
        skipped: (kind, FQN in the checkpoint) of the names that are left alone.
    """

    def __init__(
        self, selection: Selection, rename: Callable[[str], str] | None = None, kinds: Collection[str] = ()
    ) -> None:
        self.selection = selection
        self.skipped: set[tuple[str, str]] = set()
        self._rename = rename
        self._kinds = kinds
        self._hidden: set[str] = set()
        self._holders: dict[tuple[str, str], Sequence[str]] = {}  # (kind, FQN in the checkpoint) -> live names

    def of(self, kind: str, names: Sequence[str], *, parameter: bool) -> Sequence[str]:
        """Return the checkpoint's names of something live, as `SavedStates.names_of` documents it.

        Raises:
            UsageError: `rename` gives two live things one name, or no name of the kind.
        """
        if not self.selection.active and self._rename is None:
            return names
        taken = [name for name in names if self.selection.takes(kind, name, parameter=parameter)]
        if len(taken) < len(names):
            self.skipped.update((kind, self.renamed(kind, n, parameter=parameter)) for n in names if n not in taken)
            if not taken:
                self._hidden.update((f"{kind}/{names[0]}", f"{kind}/param_groups/{names[0]}"))
        if self._rename is None:
            return taken
        found = [self.renamed(kind, name, parameter=parameter) for name in taken]
        for saved in found:
            holder = self._holders.setdefault((kind, saved), names)
            if holder is not names and not set(holder) & set(names):
                raise UsageError(
                    f"rename= gives {kind}/{holder[0]} and {kind}/{names[0]} the same name in the checkpoint, "
                    f"{kind}/{saved}: give each a name of its own, or leave one of them out with exclude="
                )
        return found

    def renamed(self, kind: str, fqn: str, *, parameter: bool = False) -> str:
        """Return the checkpoint's name of one live FQN. A parameter in an optimizer is also renamed as in its module.

        Raises:
            UsageError: the new name is no name of the kind.
        """
        if self._rename is None or not fqn:
            return fqn
        new = self._call(kind, fqn)
        if new == fqn and parameter:
            # The kind of the module is not known here: an optimizer has its own name, and the module another.
            others = (self._call(other, fqn) for other in self._kinds if other != kind)
            return next((name for name in others if name != fqn), fqn)
        return new

    def _call(self, kind: str, fqn: str) -> str:
        assert self._rename is not None
        new = self._rename(f"{kind}/{fqn}")
        if not isinstance(new, str) or not new.startswith(f"{kind}/") or len(new) == len(kind) + 1:
            raise UsageError(f"rename= makes {new!r} of {f'{kind}/{fqn}'!r}: the new name must be '{kind}/' and an FQN")
        return new[len(kind) + 1 :]

    def hides(self, missing: str) -> bool:
        """Return whether what an adapter found missing is not selected.

        Args:
            missing: a name in `Destination.missing`.
        """
        if missing in self._hidden:
            return True
        if missing not in self._kinds or self.selection.takes(missing):
            return False
        return missing not in KINDS_BY_NAME or not self.selection.may_take(missing)

    def note_saved(self, keys: Iterable[TensorKey]) -> None:
        """Let patterns match names that only the checkpoint has: these patterns keep them from being unexpected."""
        for key in keys:
            if not self.selection.unmatched:
                return
            if key.slot == VALUES_SLOT:
                self.selection.takes(key.kind)
            else:
                self.selection.takes_any(key)
