"""Map names of live objects to names in the checkpoint: `rename=`, `include=` and `exclude=` of a load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import SavedTensor
from bytecheckpoint.frameworks.objects.capture import STATES_BY_NAME
from bytecheckpoint.frameworks.selection import NameSelection
from bytecheckpoint.frameworks.wrappers import without_wrappers
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog
from bytecheckpoint.representation.shards import TensorKey

__all__ = ["LiveNames", "names_below_wrappers"]

#: The name of the wrapped module in DDP; modules of users may have it, too.
_IN_DDP: Final = "module."


def names_below_wrappers(catalog: Catalog) -> dict[str, str]:
    """Return stored keys of another program's checkpoint that lead through DDP or torch.compile, by the same without them.

    Live names lead through no wrappers. A name that the checkpoint has as it is, is that one.
    """
    stored: dict[str, str] = {}
    for state in catalog.states():
        names = {*catalog.fqns(state), *catalog.aliases.get(state, ())}
        bare = {name: without_wrappers(name) for name in names if not name.startswith("#")}
        while len(set(bare.values())) == len(bare):  # else several tensors have one name
            stored |= {f"{state}/{bare[name]}": f"{state}/{name}" for name in bare if bare[name] not in names}
            if not bare or not all(name.startswith(_IN_DDP) for name in bare.values()):
                break
            bare = {name: below.removeprefix(_IN_DDP) for name, below in bare.items()}
    return stored


class LiveNames:
    """Maps live names to names of the checkpoint, and notes the live names that the load leaves alone.

    Args:
        selection: selection of live names.
        rename: function from a live name to the name in the checkpoint, both "state/FQN"; None: they are the same.
        states: the states that the caller loads.

    Attributes:
        selection: selection of live names.
        skipped: (state, FQN in the checkpoint) of the names that are left alone.
    """

    def __init__(
        self, selection: NameSelection, rename: Callable[[str], str] | None = None, states: Collection[str] = ()
    ) -> None:
        self.selection = selection
        self.skipped: set[tuple[str, str]] = set()
        self._rename = rename
        self._states = states
        self._hidden: set[str] = set()
        self._by_hooks: dict[tuple[str, str], SavedTensor | None] = {}  # by (state, live FQN)
        self._numbers: dict[tuple[str, str], str] = {}  # by (state of an optimizer, live FQN)
        self._holders: dict[tuple[str, str], Sequence[str]] = {}  # (state, FQN in the checkpoint) -> live names

    def of(self, state: str, names: Sequence[str], *, parameter: bool) -> Sequence[str]:
        """Return the checkpoint's names of something live, as `SavedStates.names_of` documents it.

        Raises:
            UsageError: `rename` gives two live things one name, or no name of the state.
        """
        if not self.selection.active and self._rename is None and not self._by_hooks and not self._numbers:
            return names
        taken = [name for name in names if self.selection.takes(state, name, parameter=parameter)]
        if len(taken) < len(names):
            self.skipped.update((state, self.renamed(state, n, parameter=parameter)) for n in names if n not in taken)
            if not taken:
                self._hidden.update((f"{state}/{names[0]}", f"{state}/param_groups/{names[0]}"))
        taken = [name for name in taken if self._by_hooks.get((state, name), True) is not None]
        if self._rename is None and not self._by_hooks and not self._numbers:
            return taken
        found = [self.renamed(state, name, parameter=parameter) for name in taken]
        for saved in found if self._rename is not None else ():  # hooks may give two tensors the value of one
            holder = self._holders.setdefault((state, saved), names)
            if holder is not names and not set(holder) & set(names):
                raise UsageError(
                    f"rename= gives {state}/{holder[0]} and {state}/{names[0]} the same name in the checkpoint, "
                    f"{state}/{saved}: give each a name of its own, or leave one of them out with exclude="
                )
        return found

    def renamed(self, state: str, fqn: str, *, parameter: bool = False) -> str:
        """Return the checkpoint's name of one live FQN. A parameter in an optimizer is also renamed as in its module.

        Raises:
            UsageError: the new name is no name of the state.
        """
        if parameter and (number := self._numbers.get((state, fqn))) is not None:
            return number
        if (self._rename is None and not self._by_hooks) or not fqn:
            return fqn
        new = self._call(state, fqn)
        if new == fqn and parameter:
            # The state of the module is not known here: an optimizer has its own name, and the module another.
            others = (self._call(other, fqn) for other in self._states if other != state)
            return next((name for name in others if name != fqn), fqn)
        return new

    def note_hooks(self, state: str, found: Mapping[str, SavedTensor | None]) -> None:
        """Note the tensors of live FQNs, as `SavedStates.substitute` documents it."""
        self._by_hooks.update({(state, fqn): tensor for fqn, tensor in found.items()})

    def note_numbers(self, state: str, names: Sequence[Sequence[str]]) -> None:
        """Note the numbers of an optimizer's parameters, as `SavedStates.number` documents it."""
        self._numbers.update({(state, fqn): f"#{i}" for i, of_one in enumerate(names) for fqn in of_one})

    def computed(self, state: str, names: Sequence[str]) -> SavedTensor | None:
        """Return the tensor that hooks compute for something live, or None."""
        found = (self._by_hooks.get((state, name)) for name in names) if self._by_hooks else ()
        return next((tensor for tensor in found if tensor is not None and tensor.key.slot), None)

    def _call(self, state: str, fqn: str) -> str:
        if (known := self._by_hooks.get((state, fqn))) is not None and not known.key.slot:
            return known.key.fqn
        if self._rename is None:
            return fqn
        new = self._rename(f"{state}/{fqn}")
        if not isinstance(new, str) or not new.startswith(f"{state}/") or len(new) == len(state) + 1:
            raise UsageError(
                f"rename= makes {new!r} of {f'{state}/{fqn}'!r}: the new name must be '{state}/' and an FQN"
            )
        return new[len(state) + 1 :]

    def hides(self, missing: str) -> bool:
        """Return whether what an adapter found missing is not selected.

        Args:
            missing: a name in `Destination.missing`.
        """
        if missing in self._hidden:
            return True
        if missing not in self._states or self.selection.takes(missing):
            return False
        return missing not in STATES_BY_NAME or not self.selection.may_take(missing)

    def note_saved(self, keys: Iterable[TensorKey]) -> None:
        """Let patterns match names that only the checkpoint has: these patterns keep them from being unexpected."""
        for key in keys:
            if not self.selection.unmatched:
                return
            if key.slot == VALUES_SLOT:
                self.selection.takes(key.state)
            else:
                self.selection.takes_any(key)
