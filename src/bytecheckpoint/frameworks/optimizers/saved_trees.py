"""The saved trees of all ranks' optimizers, read as one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.frameworks.base import ParameterName, SavedStates
from bytecheckpoint.frameworks.optimizers.names import ParamGroup
from bytecheckpoint.frameworks.optimizers.state_memory import allocate_state
from bytecheckpoint.frameworks.optimizers.tree import TREE_KEYS, parse_state_reference
from bytecheckpoint.representation.values.codec import decode

__all__ = ["SavedTrees"]


class SavedTrees:
    """The trees of all ranks as one: hyperparameters and plain state by parameter name, this rank's own tree first.

    Trees that are complete are read until every live parameter is found. Those of other pipeline stages, or of ranks
    that stepped other parameters, are not read.

    Args:
        kind: name of the state.
        saved: the checkpoint.
        live: the param groups to find.

    Attributes:
        groups: saved FQN -> saved param group.
        values: saved FQN -> state that is not plain tensors.
        fqn_of_alias: alias -> saved FQN.
        globals: state that belongs to no parameter, one dict per optimizer.
        optimizer_types: names of the types of all optimizers.
        nested: saved (FQN, slot) -> memory for a tensor inside a container, for the parameters of this rank.
    """

    def __init__(self, kind: str, saved: SavedStates, live: Sequence[ParamGroup]) -> None:
        self.groups: dict[str, dict[str, Any]] = {}
        self.values: dict[str, dict[Any, Any]] = {}
        self.fqn_of_alias: dict[str, str] = {}
        self.globals: list[dict[Any, Any]] = []
        self.optimizer_types: set[str] = set()
        self.nested: dict[tuple[str, str], torch.Tensor] = {}
        self._kind = kind
        self._saved = saved
        self._live = live
        self._live_parameters: dict[str, torch.Tensor] | None = None  # by saved name
        missing = [name for group in live for name in group.names]
        all_names = [name for fqn, aliases in missing for name in (fqn, *aliases)]
        for position, blob in enumerate(saved.trees_about(kind, all_names)):
            tree = self._read(blob)
            for group in tree["groups"]:
                for fqn in group["params"]:
                    self.groups.setdefault(fqn, group)
            for fqn, values in tree["state"].items():
                self.values.setdefault(fqn, values)
            if position == 0:
                self.globals = tree["globals"]
            if tree.get("complete", False):
                found = self.groups_of(missing)
                missing = [name for name, group in zip(missing, found, strict=True) if group is None]
                if not missing:
                    break

    def _read(self, blob: bytes) -> Any:
        """Decode a tree, and note its optimizers and aliases."""
        references: list[str] = []
        tree: Any = decode(blob, on_tensor=partial(_note_reference, references))
        if not isinstance(tree, dict) or tree.keys() - {"complete"} != TREE_KEYS:
            raise IncompatibleCheckpointError(
                f"{self._kind} was saved from plain values, not from an optimizer: load it into a dict"
            )
        self.optimizer_types.update(tree["optimizers"])
        for fqn, aliases in tree["aliases"].items():
            self.fqn_of_alias.update(dict.fromkeys(aliases, fqn))
        # The aliases are known now: decode again, with memory in place of the tensors.
        return decode(blob, on_tensor=self._memory) if references else tree

    def _memory(self, reference: str) -> torch.Tensor | None:
        fqn, slot = parse_state_reference(reference)
        if (fqn, slot) not in self.nested:
            parameter = self._live_parameter(fqn)
            found = self._saved.find(self._kind, (fqn,), slot)
            if found is None:
                raise CorruptCheckpointError(
                    f"the values of {self._kind} refer to {reference!r}, which the catalog lacks"
                )
            if parameter is None:
                return None
            self.nested[fqn, slot] = allocate_state(found, parameter, on_device=False)
        return self.nested[fqn, slot]

    def _live_parameter(self, saved_fqn: str) -> torch.Tensor | None:
        if self._live_parameters is None:
            self._live_parameters = {
                saved: parameter
                for group in self._live
                for parameter, (fqn, aliases) in zip(group.params, group.names, strict=True)
                for name in (fqn, *aliases)
                for saved in (name, self.fqn_of_alias.get(name, name))
            }
        return self._live_parameters.get(saved_fqn)

    def groups_of(self, names: Sequence[ParameterName]) -> list[dict[str, Any] | None]:
        """Return the saved param group of each parameter, found by any of its names."""
        return [self._by_name(self.groups, fqn, aliases) for fqn, aliases in names]

    def values_of(self, fqn: str, aliases: tuple[str, ...]) -> dict[Any, Any]:
        """Return the saved state of a parameter that is not plain tensors."""
        return self._by_name(self.values, fqn, aliases) or {}

    def _by_name(self, table: dict[str, dict[Any, Any]], fqn: str, aliases: tuple[str, ...]) -> dict[Any, Any] | None:
        found = table.get(fqn)
        if found is None and (aliases or self.fqn_of_alias):
            for name in (fqn, *aliases):
                found = table.get(name) or table.get(self.fqn_of_alias.get(name, name))
                if found is not None:
                    break
        return found


def _note_reference(references: list[str], name: str) -> None:
    references.append(name)
