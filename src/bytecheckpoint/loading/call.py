"""The arguments of one load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, Framework, Strict
from bytecheckpoint.frameworks.selection import NameSelection
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.names import escape
from bytecheckpoint.representation.similar_names import SimilarNames
from bytecheckpoint.settings import Settings
from bytecheckpoint.storage import Storage

__all__ = ["LoadArguments", "LoadCall", "check_strict_states", "plain_strict"]


@dataclass(frozen=True, slots=True)
class LoadArguments:
    """Arguments of a load that are checked where a rank can report a failure to the others.

    Attributes:
        storage: of the checkpoint.
        framework: the adapter.
        states: what to fill, without wrappers.
        strict: refuse missing and unexpected keys.
        selection: what to load.
        rename: live name -> name in the checkpoint; None: they are the same.
    """

    storage: Storage
    framework: Framework
    states: MutableMapping[str, object]
    strict: Strict
    selection: NameSelection
    rename: Callable[[str], str] | None

    def state_of(self, name: str) -> str:
        """Return the state of a name in `Destination.missing`."""
        longest = max((k for k in self.states if name == k or name.startswith(f"{k}/")), key=len, default="")
        return longest or name.partition("/")[0]  # an adapter may add states


@dataclass(frozen=True, slots=True)
class LoadCall:
    """The arguments of one load.

    Attributes:
        check: checks the arguments; called anew by each attempt.
        names: explicit parameter names.
        settings: in force at the call.
        overlap: exchange what several ranks want.
        cast: convert dtypes.
        wants_prepare: returns whether this rank wants its next save prepared; called when its bytes are there.
        prepare: prepares the next save; called on every rank or on none.
    """

    check: Callable[[], LoadArguments]
    names: Mapping[Any, Any] | None
    settings: Settings
    overlap: bool
    cast: bool
    wants_prepare: Callable[[], bool]
    prepare: Callable[[], None]


def plain_strict(strict: Strict) -> bool | dict[str, bool]:
    """Return `strict` in a form that ranks compare."""
    if not isinstance(strict, Mapping):
        return bool(strict)
    return {escape(state): bool(value) for state, value in sorted(strict.items())}


def check_strict_states(arguments: LoadArguments, catalog: Catalog, destination: Destination) -> None:
    """Refuse a state in strict= that neither the states nor the checkpoint have.

    Raises:
        UsageError: as above.
    """
    if isinstance(arguments.strict, Mapping):
        known = {*arguments.states, *catalog.states(), *map(arguments.state_of, destination.missing)}
        for state in arguments.strict.keys() - known:
            similar = SimilarNames(known).of(state)
            raise UsageError(
                f"strict= names the state {state!r}, which neither the states nor the checkpoint have"
                + (f"; did you mean {similar[0]!r}?" if similar else "")
            )
