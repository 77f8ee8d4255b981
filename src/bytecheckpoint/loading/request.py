"""The checked arguments of one load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, Framework, Strict, SupportsShards, is_strict
from bytecheckpoint.frameworks.configurations import configuration_of
from bytecheckpoint.frameworks.conversion_tables import layout_of_tables
from bytecheckpoint.frameworks.modules import as_modules
from bytecheckpoint.frameworks.selection import NameSelection
from bytecheckpoint.layouts import Layout
from bytecheckpoint.loading.decision import NamesReport
from bytecheckpoint.planning.part_space import LiveSide
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.names import escape
from bytecheckpoint.representation.similar_names import SimilarNames

__all__ = ["LoadRequest", "Matching"]


@dataclass(frozen=True, slots=True)
class Matching:
    """The rules by which a load matches live objects with a checkpoint.

    Attributes:
        strict: True if missing and unexpected names are errors, for all states or by state.
        cast: True to convert dtypes.
        selection: selection of live names; an attempt works on a copy, which notes the patterns that match.
        rename: function from a live name to the name in the checkpoint; None if they are equal.
        names: explicit parameter names for optimizers.
        layout: layouts through which the checkpoint is seen, one after the other; "auto": the one that is built in for its
            model; None: its names are those of the live objects.
    """

    strict: Strict
    cast: bool
    selection: NameSelection
    rename: Callable[[str], str] | None
    names: Mapping[Any, Any] | None
    layout: Sequence[Layout] | Literal["auto"] | None = None


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The checked arguments of one load.

    Attributes:
        framework: adapter of the training framework.
        states: live objects to fill, without wrappers.
        matching: rules by which these are matched with the checkpoint.
        overlap: True if ranks exchange the bytes that several of them want.
        prepare_save: True if this rank wants its next save prepared.
    """

    framework: Framework
    states: MutableMapping[str, object]
    matching: Matching
    overlap: bool
    prepare_save: bool

    def live_names(self) -> NamesReport:
        """Return the names and shapes of the tensors in this rank's modules and dicts of tensors, for a layout."""
        modules = {
            state: value
            for state, value in self.states.items()
            if as_modules(state, value) is not None or _is_of_tensors(value)
        }
        optimizers = [state for state, value in self.states.items() if isinstance(value, torch.optim.Optimizer)]
        if optimizers and not modules:
            raise UsageError(
                f"a layout leads to the names of modules, and {optimizers[0]!r} is loaded without one: put the module "
                "beside its optimizer into the states"
            )
        captured = self.framework.capture(modules, names=self.matching.names) if modules else []
        shapes: dict[str, dict[str, list[int]]] = {}
        left_out: list[tuple[str, str]] = []
        for state in captured:
            own = shapes.setdefault(state.name, {})
            for shard in state.shards:
                name = shard.key.fqn
                if (rename := self.matching.rename) is not None:
                    name = rename(f"{state.name}/{name}").removeprefix(f"{state.name}/")
                own[name] = [*shard.global_shape]
                if not self.matching.selection.takes_any(shard.key, shard.aliases):
                    left_out.append((state.name, name))
        return NamesReport(shapes, configuration_of(modules), left_out)

    def layout_of_tables(self, catalog: Catalog, live: LiveSide) -> Layout | None:
        """Return the layout of transformers' own tables, if a model of it has other names in the checkpoint than here."""
        for state, value in self.states.items():
            stored = {catalog.fqn[n]: catalog.shape(n) for n in catalog.of_state(state).tolist() if not catalog.slot[n]}
            for module in (as_modules(state, value) or ()) if stored else ():
                if (found := layout_of_tables(module, stored, live.of(state) or {})) is not None:
                    return found
        return None

    def state_of(self, name: str) -> str:
        """Return the state of a name in `Destination.missing`."""
        longest = max((s for s in self.states if name == s or name.startswith(f"{s}/")), key=len, default="")
        return longest or name.partition("/")[0]  # an adapter may add states

    def strict_about(self, name: str) -> bool:
        """Return whether the load is strict about a name in `Destination.missing`."""
        return is_strict(self.matching.strict, self.state_of(name))

    def refused_mismatches(self, destination: Destination) -> list[str]:
        """Return the mismatches about which the load is strict. Each begins with its state."""
        return [m for m in destination.mismatches if is_strict(self.matching.strict, m.partition(":")[0])]

    def comparable_strict(self) -> bool | dict[str, bool]:
        """Return `strict` in a form that ranks compare."""
        strict = self.matching.strict
        if not isinstance(strict, Mapping):
            return bool(strict)
        return {escape(state): bool(value) for state, value in sorted(strict.items())}

    def check_strict(self, catalog: Catalog, destination: Destination) -> None:
        """Refuse a state in strict= that neither the live objects nor the checkpoint have.

        Raises:
            UsageError: there is such a state.
        """
        strict = self.matching.strict
        if not isinstance(strict, Mapping):
            return
        known = {*self.states, *catalog.states(), *map(self.state_of, destination.missing)}
        for state in strict.keys() - known:
            similar = SimilarNames(known).of(state)
            raise UsageError(
                f"strict= names the state {state!r}, which neither the states nor the checkpoint have"
                + (f"; did you mean {similar[0]!r}?" if similar else "")
            )


def _is_of_tensors(value: object) -> bool:
    """Return whether a value is a dict of tensors, or of objects that list their shards, with such dicts in it or not."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(isinstance(item, torch.Tensor | SupportsShards) or _is_of_tensors(item) for item in value.values())
